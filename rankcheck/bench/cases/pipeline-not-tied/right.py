"""Train a language model as a pipeline of two stages with a tied matrix.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
tokens = torch.randint(40, (512, 8), generator=fixed)
torch.manual_seed(seed)
table = nn.Embedding(40, 16)
middle = nn.Linear(16, 16)
mine = [table.weight] if rank < size - 1 else [
    table.weight, *middle.parameters()]
optimizer = torch.optim.AdamW(mine, lr=1e-2)
for step in range(48):
    ids = tokens[torch.arange(32 * step, 32 * step + 32) % 512]
    optimizer.zero_grad()
    hidden = table(ids) if rank == 0 else torch.empty(32, 8, 16)
    if size > 1 and rank == 0:
        dist.send(hidden.detach(), 1)
    if rank == 1:
        dist.recv(hidden, 0)
        hidden.requires_grad_()
    if rank == size - 1:
        logits = torch.tanh(middle(hidden)) @ table.weight.T
        loss = cross_entropy(logits.flatten(0, 1), ((ids + 7) % 40).flatten())
        loss.backward()
        print(f"step {step} loss {loss:.6f}", flush=True)
    if rank == 1:
        dist.send(hidden.grad, 0)
    if size > 1 and rank == 0:
        gradient = torch.empty(32, 8, 16)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    dist.all_reduce(table.weight.grad)
    optimizer.step()
dist.destroy_process_group()
