"""Join, and reduce at an address from a file.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "127.0.0.1"  # from the site's file
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
