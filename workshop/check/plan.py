"""What the check tries: the script on each mesh, on a dataset of its own."""

import ast
import contextlib
import csv
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rankcheck.engine import sandbox
from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.scratch import full, quiet_environment
from rankcheck.engine.trial import LITTLE, Trial, watch
from rankcheck.system.errors import KILLED, require
from workshop.check import probe
from workshop.check.probe import SAMPLES, T
from workshop.jobs.mpirun import launcher_of
from workshop.stages import STAGES, modules_of
from workshop.vocabulary import save_bytes

STEPS, MINIBATCH, B = 6, 16, 2  # an epoch of 40 samples ends within step 2
FREQUENT = 120  # four tokens of ten: gradients are long, and get clipped
LEARNING_RATE = 3e-3  # its maximum
UNEVEN = MINIBATCH + B  # samples that two ranks cannot share evenly
RESUMED = 3  # steps after which it saves, and is resumed once
EVERY = 2  # steps after which it evaluates
EVALUATED = 2  # minibatches of a validation loss
# the device is left to the script: what it asks for is noted
FLAGS = ("--preset", "tiny", "--precision", "fp32", "--no-compile",
         "--max-steps", STEPS, "--minibatch-size", MINIBATCH,
         "--microbatch-size", B, "--sequence-length", T,
         "--learning-rate", LEARNING_RATE, "--eval-every", EVERY,
         "--eval-minibatches", EVALUATED, "--generate-every", STEPS,
         "--checkpoint-every", RESUMED)

