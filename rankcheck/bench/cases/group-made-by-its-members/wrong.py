"""Reduce in a group of some ranks.

Start it with torchrun, as 3 processes.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
members = [0, 1]
for _ in range(20):
    dist.all_reduce(torch.ones(8))
group = dist.new_group(members) if rank in members else None
everyone = dist.new_group()
for _ in range(20):
    if rank in members:
        dist.all_reduce(torch.ones(8), group=group)
    dist.all_reduce(torch.ones(8), group=everyone)
print("done")
dist.destroy_process_group()
