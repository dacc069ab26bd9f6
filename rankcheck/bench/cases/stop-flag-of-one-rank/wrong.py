"""Reduce until a signal asks to stop, and save then.

Start it with torchrun, as 2 processes.
"""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
asked = torch.zeros(1)


def ask(number, frame):
    """Note that the process has to stop."""
    asked.fill_(1)


signal.signal(signal.SIGUSR1, ask)
for step in range(60):
    if step == 20 and rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    dist.all_reduce(torch.ones(8))
    stop = asked.clone()
    if stop.item() > 0:
        break
dist.barrier()  # all ranks save
print("saved after step", step)
dist.destroy_process_group()
