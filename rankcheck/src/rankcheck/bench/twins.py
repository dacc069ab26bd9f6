"""What the two scripts of a case compute, and whether that differs."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcheck.bench.cases import SILENT, Case, Twin
from rankcheck.engine.ranks import Launch, RankExit
from rankcheck.system import proc

if TYPE_CHECKING:
    from rankcheck.record.recorder import Log

# A variable: the folder of a whole run, in the processes of all its scripts
FOLDER = "RANKCHECK_BENCH"
LIMIT = 90.0  # seconds for a script that ends, on a busy machine
SAME = 1e-5  # the relative difference that is taken for rounding
LOSS_IN_LOG = re.compile(r"\bloss (-?[\d.]+(?:e[+-]?\d+)?|nan|inf)")
CLOCK = re.compile(r"\d{10,}")  # in a file's name: another one in each run


@dataclass(frozen=True)
class Observation:
    """What one rank of a script has done.

    Attributes:
        norms: for each optimizer step the norm of each parameter.
        files: the files that it has written, in the script's folder.
    """

    norms: list[list[float]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TwinRun:
    """What a script has done.

    Attributes:
        statuses: the exit status of each rank; None: it had to be killed.
        losses: what rank 0, or the last stage, has printed.
        ranks: what each rank has done; in a resumed run a second one each.
        output: what the ranks have printed.
    """

    statuses: list[int | None]
    losses: list[float]
    ranks: list[Observation]
    output: str

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended without an error."""
        return not any(status != 0 for status in self.statuses)


