"""Collects the evidence: what the ranks of a start have written themselves
(witness.py), what the system says of them now, and SLURM's word.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

from rankcheck.errors import read_regular, require
from rankcheck.why import proc, start, witness
from rankcheck.why.ranks import Rank

ANSWER = 12  # seconds that the ranks have to answer
HOW = "start it by `rankcheck why run -- COMMAND`"
JOB = re.compile(r"\d+(_\d+)?")  # 12_3 is an element of SLURM's array 12
# Lines of a launcher's output that say nothing of the script
OWN = re.compile("^frame #|/distributed/elastic/|<omitting python frames>")


def find(target, runs):
    """The folder with the evidence.

    target: a run's folder, or a job's id; None: what was started last. runs:
    the folder of the runs' folders.
    """
    if target is None:
        starts = sorted(start.STARTS.glob("*/"))
        require(starts, f"nothing was watched yet: {HOW}")
        return starts[-1]
    number = target.partition(".")[0]  # PBS's jobs are 123.server
    is_job = JOB.fullmatch(number)
    require(is_job or Path(target).is_dir(), f"{target}: no such folder: name "
            "a run's folder, or a job's id")
    places = sorted(runs.glob(f"*-{number}")) if is_job else [Path(target)]
    require(places or find_starts_of(number), f"{target}: no run in {runs} "
            "has this number, nor a start in the cache: name the folder that "
            "the job's output names")
    places = places or find_starts_of(number)
    files = [file for place in places for inside in ("", "why/", "why/*/")
             for name in ("*-[0-9]*.json", witness.BEGIN)
             for file in place.glob(inside + name)]
    require(files, f"{target}: no rank has left evidence there: name the "
            "folder that the job's output names, or none for what was started "
            f"last; if nothing was watched, {HOW}; while it runs, `py-spy "
            "dump --subprocesses --pid PID` shows the lines of its processes")
    return max(files, key=lambda file: file.stat().st_mtime).parent


def find_starts_of(number: str) -> list[Path]:
    """The folders of `why run` of which a rank was in this job of SLURM's."""
    place, found = witness.STARTS.index("SLURM_JOB_ID"), []
    for folder in sorted(start.STARTS.glob("*/")):
        for file in sorted(folder.glob("*-[0-9]*.json"))[:3]:
            told = read_json(file).get("start") or []
            if told[place:place + 1] == [number]:
                found.append(folder)
                break
    return found


def ask_about(target):
    """What SLURM says of a job and its steps, a line each; [] without one."""
    if not JOB.fullmatch(target):
        return []
    fields = "JobID,State,ExitCode,MaxRSS,NodeList"
    lines = ask_slurm("sacct", "-n", "-P", "-j", target, "-o", fields)
    if not lines.strip():  # a cluster without accounts
        text = ask_slurm("scontrol", "-o", "show", "job", target)
        lines = " ".join(re.findall(
            r"(?:JobState|Reason|ExitCode|NodeList)=\S+", text))
    return lines.replace("|", " ").splitlines()


def ask_slurm(*command):
    """What a command of SLURM prints; "" where it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True,
                              timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def read_end(file, lines=6):
    """The last lines of a launcher's output, without its own traceback."""
    try:
        with open(file, "rb") as log:
            log.seek(max(0, os.path.getsize(file) - 100_000))
            text = log.read().decode(errors="replace")
    except OSError:  # it is gone
        return ""
    before, _, last = text.rpartition("Traceback (most recent call last)")
    kept = [line[:200] for line in (
        before if "torch/distributed/run.py" in last else text).splitlines()
        if line.strip() and not OWN.search(line)]
    return "\n".join(f"  {line}" for line in kept[-lines:])


def say_begin(folder):
    """What the launcher of a start without a rank has said, and awaits."""
    begin = read_json(folder / witness.BEGIN)
    texts = [f"{told['error']}: {told['message'].strip()}"
             for file in folder.glob("*.exits")
             for pid, told in read_json(file).items() if pid == "launcher"]
    pid = begin.get("pid", 0)
    if 0 < proc.find_begin(pid) < begin.get("time", 0) + 1:
        unmet = [place for child in proc.descendants(pid)
                 for place in proc.connecting(child)]
        texts.append(f"process {pid} runs" + "".join(
            f", and gets no answer from {place}" for place in unmet[:1]))
    if begin.get("output"):
        texts.append("its output ends:\n" + read_end(begin["output"]))
    return "; ".join(["no rank has begun", *texts])


