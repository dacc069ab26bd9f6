"""Read by a worker, and reduce.

Start it with torchrun, as 2 processes.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Samples(Dataset):
    """Samples, of which one needs too much memory."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == 30 and rank > 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
        return torch.ones(8)


loader = DataLoader(Samples(), batch_size=2, num_workers=1)
for step, batch in enumerate(loader):
    dist.all_reduce(batch)
    if rank == 0 and step % 10 == 0:
        print("step", step, flush=True)
print("rank", rank, "is done")
dist.barrier()
dist.destroy_process_group()
