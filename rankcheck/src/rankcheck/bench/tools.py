"""The tools that need PyTorch alone, and py-spy: what each says of a script.

To add one, subclass `Tool` and add it to `choice.TOOLS`; docs/bench.md says
how. A tool is asked in a process of the bench's own, one script after another.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rankcheck.bench.cases import SILENT, Case, Twin
from rankcheck.bench.scoring import Statement, ToolAnswer, without_numbers
from rankcheck.bench.twins import (
    LIMIT,
    TwinRun,
    begin_script,
    empty_folder,
    run_to_end,
    run_twin,
)
from rankcheck.engine.ranks import Launch, RankExit, free_port, launch
from rankcheck.system import proc
from rankcheck.system.command_line import Command, parse
from rankcheck.system.errors import UserError
from rankcheck.system.version import __version__

# Questions of verify whose answer says that something differs, and not why
EFFECTS = frozenset({
    "losses, gradients and weights match the single-process run",
    "gradients and weights are equal on all ranks"})
COMMANDS = {"verify": Command("rankcheck.verification.command", "")}
FIRST_ASKED = 8.0  # seconds after all ranks of a job have been seen
ASKED_AGAIN = 6.0  # seconds between two questions about a job
ALIKE = 6  # answers of `why` after which another question is of no use
GIVEN_UP = 150.0  # seconds in which `why` has to name a fault
PAUSE = 0.2
LOOKED_AT = 20.0  # seconds after a job's start
DUMP_INTERVAL = 8.0  # seconds between two dumps of stacks
SHORT_TIMEOUT = 15  # seconds: of process groups, in place of half an hour
SEEDS = 5  # of runs that show how far a final loss varies
LAST = 8  # losses whose mean is the final loss
DEVIATIONS = 3  # of a final loss that somebody would notice


class Tool:
    """Something that may find a fault.

    Attributes:
        name: as the table has it.
        is_slow: whether it is only asked if it is named: a run of all the
            others has to end within 20 minutes.
        programs: what has to be on PATH.
    """

    name = ""
    is_slow = False
    programs: Sequence[str] = ()

    def missing_programs(self) -> list[str]:
        """Return the programs of the tool that are not on PATH."""
        return [program for program in self.programs
                if shutil.which(program) is None]

    def version(self) -> str:
        """Return the version of the tool; "" if it is not installed."""
        raise NotImplementedError

    def why_not(self, case: Case) -> str:
        """Say why the tool does not apply to a case; "" if it does."""
        raise NotImplementedError

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        """Return what the tool says about one of the two scripts."""
        raise NotImplementedError


@contextmanager
def copy_of(case: Case, twin: Twin) -> Iterator[Path]:
    """A folder with the script alone, called train.py."""
    with empty_folder() as folder:
        shutil.copyfile(case.script(twin), folder / "train.py")
        yield folder


def tool_environment(**more: str) -> dict[str, str]:
    """Return the variables of a tool's process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "SEED": "0", **more}


# --------------------------------------------------------------- rankcheck


class Rankcheck(Tool):
    """verify for silent errors, why for hangs, each by its command."""

    name = "rankcheck"

    def version(self) -> str:
        return __version__

    def why_not(self, case: Case) -> str:
        return ""

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        with copy_of(case, twin) as folder:
            if case.group == SILENT:
                return ask_verify(case, folder)
            return ask_why(case, folder)


def ask_verify(case: Case, folder: Path) -> ToolAnswer:
    """Run `rankcheck verify` on the script in a folder.

    It runs in this process, so that torch is imported once for all scripts.
    """
    arguments = ["verify", "--json", "-n", str(case.processes)]
    if case.resume:
        arguments.append(f"--resume-with={' '.join(case.resume)}")
    arguments += ["--", "train.py", *case.flags]
    begin = time.monotonic()
    output = run_here(arguments, folder)
    seconds = time.monotonic() - begin
    try:
        document = json.loads(output)
    except ValueError:
        raise UserError(f"rankcheck verify has failed about {case.name}: "
                        f"{output[-300:]}") from None
    statements = [read_finding(finding) for finding in document["findings"]
                  if finding["verdict"] != "ok"]
    if document["status"] == 2:
        statements.append(Statement(document["error"], is_problem=False))
    return ToolAnswer(tuple(statements), seconds)


