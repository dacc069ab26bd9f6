"""Read the progress of a helper, and reduce.

Start it with torchrun, as 2 processes.
"""

import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

HELPER = """
import sys, time
sys.stdout.write("50 %\\r")
sys.stdout.flush()
time.sleep(45)
"""


def read_progress(helper):
    """Return what the helper says of its progress."""
    return helper.stdout.readline()


if rank == 0:
    helper = subprocess.Popen([sys.executable, "-c", HELPER],
                              stdout=subprocess.PIPE)
    print("progress:", read_progress(helper), flush=True)
    helper.kill()
for _ in range(40):
    dist.all_reduce(torch.ones(8))
print("rank", rank, "is done")
dist.destroy_process_group()