@dataclass
class Observer:
    """In a rank: writes what the script does to a file at its end."""

    folder: str

    def __call__(self, log: Log) -> None:
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook

        seen = Observation()
        place, save = os.getcwd(), torch.save

        def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            seen.norms.append([
                measure(weight) for group in optimizer.param_groups
                for weight in group["params"]])

        def note_file(path: object) -> None:
            full = os.path.abspath(os.fspath(str(path)))
            if full.startswith(place + os.sep):
                name = os.path.relpath(full, place)
                if name not in seen.files:
                    seen.files.append(name)

        def note_open(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open":
                return
            path, mode, _ = arguments
            if isinstance(path, str) and set(mode or "") & set("wax+"):
                note_file(path)

        def note_save(*arguments: Any, **named: Any) -> None:
            path = named.get("f", arguments[-1])
            if isinstance(path, (str, os.PathLike)):
                note_file(path)
            save(*arguments, **named)

        register_optimizer_step_post_hook(note_step)
        sys.addaudithook(note_open)
        torch.save = note_save
        file = Path(self.folder, f"{os.environ['RANK']}.json")

        def write() -> None:
            file.write_text(json.dumps(
                {"norms": seen.norms, "files": seen.files}))

        def leave(*_: Any, **named: Any) -> None:
            dist.barrier()
            write()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        # In place of the script's last line. On a busy machine a process
        # waits there for ever, one time in five: DDP's reducer waits for a
        # thread of gloo, which waits for the GIL (PyTorch 2.13).
        dist.destroy_process_group = leave
        atexit.register(write)


def measure(weight: Any) -> float:
    """Return the norm of this rank's part of a parameter."""
    from rankcheck.record.tensors import is_dtensor

    tensor = weight.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return float(tensor.double().norm())


@contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder for a script's run, which is removed afterwards.

    What the script's ranks have started may outlive them, and is ended. A
    worker that is ended leaves its own to the run, in whose folder it is:
    verify's handler of signals leaves the process at once.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-",
                                   dir=os.environ.get(FOLDER)))
    try:
        yield folder
    finally:
        end_processes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def end_processes_in(folder: Path) -> None:
    """End the processes of scripts that are in a folder, or below it."""
    for pid in proc.list_processes():
        place = proc.read_cwd(pid)
        if place is None or not place.is_relative_to(folder):
            continue
        if is_of_a_script(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_of_a_script(pid: int) -> bool:
    """Whether a process has the variable that the bench gives to scripts."""
    variables = proc.read_variables(pid) or []
    return any(one.startswith(f"{FOLDER}=") for one in variables)


def run_twin(case: Case, twin: Twin, seed: int = 0,
             limit: float = LIMIT) -> TwinRun:
    """Run one script of a case, and resume it if the case says so."""
    with empty_folder() as folder:
        starts: list[Sequence[str]] = [case.flags]
        if case.resume:
            starts.append([*case.flags, *case.resume])
        statuses: list[int | None] = []
        losses: list[float] = []
        seen: list[Observation] = []
        output = ""
        for flags in starts:
            ranks = run_to_end(case, twin, flags, folder / "work", seed, limit)
            statuses += [rank.status for rank in ranks]
            text = "".join(rank.out + rank.err for rank in ranks)
            losses = [float(number) for number in LOSS_IN_LOG.findall(text)]
            seen += read_observations(folder / "work.seen", case.processes)
            output += text
        return TwinRun(statuses, losses, seen, output)


def run_to_end(case: Case, twin: Twin, flags: Sequence[str], folder: Path,
               seed: int, limit: float,
               probe: Callable[[Log], object] | None = None) -> list[RankExit]:
    """Start a script in a folder, and wait for its end.

    Args:
        Others: see `begin_script`.
        limit: seconds after which the ranks are killed.
    """
    return begin_script(case, twin, flags, folder, seed, probe).wait(limit)


def begin_script(case: Case, twin: Twin, flags: Sequence[str], folder: Path,
                 seed: int, probe: Callable[[Log], object] | None = None
                 ) -> Launch:
    """Start a script in a folder.

    Args:
        probe: called in each rank first, in place of an `Observer`.
    """
    folder.mkdir(exist_ok=True)
    observed = folder.with_suffix(".seen")
    shutil.rmtree(observed, ignore_errors=True)
    observed.mkdir()
    script = folder / "train.py"
    shutil.copyfile(case.script(twin), script)
    variables = {FOLDER: str(folder), **os.environ, "SEED": str(seed),
                 "OMP_NUM_THREADS": "1"}
    probes: list[Callable[[Log], object]] = []
    if probe is not None:
        probes = [probe]
    elif case.group == SILENT:  # the others may end without a word
        probes = [Observer(str(observed))]
    return Launch(
        script, *(flag.replace("{run}", "1") for flag in flags),
        env=variables, world_size=processes_of(case),
        nodes=case.nodes, cwd=str(folder), probes=probes,
        hashes=1 if case.hashes else None)


def processes_of(case: Case) -> int | None:
    """Return how many processes are started; None: one by plain python."""
    return case.processes if case.launch == "torchrun" else None


def read_observations(folder: Path, processes: int) -> list[Observation]:
    """Return what the ranks have written about themselves."""
    found = []
    for rank in range(processes):
        file = folder / f"{rank}.json"
        if file.is_file():
            found.append(Observation(**json.loads(file.read_text())))
    return found


def find_differences(one: TwinRun, other: TwinRun) -> list[str]:
    """Return in what two runs differ: "weights", "losses", "files"."""
    found = []
    norms = [join_lists(rank.norms) for rank in one.ranks]
    others = [join_lists(rank.norms) for rank in other.ranks]
    if differ(join_lists(norms), join_lists(others)):
        found.append("weights")
    if differ(one.losses, other.losses):
        found.append("losses")
    if describe_files(one) != describe_files(other):
        found.append("files")
    return found


def join_lists(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the numbers of several lists as one list."""
    return [number for numbers in lists for number in numbers]


def differ(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two lists of numbers differ by more than rounding."""
    if len(some) != len(others):
        return True
    for a, b in zip(some, others, strict=True):
        if a != b and not abs(a - b) <= SAME * max(abs(a), abs(b)):
            return True
    return False


def describe_files(run: TwinRun) -> list[list[str]]:
    """Return which files each rank has written, without times in names.

    The first time in a name becomes #0, another one #1, and so on.
    """
    times: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return times.setdefault(found[0], f"#{len(times)}")

    return [[CLOCK.sub(number, name) for name in rank.files]
            for rank in run.ranks]
