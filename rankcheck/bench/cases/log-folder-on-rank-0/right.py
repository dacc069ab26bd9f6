"""Train with DDP, and say where the log is.

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


def log_folder():
    """Return rank 0's folder, on all ranks."""
    folders = ["runs/1"]
    dist.broadcast_object_list(folders)
    return folders[0]


for step in range(60):
    loss = train_step(torch.randn(4, 8))
    if step == 20:
        folder = log_folder()
        if rank == 0:
            print("the log is in", folder)
dist.barrier()
dist.destroy_process_group()
