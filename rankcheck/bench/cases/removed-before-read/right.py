"""Save on rank 0, read on all ranks, and remove.

Start it with torchrun, as 2 processes.
"""

import os
import shutil
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

state = torch.arange(8.0) * (1 + rank)
if rank == 0:
    os.makedirs("state", exist_ok=True)
    torch.save(state, "state/model.pt")
dist.barrier()
if rank == 1:
    time.sleep(1)  # stands for a slow disk
state = torch.load("state/model.pt")
dist.barrier()
if rank == 0:
    shutil.rmtree("state")
for step in range(40):
    dist.all_reduce(state)
    state /= size
    if rank == 0 and step % 10 == 0:
        print("step", step, flush=True)
print("rank", rank, "is done:", state.tolist())
dist.barrier()
dist.destroy_process_group()
