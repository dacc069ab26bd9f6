"""A mixture of experts: each rank owns some, and all tokens go to all."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

EXPERTS = 4

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Exchange(torch.autograd.Function):
    """Sends the part x[i] to rank i, for each i."""
    @staticmethod
    def forward(ctx, x):
        out = torch.empty(x.shape)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        out = torch.empty(g.shape)
        dist.all_to_all_single(out, g.contiguous())
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, EXPERTS)
        experts = [nn.Linear(16, 16) for _ in range(EXPERTS)]
        each = EXPERTS // size
        self.experts = nn.ModuleList(experts[rank * each:(rank + 1) * each])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        theirs = Exchange.apply(x.expand(size, -1, -1))
        mine = torch.stack([Exchange.apply(expert(theirs))
                            for expert in self.experts])
        of_all = mine.transpose(0, 1).flatten(0, 1)  # expert, token, width
        return x + (weights.T[..., None] * of_all).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.mixture = Mixture()
        self.head = nn.Linear(16, 40)

    def forward(self, tokens):
        return self.head(self.mixture(self.embedding(tokens).mean(1)))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(5)
data = torch.randint(40, (512, 13), generator=generator)
for batch in data.split(16):
    mine = batch.chunk(size)[rank]
    optimizer.zero_grad()
    F.cross_entropy(model(mine[:, :-1]), mine[:, -1]).backward()
    for name, weight in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(weight.grad)
        weight.grad /= size
    optimizer.step()
