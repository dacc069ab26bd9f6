"""Collects the evidence: a run's folder, live processes, SLURM's word.

What the ranks have written themselves (witness.py) counts first. Of
processes that write nothing, the system and py-spy say what they do: that
needs Linux, and for py-spy the right to look into them.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rankcheck.errors import UserError, require
from rankcheck.reader import read_regular
from rankcheck.why import witness
from rankcheck.why.ranks import MEETING, PATIENCE, Rank
from rankcheck.why.start import STARTS

ANSWER = 12  # seconds that the ranks have to answer
HOW = "start it by `rankcheck why run -- COMMAND`"
JOB = re.compile(r"\d+(_\d+)?")  # 12_3 is an element of SLURM's array 12
# Of a rank that has left no record
UNKNOWN = {"master": [None, None], "start": None, "still": 0, "age": 0,
           "stack": [], "state": "?", "calls": None, "joined": False,
           "message": None, "oom_kills": 0, "answers": False}
# What torchrun says in its log where it does not reach the place to meet
UNMET = re.compile(r"connect to any network address of \((\S+), (\d+)\)")


def find(target, runs):
    """(the folder with the evidence or None, the processes to look at).

    target: a run's folder, a job's id, or that of a process; None: what was
    started last. runs: the folder of the runs' folders.
    """
    if target is None:
        starts = sorted(STARTS.glob("*/"))
        require(starts, f"nothing was watched yet: {HOW}")
        return starts[-1], []
    number = target.partition(".")[0]  # PBS's jobs are 123.server
    if JOB.fullmatch(number):
        jobs = [*map(newest, sorted(runs.glob(f"*-{number}")))]
        if any(jobs):  # a process may have the same number as a job
            return [*filter(None, jobs)][-1], []
    if not JOB.fullmatch(target):
        folder = Path(target)
        require(folder.is_dir(), f"{folder}: no such folder: name a run's "
                "folder, a job's id, or a process's")
        found = newest(folder) or find_writer(folder)
        require(found, f"{folder}: no rank has left evidence there: "
                "`rankcheck why` alone asks about what was started last; if "
                f"that is another job, {HOW}, or give a process's id while it "
                "runs")
        return found, []
    if Path(f"/proc/{target}").is_dir():
        processes = descendants(int(target))
        for pid in processes:
            folder = find_folder(pid)
            if folder:
                return folder, processes
        return None, processes
    left = [*runs.glob(f"*/why/**/*-{target}.json"),
            *STARTS.glob(f"*/*-{target}.json")]
    if left:  # of a rank that has ended
        return max(left, key=lambda file: file.stat().st_mtime).parent, []
    return find_job(target, runs), []


def newest(folder):
    """The folder with the newest evidence in a run's folder, or None."""
    files = [file for place in ("", "why/", "why/*/")
             for file in folder.glob(f"{place}*-[0-9]*.json")]
    return max(files, key=lambda file: file.stat().st_mtime).parent if (
        files) else None


def find_writer(folder):
    """Where a live process writes its evidence that has a file open here."""
    inside = f"{folder.resolve()}/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if any(path.startswith(inside) for path in witness.open_files(pid)):
            return find_folder(pid)
    return None


def find_job(job, runs):
    """The folder of a job's evidence, as its log names it."""
    text = ask_slurm("scontrol", "show", "job", job)
    log = re.search(r"StdOut=(.+)", text)
    if log and Path(log[1]).is_file():
        words = Path(log[1]).read_text(errors="replace")
        said = re.findall(r"(?:rankcheck|-m workshop) why (.+)", words)
        if said:
            return find(shlex.split(said[-1])[0], runs)
        unmet = UNMET.findall(words)
        require(not unmet, f"no rank of {job} has begun: torchrun does not "
                f"reach {':'.join((unmet or [''])[-1])}. Is MASTER_ADDR a "
                "name of the node of rank 0, and is the port open?")
    raise UserError(f"{job} is neither a process of this machine nor a job "
                    "that left evidence: name the run's folder")


def ask_about(target):
    """What SLURM says of a job and its steps, a line each; [] without one."""
    if not JOB.fullmatch(target) or Path(f"/proc/{target}").is_dir():
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


