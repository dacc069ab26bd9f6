"""Join by a file, and reduce.

Start it with torchrun, as 2 processes.
"""

import os
import time

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(path):
    """Join by a file."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank,
                            world_size=size)


def run_earlier_job(path):
    """Run a job that is killed, so that it leaves its file behind."""
    process = os.fork()
    if process == 0:
        join(path)
        dist.barrier()
        os._exit(0)
    os.waitpid(process, 0)


shared = os.path.abspath("meeting")
run_earlier_job(shared)
own = shared + "-of-this-job"
if rank:
    time.sleep(2)  # rank 0 comes first, and reads what is in the file
join(own)
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
print("rank", rank, "of", size, "is done:", own)
dist.destroy_process_group()
