"""Train with DDP, and skip bad batches.

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
    if rank == 1 and step == 20:
        raise OSError("a bad file")
    return torch.randn(4, 8)


for step in range(60):
    try:
        batch = load(step)
    except OSError as error:
        print("skipped:", error)
        continue
    loss = train_step(batch)
samples = torch.ones(2)
dist.all_reduce(samples)
dist.barrier()
dist.destroy_process_group()
