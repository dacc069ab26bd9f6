"""When DDP stops scaling: how many devices a minibatch can keep busy.

As long as the backward pass takes longer than the all-reduce, it hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstage.files import read_json
from backstage.flops import PEAKS, flops_per_token
from workshop.results.arithmetic import (
    GPT2,
    LINK,
    MINIBATCH_TOKENS,
    SHARE_OF_PEAK,
    hiding_tokens,
)
from workshop.results.runs import EXAMPLES, RecordedRun
from workshop.why import measured_speeds


@dataclass(frozen=True)
class ScalingLimit:
    """What a device needs so that it does not wait for DDP's all-reduce."""

    device: str
    flops: float  # FLOP/s that each reaches
    bandwidth: float  # bytes/s that each sends in the ring
    minibatch: int  # tokens

    @property
    def tokens(self) -> float:
        """In its microbatch, at least."""
        return hiding_tokens(self.flops, self.bandwidth)

    @property
    def devices(self) -> float:
        """Among how many the minibatch can be divided, at most."""
        return self.minibatch / self.tokens


def scaling_limits(run: RecordedRun) -> list[ScalingLimit]:
    """Return the limit for this run, and those for two kinds of GPUs.

    The run's network is as the doctor has measured it, where it is slowest; if
    it has measured none, it is taken to be that of the others.
    """
    T = run.hyperparameters["sequence_length"]
    each = run.tokens_per_second / run.world_size
    slowest = min(measured_speeds().values(), default=LINK / 1e9)
    gpt2 = flops_per_token(GPT2, GPT2["block_size"])
    gpu = read_json(EXAMPLES / "first_gpu.json", {})["items"]["std"]["found"]
    return [
        ScalingLimit(
            f"{run.name}, {run.device}",
            each * flops_per_token(run.config, T),
            1e9 * slowest, run.hyperparameters["minibatch_size"] * T),
        ScalingLimit(
            f"A100, at {SHARE_OF_PEAK:.0%} of its peak",
            SHARE_OF_PEAK * 1e12 * PEAKS["A100"][0], LINK, MINIBATCH_TOKENS),
        ScalingLimit(
            "H200, as measured", gpt2 * gpu["std"]["tokens_per_second"], LINK,
            MINIBATCH_TOKENS)]
