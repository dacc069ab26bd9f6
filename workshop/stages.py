"""The stages: everything that the tools of the course know about them.

A stage is its script in solutions/, its lesson in workshop/lessons/ with its
notebook (the first one needs none), its batch file, and its entry here. No
other place knows its name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from backstage import ROOT
from backstage.errors import require

WORKING_COPY = ROOT / "code" / "train_gpt2.py"


@dataclass(frozen=True)
class Stage:
    name: str
    after: str  # the stage that its lesson starts from; "" for the first one
    title: str
    colour: str  # in the pictures
    launcher: str  # of its processes: "python", "torchrun" or "mpirun"
    # that it is tested on: (pipeline, data, tensor) parallel
    meshes: tuple[tuple[int, int, int], ...]
    # those of them on which a check tries it (): all
    tried: tuple[tuple[int, int, int], ...] = ()
    kernels: bool = False  # whether its operations are kernels of its own
    trainer: bool = False  # whether Lightning's Trainer has the loop
    split: str = ""  # what is split over the devices: see arithmetic.py

    @property
    def shards(self) -> bool:
        """Whether each device holds a part of the model."""
        return self.split not in ("", "samples")

    @property
    def solution(self) -> Path:
        return ROOT / "solutions" / f"train_gpt2_{self.name}.py"

    @property
    def lesson(self) -> Path:
        """The document that leads to it from the previous stage."""
        return ROOT / "workshop" / "lessons" / f"{self.name}.md"


STAGES = {stage.name: stage for stage in (
    Stage("std", "", "one device", "#8a8a8a", "python", ((1, 1, 1),)),
    Stage("mpi", "std", "gradients averaged by hand, with MPI", "#1792a4",
          "mpirun", ((1, 1, 1), (1, 2, 1), (1, 4, 1))),
    Stage("kernels", "std", "kernels of its own, in Triton", "#9a7b00",
          "python", ((1, 1, 1),), kernels=True),
    Stage("ddp", "std", "a process for each device, with DDP", "#3b7dd8",
          "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)), split="samples"),
    Stage("lit", "ddp", "the same training with Lightning", "#cf7a12",
          "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)), trainer=True,
          split="samples"),
    Stage("fsdp", "ddp", "a part of the model on each device, with FSDP",
          "#2b9a5f", "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)),
          split="parameters"),
    Stage("tp", "fsdp", "each matrix split over devices, and FSDP", "#8e4ec6",
          "torchrun", ((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2)),
          tried=((1, 1, 1), (1, 1, 2), (1, 2, 2)), split="matrices"),
    Stage("3d", "tp", "pipeline stages, with tp and FSDP in each", "#c2375a",
          "torchrun", ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2),
                       (2, 2, 2)),
          tried=((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 2)),
          split="layers"),
)}
FIRST_STAGE = next(iter(STAGES))  # where the course starts
LESSONS = tuple(name for name, stage in STAGES.items() if stage.after)


def find_stage(name: str) -> Stage:
    """The `Stage` of that name; raises `UserError` if there is none."""
    require(name in STAGES, f"no such stage: {name}; fix: choose from "
            f"{', '.join(STAGES)}")
    return STAGES[name]


def require_lesson(stage: str) -> None:
    """Raise a `UserError` unless a lesson makes this stage."""
    require(stage in LESSONS, f"no lesson leads to a stage {stage}; fix: "
            f"choose from {', '.join(LESSONS)}")


def require_writable(folder: Path = ROOT) -> None:
    """Raise a `UserError` in a read-only clone."""
    require(os.access(folder, os.W_OK | os.X_OK), f"{folder} cannot be "
            "written; fix: work in a clone of your own")


def modules_of(stage: str) -> list[str]:
    """What to import before a stage's processes are forked, as a list."""
    from rankcheck.engine.run import PRELOAD

    return [*PRELOAD, "tiktoken", "tyro", "regex", "backstage.run",
            "workshop.check.probe",
            *["backstage.lightning"] * STAGES[stage].trainer]


def batch_files() -> list[str]:
    """The names of SLURM's batch files: "ddp-2n4g" for batch-ddp-2n4g.sh."""
    return sorted(path.stem[len("batch-"):] for path in
                  (ROOT / "batchfiles").glob("batch-*.sh"))
