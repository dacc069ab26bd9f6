"""The stages: everything that the tools of the course know about them.

A stage is its script in solutions/, its lesson in workshop/lessons/ with its
notebook (the first one needs none), and its entry here. No other place knows
its name: `python -m workshop.jobs` writes its batch files and its workspace.
Only the standard library, from Python 3.9 on.
"""

from dataclasses import dataclass, field

from backstage import ROOT
from backstage.errors import UserError

DESK = ROOT / "code" / "train_gpt2.py"
SIZES = ("1n1g", "1n2g", "1n4g", "2n1g", "2n2g", "2n4g")  # nodes, GPUs on each


@dataclass(frozen=True)
class Stage:
    """A stage of the course."""

    name: str
    after: str  # the stage that its lesson starts from; "" for the first one
    label: str  # at the top of its batch files
    title: str
    colour: str  # in the pictures
    launcher: str  # of its processes: "python", "torchrun" or "mpirun"
    meshes: tuple  # that it is tested on: (pipeline, data, tensor) parallel
    tried: tuple = ()  # those of them on which a check tries it (): all
    kernels: bool = False  # whether its operations are kernels of its own
    trainer: bool = False  # whether Lightning's Trainer has the loop
    split: str = ""  # what is split over the devices: see arithmetic.py
    jobs: dict = field(  # its batch files: size -> flags of the script
        default_factory=lambda: dict.fromkeys(SIZES, ""))

    @property
    def shards(self):
        """Whether each device holds a part of the model."""
        return self.split not in ("", "samples")

    @property
    def solution(self):
        """The finished script."""
        return ROOT / "solutions" / f"train_gpt2_{self.name}.py"

    @property
    def lesson(self):
        """The document that leads to it from the previous stage."""
        return ROOT / "workshop" / "lessons" / f"{self.name}.md"


STAGES = {stage.name: stage for stage in (
    Stage("std", "", "The single-device stage", "one device", "#8a8a8a",
          "python", ((1, 1, 1),), jobs=dict.fromkeys(SIZES[:2], "")),
    Stage("mpi", "std", "MPI", "gradients averaged by hand, with MPI",
          "#1792a4", "mpirun", ((1, 1, 1), (1, 2, 1), (1, 4, 1))),
    Stage("kernels", "std", "Kernels", "kernels of its own, in Triton",
          "#9a7b00", "python", ((1, 1, 1),), kernels=True,
          jobs=dict.fromkeys(SIZES[:1], "")),
    Stage("ddp", "std", "DDP", "a process for each device, with DDP",
          "#3b7dd8", "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)),
          split="samples"),
    Stage("lit", "ddp", "Lightning", "the same training with Lightning",
          "#cf7a12", "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)),
          trainer=True, split="samples"),
    Stage("fsdp", "ddp", "FSDP",
          "a part of the model on each device, with FSDP", "#2b9a5f",
          "torchrun", ((1, 1, 1), (1, 2, 1), (1, 4, 1)), split="parameters"),
    Stage("tp", "fsdp", "Tensor parallelism",
          "each matrix split over devices, and FSDP", "#8e4ec6", "torchrun",
          ((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2)),
          tried=((1, 1, 1), (1, 1, 2), (1, 2, 2)), split="matrices",
          jobs={"1n2g": "--tensor-parallel 2", "1n4g": "--tensor-parallel 2"}),
    Stage("3d", "tp", "3D parallelism",
          "pipeline stages, with tp and FSDP in each", "#c2375a",
          "torchrun", ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2),
                       (2, 2, 2)),
          tried=((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 2)),
          split="layers",
          jobs={"2n4g": "--pipeline-parallel 2 --tensor-parallel 2"}),
)}
FIRST = next(iter(STAGES))  # where the course starts
LESSONS = tuple(name for name, stage in STAGES.items() if stage.after)


def find(name):
    """The `Stage` of that name; raises `UserError` if there is none."""
    if name not in STAGES:
        raise UserError(f"there is no stage {name}: choose from "
                        f"{', '.join(STAGES)}")
    return STAGES[name]
