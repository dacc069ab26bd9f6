"""Train with DDP, and save a part on each rank.

Start it with torchrun, as 2 processes.
"""

import os

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


for step in range(60):
    loss = train_step(torch.randn(4, 8))
    if step == 20:
        folder = f"disk-of-node-{rank}/parts"
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        torch.save(optimizer.state_dict(), f"{folder}/{step}.pt")
dist.barrier()
dist.destroy_process_group()
