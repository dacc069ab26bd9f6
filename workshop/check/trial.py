"""A trial: the script is started once, watched, and what came is collected.
"""

import ast
import csv
import json
import os
import platform
import shutil
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from backstage import vocabulary
from backstage.errors import UserError, require
from workshop.check.observe import SAMPLES, Observer, T
from workshop.processes import Launch, modules_of
from workshop.stages import STAGES

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

LONGEST = 48  # characters of a folder in which sockets still have a place
ROOM = 50e6  # bytes that a check may need
LITTLE = 1e6  # with no more than that left, a file may not be whole
ASLEEP = 3.0  # seconds without anything to do after which it hangs
UNSTARTED = 20.0  # the same, before mpirun has started the script
FLOOD = 20e6  # bytes of output: it prints without end
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL",
             "TORCHELASTIC_")
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE",
         "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mesh:
    """How many processes there are, and how they share the work."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self):
        return self.pp * self.dp * self.tp

    @property
    def nodes(self):
        """On how many nodes the processes believe they are."""
        return 2 if self.size >= 4 else 1

    def flags(self):
        """What tells a sharded stage."""
        return [*(("--pipeline-parallel", self.pp) if self.pp > 1 else ()),
                *(("--tensor-parallel", self.tp) if self.tp > 1 else ())]


@dataclass
class Trial:
    """What came of one start of a script."""

    stage: str
    mesh: Mesh
    script: Path
    ranks: list  # of workshop.processes.Rank
    more: tuple = ()  # flags of this trial alone
    gave_up: str = ""  # why it was ended: "asleep", "busy", "endless", "flood"
    seen: list = field(default_factory=list)  # of each rank, None if it died
    events: list = field(default_factory=list)  # of each rank, in their order
    rows: list = field(default_factory=list)  # of metrics.csv
    state: dict | None = None  # the last checkpoint
    saved: list = field(default_factory=list)  # the steps of all that are left
    first_step: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def by_trainer(self):
        """Whether Lightning's Trainer has the stage's loop."""
        return STAGES[self.stage].trainer

    @property
    def shards(self):
        """Whether the stage leaves each rank a part of the model."""
        return STAGES[self.stage].shards

    @property
    def flags(self):
        """The flags, if any, that tell the stage's script about its mesh."""
        return sorted({flag for sizes in STAGES[self.stage].meshes
                       for flag in Mesh(*sizes).flags()[::2]})

    @property
    def by_mpi(self):
        """Whether the stage's processes are a world of MPI."""
        return STAGES[self.stage].launcher == "mpirun"

    @property
    def pipelined(self):
        """Whether the script leaves its steps to a pipeline's schedule."""
        return bool(self.seen[0] and self.asked("schedule"))

    def asked(self, what, rank=0):
        """The values with which a rank asked for it."""
        seen = self.seen[rank]
        return [value for name, value in seen["asked"] if name == what]

    def calls(self, rank):
        return [event for event in self.events[rank] if "call" in event]

    def updates(self, rank):
        return sum("call" not in event for event in self.events[rank])

    def tree(self):
        return ast.parse(self.script.read_bytes())


class Bench:
    """A folder for trials, with a dataset and the script as it was read."""

    def __init__(self, folder, stage, script, data, say=print):
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
        self.reference = None

    def try_out(self, name, mesh, *flags, script=None, plain=False,
                terminated=None):
        """Run the script under observation, with more flags: a `Trial`."""
        run, observed = self.folder / name, self.folder / f"{name}-seen"
        observed.mkdir()
        begin = time.monotonic()

        def start():
            launch = Launch(
                script or self.script, *FLAGS, "--data", self.folder / "data",
                "--run", run, *mesh.flags(), *flags,
                world_size=None if plain else mesh.size,
                nodes=mesh.nodes,
                mpirun=STAGES[self.stage].launcher == "mpirun" and (
                    script is None),  # the reference knows nothing of it
                observe=Observer(observed, run, terminated,
                                 self.lightning),
                env=quiet_environment(self.folder / "tmp"),
                preload=self.preload,
                place=script.parent if script else self.place,
                within=self.folder)
            patience = Patience(launch, observed, self.reference, self.say)
            return launch.wait(900, patience), patience

        ranks, patience = start()
        if patience.reason == "unstarted":
            # in rare cases Open MPI 4 hangs before the script begins
            ranks, patience = start()
            require(patience.reason != "unstarted", "mpirun does not start "
                    f"the processes: does `mpirun -n {mesh.size} hostname` "
                    f"print {mesh.size} lines?")
        trial = Trial(self.stage, mesh, script or self.script, ranks, flags)
        trial.gave_up, trial.cpu = patience.reason, patience.cpu
        trial.seconds = time.monotonic() - begin
        self.collect(trial, run, observed)
        return trial

    def collect(self, trial, run, observed):
        written = all((observed / f"{rank}.pt").exists()
                      for rank in range(trial.mesh.size))
        failed = any(rank.status != 0 for rank in trial.ranks)
        if (failed or not written) and (
                shutil.disk_usage(self.folder).free < LITTLE):
            raise full(self.folder.parent)  # whatever the script says to it
        for rank in range(trial.mesh.size):
            file = observed / f"{rank}.pt"
            trial.seen.append(torch.load(file) if file.exists() else None)
            trial.events.append(read_events(observed / f"{rank}.jsonl"))
        if (run / "metrics.csv").exists():
            with open(run / "metrics.csv", newline="") as file:
                trial.rows = list(csv.DictReader(file))
        files = sorted(run.glob("checkpoints/step_*.pt"))
        trial.saved = [file.stem.removeprefix("step_").lstrip("0")
                       for file in files]
        if files:
            try:
                trial.state = torch.load(files[-1], weights_only=True)
            except Exception:  # whatever a script may write there
                trial.state = None
        shutil.rmtree(observed)

    def keep_first_checkpoint(self, name, copy):
        """A copy of a run as it was after its first checkpoint."""
        run = shutil.copytree(self.folder / name, self.folder / copy)
        for file in sorted(run.glob("checkpoints/step_*.pt"))[1:]:
            file.unlink()