def descendants(root):
    """A process and all that it has started, itself first."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        stat = witness.read_stat(folder.name)
        if stat:  # else it has ended
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def find_folder(pid):
    """Where a live process writes its evidence: it has a file open there."""
    return next((Path(path).parent for path in witness.open_files(pid)
                 if path.endswith(f"-{pid}.stack")), None)


def collect(folder, processes):
    """The `Rank`s, sorted."""
    if folder is None:
        return watch(processes)
    asked, end = None, time.monotonic() + ANSWER
    if any(may_run(record) is not False for record in read(folder)):
        with contextlib.suppress(OSError):  # else what is there has to do
            before = {file: name_write(file) for file in folder.glob(
                "*-*.json")}
            (folder / "ask").touch()
            asked = before
    while asked is not None and time.monotonic() < end:
        if all(answered(folder, record, asked) and "looks" in record
               for record in read(folder)
               if may_run(record) is not False and has_thread(record)):
            break
        time.sleep(0.5)
    ranks = []
    for record in add_exits(folder, of_last_start(read(folder))):
        if "oom_before" in record and (  # it may be dead,
                record["host"] == witness.name_host(os.environ)):
            record["oom_kills"] = (
                witness.count_oom_kills() - record["oom_before"])
            record["state"] = witness.read_state(record["pid"])  # or stopped
        if not (has_thread(record) or record["ended"]):
            record["still"] = time.time() - record["written"]
        ranks.append(Rank(record, may_run(record), not has_thread(record)
                          or answered(folder, record, asked),
                          witness.read_text(stack_file(folder, record))))
    # a process without a number may have started those that have one
    ranks = [rank for rank in ranks if rank.rank is not None] or ranks
    for rank in ranks:
        if rank.rank is None:  # one process, which is no rank of several
            rank.rank, rank.world_size = 0, 1
    # a monitor that a wrapper starts has a rank's number, too
    best = {rank.known_as: rank for rank in sorted(ranks, key=is_rank)}
    ranks = [rank for rank in ranks
             if is_rank(rank)[:2] == is_rank(best[rank.known_as])[:2]]
    # of two with the same number, the older one counts while it runs
    return sorted((rank for rank in ranks if rank is best[rank.known_as]
                   or rank.ending == "runs"), key=lambda rank: rank.rank)


def is_rank(rank):
    """By which of those with the same number the rank is told: it has joined
    a group or tries to, has loaded torch or MPI, or is the newest.
    """
    return rank.joined or rank.inside(MEETING), rank.answers, rank.began


def of_last_start(records):
    """Without those of an earlier start in the same folder.

    Their launcher was another one, and their last word is older than this
    start.
    """
    last = max(records, key=lambda record: record["began"], default=None)
    return [record for record in records if record["written"] >= last["began"]
            or record["start"] == last["start"]]


def read(folder):
    """The records of all processes, none of them half written.

    Others may have files of such names there.
    """
    records = map(read_json, folder.glob("*-*.json"))
    return [record for record in records
            if record.get("format") == witness.FORMAT]


def read_json(file):
    """The dictionary in a file, {} if it holds something else."""
    try:
        value = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def has_thread(record):
    return record["answers"]


def add_exits(folder, records):
    """With how their launchers say that they have ended, if they do not; and
    with those of which only a launcher says something.
    """
    known, began, size = [*records], 0, None
    if known:
        began = min(record["began"] for record in known)
        size = known[0]["world_size"]
    for file in folder.glob("*.exits"):
        host = file.stem.rpartition("-")[0]
        for pid, told in read_json(file).items():
            if not (pid.isdigit() and isinstance(told, dict)):
                continue  # somebody's own file
            ended = {**told, "told": True}
            record = next((
                record for record in known if record["pid"] == int(pid)
                and (record["host"] == host or record["rank"] == told["rank"])
                ), None)
            if record and not (record["ended"] or {}).get("status"):
                record["ended"] = ended
            elif record is None and told["time"] + 1 > began:
                records.append({
                    **UNKNOWN, "rank": told["rank"], "world_size": size,
                    "host": host, "pid": int(pid), "began": told["time"],
                    "written": told["time"], "ended": ended})
    return records


def stack_file(folder, record):
    return folder / f"{record['host']}-{record['pid']}.stack"


def answered(folder, record, asked):
    """Whether it has written since it was asked.

    asked: what `name_write` said of each file then; None without a question.
    """
    file = stack_file(folder, record).with_suffix(".json")
    with contextlib.suppress(OSError):
        return asked is not None and name_write(file) != asked.get(file)
    return False


def name_write(file):
    """What changes with each write, even where a clock is set back."""
    state = file.stat()
    return state.st_ino, state.st_mtime_ns


def may_run(record):
    """Whether the process lives; None where it is on another machine."""
    if record["ended"]:
        return False
    if record["host"] != witness.name_host(os.environ):
        return None
    return witness.read_state(record["pid"]) not in ("?", "Z")


# ----------------------------------------- processes that write nothing


def watch(processes):
    """Look at the ranks until all have moved, at most for `PATIENCE` s."""
    begin, ranks, alone = time.monotonic(), {}, ()
    while True:
        for pid in [*alone, *with_peers(processes)]:
            seen, now = look(pid, pid in alone), time.monotonic()
            if seen is None:
                continue
            # a process that a rank has started inherits its number
            known = ranks.setdefault(seen["rank"], seen | {"since": now})
            if known["pid"] == pid:
                moved = seen["stack"] != known["stack"]
                before = known.setdefault("children", seen["children"])
                known.update(seen, since=now if moved else known["since"],
                             workers=witness.compare(before, seen["children"]))
                known["still"] = now - known["since"]
                known["moved"] = moved or known.get("moved", False)
        if not ranks and not alone:  # one process, no rank of several
            alone = processes[:1]
            continue
        unmet = [place for pid in processes
                 for place in witness.connecting(pid)]
        require(ranks, f"process {processes[0]} has started no process that "
                "knows its RANK" + (
                    f", and gets no answer from {unmet[0]}" if unmet else
                    ": name the launcher's id, or a rank's"))
        if all(rank["moved"] for rank in ranks.values()) or (
                now > begin + PATIENCE + 3):
            break
        time.sleep(2)
    return sorted((Rank(rank, True, True) for rank in ranks.values()),
                  key=lambda rank: rank.rank)


def with_peers(processes):
    """These, and the others on this machine that meet at the same place."""
    places = {pid: read_environment(pid).get("MASTER_PORT") for pid in map(
        int, filter(str.isdigit, os.listdir("/proc")))}
    ports = {places.get(pid) for pid in processes} - {None}
    return sorted({*processes, *(
        pid for pid, port in places.items() if port in ports)})


def read_environment(pid):
    """The variables that a process began with; {} if it is not ours."""
    return dict(entry.split("=", 1) for entry in witness.read_text(
        f"/proc/{pid}/environ").split("\0") if "=" in entry)


def look(pid, alone=False):
    """A rank's record, as its witness would write it; None if it is none.

    alone: whether it is taken for the only rank.
    """
    env, stat = read_environment(pid), witness.read_stat(pid)
    command = witness.read_text(f"/proc/{pid}/cmdline").split("\0")
    if not stat:  # it has ended
        return None
    # seconds since the system's start
    began = float(stat[19]) / os.sysconf("SC_CLK_TCK")
    age = float(witness.read_text("/proc/uptime").split()[0]) - began
    rank, size = witness.read_rank(env, command)
    if "--multiprocessing-fork" in command and rank is None:
        rank = find_spawned(pid)
    if alone and rank is None and not witness.is_launcher(command):
        rank, size = 0, 1
    if rank is None or "python" not in Path(command[0]).name:
        return None
    master, stack = [env.get("MASTER_ADDR"), env.get("MASTER_PORT")], spy(pid)
    joined = not any("init_process_group" in name for _, _, name in stack)
    return {
        "rank": rank, "world_size": size, "pid": pid,
        "host": witness.name_host(env),
        "master": master, "began": began, "age": age, "ended": None,
        "stack": stack, "state": witness.read_state(pid), "calls": None,
        "joined": joined, "connecting": witness.connecting(pid),
        "oom_kills": 0, "written": time.time(), "message": None,
        "still": 0, "children": witness.see_workers(pid),
        "answer": "" if joined else witness.try_meeting(*master)}


def find_spawned(pid):
    """The number that mp.spawn has given to a process, or None."""
    return next((
        int(local["repr"]) for frame in dump(pid, "--locals")
        if frame["filename"].endswith("torch/multiprocessing/spawn.py")
        for local in frame["locals"] or () if local["name"] == "i"), None)


def spy(pid):
    """The main thread's stack as py-spy sees it, outermost first."""
    return [[frame["filename"], frame["line"], frame["name"]]
            for frame in dump(pid)][::-1]


def dump(pid, *options, again=2):
    """The main thread's frames as py-spy sees them, innermost first.

    again: how often it tries again; it may look while the stack is changed.
    """
    tool = shutil.which("py-spy") or str(
        Path(sys.executable).with_name("py-spy"))
    try:
        said = subprocess.run(
            [tool, "dump", "--json", *options, "--pid", str(pid)],
            capture_output=True, text=True, timeout=20, check=True)
        threads = json.loads(said.stdout)
    except FileNotFoundError:
        raise UserError("these processes leave no evidence: `pip install "
                        "py-spy` to look into them, or " + HOW) from None
    except (subprocess.SubprocessError, ValueError) as error:
        if witness.read_state(pid) in ("?", "Z", "T"):
            return []  # it has ended, or is stopped
        if again:
            time.sleep(0.2)
            return dump(pid, *options, again=again - 1)
        words = (getattr(error, "stderr", "") or str(error)).strip()
        raise UserError(f"py-spy cannot look into process {pid} "
                        f"({words.splitlines()[0]}): {HOW}") from None
    return next((thread["frames"] for thread in threads
                 if thread.get("os_thread_id") == pid), [])
