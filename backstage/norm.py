"""The norm of a gradient that is spread over a mesh of devices."""

import math

import torch
import torch.distributed as dist
from torch import nn


def clip_grad_norm(weights, max_norm, ranks, tied=None):
    """Clip the gradients to `max_norm`; returns their norm before, a float.

    weights: this rank's DTensors, on meshes that may differ, as PyTorch's
    `clip_grad_norm_` does not allow. ranks: how many share these weights,
    each having a part of every one. tied: a weight that as many others have,
    too, with the same gradient. All ranks of the world.

    A part counts once, however many ranks hold a copy of it: each adds its
    square divided by the number of copies, and one all-reduce sums them up.
    """
    weights, square = list(weights), 0
    for weight in weights:
        parts = math.prod(
            size for size, placement in zip(
                weight.device_mesh.shape, weight.placements, strict=True)
            if not placement.is_replicate())
        copies = (2 if weight is tied else 1) * ranks / parts
        square += weight.grad.to_local().square().sum() / copies
    dist.all_reduce(square)  # the sum over all ranks
    norm = torch.sqrt(square)
    nn.utils.clip_grads_with_norm_(weights, max_norm, norm, foreach=False)
    return norm.item()