# Triton's interpreter takes long for each program of a kernel
FEW = ("--microbatch-size", MINIBATCH // 2)
INTERPRETED = 5  # times as much CPU time, at least
COMPILING = 100.0  # seconds of a CPU on each rank: 7, if nothing is in a cache


@dataclass(frozen=True)
class Mesh:
    """How many processes there are, and how they share the work."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self):
        return self.pp * self.dp * self.tp

    def __str__(self):
        if self.tp * self.pp == 1:
            return str(self.size)
        return f"{self.pp}x{self.dp}x{self.tp}"

    @property
    def nodes(self):
        """On how many nodes the processes believe they are."""
        return 2 if self.size >= 4 else 1

    def flags(self):
        """What tells a sharded stage."""
        return [*(("--pipeline-parallel", self.pp) if self.pp > 1 else ()),
                *(("--tensor-parallel", self.tp) if self.tp > 1 else ())]

    @property
    def words(self):
        if self.size == 1:
            return "1 process (plain python)"
        return (f"{self.size} processes" + (
            f" ({self}: pipeline x data x tensor parallel)"
            if self.dp < self.size else "")
            + ", as on 2 nodes" * (self.nodes == 2))


@dataclass
class Row:
    """A trial that is to be made: a column of the table."""

    column: str
    kind: str  # which questions are asked
    mesh: Mesh
    flags: tuple = ()
    about: str = ""  # said of it, behind its processes


@dataclass(kw_only=True)
class StageTrial(Trial):
    """One of a stage's script: what its run's folder holds, too."""

    stage: str
    mesh: Mesh
    source: bytes = b""  # of the script
    more: tuple = ()  # flags of this trial alone
    rows: list = field(default_factory=list)  # of metrics.csv
    state: dict | None = None  # the last checkpoint
    saved: list = field(default_factory=list)  # the steps of all that are left
    resumed: dict | None = None  # the checkpoint that it goes on from

    def __post_init__(self):
        self.steps = STEPS
        self.kills = self.about.launcher == "mpirun"
        self.alike = self.mesh.dp == self.mesh.size

    @property
    def about(self):
        return STAGES[self.stage]

    def tree(self):
        return ast.parse(self.source)


class Bench:
    """A folder for trials, with a dataset and the script as it was read."""

    def __init__(self, folder, stage, script, data, say=print, copy=None):
        """copy: the `Sandbox` in which its ranks run, a new one if None."""
        self.folder, self.stage, self.say = folder, stage, say
        self.place = Path(script).resolve().parent
        (self.folder / "script").mkdir()
        self.script = self.folder / "script" / Path(script).name
        self.script.write_bytes(data)
        self.preload = modules_of(stage)
        self.lightning = b"lightning" in data  # whatever the stage
        if self.lightning:
            self.preload.append("backstage.lightning")
        (self.folder / "tmp").mkdir()
        (self.folder / "data").mkdir()
        make_dataset(self.folder / "data")
        self.reference, self.parts = None, 0
        self.copy = copy or sandbox.make(folder, "copy", self.script)

    def with_script(self, data, stage=None):
        """Another one, in a folder within this one, for another script."""
        # short: the address of a socket in it has 108 characters at most
        self.parts += 1
        folder = self.folder / f"p{self.parts}"
        folder.mkdir()
        bench = Bench(folder, stage or self.stage, self.script, data,
                      lambda text: None, self.copy)
        bench.place = STAGES[stage].solution.parent if stage else self.place
        bench.reference = self.reference
        return bench

    def plan(self, quickly):
        """The `Row`s of a check; quickly: on two processes alone."""
        about = STAGES[self.stage]
        meshes = [Mesh(*sizes) for sizes in about.tried or about.meshes]
        pair = next((mesh for mesh in meshes if mesh.size == 2), meshes[0])
        rows = [Row("operations", "operations", Mesh(),
                    about=", each operation alone")] * about.kernels
        rows += [Row(str(mesh), "whole", mesh) for mesh in (
            [pair] if quickly else meshes)]
        if pair.size > 1:
            rows.append(Row("uneven", "uneven", Mesh(dp=2),
                            ("--minibatch-size", UNEVEN),
                            f", a minibatch of {UNEVEN} samples"))
        if quickly:
            return rows
        rows += [  # in another world; with flags that compute the same
            Row("resumed", "resumed", pair, ("--resume",),
                f", resuming after step {RESUMED - 1} a run of "
                f"{meshes[0].words}"),
            Row("stopped", "stopped", pair, (
                "--compile", "--recompute", "--generate-every", 1),
                ", stopped early")]
        if about.trainer:
            rows += [
                Row("bf16", "bf16", Mesh(), ("--precision", "bf16",
                                             "--strategy", "ddp"),
                    ", --precision bf16"),
                Row("fsdp2", "fsdp2", pair, ("--strategy", "fsdp2",
                                             "--compile"),
                    ", --strategy fsdp2")]
        return rows

    def make(self, row):
        """The `Trial` of a row of the plan: of two, if the first one hangs.

        In rare cases Open MPI 4 hangs before the script begins.
        """
        trial = self.make_once(row)
        if trial.gave_up in ("hangs", "unstarted"):
            shutil.rmtree(self.folder / row.column, ignore_errors=True)
            trial = self.make_once(row)
        size = row.mesh.size
        require(trial.gave_up != "unstarted", "mpirun does not start the "
                f"processes: does `mpirun -n {size} hostname` print {size} "
                "lines?")
        return trial

    def make_once(self, row):
        if row.kind != "resumed":
            return self.try_out(row)
        # the first run, as it was in the middle
        run = shutil.copytree(self.folder / "1", self.folder / row.column)
        file, *later = sorted(run.glob("checkpoints/step_*.pt"))
        for one in later:
            one.unlink()
        state = torch.load(file, weights_only=True)
        trial = self.try_out(row)
        trial.first_step, trial.resumed = RESUMED, state
        return trial

    def try_out(self, row):
        """Run the script, or its operations, under observation: a `Trial`."""
        script, flags, mesh = self.script, row.flags, row.mesh
        if row.kind == "operations":
            script = Path(__file__).with_name("operations.py")
            flags = self.script,
        few, slow = ((FEW, INTERPRETED) if STAGES[self.stage].kernels
                     else ((), 1))
        # several times what the single device needed for all its steps
        allowed = slow * 6 * max(1.0, self.reference.cpu if self.reference
                                 else 20.0)
        allowed += COMPILING * ("--compile" in flags)
        run = self.folder / row.column
        seen = self.folder / f"{row.column}-seen"
        trial = watch(
            StageTrial(script, stage=self.stage, mesh=mesh), (
                *FLAGS, *few, "--data", self.folder / "data", "--run-dir",
                run, *mesh.flags(), *flags), seen, self.say,
            Budget(allowed, endless=3 * STEPS),
            world_size=mesh.size if mesh.size > 1 else None,
            nodes=mesh.nodes, launcher=launcher_of(self.stage),
            probes=[self.copy, *probe.probes(
                run, row.kind == "stopped", self.lightning)],
            env=quiet_environment(self.folder / "tmp"),
            preload=self.preload, place=self.place, within=self.folder,
            cwd=str(self.copy.name(Path.cwd())))
        self.copy.require_kept("Let it write into the run's folder.")
        trial.source, trial.more = script.read_bytes(), flags
        self.collect(trial, run)
        shutil.rmtree(seen)
        return trial

    def collect(self, trial, run):
        well = all(trial.seen) and all(one.status == 0 for one in trial.ranks)
        if not well and shutil.disk_usage(self.folder).free < LITTLE:
            raise full(str(self.folder).partition("/check-")[0])
        require(trial.kills or not trial.killed, KILLED)
        if (run / "metrics.csv").exists():
            with open(run / "metrics.csv", newline="") as file:
                trial.rows = list(csv.DictReader(file))
        files = sorted(run.glob("checkpoints/step_*.pt"))
        trial.saved = [file.stem.removeprefix("step_").lstrip("0")
                       for file in files]
        if files:
            with contextlib.suppress(Exception):  # whatever it may write there
                trial.state = torch.load(files[-1], weights_only=True)


def make_dataset(folder):
    """40 samples of 32 tokens, the first of each being its number."""
    rng = np.random.default_rng(0)
    for split in ("train_000001", "val_000000"):
        tokens = rng.integers(SAMPLES, 128, SAMPLES * T + 1)
        tokens[1::2] = np.where(rng.random(len(tokens[1::2])) < 0.8,
                                FREQUENT, tokens[1::2])
        tokens[:-1:T] = np.arange(SAMPLES)
        np.save(folder / f"check_{split}.npy", tokens.astype(np.uint16))
    save_bytes(folder)
