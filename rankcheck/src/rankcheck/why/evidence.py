"""Collects the evidence: what the ranks of a start have written themselves
(watcher.py), what the system says of them now, and SLURM's word.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rankcheck.system import proc
from rankcheck.system.errors import UserError, read_regular, require
from rankcheck.system.hook import HOOK
from rankcheck.why import calls, jobs, start, watcher
from rankcheck.why.process_record import Ended, Identity, ProcessRecord
from rankcheck.why.ranks import Rank
from rankcheck.why.start import START_LINE, Start

ANSWER_SECONDS = 12  # seconds that the ranks have to answer
# Of records that can be read
FORMATS = (watcher.RECORD_FORMAT, "rankcheck 4", "rankcheck 3")
# Keys of the formats before today's -> today's
RENAMED = {"looks": "stack_samples", "still": "idle_seconds",
           "stays": "line_seconds", "over": "script_ended"}
HOW = "start it with `rankcheck why run -- COMMAND`"
PY_SPY = ("while it runs, `py-spy dump --subprocesses --pid PID` shows the "
          "lines of its processes")
JOB = re.compile(r"\d+(_\d+)?")  # 12_3 is an element of SLURM's array 12
# Lines of a launcher's output that say nothing of the script
PYTHON_NAME = re.compile(r"python[0-9.]*")
IGNORES = re.compile("-[a-zA-Z]*[IES][a-zA-Z]*")
UNWATCHED = ("look for ranks that run without the hook: a job script that "
             "resets PYTHONPATH, `env -i`, sudo, ssh, a container, "
             "--export=NONE, Python's options -I, -E and -S; or an import "
             "that fails, or a launcher that has not started them")
LAUNCHER_LINE = re.compile(
    "^frame #|/distributed/elastic/|<omitting python frames>")


@dataclass(frozen=True)
class Candidate:
    """A start that may be meant, as JSON has it."""

    folder: str
    command: str  # "" if it is not known
    text: str  # a line by which to choose it


class Ambiguous(UserError):
    """Several starts may be meant: `candidates`."""

    def __init__(self, found: Sequence[Start | Path]) -> None:
        self.candidates = [describe_candidate(one) for one in found]
        lines = [f"  {one.text}" for one in self.candidates]
        names = shlex.quote(self.candidates[-1].folder)
        super().__init__("\n".join([
            f"{len(lines)} starts are possible, and it is unknown which one "
            "you mean:", *lines,
            f"fix: name one, as in `rankcheck why {names}`"]))


def describe_candidate(candidate: Start | Path) -> Candidate:
    if isinstance(candidate, Path):
        return Candidate(str(candidate), "",
                         f"{candidate}  (named by RANKCHECK_WHY here)")
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(candidate.time))
    state = "has ended"
    if candidate.runs:
        state = "is running"
    elif candidate.may_run:
        state = "may be running"
    command = shlex.join(candidate.command)
    return Candidate(
        candidate.folder, command,
        f"{candidate.folder}  {command}  ({state} on {candidate.host}, "
        f"started at {clock})")


def find_last_evidence(env: Mapping[str, str]) -> Path:
    """Return the folder of what was started last.

    Raises:
        Ambiguous: if each of several may be meant.
        UserError: if there is none.
    """
    starts = start.find_last_starts(env)
    found: list[Start | Path] = [*starts]
    named = start.find_named(env)
    if named and named not in {one.folder for one in starts} and (
            [*Path(named).glob("*-[0-9]*.json")]):
        # started without `why run`, with the hook alone
        found.append(Path(named))
    require(found, f"no job has been recorded yet; fix: {HOW}; {PY_SPY}")
    if len(found) > 1:
        raise Ambiguous(found)
    last = found[0]
    if isinstance(last, Path):
        return last
    folder = Path(last.folder)
    require(folder.is_dir(), f"the folder of the last start was removed: "
            f"{folder}, of {shlex.join(last.command)}")
    return folder


def find_evidence(target: str | None, runs: Path) -> Path:
    """Return the folder with the evidence.

    Args:
        target: a run's folder, or a job's id; None: what was started last.
        runs: the folder of the runs' folders.

    Raises:
        UserError: if there is none.
    """
    if target is None:
        return find_last_evidence(os.environ)
    number = target.partition(".")[0]  # PBS's jobs are 123.server
    is_job = JOB.fullmatch(number)
    require(is_job or Path(target).is_dir(), f"{target}: no such folder; fix: "
            "name a run's folder, or a job's id")
    places = sorted(runs.glob(f"*-{number}")) if is_job else [Path(target)]
    require(places or find_starts_of(number), f"{target}: no run in {runs} "
            "has this number, nor a start in the cache; fix: name the folder "
            "that the job's output names")
    places = places or find_starts_of(number)
    files: list[Path] = []
    for place in places:
        for inside in ("", "why/", "why/*/"):
            files += place.glob(f"{inside}*-[0-9]*.json")
            files += place.glob(f"{inside}*{watcher.START_SUFFIX}")
    require(files, f"{target}: no rank left a record there; fix: name the "
            "folder that the job's output names, or none for the last start; "
            f"if nothing was recorded, {HOW}; {PY_SPY}")
    return max(files, key=lambda file: file.stat().st_mtime).parent


def find_starts_of(number: str) -> list[Path]:
    """Return the folders of `why run` of which a rank was in this job of
    SLURM's.
    """
    place = watcher.JOB_VARIABLES.index("SLURM_JOB_ID")
    found = []
    for folder in sorted(start.STARTS_FOLDER.glob("*/")):
        for file in sorted(folder.glob("*-[0-9]*.json"))[:3]:
            values = read_object(file).get("start") or []
            if values[place:place + 1] == [number]:
                found.append(folder)
                break
    return found


def ask_about_job(target: str) -> list[str]:
    """Return what SLURM says of a job and its steps, a line each; [] without
    one.
    """
    if not JOB.fullmatch(target):
        return []
    fields = "JobID,State,ExitCode,MaxRSS,NodeList"
    lines = run_slurm_command("sacct", "-n", "-P", "-j", target, "-o", fields)
    if not lines.strip():  # a cluster without accounts
        text = run_slurm_command("scontrol", "-o", "show", "job", target)
        lines = " ".join(re.findall(
            r"(?:JobState|Reason|ExitCode|NodeList)=\S+", text))
    return lines.replace("|", " ").splitlines()


def run_slurm_command(*command: str) -> str:
    """Return what a command of SLURM prints; "" where it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True,
                              timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def read_output(begun: Start) -> bytes | None:
    """Return what was written to the file of a start's standard error since
    then; None if it is not there any more, as after another start with
    `> FILE`.

    Another start that writes to it says so by a line of its own: what follows
    is not of this one.
    """
    if begun.output is None:
        return None
    try:
        with open(begun.output, "rb") as log:
            log.seek(begun.output_begin)
            text = log.read()
    except OSError:
        return None
    line = f"{START_LINE}{shlex.quote(begun.folder)}\n".encode()
    if not text.startswith(line):
        return None
    return text[len(line):].partition(START_LINE.encode())[0]


