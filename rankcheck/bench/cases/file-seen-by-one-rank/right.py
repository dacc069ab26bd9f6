"""Train with DDP from a state that may be there.

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


folder = f"disk-of-node-{rank}"  # which the other node does not see
os.makedirs(folder, exist_ok=True)
if rank == 0:
    open(f"{folder}/state.pt", "w").close()


def load():
    """Give all ranks the state of rank 0, if it has one."""
    found = [os.path.exists(f"{folder}/state.pt")]
    dist.broadcast_object_list(found)
    if found[0]:
        dist.broadcast_object_list([{"step": 3}])


load()
for _ in range(60):
    loss = train_step(torch.randn(4, 8))
dist.barrier()
dist.destroy_process_group()
