"""Tools of others: PyTorch's flight recorder, TrainCheck and spmd_types.

Each is set up as its own documentation says; docs/bench.md tells how, and
where that was not enough.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankcheck.bench.cases import SILENT, Case, Twin
from rankcheck.bench.scoring import Statement, ToolAnswer
from rankcheck.bench.tools import Tool, tool_environment
from rankcheck.bench.twins import empty_folder, run_to_end
from rankcheck.engine.ranks import free_port
from rankcheck.system.errors import UserError

STILL = 8.0  # seconds without a new collective, in place of NCCL's timeout
POLL = 0.5
LONGEST = 60.0  # seconds for a job whose ranks leave their records
NO_COLLECTIVE = "it begins with the first collective"

# -------------------------------------------------------- torchfrtrace


@dataclass
class RecordKeeper:
    """In a rank: dumps PyTorch's flight record, as NCCL's watchdog does.

    It does so when the rank has called no collective for a while, and at its
    end. Gloo's record names no groups, and the tool reads NCCL's names only:
    they are added here.
    """

    folder: str

    def __call__(self, log: object) -> None:
        rank = os.environ.get("RANK")
        if rank is None:
            return
        groups: dict[str, dict[str, str]] = {}
        file = Path(self.folder, f"dump_{rank}")

        def dump() -> None:
            content = own_flight_record()
            if content["entries"]:
                part = file.with_name(f"part_{rank}")
                part.write_bytes(pickle.dumps(as_nccl(content, groups)))
                part.replace(file)  # a rank may be killed while it writes

        def watch() -> None:
            seen, since = -1, time.monotonic()
            while time.monotonic() - since < STILL or seen <= 0:
                time.sleep(POLL)
                record_groups(groups)
                count = count_calls(own_flight_record())
                if count != seen:
                    seen, since = count, time.monotonic()
            dump()
            os._exit(1)

        atexit.register(dump)
        threading.Thread(target=watch, daemon=True).start()


def own_flight_record() -> dict[str, Any]:
    """Return this rank's flight record."""
    import torch

    c10d: Any = torch._C._distributed_c10d
    content = pickle.loads(c10d._dump_fr_trace(True, True, False))
    content.setdefault("entries", [])
    return dict(content)


def count_calls(content: dict[str, Any]) -> int:
    """Return how many collectives a rank has called."""
    entries = content["entries"]
    return int(entries[-1]["record_id"]) + 1 if entries else 0


def record_groups(groups: dict[str, dict[str, str]]) -> None:
    """Add the process groups that this rank knows."""
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        name = world.pg_names.get(group)
        if name is not None:
            description = "undefined" if groups else "default_pg"
            groups.setdefault(str(name), {
                "name": str(name), "desc": description,
                "ranks": str(sorted(ranks))})


def as_nccl(content: dict[str, Any], groups: dict[str, dict[str, str]]
            ) -> dict[str, Any]:
    """Return a record of gloo as one of NCCL."""
    everyone = [*range(int(os.environ["WORLD_SIZE"]))]
    default = {"name": "0", "desc": "default_pg", "ranks": str(everyone)}
    content["pg_config"] = {"0": default, **groups}
    for entry in content["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace(
            "gloo", "nccl")
    return content


CULPRIT = re.compile(r"[^\n]*Culprit rank[^\n]*")
ABORTED = re.compile(r"[^\n]*Too many mismatches[^\n]*")
MISSING = re.compile(r"[^\n]*missing ranks[^\n]*")
RANKS = re.compile(r"(?:Culprit rank |missing ranks: \{)([\d, ]+)")


class FlightRecorder(Tool):
    """`torchfrtrace` on the dumps that the ranks have left."""

    name = "torchfrtrace"
    applies = frozenset({"collective mismatch", "deadlock", "early exit",
                         "exception", "signal", "I/O"})

    def version(self) -> str:
        import torch

        return str(torch.__version__)

    def why_not(self, case: Case) -> str:
        if case.group == SILENT:
            return "it compares collectives, not what a script computes"
        if case.kind not in self.applies:
            return NO_COLLECTIVE
        if "fully_shard" in case.script("right").read_text("utf-8"):
            return "gloo records other sizes of FSDP's collectives than NCCL"
        return ""

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        begin = time.monotonic()
        with empty_folder() as folder:
            dumps = folder / "dumps"
            dumps.mkdir()
            run_to_end(case, twin, case.flags, folder / "work", 0, LONGEST,
                       RecordKeeper(str(dumps)))
            statements = read_dumps(dumps, case.processes)
        return ToolAnswer(tuple(statements), time.monotonic() - begin)


