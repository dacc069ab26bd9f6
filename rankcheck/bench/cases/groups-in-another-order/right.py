"""Reduce in two groups of the same ranks.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data, model = dist.new_group([0, 1]), dist.new_group([0, 1])


def reduce(group):
    """Reduce something in a group."""
    tensor = torch.ones(8)
    dist.all_reduce(tensor, group=group)
    return tensor


for step in range(40):
    groups = [data, model]
    if step == 20:
        groups = [model, data]
    for group in groups:
        reduce(group)
dist.destroy_process_group()
