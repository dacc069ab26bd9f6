"""Count in a process of its own on rank 0, and reduce.

Start it with torchrun, as 2 processes.
"""

import multiprocessing

import torch
import torch.distributed as dist


def count(results):
    """Put much into a queue."""
    results.put(b"x" * 1_000_000)


def measure():
    """Return what another process has counted."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=count, args=(results,))
    process.start()
    process.join()
    return results.get()


dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(40):
    if step == 20 and rank == 0:
        measure()
    dist.all_reduce(torch.ones(8))
print("done")
dist.destroy_process_group()
