"""Datasets and runs for the tests of the stages."""

import collections
import csv
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import edit, needs, program
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from backstage import ROOT, dataset
from backstage.run import Run
from rankcheck.engine.ranks import Launch
from rankcheck.record.collectives import Collectives
from rankcheck.record.recorder import replace
from workshop.check.probe import CourseRecord
from workshop.diff import documents
from workshop.jobs.mpirun import OPEN_MPI, Mpirun, launcher_of
from workshop.stages import STAGES, modules_of
from workshop.vocabulary import save_vocabulary

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER / "golden"  # what was once computed from the dataset
CORE = ("std", "ddp", "lit", "starter")  # `pytest` tries all of it
STARTER = ROOT / "starter" / "train.py"  # the tests call it stage "starter"

BYTES = tiktoken.Encoding(  # a vocabulary of 257 tokens
    "bytes", pat_str=r"[\s\S]",
    mergeable_ranks={bytes([i]): i for i in range(256)},
    special_tokens={dataset.END_OF_TEXT: 256})


def write_shards(folder, train, val, name="test"):
    """Write lists of tokens as a dataset: several for train, one for val."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{name}_val_000000.npy", np.asarray(val, np.uint16))
    for number, tokens in enumerate(train, 1):
        np.save(folder / f"{name}_train_{number:06d}.npy",
                np.asarray(tokens, np.uint16))
    return folder


def make_dataset(folder):
    """Learnable text in bytes: 262 samples of 32 tokens, in three shards."""
    words = "the cat sat on a mat and saw one more rat at the door".split()
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(words, 3000)).encode()
    tokens = np.frombuffer(text, np.uint8)[:8400]
    write_shards(folder, np.split(tokens, [2500, 2510]), tokens[:1100])
    save_vocabulary(BYTES, folder)
    return folder


@dataclass
class Result:
    """What a run of a stage left behind."""

    folder: Path
    ranks: list  # of rankcheck.engine.ranks.RankExit

    @property
    def status(self):
        """The one exit status of all ranks, or the list of them.

        Those that were ended after an error of rank 0 do not count.
        """
        every = [rank.status for rank in self.ranks]
        counted = set(every)
        if every[0]:
            counted.discard(-signal.SIGTERM)
        return every[0] if len(counted) == 1 else every

    @property
    def out(self):
        return "".join(rank.out for rank in self.ranks)

    @property
    def err(self):
        return "".join(rank.err for rank in self.ranks)

    @property
    def rows(self):
        """metrics.csv as dictionaries of floats; None for an empty field."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return [{key: float(value) if value else None
                     for key, value in row.items()}
                    for row in csv.DictReader(file)]

    def column(self, name):
        return [row[name] for row in self.rows]

    def checkpoint(self):
        newest = max((self.folder / "checkpoints").glob("*.pt"))
        return torch.load(newest, weights_only=True)


class StageLaunch(Launch):
    """A stage's solution, started on preset tiny."""

    def result(self, run, timeout=400):
        """What it left behind, once it has ended.

        After an error of rank 0 it ends the others, as a launcher does;
        mpirun does so itself.
        """
        return Result(Path(run), self.wait(timeout, self.end_others))

    def end_others(self):
        if not isinstance(self.launcher, Mpirun) and self.jobs[0].status:
            self.signal(signal.SIGTERM)


def without_texts(log):
    """A probe: the run writes none, which take a third of its time, and most
    with DTensors, or in Triton's interpreter."""
    @replace(Run, "_load_tokenizer")
    def load(load, run):
        return None


def start_stage(stage, run, *flags, data=None, mesh=None, script=None,
                texts=False, **options):
    """Start a stage's solution on preset tiny: a `StageLaunch`.

    mesh: (pipeline, data, tensor) parallel, in the place of a world_size.
    script: to start instead. texts: whether it writes any.
    """
    if stage == "starter":  # which has its own data
        size = math.prod(mesh or [1])
        return StageLaunch(script or STARTER, "--run-dir", run, "--fp32",
                           *flags,
                           world_size=size if size > 1 else None, **options)
    given = ["--run-dir", run, *(["--data", data] if data else [])]
    if "--resume" not in flags:
        given += ["--preset", "tiny", "--device", "cpu"]
    if mesh:
        pipeline, _, tensor = mesh
        given += ["--pipeline-parallel", pipeline] * (pipeline > 1)
        given += ["--tensor-parallel", tensor] * (tensor > 1)
        size = math.prod(mesh)
        options["world_size"] = size if size > 1 else None
    options["launcher"] = launcher_of(stage)
    options["preload"] = [*modules_of(stage), *options.get("preload", ())]
    options["probes"] = [*options.get("probes", ()),
                         *[without_texts] * (not texts)]
    if STAGES[stage].launcher == "mpirun":
        needs("mpirun")
    if STAGES[stage].kernels:
        needs("triton")
    return StageLaunch(script or STAGES[stage].solution, *given, *flags,
                       **options)


def attempt(stage, run, *flags, timeout=400, **options):
    """Run a stage's solution on preset tiny to its end: a `Result`."""
    return start_stage(stage, run, *flags, **options).result(run, timeout)


def train(stage, run, *flags, **options):
    """The same, where nothing may go wrong."""
    result = attempt(stage, run, *flags, **options)
    assert result.status == 0, result.err
    return result


def edited(folder, stage, *pairs):
    """A copy of a stage's solution, with each old string replaced."""
    solution = STARTER if stage == "starter" else STAGES[stage].solution
    return program(folder / solution.name,
                   edit(solution.read_text(), *pairs))