def say_output(begun: Start) -> str:
    """Return how the output of a start ends, in lines; "" if it went to no
    file.
    """
    if begun.output is None:
        return ""
    text = read_output(begun)
    if text is None:
        return (f"its output, {begun.output}, no longer exists, or was "
                "overwritten")
    return f"its output, {begun.output}, ends:\n{cut_output(text)}"


def cut_output(output: bytes, lines: int = 6) -> str:
    """Return the last lines of a launcher's output, without its own
    traceback.
    """
    text = output[-100_000:].decode(errors="replace")
    before, _, last = text.rpartition("Traceback (most recent call last)")
    if "torch/distributed/run.py" in last:
        text = before
    kept = [line[:200] for line in text.splitlines()
            if line.strip() and not LAUNCHER_LINE.search(line)]
    return "\n".join(f"  {line}" for line in kept[-lines:])


def say_begin(folder: Path) -> str:
    """Return what is known of a start without a rank: what its launcher has
    said, what it awaits, and which of its processes run without the hook.
    """
    starts = start.starts_of(folder)
    texts = []
    for file in folder.glob("*.exits"):
        error = read_object(file).get("launcher")
        if error is not None:
            texts.append(f"{error['error']}: {error['message'].strip()}")
    begun = starts[-1] if starts else None
    if begun is not None and begun.runs:
        children = proc.descendants(begun.pid)
        unmet = [place for child in children
                 for place in proc.connecting(child)]
        text = f"process {begun.pid} is running"
        if unmet:
            text += f" and cannot connect to {unmet[0]}"
        texts.append(text)
        texts += filter(None, map(say_unwatched, children))
        texts.append("`py-spy dump --subprocesses --pid "
                     f"{begun.pid}` shows the lines of its processes")
    else:
        texts.append(UNWATCHED)
    output = say_output(begun) if begun is not None else ""
    if output:
        texts.append(output)
    return "; ".join(["no rank left a record", *texts])