class Patience:
    """Whether to give the ranks up, by what they do and not by the clock.

    On a busy machine everything takes longer, but not more seconds of a CPU:
    they are given up when all sleep, though nobody will wake them, or when
    they have used several times what the single device needed for all its
    steps, without a step of theirs. Says what it waits for.
    """

    steps, endless, sleep = STEPS, 3 * STEPS, ASLEEP

    def __init__(self, launch, observed, reference, say):
        self.launch, self.observed, self.say = launch, observed, say
        self.allowed = 6 * max(1.0, reference.cpu if reference else 20.0)
        self.reason, self.cpu, self.spent = "", 0.0, 0.0
        self.begun = not launch.mpirun
        self.tasks, self.updates, self.asleep = {}, 0, []
        self.begin = self.last = self.stepped = time.monotonic()
        self.said = self.begin

    def __call__(self):
        now = time.monotonic()
        if now - self.last < 0.15:
            return False
        self.last = now
        updates = sum(count_updates(file)
                      for file in self.observed.glob("*.jsonl"))
        if updates > self.updates:
            self.updates, self.spent, self.stepped = updates, 0.0, now
        self.reason = self.look(now, updates)
        if now - self.said > 5 and not self.reason:
            self.said = now
            self.say(f"        still waiting after {now - self.begin:.0f} s: "
                     f"{updates} of {self.steps * len(self.launch.jobs)} "
                     "steps taken, over all ranks")
        return bool(self.reason)

    def look(self, now, updates):
        """Why it is to end, "" if it is to go on."""
        size = len(self.launch.jobs)
        if self.launch.printed() > FLOOD:
            return "flood"
        if updates > self.endless * size:
            return "endless"
        activity = self.launch.activity()
        if activity is None:  # no such figures on this system
            return "asleep" if now - self.stepped > 60 else ""
        tasks, eager = activity
        used = sum(seconds - self.tasks.get(task, 0.0)
                   for task, seconds in tasks.items())
        self.tasks = tasks
        self.cpu += used
        self.spent += used
        self.asleep.append((now, used, eager))
        if not self.begun and any(self.observed.glob("*.jsonl")):
            self.begun, self.asleep = True, [(now, used, eager)]
        seconds, reason = ((self.sleep, "asleep") if self.begun else
                           (UNSTARTED, "unstarted"))
        while now - self.asleep[0][0] > seconds:
            self.asleep.pop(0)
        watched = now - max(self.begin, self.asleep[0][0])
        busy = sum(used for _, used, _ in self.asleep[1:])
        wanted = sum(eager > 0 for _, _, eager in self.asleep)
        if (watched > 0.9 * seconds and busy < 0.05 * watched
                and wanted < 0.2 * len(self.asleep)):
            return reason
        return "busy" if self.spent > self.allowed * size else ""


def count_updates(file):
    return file.read_bytes().count(b'{"update"')


def read_events(file):
    events = []
    if file.exists():
        for line in file.read_bytes().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:  # the last one of a killed process
                pass
    return events


def name_folder():
    """A new name for the folder of a check: with room, and not too deep.

    Folders of checks that were killed (kill -9) are removed.
    """
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST and os.access("/tmp", os.W_OK):
        parent = "/tmp"  # the address of a socket has 108 characters at most
    host = f"{zlib.crc32(platform.node().encode()):08x}"  # of several
    for folder in Path(parent).glob(f"check-*-{host}-*"):
        if not is_running(folder.name.split("-")[1]):
            shutil.rmtree(folder, ignore_errors=True)
    if shutil.disk_usage(parent).free < ROOM:
        raise full(parent)
    return Path(parent, f"check-{os.getpid()}-{host}-"
                f"{time.time_ns() % 16**8:08x}")


def is_running(pid):
    """Whether a process of this machine, also another user's, is there."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # not ours, or no number
        pass
    return True


def full(folder):
    return UserError(f"{folder} is full: make room there, or name another "
                     "folder for temporary files, export TMPDIR=...")


def make_dataset(folder):
    """40 samples of 32 tokens, the first of each being its number."""
    rng = np.random.default_rng(0)
    for split in ("train_000001", "val_000000"):
        tokens = rng.integers(SAMPLES, 128, SAMPLES * T + 1)
        tokens[1::2] = np.where(rng.random(len(tokens[1::2])) < 0.8,
                                FREQUENT, tokens[1::2])
        tokens[:-1:T] = np.arange(SAMPLES)
        np.save(folder / f"check_{split}.npy", tokens.astype(np.uint16))
    import tiktoken

    vocabulary.save(tiktoken.Encoding(
        "check", pat_str=r"[\s\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={vocabulary.END_OF_TEXT: 256}), folder)


def quiet_environment(temporary):
    """The environment, without a launcher's variables and the GPUs."""
    return {key: value for key, value in os.environ.items()
            if key not in NAMES and not key.startswith(LAUNCHERS)} | {
                "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "",
                "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
