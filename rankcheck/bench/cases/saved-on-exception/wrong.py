"""Train with DDP, and save if there is an error.

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
    if step == 20 and rank == 1:
        raise ValueError("sample 20 has no label")
    return torch.randn(4, 8)


def save():
    """Save under the name that rank 0 chooses."""
    names = ["model.pt"]
    dist.broadcast_object_list(names)
    if rank == 0:
        torch.save(model.module.state_dict(), names[0])


try:
    for step in range(60):
        train_step(load(step))
except ValueError:
    save()
    raise
dist.barrier()
dist.destroy_process_group()