def say_unwatched(pid: int) -> str:
    """Return why a process that runs Python is not watched; "" if it is, or if
    it is another program.
    """
    command = [word for word in proc.read_command(pid) if word]
    if not command or not PYTHON_NAME.fullmatch(os.path.basename(command[0])):
        return ""
    given = proc.read_variables(pid)
    if given is None:  # it has ended, or is another user's
        return ""
    variables = dict(line.split("=", 1) for line in given if "=" in line)
    hooks = [place for place in variables.get("PYTHONPATH", "").split(":")
             if place.endswith("/rankcheck/system/hook")]
    ignores = [word for word in command[1:2] if IGNORES.fullmatch(word)]
    name = f"process {pid} ({shlex.join(command)[:100]}) is not watched: "
    if not variables.get(watcher.FOLDER_VARIABLE):
        return name + ("the variable RANKCHECK_WHY is not set; fix: look for "
                       "`env -i`, sudo, ssh, a container, --export=NONE")
    if not hooks:
        return name + (f"its PYTHONPATH lacks {HOOK}; fix: look for "
                       "a line that resets it, and append to it instead")
    if ignores:
        return name + (f"Python's option {ignores[0]} ignores PYTHONPATH")
    return ""


@dataclass(frozen=True)
class Evidence:
    """What a folder holds of the last start, and of what still runs there."""

    jobs: list[list[Rank]]  # of each job its ranks, sorted; the last one last
    refused: str = ""  # why the ranks could not be asked

    @property
    def ranks(self) -> list[Rank]:
        """Those of all jobs."""
        return [rank for ranks in self.jobs for rank in ranks]


def collect(folder: Path) -> list[Rank]:
    """Return the `Rank`s of one job, sorted: of several, of the last that
    runs, and of the last one if none does.
    """
    found = gather(folder).jobs
    if not found:
        return []
    running = [ranks for ranks in found if any(rank.runs for rank in ranks)]
    return (running or found)[-1]


def gather(folder: Path) -> Evidence:
    """Ask all ranks that may run, and read what there is of each job."""
    records, request, refused = read_records(folder), "no request", ""
    if any(lives(record) is not False for record in records):
        try:
            request = watcher.add_request(folder / "ask")
            records = wait_for_answers(folder, records, request)
        except OSError as error:
            refused = error.strerror or str(error)
    nested = find_nested(records)
    records = add_exits(folder, of_this_job(records))
    for record in records:
        record["alive"] = lives(record)
    starts = start.starts_of(folder)
    last = starts[-1].token if starts else None
    found = [make_ranks(folder, job, request)
             for job in jobs.choose_current(jobs.split_jobs(records), last)]
    gathered = Evidence(found, refused)
    add_nested(gathered.ranks, nested, request)
    return gathered


def wait_for_answers(folder: Path, records: list[ProcessRecord],
                     request: str) -> list[ProcessRecord]:
    """Return the records, once all ranks have answered, or had their time to.
    """
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end and any(
            record["answers"] and not record["ended"]
            and lives(record) is not False
            and not (request in record["asked"] and "stack_samples" in record)
            for record in records):
        time.sleep(0.5)
        records = read_records(folder)
    return records


def make_ranks(folder: Path, records: list[ProcessRecord],
               request: str) -> list[Rank]:
    """Return the ranks of one job, sorted."""
    # a process without a number may have started those that have one; else it
    # is no rank of several
    numbered = [record for record in records if record["rank"] is not None]
    if not numbered:
        numbered = [{**record, "rank": 0, "world_size": 1}
                    for record in records]
    ranks: list[Rank] = []
    kills = proc.count_oom_kills()
    for record in numbered:
        alive = record.pop("alive")
        if alive is not None:  # it may be dead, or
            record["state"] = proc.read_state(record["pid"])  # stopped
            record["oom_kills"] = kills - record.get("oom_before", kills)
        if not (record["answers"] or record["ended"]):
            record["idle_seconds"] = time.time() - record["written"]
        stack = folder / f"{record['process']}.stack"
        has_answered = not record["answers"] or request in record["asked"]
        ranks.append(Rank(record, alive, has_answered, proc.read_text(stack)))
    # a monitor that a wrapper starts has a rank's number, too; and of two
    # ranks with the same one, the older one counts while it runs
    ranks.sort(key=lambda rank: rank.claim)
    best: dict[Identity, Rank] = {rank.identity: rank for rank in ranks}
    kept = []
    for rank in ranks:
        other = best[rank.identity]
        if rank is other or (rank.runs and rank.claim.is_like(other.claim)):
            kept.append(rank)
    return sorted(kept, key=lambda rank: rank.rank)


def of_this_job(records: list[ProcessRecord]) -> list[ProcessRecord]:
    """Return the records without the ranks of jobs that a rank, which has
    joined, has started.
    """
    def name(record: ProcessRecord,
             pid: int | str | None) -> tuple[str, str, str]:
        return record["host"], str(record.get("space")), str(pid)

    joined = {name(record, record["pid"]) for record in records
              if record["joined"]}
    return [one for one in records if name(one, one.get("starter"))
            not in joined - {name(one, one["pid"])}]


