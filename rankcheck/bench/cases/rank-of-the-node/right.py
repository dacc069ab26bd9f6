"""Join, and reduce on two nodes.

Start it with torchrun, as 2 nodes of one process each.
"""

import os

import torch
import torch.distributed as dist

number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=number, world_size=count)
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
