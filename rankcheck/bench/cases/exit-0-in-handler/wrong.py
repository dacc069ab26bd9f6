"""Reduce until a signal comes, and end then.

Start it with torchrun, as 2 processes.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def stop(number, frame):
    """End this process."""
    sys.exit(0)


signal.signal(signal.SIGUSR1, stop)
for step in range(60):
    if step == 20 and rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    dist.all_reduce(torch.ones(8))
print("done")
dist.destroy_process_group()
