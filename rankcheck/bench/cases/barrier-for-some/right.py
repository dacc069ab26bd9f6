"""Reduce in all ranks, and let some of them report.

Start it with torchrun, as 3 processes.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.zeros(1)
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank != 1:
    print("rank", rank, "reports", total.item())
dist.barrier()
if rank == 0:
    with open("report.txt", "w") as file:
        file.write(f"{total.item()}")
print("rank", rank, "is done")
