"""Join, and reduce among as many processes as devices.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist

size = int(os.environ["WORLD_SIZE"])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=size)
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
