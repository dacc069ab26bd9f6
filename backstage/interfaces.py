"""Types of what the stage scripts pass to backstage.

Each stage has classes of its own with these fields and methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class ModelConfig(Protocol):
    """A stage's `GPTConfig`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int


class StageFlags(Protocol):
    """What every stage's `Hyperparameters` have; see backstage/flags.py."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    data: str
    run_dir: str
    resume: bool
    init: str
    device: str
    track: str
    profile: int
    prompt: str
    devices: int
    tensor_parallel: int
    pipeline_parallel: int
    preset: str
    max_steps: int
    minibatch_size: int
    microbatch_size: int
    sequence_length: int
    warmup_steps: int
    precision: str
    eval_minibatches: int


class LightningFlags(StageFlags, Protocol):
    """What the Lightning stage's `Hyperparameters` have."""

    strategy: str
    seed: int
    eval_every: int
    generate_every: int
    checkpoint_every: int


class RestorableRun(Protocol):
    """What DeepSpeed's strategy needs of a `backstage.run.Run`."""

    rank: int

    def restore(self, model: torch.nn.Module,
                optimizer: torch.optim.Optimizer) -> int:
        """Resume from the newest checkpoint; return its step."""

    def save(self, step: int, model: torch.nn.Module,
             optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint after `step` steps."""


class Samples(Protocol):
    """A stage's `DataIterator`."""

    def seek(self, i: int) -> None:
        """Continue from sample i."""


WriteTexts = Callable[[Any, Any, int], str]  # (model, run, seed)
