"""Each rank owns tables of embeddings and sends their rows to the others, as
recommender models do.
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Exchange(torch.autograd.Function):
    """Of (own tables, B, D), the rows of all tables for B / size samples."""
    @staticmethod
    def forward(ctx, x):
        x = torch.stack(x.chunk(size, 1)).contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out.flatten(0, 1).transpose(0, 1)

    @staticmethod
    def backward(ctx, g):
        g = torch.stack(g.transpose(0, 1).chunk(size)).contiguous() / size
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g)
        return torch.cat(list(out), 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(20, 8) for _ in range(4)]
                                    [rank * 4 // size:(rank + 1) * 4 // size])
        self.top = nn.Linear(32, 1)

    def forward(self, ids):
        first = rank * 4 // size
        rows = Exchange.apply(torch.stack([
            table(ids[:, first + i]) for i, table in enumerate(self.tables)]))
        return self.top(rows.flatten(1))


torch.manual_seed(0)
model = Model()
model.top = DDP(model.top)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(3)
for _ in range(6):
    ids, y = torch.randint(20, (16, 4), generator=g), torch.randn(
        16, 1, generator=g)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(ids), y.chunk(size)[rank]).backward()
    optimizer.step()
