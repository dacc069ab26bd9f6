"""Start processes by mp.spawn, and reduce.

Start it with python.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size, port):
    """Join, and reduce."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for _ in range(40):
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    size = 2
    mp.spawn(work, args=(size, port), nprocs=size)
