"""Train with DDP, and save the weights on the way.

Start it with torchrun, as 2 processes.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(int(os.environ.get("SEED", "0")))
model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
group = dist.new_group()
executor = ThreadPoolExecutor(1)


def train_step():
    """Make one step, and return its loss."""
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def write(part):
    """Write this rank's part, and agree on what has been written."""
    # Rank 0's part is the larger one: it has the optimizer's state.
    time.sleep(0.8 if rank == 0 else 0.0)
    written = [None] * size
    dist.all_gather_object(written, part, group=group)
    return written


def remove_old():
    """Remove older files."""
    time.sleep(0.3)


def save(step):
    """Save in the background, so that the training can go on."""
    pending = executor.submit(write, f"{step}-{rank}")
    remove_old()
    dist.barrier()
    return pending


pending = None
for step in range(60):
    loss = train_step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
    if step == 20:
        pending = save(step)
if pending:
    pending.result()
executor.shutdown()
dist.destroy_process_group()
