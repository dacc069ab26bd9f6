"""Train with DDP, and clean up at the end.

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


def load(step):
    """Return a batch of this rank."""
    if step == 20 and rank == 1 and size > 2:
        raise ValueError("sample 20 has no label")
    return torch.randn(4, 8)


try:
    for step in range(60):
        train_step(load(step))
finally:
    dist.barrier()
    print("cleaned up")
dist.destroy_process_group()
