"""Sums, factors and directions of vectors: of gradients and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rankcheck.verification.comparison import off

TINY = 1e-30  # the smallest divisor: of lengths that may be 0


def mix(weights: Sequence[float], vectors: Sequence[torch.Tensor]
        ) -> torch.Tensor:
    """Return the weighted sum of vectors."""
    return add_up([weight * vector for weight, vector
                   in zip(weights, vectors, strict=True)])


def add_up(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of vectors, in their order."""
    return sum(vectors, torch.zeros(()))


def ratio_of(vector: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the factor that brings the second closest to the first."""
    squares = expected.square().sum().clamp(min=TINY)
    return float((vector @ expected / squares).item())


def are_parallel(vector: torch.Tensor, expected: torch.Tensor, limit: float
                 ) -> bool:
    """Return whether one vector is a multiple of the other.

    Args:
        limit: the relative error up to which it is.
    """
    return off(vector, ratio_of(vector, expected) * expected) < limit


def multiple_of(vector: torch.Tensor, expected: torch.Tensor, size: int
                ) -> float | None:
    """Return the factor between two vectors, if a fault makes such a factor.

    BatchNorm and random numbers explain a few per cent, but no factor. A
    factor counts in two cases:

    - The vectors have about the same direction (a cosine above 0.9), and the
      factor is within 15% of the number of processes or its inverse.
    - They have nearly the same direction (a cosine above 0.98), and the factor
      differs from 1 by more than 0.5.

    These limits are choices, not measurements. Noise as large as the gradients
    hides a factor. A factor between 0.5 and 1.5 is not seen unless it is close
    to the number of processes or its inverse.

    Args:
        size: the number of processes.
    """
    ratio = ratio_of(vector, expected)
    lengths = (vector.norm() * expected.norm()).clamp(min=TINY)
    cosine = (vector @ expected / lengths).item()
    near_size = any(abs(ratio / factor - 1) < 0.15
                    for factor in (size, 1 / size))
    far_from_one = abs(ratio - 1) > 0.5 and cosine > 0.98
    if cosine > 0.9 and (near_size or far_from_one):
        return ratio
    return None
