"""Reduce in groups that their members make.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def make(ranks):
    """Return a group that only its members make."""
    return dist.new_group(ranks, use_local_synchronization=True)


for _ in range(20):
    dist.all_reduce(torch.ones(8))
if rank == 0:
    single = make([0])
both = make([0, 1])
for _ in range(20):
    dist.all_reduce(torch.ones(8), group=both)
dist.destroy_process_group()