def run_here(arguments: Sequence[str], folder: Path) -> str:
    """Run rankcheck's command in a folder, and return what it prints.

    Its errors are not printed between the bench's rows: the document that it
    prints has them.
    """
    output = io.StringIO()
    folder_before, argv_before = os.getcwd(), sys.argv
    variables = dict(os.environ)
    try:
        os.chdir(folder)
        sys.argv = ["rankcheck", *arguments]
        os.environ.update(OMP_NUM_THREADS="1", SEED="0")
        with (contextlib.redirect_stdout(output),
              contextlib.redirect_stderr(io.StringIO()),
              contextlib.suppress(UserError)):
            args = parse("rankcheck", "", COMMANDS)
            args.function(args)
    finally:
        os.chdir(folder_before)
        sys.argv = argv_before
        os.environ.clear()
        os.environ.update(variables)
    return output.getvalue()


def read_finding(finding: Mapping[str, Any]) -> Statement:
    """Return a finding of verify as a statement."""
    return Statement(
        f"{finding['text']} -> {finding['fix']}",
        is_warning=finding["verdict"] == "warn",
        is_cause=finding["question"] not in EFFECTS,
        kind=finding["kind"] or "", ranks=tuple(finding["ranks"]),
        lines=tuple(place["line"] for place in finding["places"]))


def ask_why(case: Case, folder: Path) -> ToolAnswer:
    """Start a job under `rankcheck why run`, and ask about it."""
    records = folder / "records"
    begin = time.monotonic()
    statements: list[Statement] = []
    answers: list[str] = []
    why = [sys.executable, "-m", "rankcheck", "why", "run", "--"]
    with started([*why, *launch_command(case)], folder, records) as job:
        joined = None
        while job.poll() is None:
            time.sleep(PAUSE)
            now = time.monotonic()
            if joined is None and has_begun(records, case):
                joined = now
            late = now - begin > LIMIT + GIVEN_UP
            if not late and (joined is None or now - joined < FIRST_ASKED):
                continue
            statements = [read_why(records)]
            answers.append(without_numbers(statements[0]))
            asked = time.monotonic()
            expired = joined is not None and asked - joined > GIVEN_UP
            is_settled = answers[-ALIKE:] == answers[-1:] * ALIKE
            if statements[0].is_problem or late or expired or is_settled:
                break
            while job.poll() is None and time.monotonic() < (
                    asked + ASKED_AGAIN):
                time.sleep(PAUSE)
        if job.poll() is not None:
            statements = [read_why(records)]
    return ToolAnswer(tuple(statements), time.monotonic() - begin)


