"""Fingerprints of slices: they tell which part of a tensor another one is."""

from __future__ import annotations

import torch

BLOCK = 2 ** 22  # elements that are hashed at a time, 32 MiB as int64


def slice_fingerprints(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a fingerprint of each slice of a tensor, along each dimension.

    A part of a tensor that has some of its slices along one dimension, and all
    of the others, has their fingerprints along that dimension. Those of slices
    that differ are equal with a probability of about 2**-64.

    Args:
        tensor: of any floating dtype; it is read as float32. One without
            dimensions counts as one with a single element.

    Returns:
        For each dimension an int64 vector, on the CPU: the bits of a slice's
        elements, each times an odd number that depends on its place in the
        slice, added up modulo 2**64. The order of the sum does not matter.
    """
    values = tensor.detach().float().cpu().contiguous()
    bits = values.reshape(values.shape or (1,)).view(torch.int32)
    return [hash_slices(bits.movedim(dim, 0)) for dim in range(bits.dim())]


def hash_slices(bits: torch.Tensor) -> torch.Tensor:
    """Return a hash of each slice of integers along the first dimension."""
    size = bits[:1].numel()
    factors = odd_factors(size)
    count = max(1, BLOCK // max(size, 1))  # slices at a time
    hashes = [(block.reshape(len(block), size) * factors).sum(1)
              for block in torch.split(bits, count)]
    return torch.cat(hashes)


def odd_factors(count: int) -> torch.Tensor:
    """Return as many odd int64 numbers, which look random.

    They are the outputs of SplitMix64 (Steele, Lea and Flood: Fast splittable
    pseudorandom number generators, 2014) without its last step; shifts keep
    the sign.
    """
    numbers = torch.arange(1, count + 1) * -0x61C8864680B583EB
    numbers = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ (numbers >> 27)) * -0x6B2FB644ECCEEE15
    return numbers | 1