def read_dumps(folder: Path, processes: int) -> list[Statement]:
    """Return what torchfrtrace says of the dumps in a folder."""
    files = [*folder.glob("dump_*")]
    if not files:
        return [Statement("no rank has left a dump", is_problem=False)]
    command = [sys.executable, "-m",
               "torch.distributed.flight_recorder.fr_trace", "--prefix",
               "dump_", str(folder)]
    if len(files) < processes:
        command.append("--allow-incomplete-ranks")
    done = subprocess.run(command, text=True, capture_output=True, check=False,
                          env=tool_environment())
    return read_analysis(done.stdout + done.stderr, done.returncode)


def read_analysis(text: str, status: int) -> list[Statement]:
    """Return what torchfrtrace has printed as statements."""
    found = []
    for pattern in CULPRIT, MISSING, ABORTED:
        for line in dict.fromkeys(pattern.findall(text)):
            is_culprit = pattern is CULPRIT
            found.append(Statement(
                shorten(line), is_cause=is_culprit,
                kind="collective mismatch" if is_culprit else "",
                ranks=read_ranks(line)))
    if not found and status != 0:
        last = text.strip().splitlines()[-1:]
        found.append(Statement(f"it ended with an error: {''.join(last)}",
                               is_problem=False))
    return found


def read_ranks(line: str) -> tuple[int, ...]:
    """Return the ranks that a line of torchfrtrace blames."""
    found = RANKS.search(line)
    if found is None:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", found[1]))


def shorten(line: str, most: int = 600) -> str:
    """Return a line without what is too long to be read."""
    line = line.strip()
    return line if len(line) <= most else f"{line[:most]} ..."


# ----------------------------------------------------------- TrainCheck

COLLECT, INFER, CHECK = "traincheck-collect", "traincheck-infer", (
    "traincheck-check")
MODEL = re.compile(r"^(model|net) = ", re.MULTILINE)
ENOUGH = 900.0  # seconds for one of its programs
# The first steps: to infer from all 48 of a case takes more than ten minutes
TRACED = ("--warm-up-steps", "8", "--sampling-interval", "1000")
REFERENCE_SEEDS, OTHER_SEED = ("0", "2"), "1"


@dataclass(frozen=True)
class Invariants:
    """What TrainCheck has inferred from the right script of a case.

    Attributes:
        text: the file that it has written.
        violated: those that the right script violates with another seed.
    """

    text: str
    violated: list[str]


class TrainCheck(Tool):
    """Invariants of the right script, checked on a run of another script.

    The right script with two seeds is the reference, and the wrong script with
    the first of these is the target. What the right script violates with a
    third seed does not count: it says nothing about the fault.
    """

    name = "TrainCheck"
    is_slow = True
    programs = (COLLECT, INFER, CHECK)

    def __init__(self) -> None:
        self.known: dict[str, Invariants] = {}  # by the case's name
        self.failed: dict[str, UserError] = {}

    def version(self) -> str:
        done = subprocess.run(
            [find_python(), "-c", "from importlib import metadata; "
             "print(metadata.version('traincheck'))"], text=True,
            capture_output=True, check=False)
        return done.stdout.strip()

    def why_not(self, case: Case) -> str:
        if case.group != SILENT:
            return "it checks the trace of a run, which has to end"
        return ""

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        begin = time.monotonic()
        with empty_folder() as folder:
            known = self.invariants_of(case, folder)
            statements = [Statement(
                f"{len(known.violated)} invariants are also violated by the "
                "right script with another seed", is_problem=False)]
            if twin == "wrong":
                violated = find_violated(case, twin, folder, known.text,
                                         REFERENCE_SEEDS[0])
                statements += [Statement(text) for text in violated
                               if text not in known.violated]
        return ToolAnswer(tuple(statements), time.monotonic() - begin)

    def invariants_of(self, case: Case, folder: Path) -> Invariants:
        """Return the invariants of a case, which are inferred once.

        Raises:
            UserError: TrainCheck has failed, perhaps when it was asked first.
        """
        if case.name in self.failed:
            raise self.failed[case.name]
        if case.name not in self.known:
            try:
                self.known[case.name] = infer_invariants(case, folder)
            except UserError as error:
                self.failed[case.name] = error
                raise
        return self.known[case.name]


