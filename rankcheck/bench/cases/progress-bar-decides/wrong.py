"""Train with DDP, and evaluate on the way.

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


class Bar:
    """A progress bar, of the main process."""

    count = 0

    def update(self):
        """Count one step."""
        self.count += rank == 0


def evaluate():
    """Gather the number of right answers."""
    found = [None] * size
    dist.all_gather_object(found, rank)


bar = Bar()
for _ in range(60):
    loss = train_step(torch.randn(4, 8))
    bar.update()
    if bar.count == 20:
        evaluate()
dist.barrier()
dist.destroy_process_group()
