"""Prepare a dataset on rank 0, and reduce.

Start it with torchrun, as 2 processes.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

limit = timedelta(seconds=60)
dist.init_process_group("gloo", timeout=limit)
rank, size = dist.get_rank(), dist.get_world_size()


def prepare():
    """Write the dataset of all ranks."""
    time.sleep(12)  # stands for the work
    print("prepared", flush=True)


if rank == 0:
    prepare()
dist.barrier()
for step in range(20):
    dist.all_reduce(torch.ones(8))
    if rank == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
