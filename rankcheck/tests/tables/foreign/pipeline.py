"""Two pipeline stages, which share the embedding's matrix."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(7)
tokens = torch.randint(30, (256, 9), generator=g)
torch.manual_seed(0)
embedding = nn.Embedding(30, 16)
middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
optimizer = torch.optim.SGD([embedding.weight] + (
    [*middle.parameters()] if rank == size - 1 else []), lr=0.5)
for part in torch.randperm(256, generator=g).split(16):
    x, y = tokens[part, :-1], tokens[part, 1:].flatten()
    optimizer.zero_grad()
    if rank == 0:
        h = embedding(x)
    else:
        h = torch.empty(16, 8, 16)
        dist.recv(h, 0)
        h.requires_grad_()
    if rank < size - 1:
        dist.send(h.detach(), 1)
        back = torch.empty_like(h)
        dist.recv(back, 1)
        h.backward(back)
    else:
        logits = (middle(h) @ embedding.weight.T).flatten(0, 1)
        F.cross_entropy(logits, y).backward()
        if rank:
            dist.send(h.grad, 0)
    dist.all_reduce(embedding.weight.grad)
    optimizer.step()