def collect(folder):
    """The `Rank`s, sorted."""
    records, question = read(folder), "no question"
    end = time.monotonic() + ANSWER
    with contextlib.suppress(OSError):  # else what is there has to do
        if any(lives(record) is not False for record in records):
            question = witness.add_question(folder / "ask")
        while time.monotonic() < end and any(
                record["answers"] and not record["ended"]
                and lives(record) is not False
                and not (question in record["asked"] and "looks" in record)
                for record in records):
            time.sleep(0.5)
            records = read(folder)
    nested = find_nested(records)
    records = add_exits(folder, of_last_start(of_this_job(records)))
    # a process without a number may have started those that have one; else it
    # is no rank of several
    records = [record for record in records if record["rank"] is not None] or [
        {**record, "rank": 0, "world_size": 1} for record in records]
    ranks, kills = [], proc.count_oom_kills()
    for record in records:
        alive = lives(record)
        if alive is not None:  # it may be dead, or
            record["state"] = proc.read_state(record["pid"])  # stopped
            record["oom_kills"] = kills - record.get("oom_before", kills)
        if not (record["answers"] or record["ended"]):
            record["still"] = time.time() - record["written"]
        stack = folder / f"{record['host']}-{record['pid']}.stack"
        fresh = not record["answers"] or question in record["asked"]
        ranks.append(Rank(record, alive, fresh, proc.read_text(stack)))
        ranks[-1].nested = [
            Rank(one, True, question in one["asked"]) for one in nested
            if (one["host"], one["starter"]) == (
                record["host"], str(record["pid"]))]
    # a monitor that a wrapper starts has a rank's number, too; and of two
    # ranks with the same one, the older one counts while it runs
    ranks.sort(key=lambda rank: rank.claim)
    best = {rank.known_as: rank for rank in ranks}
    return sorted((rank for rank in ranks if rank is best[rank.known_as] or (
        rank.runs and rank.claim[:3] == best[rank.known_as].claim[:3])),
        key=lambda rank: rank.rank)


def of_this_job(records):
    """Without the ranks of jobs that a rank, which has joined, has started."""
    joined = {(record["host"], str(record["pid"])) for record in records
              if record["joined"]}
    return [one for one in records if (one["host"], one.get("starter"))
            not in joined - {(one["host"], str(one["pid"]))}]


def find_nested(records):
    """Those that `of_this_job` leaves out and that live, by their rank."""
    kept = of_this_job(records)
    return sorted((one for one in records if one not in kept and lives(one)
                   and not one["ended"]), key=lambda one: one["rank"] or 0)


def of_last_start(records):
    """Without those of an earlier start in the same folder, now silent."""
    last = max(records, key=lambda record: record["began"], default=None)
    return [record for record in records if record["written"] >= last["began"]
            or record["start"] == last["start"]]


def read(folder):
    """The records of all processes, with how they ended."""
    records = {file: read_json(file) for file in folder.glob("*-*.json")}
    return [{**record, "ended": record["ended"] or read_json(
                file.with_suffix(".end")) or None}
            for file, record in records.items()
            if record.get("format") == witness.FORMAT]


def read_json(file):
    """The dictionary in a file, {} if it holds something else."""
    try:
        value = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def add_exits(folder, records):
    """With how their launchers say that they have ended, if they do not; and
    with those of which only a launcher says something.
    """
    known, size = [*records], records[0]["world_size"] if records else None
    began = min((record["began"] for record in known), default=0)
    for file in folder.glob("*.exits"):
        host = file.stem.rpartition("-")[0]
        for pid, told in read_json(file).items():
            if not isinstance(told, dict) or told.get("time", 0) + 1 < began:
                continue  # somebody's own file, or of an earlier start
            if pid == "launcher" and told["signal"]:  # it passes that on
                for record in known:
                    if record["host"] == host and lives(record) is False:
                        record["ended"] = record["ended"] or {
                            "status": -told["signal"], "told": True,
                            "time": told["time"]}
            if not pid.isdigit():
                continue
            blank = {"rank": told["rank"], "world_size": size, "host": host,
                     "pid": int(pid), "began": told["time"], "ended": None,
                     "written": told["time"], "answers": False}
            record = next((
                record for record in known if record["pid"] == int(pid)
                and (record["host"] == host or record["rank"] == told["rank"])
                ), blank)
            if record is blank:
                records.append(blank)
            if not (record["ended"] or {}).get("status"):
                record["ended"] = {**told, "told": True}
    return records


def lives(record):
    """Whether the process lives; None where that cannot be seen."""
    if record["host"] != proc.name_host(os.environ) or record.get(
            "space") != proc.SPACE or not os.path.isdir("/proc"):
        return None  # it is on another node, or in a container
    # one that has begun after the record has its number by chance
    return proc.read_state(record["pid"]) not in ("?", "Z") and (
        proc.find_begin(record["pid"]) < record["began"] + 2)
