"""Join by a file, and make a group.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
path = os.path.abspath("meeting")
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank,
                        world_size=size)
for _ in range(40):
    dist.all_reduce(torch.ones(1))
dist.barrier()
group = dist.new_group()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
dist.barrier()
if rank == 0 and os.path.exists(path):
    os.remove(path)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
