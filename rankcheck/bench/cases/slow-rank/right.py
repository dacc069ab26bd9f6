"""Reduce what each rank has prepared.

Start it with torchrun, as 2 processes.
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def prepare():
    """Return a batch of this rank."""
    time.sleep(0.01)  # stands for the work
    return torch.ones(8)


begin = time.monotonic()
for _ in range(160):
    batch = prepare()
    dist.all_reduce(batch)
print("steps took", time.monotonic() - begin)
dist.destroy_process_group()
