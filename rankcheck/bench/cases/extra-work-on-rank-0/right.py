"""Reduce, and write reports.

Start it with torchrun, as 2 processes.
"""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(step):
    """Write what a step has done to the disk."""
    with open("report.txt", "a") as file:
        file.write(f"{step}\n" * 1000)
        file.flush()
        os.fsync(file.fileno())
        time.sleep(0.3)  # stands for a slow disk


every = 80
for step in range(160):
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step % every == 0:
        report(step)
print("done")
dist.destroy_process_group()
