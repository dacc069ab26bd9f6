"""The gradient noise scale, at which a larger minibatch stops paying off.

McCandlish et al. (2018), arXiv:1812.06162, Appendix A.1: the gradient of B
samples has on average the squared norm |G|^2 + tr(Sigma)/B, so two sizes of B
tell signal and noise apart. Here they are a microbatch and the minibatch, the
mean of all microbatches of all ranks: nothing is computed twice.
"""

import math

import torch

from backstage.checkpoint import is_sharded
from backstage.errors import require
from backstage.world import get_rank_and_size, on_every_rank

KEEP = 0.99  # of the running means in each step: they remember some 100 steps


class NoiseScale:
    """Measures the norm of the microbatches' gradients, before they are added.

    B, S: the samples of a microbatch and of a minibatch.
    """

    def __init__(self, B, S):
        self.B, self.S = B, S
        self.signal = self.noise = 0.0  # running means of |G|^2, tr(Sigma)

    def watch(self, model):
        """Look at each gradient of the model. All ranks.

        Raises a `UserError` if none is whole, or none is of a part.
        """
        require(self.S > self.B, "--noise-scale compares microbatches with "
                f"the minibatch, but both have {self.S} samples: choose a "
                "smaller --microbatch-size")
        require(not is_sharded(model), "--noise-scale needs whole gradients "
                "before they are averaged: use a stage in which each device "
                "holds all of the model")
        weights = list(model.parameters())
        self.squares = torch.zeros((), device=weights[0].device)
        for weight in weights:
            weight.register_hook(self._add)

    def _add(self, gradient):
        self.squares += torch.linalg.vector_norm(gradient).float() ** 2

    def read(self):
        """The microbatches' root mean square norm in this step. All ranks."""
        squares = sum(on_every_rank(self.squares.item()))
        self.squares.zero_()
        # each loss is divided by the number of a rank's microbatches
        _, world_size = get_rank_and_size()
        return math.sqrt(squares * self.S / self.B) / world_size

    def add(self, norm, microbatch_norm):
        """The noise scale in samples, with a step's norms; None if below 0.

        It is the ratio of the means: a mean of ratios would be biased.
        """
        B, S, small, big = self.B, self.S, microbatch_norm**2, norm**2
        signal = (S * big - B * small) / (S - B)
        noise = (small - big) / (1 / B - 1 / S)
        self.signal += (1 - KEEP) * (signal - self.signal)
        self.noise += (1 - KEEP) * (noise - self.noise)
        return self.noise / self.signal if self.signal > 0 else None
