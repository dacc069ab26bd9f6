"""Start two nodes of one process each, and reduce.

Start it with python.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(node_rank, size, port):
    """Join as the process of a node, and reduce."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=node_rank, world_size=size)
    for _ in range(40):
        dist.all_reduce(torch.ones(8))
    print("rank", node_rank, "is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = mp.get_context("spawn").Process
    nodes = [start(target=work, args=(number, 2, port))
             for number in (0, 0)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    raise SystemExit(max(abs(node.exitcode) for node in nodes))
