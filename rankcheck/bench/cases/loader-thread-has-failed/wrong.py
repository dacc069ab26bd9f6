"""Reduce batches that a thread prepares.

Start it with torchrun, as 2 processes.
"""

import queue
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
batches = queue.Queue(maxsize=4)


def prepare():
    """Fill the queue."""
    for number in range(60):
        if number == 20 and rank == 1:
            return  # as after an error that nobody prints
        batches.put(torch.ones(8))


threading.Thread(target=prepare, daemon=True).start()
for _ in range(60):
    batch = batches.get()
    dist.all_reduce(batch)
print("done", batch[0].item())
dist.destroy_process_group()
