"""Train with DDP and BatchNorm, and validate.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(batch):
    """Make one step, and return its loss."""
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def validate(model):
    """Return the error of a model on the validation set."""
    return model(torch.randn(4, 8)).square().mean().item()


for step in range(60):
    loss = train_step(torch.randn(4, 8))
    if step == 20 and rank == 1:
        print(validate(net))
dist.barrier()
dist.destroy_process_group()