def count_lines(run):
    """How many lines metrics.csv has, with its header; 0 without it."""
    metrics = Path(run, "metrics.csv")
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_rows(run, number):
    """Wait until metrics.csv has that many steps."""
    end = time.monotonic() + 120
    while count_lines(run) <= number:
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.01)


class SignalAt:
    """Sends itself a signal in the step with this number; one rank, or all."""

    def __init__(self, step, number, rank=None):
        self.step, self.number, self.rank = step, number, rank

    def __call__(self, log):
        self.count = 0
        if self.rank in (None, log.rank):
            register_optimizer_step_pre_hook(self.on_step)

    def on_step(self, *_):
        self.count += 1
        if self.count == self.step:
            os.kill(os.getpid(), self.number)


class DeepSpeedOnCPU(SignalAt):
    """Lets Lightning run DeepSpeed on a CPU, where the sums are the same.

    It sends a signal, too. (DeepSpeed makes an update in several calls.)
    """

    def __call__(self, log):
        super().__call__(log)
        import deepspeed
        from lightning.pytorch.accelerators import CPUAccelerator
        from lightning.pytorch.strategies import deepspeed as strategy

        from backstage import zero

        # no GPU's, and compiled for a minute; the package has another torch
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        zero.DEVICES.add("cpu")
        strategy.CUDAAccelerator = CPUAccelerator
        strategy._validate_device_index_selection = lambda devices: None
        initialize = deepspeed.initialize  # args: a GPU's number
        deepspeed.initialize = lambda args, **more: initialize(**more)


def DieAfter(steps):
    """Kills every process when that many steps are done and saved."""
    return SignalAt(steps + 2, signal.SIGKILL)  # then the last one is saved


@dataclass
class StepsRecord(CourseRecord):
    """A rank's record with what `steps_seen` has seen, too.

    Attributes:
        sent: {collective: (how often, how many bytes go in)}. all_reduce:
            those between DTensors, also inside of PyTorch's operations;
            allreduce, allgather_base, send, ...: all others.
        kept: the elements of weights, gradients and the two moments.
    """

    sent: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)


def steps_seen(log):
    """A probe: what a rank sends in each step, and keeps of its shards.

    Its record has to be a `StepsRecord`.
    """
    calls, sent = collections.Counter(), collections.Counter()
    def note(name, tensors, function, args):
        calls[name] += 1
        sent[name] += sum(tensor.nbytes for tensor in tensors)

    def before(*_):
        log.record.sent.append({
            name: (calls[name], sent[name]) for name in sorted(calls)})
        calls.clear()
        sent.clear()

    def after(optimizer, *_):
        weights = [weight for group in optimizer.param_groups
                   for weight in group["params"]]
        state = [optimizer.state[weight] for weight in weights]
        log.record.kept.append([
            sum(getattr(one, "_local_tensor", one).numel() for one in tensors)
            for tensors in (weights, [weight.grad for weight in weights],
                            [one["exp_avg"] for one in state],
                            [one["exp_avg_sq"] for one in state])])

    Collectives(note).__enter__()
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def sent_by(ranks, mesh):
    """What each pipeline stage sends in a step, as `of_step` says it.

    ranks: what `steps_seen` has seen of each. It is the same for all of a
    stage, and in every step but the first ones: with them comes what the run
    begins with, and how DDP orders its buckets.
    """
    _, dp, tp = mesh
    assert all(rank.sent[3] == rank.sent[4] for rank in ranks)
    found = [rank.sent[4] for rank in ranks]
    stages = [found[i:i + dp * tp] for i in range(0, len(found), dp * tp)]
    assert all(rank == ranks[0] for ranks in stages for rank in ranks)
    return [ranks[0] for ranks in stages]


# ----------------------------------------------------------- real launchers


def run_command(*command, timeout=400, folder=ROOT, **more):
    """Run a launcher, and wait until everything that it started has ended.

    more: variables of its environment.
    """
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
        env={**os.environ, **OPEN_MPI, "PYTHONPATH": str(folder),
             "OMP_NUM_THREADS": "1", **more,
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # as activate.sh
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# Without torch: the ranks meet where rank 0 is said to be.
MEETS = """\
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as door:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            door.accept()
    print("all have met")
else:
    met = None
    while not met:
        try:
            met = socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


def tiny(run, data, *flags):
    return ("--preset", "tiny", "--device", "cpu", "--data", data, "--run-dir",
            run, *flags)


# ------------------------------------------------------------- comparing


def refused(result, *words):
    """One line of ours with these words, from rank 0, and status 1."""
    assert result.status == 1, (result.status, result.out, result.err)
    (line,) = (line for line in result.ranks[0].err.splitlines()
               if not line.startswith("warning: "))
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def agree(result, single, learning_rate=3e-3):
    """Contract 1: losses, norms, learning rates and final weights."""
    assert result.status == 0, result.err
    assert result.column("step") == single.column("step")
    for column, tolerance in (("loss", 1e-5), ("lr", 1e-9), ("norm", 1e-4)):
        assert result.column(column) == pytest.approx(
            single.column(column), rel=tolerance)
    for a, b in zip(result.column("val_loss"), single.column("val_loss"),
                    strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, rel=1e-5)
    mine, theirs = (run.checkpoint()["model"] for run in (result, single))
    assert all((mine[name] - theirs[name]).abs().max() <= 0.02 * learning_rate
               for name in mine)


def number_of(stage, title):
    """The number of the lesson's one change whose title begins so."""
    number, = (number for number, change
               in enumerate(documents.load_changes(stage), 1)
               if change.title.startswith(title))
    return number


def same_state(a, b):
    """Whether two nested dictionaries or lists of tensors are equal."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(
            same_state(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b
