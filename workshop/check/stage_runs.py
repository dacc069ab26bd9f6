"""Makes the check's runs: a stage's script, watched, and what it leaves."""

from __future__ import annotations

import ast
import contextlib
import csv
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from rankcheck.engine import sandbox
from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.ranks import Flag
from rankcheck.engine.run_record import RunRecord
from rankcheck.engine.scratch import quiet_environment
from rankcheck.engine.workspace import Workspace
from rankcheck.system.errors import KILLED, require
from workshop.check import probe
from workshop.check.plan import (
    MINIBATCH,
    RESUMED,
    RUN_FLAGS,
    STEPS,
    Mesh,
    StageRunPlan,
    make_dataset,
)
from workshop.jobs.mpirun import launcher_of
from workshop.stages import STAGES, Stage, modules_of

# Triton's interpreter takes long for each program of a kernel
SMALL_MICROBATCH = ("--microbatch-size", MINIBATCH // 2)
INTERPRETER_FACTOR = 5  # times as much CPU time, at least
COMPILING = 100.0  # seconds of a CPU on each rank: 7, if nothing is in a cache
# CPU seconds that the single device's steps take before they are measured,
# and times as many that a run may take. An idle machine needs 2 to 4 s.
FIRST_CPU_SECONDS, TIMES = 20.0, 6

Checkpoint = dict[str, Any]  # as a stage saves it


@dataclass(kw_only=True)
class StageRun(RunRecord):
    """A run of a stage's script, with what its run's folder holds.

    Attributes:
        stage: the name of the stage that the script should be.
        mesh: its processes.
        source: of the script.
        more: flags of this run alone.
        rows: of metrics.csv, a value by the name of its column.
        state: the last checkpoint; None if there is none, or it is damaged.
        saved: the steps of all checkpoints that are left.
        resumed: the checkpoint that it goes on from, if it does.
    """

    stage: str
    mesh: Mesh
    records: Sequence[probe.CourseRecord | None] = ()
    source: bytes = b""
    more: tuple[Flag, ...] = ()
    rows: list[dict[str, str]] = field(default_factory=list)
    state: Checkpoint | None = None
    saved: list[str] = field(default_factory=list)
    resumed: Checkpoint | None = None

    def __post_init__(self) -> None:
        self.steps = STEPS
        self.kills = self.about.launcher == "mpirun"
        self.alike = self.mesh.is_data_parallel

    @property
    def about(self) -> Stage:
        return STAGES[self.stage]

    @property
    def all_records(self) -> Sequence[probe.CourseRecord]:
        return cast("Sequence[probe.CourseRecord]", super().all_records)

    def record_of(self, rank: int) -> probe.CourseRecord:
        return cast("probe.CourseRecord", super().record_of(rank))

    def tree(self) -> ast.Module:
        """Return the script's syntax tree."""
        return ast.parse(self.source)


class Bench:
    """A place for runs of one script, as it was read, with a dataset.

    Attributes:
        workspace: where its runs are made.
        stage: the name of the stage that the script should be.
        script: its copy, which the ranks run.
        reference: the single device's run, once that is known.
    """

    def __init__(self, workspace: Workspace, stage: str, script: Path,
                 data: bytes, say: Callable[[str], None] = print, *,
                 copy: sandbox.Sandbox | None = None,
                 folder: Path | None = None) -> None:
        """Make the folders.

        Args:
            workspace: where its runs are made.
            stage: the name of the stage that the script should be.
            script: its file, beside which it finds its modules.
            data: its content.
            say: is told what a run waits for.
            copy: the sandbox in which the ranks run; None: a new one.
            folder: for the runs; None: the workspace's.
        """
        self.workspace, self.stage, self.say = workspace, stage, say
        self.folder = folder or workspace.folder
        self.place = script.resolve().parent
        (self.folder / "script").mkdir()
        self.script = self.folder / "script" / script.name
        self.script.write_bytes(data)
        self.preload = modules_of(stage)
        self.uses_lightning = b"lightning" in data  # whatever the stage
        if self.uses_lightning:
            self.preload.append("backstage.lightning")
        (self.folder / "data").mkdir()
        make_dataset(self.folder / "data")
        self.reference: StageRun | None = None
        self.parts = 0
        self.copy = copy or sandbox.make(workspace.folder, "copy",
                                         self.script)

    def with_script(self, data: bytes, stage: str | None = None) -> Bench:
        """Return a place for another script, in a folder within this one.

        stage: the name of the stage whose solution it is; None: it is another
            version of this script.
        """
        # short: the address of a socket in it has 108 characters at most
        self.parts += 1
        folder = self.folder / f"p{self.parts}"
        folder.mkdir()
        bench = Bench(self.workspace, stage or self.stage, self.script, data,
                      self.say, copy=self.copy, folder=folder)
        bench.place = self.place
        if stage:
            bench.place = STAGES[stage].solution.parent
        bench.reference = self.reference
        return bench

    def make(self, planned: StageRunPlan) -> StageRun:
        """Make a run; if it hangs, make it anew.

        In rare cases Open MPI 4 hangs before the script begins.

        Raises:
            UserError: the script could not be run.
        """
        run = self.make_once(planned)
        if run.gave_up in ("hangs", "unstarted"):
            shutil.rmtree(self.folder / planned.name, ignore_errors=True)
            run = self.make_once(planned)
        size = planned.mesh.size
        require(run.gave_up != "unstarted", "mpirun does not start the "
                f"processes; fix: see why `mpirun -n {size} hostname` does "
                f"not print {size} lines")
        return run

    def make_once(self, planned: StageRunPlan) -> StageRun:
        if planned.kind != "resumed":
            return self.try_out(planned)
        # the first run, as it was in the middle
        run_folder = shutil.copytree(
            self.folder / "1", self.folder / planned.name)
        file, *later = sorted(run_folder.glob("checkpoints/step_*.pt"))
        for one in later:
            one.unlink()
        state = torch.load(file, weights_only=True)
        run = self.try_out(planned)
        run.first_step, run.resumed = RESUMED, state
        return run

    def try_out(self, planned: StageRunPlan) -> StageRun:
        """Run the script, or its operations alone, under observation."""
        script, flags, mesh = self.script, planned.flags, planned.mesh
        if planned.kind == "operations":
            script = Path(__file__).with_name("operations.py")
            flags = (self.script,)
        run_folder = self.folder / planned.name
        record_folder = self.folder / f"{planned.name}-seen"
        few = SMALL_MICROBATCH if STAGES[self.stage].kernels else ()
        run = self.workspace.run(
            StageRun(script, stage=self.stage, mesh=mesh),
            (*RUN_FLAGS, *few, "--data", self.folder / "data",
             "--run-dir", run_folder, *mesh.flags(), *flags),
            record_folder, self.say,
            Budget(self.allow(planned), endless=3 * STEPS,
                   steps=count_steps(planned)),
            sandbox=self.copy,
            fix="fix: let it write into the run's folder",
            env=quiet_environment(self.workspace.temporary),
            world_size=mesh.size if mesh.size > 1 else None,
            nodes=mesh.nodes, launcher=launcher_of(self.stage),
            probes=probe.check_probes(run_folder, planned.kind == "stopped",
                                      self.uses_lightning),
            record=probe.CourseRecord, preload=self.preload, place=self.place)
        require(run.kills or not run.killed, KILLED)
        run.source, run.more = script.read_bytes(), flags
        self.collect(run, run_folder)
        shutil.rmtree(record_folder)
        return run

    def allow(self, planned: StageRunPlan) -> float:
        """Return how many seconds of a CPU a step of a run may take."""
        needed = FIRST_CPU_SECONDS
        if self.reference:
            needed = max(1.0, self.reference.cpu)
        allowed = TIMES * needed
        if STAGES[self.stage].kernels:
            allowed *= INTERPRETER_FACTOR
        if "--compile" in planned.flags:
            allowed += COMPILING
        return allowed

    def collect(self, run: StageRun, run_folder: Path) -> None:
        """Read what the run's folder holds."""
        if (run_folder / "metrics.csv").exists():
            with open(run_folder / "metrics.csv", newline="") as file:
                run.rows = list(csv.DictReader(file))
        files = sorted(run_folder.glob("checkpoints/step_*.pt"))
        run.saved = [file.stem.removeprefix("step_").lstrip("0")
                     for file in files]
        if files:
            with contextlib.suppress(Exception):  # whatever it may write there
                run.state = torch.load(files[-1], weights_only=True)


def count_steps(planned: StageRunPlan) -> int:
    """Return how many steps a run makes, 0 if that is not known."""
    return {"whole": STEPS, "bf16": STEPS, "fsdp2": STEPS,
            "resumed": STEPS - RESUMED}.get(planned.kind, 0)
