"""The plan of a check: its runs on each mesh, and their questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankcheck.engine.ranks import Flag
from workshop.check.probe import SAMPLE_COUNT, T
from workshop.stages import STAGES, Stage
from workshop.vocabulary import save_bytes

STEPS, MINIBATCH, B = 6, 16, 2  # an epoch of 40 samples ends within step 2
FREQUENT = 120  # four tokens of ten: gradients are long, and get clipped
LEARNING_RATE = 3e-3  # its maximum
UNEVEN = MINIBATCH + B  # samples that two ranks cannot share evenly
RESUMED = 3  # steps after which it saves, and is resumed once
EVAL_EVERY = 2  # steps after which it evaluates
EVALUATED = 2  # minibatches of a validation loss
# the device is left to the script: what it asks for is noted
RUN_FLAGS = ("--preset", "tiny", "--precision", "fp32", "--no-compile",
             "--max-steps", STEPS, "--minibatch-size", MINIBATCH,
             "--microbatch-size", B, "--sequence-length", T,
             "--learning-rate", LEARNING_RATE, "--eval-every", EVAL_EVERY,
             "--eval-minibatches", EVALUATED, "--generate-every", STEPS,
             "--checkpoint-every", RESUMED)


@dataclass(frozen=True)
class Mesh:
    """How many processes there are, and how they share the work.

    Attributes:
        pp: the stages of a pipeline.
        dp: the ranks that share the data.
        tp: the ranks that share each matrix.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.pp * self.dp * self.tp

    @property
    def is_data_parallel(self) -> bool:
        """Whether the ranks share the data, and nothing else of the work."""
        return self.dp == self.size

    def __str__(self) -> str:
        if self.tp * self.pp == 1:
            return str(self.size)
        return f"{self.pp}x{self.dp}x{self.tp}"

    @property
    def nodes(self) -> int:
        """The number of nodes that the processes are told."""
        return 2 if self.size >= 4 else 1

    def flags(self) -> list[str]:
        """Return the flags of this mesh for a sharded stage."""
        flags = []
        if self.pp > 1:
            flags += ["--pipeline-parallel", str(self.pp)]
        if self.tp > 1:
            flags += ["--tensor-parallel", str(self.tp)]
        return flags

    @property
    def description(self) -> str:
        """The mesh in a sentence."""
        if self.size == 1:
            return "1 process (plain python)"
        text = f"{self.size} processes"
        if not self.is_data_parallel:
            text += f" ({self}: pipeline x data x tensor parallel)"
        if self.nodes == 2:
            text += ", as on 2 nodes"
        return text


@dataclass(frozen=True)
class StageRunPlan:
    """A run that is to be made: a column of the table.

    Attributes:
        name: the column's.
        kind: which questions are asked: see `check_question`.
        mesh: its processes.
        flags: of the script, beside `RUN_FLAGS`.
        about: what is said of it, behind its processes.
    """

    name: str
    kind: str
    mesh: Mesh
    flags: tuple[Flag, ...] = ()
    about: str = ""


def plan_runs(stage: str, *, quickly: bool = False) -> list[StageRunPlan]:
    """Return the runs of a check, in their order.

    quickly: as for one change: on two processes alone.
    """
    about = STAGES[stage]
    meshes = [Mesh(*sizes) for sizes in about.tried or about.meshes]
    pair = meshes[0]
    for mesh in reversed(meshes):
        if mesh.size == 2:
            pair = mesh
    runs = []
    if about.kernels:
        runs.append(StageRunPlan("operations", "operations", Mesh(),
                                 about=", each operation alone"))
    for mesh in [pair] if quickly else meshes:
        runs.append(StageRunPlan(str(mesh), "whole", mesh))
    if pair.size > 1:
        runs.append(StageRunPlan(
            "uneven", "uneven", Mesh(dp=2), ("--minibatch-size", UNEVEN),
            f", a minibatch of {UNEVEN} samples, which they cannot share"))
    if not quickly:
        runs += plan_other_flags(about, meshes[0], pair)
    return runs


def plan_other_flags(about: Stage, first: Mesh, pair: Mesh
                     ) -> list[StageRunPlan]:
    """Return the runs that resume, stop early, or compute the same by
    other flags.

    Args:
        about: the stage.
        first: the mesh whose run is resumed.
        pair: the mesh of these runs.
    """
    runs = [
        StageRunPlan(
            "resumed", "resumed", pair, ("--resume",),
            f", resuming the run of {first.description} after step "
            f"{RESUMED - 1}"),
        StageRunPlan(
            "stopped", "stopped", pair,
            ("--compile", "--recompute", "--generate-every", 1),
            ", stopped early")]
    if about.trainer:
        runs += [
            StageRunPlan(
                "bf16", "bf16", Mesh(),
                ("--precision", "bf16", "--strategy", "ddp"),
                ", --precision bf16"),
            StageRunPlan(
                "fsdp2", "fsdp2", pair, ("--strategy", "fsdp2", "--compile"),
                ", --strategy fsdp2")]
    return runs


def make_dataset(folder: Path) -> None:
    """Write 40 samples of 32 tokens, the first of each being its number."""
    rng = np.random.default_rng(0)
    for split in ("train_000001", "val_000000"):
        tokens = rng.integers(SAMPLE_COUNT, 128, SAMPLE_COUNT * T + 1)
        tokens[1::2] = np.where(rng.random(len(tokens[1::2])) < 0.8,
                                FREQUENT, tokens[1::2])
        tokens[:-1:T] = np.arange(SAMPLE_COUNT)
        np.save(folder / f"check_{split}.npy", tokens.astype(np.uint16))
    save_bytes(folder)