def find_python() -> str:
    """Return the Python of TrainCheck's environment."""
    found = shutil.which(COLLECT)
    return str(Path(found or "").with_name("python"))


def infer_invariants(case: Case, folder: Path) -> Invariants:
    """Trace the right script, and infer what is always true of it.

    With one seed alone, the numbers of that run would be invariants.
    """
    traces = []
    for seed in REFERENCE_SEEDS:
        traces.append(trace_script(case, "right", folder / f"reference-{seed}",
                                   seed))
    file = folder / "inferred.json"
    run_program([INFER, "--num-workers", "0", "-f", *traces, "-o", str(file)],
                folder)
    text = file.read_text("utf-8")
    return Invariants(
        text, find_violated(case, "right", folder, text, OTHER_SEED))


def find_violated(case: Case, twin: Twin, folder: Path, invariants: str,
                  seed: str) -> list[str]:
    """Return the invariants that a script violates."""
    given, checked = folder / f"{twin}.json", folder / f"checked-{twin}"
    given.write_text(invariants, "utf-8")
    trace = trace_script(case, twin, folder / f"target-{twin}", seed,
                         "--invariants", str(given))
    run_program([CHECK, "-f", trace, "-i", str(given), "-o", str(checked)],
                folder)
    return read_violated(checked)


def trace_script(case: Case, twin: Twin, folder: Path, seed: str,
                 *options: str) -> str:
    """Trace a script in a new folder; return that of its trace."""
    folder.mkdir()
    shutil.copyfile(case.script(twin), folder / "train.py")
    run_program([*collect_command(case, folder), *options], folder, seed)
    return str(folder / "trace")


def collect_command(case: Case, folder: Path) -> list[str]:
    """Return the command that traces a script, which a shell script starts.

    The model that is trained is the last that the script assigns: a module
    that DDP has wrapped since then crashes when it is tracked.
    """
    tracked = MODEL.findall((folder / "train.py").read_text("utf-8"))
    lines = ["set -e"]
    starts: list[Sequence[str]] = [case.flags]
    if case.resume:
        shutil.copyfile(folder / "train.py", folder / "first.py")
        lines.append(launch_line(case, folder / "first.py", case.flags))
        starts = [[*case.flags, *case.resume]]
    for flags in starts:
        lines.append(launch_line(case, Path("./train.py"), flags))
    script = folder / "start.sh"
    script.write_text("\n".join(lines) + "\n")
    return [COLLECT, "--pyscript", str(folder / "train.py"), "--shscript",
            str(script), "--models-to-track", *(tracked[-1:] or ["model"]),
            *TRACED, "--output-dir", str(folder / "trace")]


def launch_line(case: Case, script: Path, flags: Sequence[str]) -> str:
    """Return the line of a shell script that starts a script by torchrun."""
    command = [find_python(), "-m", "torch.distributed.run",
               "--nproc-per-node", str(case.processes), "--master-port",
               str(free_port()), str(script)]
    command += [flag.replace("{run}", "1") for flag in flags]
    return " ".join(command)


def run_program(command: Sequence[str], folder: Path, seed: str = "0"
                ) -> None:
    """Run a program of TrainCheck; raise a `UserError` if it fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, cwd=folder, text=True, capture_output=True, check=False,
            timeout=ENOUGH, env=tool_environment(SEED=seed))
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} did not end within {ENOUGH:.0f} s") from None
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise UserError(
            f"{name} ended with an error: {shorten(''.join(last))}")


def read_violated(folder: Path) -> list[str]:
    """Return the invariants that TrainCheck has found violated, as text."""
    found = []
    for file in sorted(folder.rglob("failed*.log")):
        for line in file.read_text("utf-8").splitlines():
            name, _, text = line.strip().partition(": ")
            if name == '"text_description"':
                found.append(shorten(text.strip('",')))
    return list(dict.fromkeys(found))


# ----------------------------------------------------------- spmd_types


class SpmdTypes(Tool):
    """Meta's type system for distributed tensors.

    It checks code whose tensors have been given its types, and whose
    collectives are its own: no script of the bench is written so.
    """

    name = "spmd_types"

    def version(self) -> str:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("spmd_types")
        return ""

    def why_not(self, case: Case) -> str:
        if case.group != SILENT:
            return "it checks types of tensors, not whether ranks wait"
        return ("it checks code that is written with its types and "
                "collectives, and the script is not")

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        raise NotImplementedError
