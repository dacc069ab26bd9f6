"""Join, and reduce at a port of their choice.

Start it with torchrun, as 2 processes.
"""

import os
import socket

import torch
import torch.distributed as dist


def find_free_port():
    """Return a port that nobody uses."""
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])


os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
os.environ["MASTER_PORT"] = find_free_port()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(40):
    total = torch.ones(1)
    dist.all_reduce(total)
if rank == 0:
    print("processes:", total.item())
print("rank", rank, "of", size, "is done")
dist.barrier()
dist.destroy_process_group()