@contextmanager
def started(command: Sequence[str], folder: Path, records: Path
            ) -> Iterator[subprocess.Popen[bytes]]:
    """A job that runs, in a session of its own; it is ended afterwards."""
    with open(folder / "log", "wb") as log:
        job = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
            env=tool_environment(RANKCHECK_WHY=str(records)))
        try:
            yield job
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(3)
            # a launcher gives each rank a session of its own
            for pid in processes_with(f"RANKCHECK_WHY={records}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_with(variable: str) -> list[int]:
    """Return the processes that have a variable, as in NAME=value."""
    return [pid for pid in proc.list_processes()
            if variable in (proc.read_variables(pid) or ())]


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose current folder is this one."""
    return [pid for pid in proc.list_processes()
            if proc.read_cwd(pid) == folder]


def launch_command(case: Case) -> list[str]:
    """Return the command that starts the script of a case."""
    script = ["train.py", *(flag.replace("{run}", "1")
                            for flag in case.flags)]
    if case.launch == "python":
        return [sys.executable, *script]
    port = free_port()
    agents = []
    for node in range(case.nodes):
        agents.append([
            sys.executable, "-m", "torch.distributed.run", "--nnodes",
            str(case.nodes), "--node-rank", str(node), "--nproc-per-node",
            str(case.processes // case.nodes), "--master-addr", "127.0.0.1",
            "--master-port", str(port), *script])
    if len(agents) == 1:
        return agents[0]
    background = " & ".join(" ".join(agent) for agent in agents)
    return ["bash", "-c", f"{background} & wait"]


def has_begun(records: Path, case: Case) -> bool:
    """Whether as many processes as there are ranks have left records."""
    return len(list(records.glob("*.json"))) >= case.processes


def read_why(records: Path) -> Statement:
    """Return what `rankcheck why` says about a job."""
    done = subprocess.run(
        [sys.executable, "-m", "rankcheck", "why", "--json", str(records)],
        text=True, capture_output=True, env=tool_environment(), check=False)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        raise UserError(f"rankcheck why has failed: {done.stderr[-300:]}"
                        ) from None
    if document["status"] == 2:
        return Statement(f"no answer: {document['error']}", is_problem=False)
    is_proven = document["verdict"] == "FAIL"
    lines = [document["text"]]
    if is_proven:
        lines = [f"{document['kind']}: {document['text']}"]
    else:
        lines += [rank["text"] for rank in document["ranks"]]
    return Statement(" | ".join(lines), is_problem=is_proven,
                     is_cause=is_proven, describes=not is_proven,
                     kind=document["kind"] or "",
                     ranks=tuple(document["blamed"]))


# ------------------------------------------------------------ py-spy dump


@dataclass(frozen=True)
class Stand:
    """Where a rank is: its innermost line of the script."""

    rank: int
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return (f"rank {self.rank} is in line {self.line}, in "
                f"{self.function}: {self.code}")


class PySpy(Tool):
    """`py-spy dump` of all ranks, read by a rule.

    If each rank is in the same line in two dumps, the job hangs, and these
    lines are the answer.
    """

    name = "py-spy dump"
    programs = ("py-spy",)

    def version(self) -> str:
        done = subprocess.run(["py-spy", "--version"], text=True,
                              capture_output=True, check=False)
        return done.stdout.strip().removeprefix("py-spy ")

    def why_not(self, case: Case) -> str:
        if case.group == SILENT:
            return "it shows stacks, not what a script computes"
        return ""

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        begin = time.monotonic()
        statements: list[Statement] = []
        with empty_folder() as folder:
            work = folder / "work"
            job = begin_script(case, twin, case.flags, work, 0)
            looked = self.look(job, work)
            job.wait(0)
        if looked:
            text = "; ".join(map(str, looked))
            statements = [Statement(text, describes=True)]
        return ToolAnswer(tuple(statements), time.monotonic() - begin)

    def look(self, job: Launch, folder: Path) -> list[Stand]:
        """Return where the ranks are if none has moved between two looks."""
        job.wait_for_end(time.monotonic() + LOOKED_AT)
        first = read_stacks(folder)
        if not first:
            return []
        job.wait_for_end(time.monotonic() + DUMP_INTERVAL)
        return first if read_stacks(folder) == first else []


def read_stacks(folder: Path) -> list[Stand]:
    """Return where each process of a job is that runs the script."""
    found = []
    for number, pid in enumerate(sorted(processes_in(folder))):
        done = subprocess.run(
            ["py-spy", "dump", "--json", "--pid", str(pid)], text=True,
            capture_output=True, check=False)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            frames = json.loads(done.stdout)[0]["frames"]
            stand = find_stand(frames, rank_of_process(pid, number), folder)
            if stand is not None:
                found.append(stand)
    return sorted(found, key=lambda stand: stand.rank)


def find_stand(frames: Sequence[Mapping[str, Any]], rank: int, folder: Path
               ) -> Stand | None:
    """Return the innermost line of the script among frames, if there is one.
    """
    lines = (folder / "train.py").read_text("utf-8").splitlines()
    for frame in frames:
        if frame["short_filename"] == "train.py":
            number = int(frame["line"])
            return Stand(rank, number, str(frame["name"]),
                         lines[number - 1].strip())
    return None


def rank_of_process(pid: int, otherwise: int) -> int:
    """Return the rank that a process was told."""
    for variable in proc.read_variables(pid) or ():
        name, _, value = variable.partition("=")
        if name == "RANK" and value.isdigit():
            return int(value)
    return otherwise


# ------------------------------------------- TORCH_DISTRIBUTED_DEBUG=DETAIL


@dataclass
class Detail:
    """In a rank: switches DETAIL on, with a short timeout."""

    def __call__(self, log: object) -> None:
        from datetime import timedelta

        from torch._C._distributed_c10d import DebugLevel, set_debug_level
        from torch.distributed import distributed_c10d

        set_debug_level(DebugLevel.DETAIL)
        distributed_c10d.default_pg_timeout = timedelta(seconds=SHORT_TIMEOUT)


MAKES_DDP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1))
"""
MISMATCH = re.compile(r"Detected mismatch between collectives[^\n]*")
ABSENT = re.compile(r"[^\n]*(?:failed to pass monitoredBarrier|"
                    r"[Tt]imed out|Connection closed by peer)[^\n]*")
ERROR = re.compile(r"^(?:\[rank\d+\]:? *)?(\w*(?:Error|Exception)\b: .*)",
                   re.MULTILINE)
PLACE = re.compile(r'File "[^"]*train\.py", line (\d+), in (\S+)\n'
                   r"(?:\[rank\d+\]:? *)?\s*(\S.*)")


class DebugDetail(Tool):
    """PyTorch's own check of collectives, with its error in the log."""

    name = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    applies = frozenset({"collective mismatch", "deadlock", "early exit",
                         "exception", "signal", "I/O"})

    def __init__(self) -> None:
        self.ends_ddp: bool | None = None

    def version(self) -> str:
        import torch

        return str(torch.__version__)

    def why_not(self, case: Case) -> str:
        if case.group == SILENT:
            return "it compares collectives, not what a script computes"
        if case.kind not in self.applies:
            return "it begins with the first collective"
        text = case.script("right").read_text("utf-8")
        if "DistributedDataParallel" in text and self.find_ends_ddp():
            return f"PyTorch {self.version()} ends DDP with SIGSEGV under it"
        return ""

    def find_ends_ddp(self) -> bool:
        """Whether DDP cannot be made here, whatever the script does.

        This was so with PyTorch 2.13 on a CPU: SIGSEGV in DDP's constructor.
        """
        if self.ends_ddp is None:
            with empty_folder() as folder:
                script = folder / "train.py"
                script.write_text(MAKES_DDP, "utf-8")
                ranks = launch(script, world_size=2, cwd=str(folder),
                               timeout=LIMIT, probes=[Detail()])
            self.ends_ddp = any(rank.status == -signal.SIGSEGV
                                for rank in ranks)
        return self.ends_ddp

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        begin = time.monotonic()
        with copy_of(case, twin) as folder:
            ranks = run_to_end(case, twin, case.flags, folder / "work", 0,
                               3.0 * SHORT_TIMEOUT, Detail())
        statements = [describe_end(number, rank)
                      for number, rank in enumerate(ranks)]
        found = [one for one in statements if one is not None]
        found.sort(key=lambda one: not one.is_cause)
        return ToolAnswer(tuple(found), time.monotonic() - begin)


def describe_end(number: int, rank: RankExit) -> Statement | None:
    """Return what a rank's log says of its end; None: it ended well."""
    if rank.status == 0:
        return None
    text = rank.out + rank.err
    places = PLACE.findall(text)
    where = ""
    if places:
        line, function, code = places[-1]
        where = f" in line {line}, in {function}: {code}"
    begin = f"rank {number}{where}: "
    mismatch = MISMATCH.search(text)
    if mismatch:
        return Statement(begin + mismatch[0], is_cause=True)
    absent = ABSENT.search(text)
    if absent:
        return Statement(begin + absent[0].strip())
    error = ERROR.findall(text)
    if error:
        return Statement(begin + error[-1], is_cause=True)
    if rank.status is None:
        return Statement(f"{begin}still runs")
    if rank.status < 0:
        name = signal.Signals(-rank.status).name
        return Statement(f"{begin}ended by {name}",
                         is_cause=name != "SIGABRT")
    return Statement(f"{begin}ended with status {rank.status}")


# ---------------------------------------------------------- the loss curve


class LossCurve(Tool):
    """Would somebody see it who knows how far the final loss varies?

    The final loss is compared with those of the right script with five
    seeds. It is noticed if it is more than three standard deviations from
    their mean.
    """

    name = "the loss curve"

    def __init__(self) -> None:
        self.known: dict[str, list[float]] = {}

    def version(self) -> str:
        return f"{SEEDS} seeds"

    def why_not(self, case: Case) -> str:
        return "" if case.group == SILENT else "it has no end"

    def ask(self, case: Case, twin: Twin) -> ToolAnswer:
        begin = time.monotonic()
        if case.name not in self.known:
            self.known[case.name] = [
                final_loss(run_twin(case, "right", seed))
                for seed in range(SEEDS)]
        usual = self.known[case.name]
        mean, deviation = fmean(usual), stdev(usual)
        value = final_loss(run_twin(case, twin, SEEDS))
        is_near = abs(value - mean) <= DEVIATIONS * deviation
        statement = Statement(
            f"the final loss is {value:.4g}, with {SEEDS} other seeds "
            f"{mean:.4g} with a standard deviation of {deviation:.4g}",
            is_problem=not is_near)
        return ToolAnswer((statement,), time.monotonic() - begin)


def final_loss(run: TwinRun) -> float:
    """Return the mean of a run's last losses."""
    last = run.losses[-LAST:]
    return sum(last) / len(last) if last else float("nan")
