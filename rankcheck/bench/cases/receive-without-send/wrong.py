"""Exchange borders with the neighbour, and reduce.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
other = 1 - rank


def exchange(step):
    """Send a border to the neighbour, and receive its border."""
    mine, theirs = torch.ones(1000), torch.empty(1000)
    operations = [P2POp(dist.irecv, theirs, other)]
    if rank == 0 or step != 20:
        operations.append(P2POp(dist.isend, mine, other))
    for work in batch_isend_irecv(operations):
        work.wait()
    return theirs


for step in range(40):
    exchange(step)
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
