"""Join, and reduce among as many processes as devices.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist

devices = 4  # as torch.cuda.device_count() says
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=devices)
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
