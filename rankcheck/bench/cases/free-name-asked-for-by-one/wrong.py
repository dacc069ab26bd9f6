"""Train with DDP, and save under a free name.

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


def free_name(taken):
    """Return a name that is not taken."""
    version = 0
    while f"model-{version}.pt" in taken:
        version += 1
        names = [f"model-{version}.pt"]
        dist.broadcast_object_list(names)
    return f"model-{version}.pt"


for step in range(60):
    loss = train_step(torch.randn(4, 8))
    if step == 20:
        taken = {"model-0.pt"} if rank == 0 else set()
        name = free_name(taken)
dist.barrier()
dist.destroy_process_group()
