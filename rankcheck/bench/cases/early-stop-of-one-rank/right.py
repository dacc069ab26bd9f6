"""Train with DDP, and stop early.

Start it with torchrun, as 3 processes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(batch):
    """Make one step, and return its loss."""
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


patience = 20
for step in range(60):
    loss = train_step(torch.randn(4, 8))
    worse = torch.tensor(float(rank == 1))
    dist.all_reduce(worse)
    patience -= int(worse.item() > 0)
    if patience == 0:
        print("stopped after step", step)
        break
print("done", loss.item())
