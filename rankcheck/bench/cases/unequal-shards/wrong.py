"""Train with DDP on the files of each rank.

Start it with torchrun, as 2 processes.
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


batches = [torch.randn(4, 8) for _ in range(60 - 20 * rank)]
for batch in batches:
    loss = train_step(batch)
print("done", loss.item())