def find_nested(records: list[ProcessRecord]) -> list[ProcessRecord]:
    """Return those that `of_this_job` leaves out and that live, by their rank.
    """
    kept = of_this_job(records)
    return sorted((one for one in records if one not in kept and lives(one)
                   and not one["ended"]), key=lambda one: one["rank"] or 0)


def add_nested(ranks: list[Rank], nested: list[ProcessRecord],
               request: str) -> None:
    """Let each rank know those of a job that it has started itself."""
    for rank in ranks:
        started = [one for one in nested if one["starter"] == str(rank.pid)
                   and one["host"] == rank.host]
        rank.started_ranks = [
            Rank(one, True, request in one["asked"]) for one in started]


def read_records(folder: Path) -> list[ProcessRecord]:
    """Return the records of all processes, with how they ended."""
    found = []
    for file in folder.glob("*-*.json"):
        record = read_object(file)
        if record.get("format") not in FORMATS:
            continue
        rename_keys(record)
        end = file.with_suffix(".end")
        ended = record["ended"] or read_object(end) or None
        calls.unpack_groups(record)
        record.update(ended=ended, process=file.stem)
        found.append(cast(ProcessRecord, record))
    return found


def rename_keys(record: dict[str, Any]) -> None:
    """Give a record of an older format the keys of today's."""
    for before, now in RENAMED.items():
        if before in record:
            record[now] = record.pop(before)


def read_object(file: Path) -> dict[str, Any]:
    """Return the dictionary in a file, {} if it holds something else."""
    try:
        value = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Launcher:
    """The process that has written a file PROCESS.exits."""

    host: str
    pid: str
    space: str


def add_exits(folder: Path,
              records: list[ProcessRecord]) -> list[ProcessRecord]:
    """Return the records, with how their launchers say that they have ended,
    if they do not; and with those of which only a launcher says something.
    """
    known = [*records]
    began = min((record["began"] for record in known), default=0)
    for file in folder.glob("*.exits"):
        name, _, space = file.stem.partition("@")
        host, _, number = name.rpartition("-")
        launcher = Launcher(host, number, space)
        for pid, entry in read_object(file).items():
            if not isinstance(entry, dict) or entry.get("time", 0) + 1 < began:
                continue  # somebody's own file, or of an earlier start
            if pid == "launcher" and entry["signal"]:
                pass_on_signal(known, launcher, entry)
            if pid.isdigit():
                record = find_record(known, launcher, int(pid), entry["rank"])
                if record is None:
                    record = make_blank(known, launcher, int(pid), entry)
                    records.append(record)
                if not (record["ended"] or {}).get("status"):
                    record["ended"] = cast(Ended, {**entry, "told": True})
    return records


def pass_on_signal(records: list[ProcessRecord], launcher: Launcher,
                   entry: dict[str, Any]) -> None:
    """Let those that a launcher has started end by the signal that it got."""
    for record in records:
        parent = str(record.get("parent", launcher.pid))
        if record["host"] == launcher.host and parent == launcher.pid and (
                lives(record) is False and not record["ended"]):
            record["ended"] = {"status": -entry["signal"], "told": True,
                               "time": entry["time"]}


def find_record(records: list[ProcessRecord], launcher: Launcher, pid: int,
                rank: int) -> ProcessRecord | None:
    """Return what a process has written that a launcher speaks of."""
    for record in records:
        if record["pid"] != pid or record.get("space", launcher.space) not in (
                launcher.space, "", proc.SPACE):
            continue
        if record["host"] == launcher.host or record["rank"] == rank:
            return record
    return None


def make_blank(records: list[ProcessRecord], launcher: Launcher, pid: int,
               entry: dict[str, Any]) -> ProcessRecord:
    """Return a record for a process of which only its launcher speaks."""
    return {
        "rank": entry["rank"],
        "world_size": records[0]["world_size"] if records else None,
        "host": launcher.host, "pid": pid, "began": entry["time"],
        "ended": None, "written": entry["time"], "answers": False,
        "joined": False, "process": f"{launcher.host}-{pid}@{launcher.space}",
        "space": launcher.space, "parent": int(launcher.pid)}


def lives(record: ProcessRecord) -> bool | None:
    """Whether the process lives; None where that cannot be seen."""
    if record["host"] != proc.name_host(os.environ) or record.get(
            "space") not in (proc.name_space(), proc.SPACE) or (
            not os.path.isdir("/proc")):
        return None  # it is on another node, or in a container
    # one that has begun after the record has its number by chance
    return proc.read_state(record["pid"]) not in ("?", "Z") and (
        proc.find_begin(record["pid"]) < record["began"] + 2)
