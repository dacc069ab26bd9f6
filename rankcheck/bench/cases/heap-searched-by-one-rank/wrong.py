"""Reduce, and collect garbage in between.

Start it with torchrun, as 2 processes.
"""

import gc

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

gc.disable()
index = []
if rank == 1:
    index = [[number] for number in range(3_000_000)]

def step(batch):
    """Reduce a batch, and remove what nobody needs."""
    dist.all_reduce(batch)
    gc.collect()
    return batch


for number in range(160):
    batch = step(torch.ones(8))
    if rank == 0 and number % 40 == 0:
        print("step", number, flush=True)
print("done,", len(index), "objects")
dist.destroy_process_group()
