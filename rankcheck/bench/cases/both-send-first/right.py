"""Exchange tensors between two ranks.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
other = 1 - rank


def exchange(tensor):
    """Return the other rank's tensor."""
    received = torch.empty_like(tensor)
    work = dist.isend(tensor, other)
    dist.recv(received, other)
    work.wait()
    return received


for step in range(40):
    tensor = torch.full((1000,), float(rank))
    received = exchange(tensor)
    if rank == 0 and step % 10 == 0:
        print("step", step, received[0].item(), flush=True)
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
