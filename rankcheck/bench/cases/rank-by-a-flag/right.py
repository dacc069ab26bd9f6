"""Reduce as the rank that a flag tells.

Start it with torchrun, as 2 processes.
"""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=size)
for step in range(40):
    total = torch.ones(8)
    dist.all_reduce(total)
    if rank == 0:
        print("step", step, total[0].item(), flush=True)
print("rank", rank, "of", size, "with flag", args.local_rank, "is done")
dist.barrier()
dist.destroy_process_group()
