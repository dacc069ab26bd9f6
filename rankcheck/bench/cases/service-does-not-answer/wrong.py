"""Reduce, and tell a service about it on rank 0.

Start it with torchrun, as 2 processes.
"""

import socket

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
service = socket.create_server(("127.0.0.1", 0))


def tell(number):
    """Send a number to the service, and wait for its answer."""
    with socket.create_connection(service.getsockname()) as client:
        connection, _ = service.accept()
        client.sendall(b"%d" % number)
        connection.recv(8)
        return client.recv(1)


for step in range(40):
    if step == 20 and rank == 0:
        tell(step)
    dist.all_reduce(torch.ones(8))
print("done")
dist.destroy_process_group()
