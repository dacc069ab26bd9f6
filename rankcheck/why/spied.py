"""Looks into processes that leave no evidence: by Linux and by py-spy.

It needs the right to look into them, and sees lines, but no collectives.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rankcheck.errors import UserError
from rankcheck.why import launchers, proc
from rankcheck.why.ranks import PATIENCE, Rank

HOW = "start it by `rankcheck why run -- COMMAND`"


def watch(processes):
    """The `Rank`s among them, looked at until all have moved, at most for
    `PATIENCE` s.
    """
    begin, ranks = time.monotonic(), {}
    pids = with_peers(processes)
    alone = not any(map(look, pids))  # one process, no rank of several
    while True:
        for pid in processes[:1] if alone else pids:
            seen = look(pid, alone)
            # a process that a rank has started inherits its number
            known = ranks.setdefault(seen["rank"], seen) if seen else {}
            if known.get("pid") == pid:
                moved = seen["stack"] != known["stack"]
                since = seen["written"] if moved else known.get(
                    "since", seen["written"])
                ranks[seen["rank"]] = seen | {
                    "since": since, "still": seen["written"] - since,
                    "moved": moved or known.get("moved", False),
                    "work": proc.describe_work(
                        known["counts"], seen["counts"],
                        seen["written"] - known["written"])}
        if not ranks:
            unmet = [place for pid in processes
                     for place in proc.connecting(pid)]
            raise UserError(
                f"process {processes[0]} has started no process that knows "
                "its RANK" + (f", and gets no answer from {unmet[0]}" if unmet
                              else ": name the launcher's id, or a rank's"))
        if all(rank["moved"] for rank in ranks.values()) or (
                time.monotonic() > begin + PATIENCE):
            return sorted((Rank(rank, proc.read_state(rank["pid"]) not in
                                ("?", "Z"), True) for rank in ranks.values()),
                          key=lambda rank: rank.rank)
        time.sleep(2)


def with_peers(processes):
    """These, and the others on this machine that meet at the same place."""
    places = {pid: read_environment(pid).get("MASTER_PORT") for pid in
              proc.list_processes()}
    ports = {places.get(pid) for pid in processes} - {None}
    return sorted({*processes, *(
        pid for pid, port in places.items() if port in ports)})


def read_environment(pid):
    """The variables that a process began with; {} if it is not ours."""
    return dict(entry.split("=", 1) for entry in proc.read_text(
        f"/proc/{pid}/environ").split("\0") if "=" in entry)


def look(pid, alone=False):
    """A rank's record, as its witness would write it; None if it is none.

    alone: whether it is taken for the only rank.
    """
    env, command = read_environment(pid), proc.read_command(pid)
    rank, size = launchers.read_rank(env, command)
    if "--multiprocessing-fork" in command and rank is None:
        rank = find_spawned(pid)
    if alone and rank is None and not launchers.is_launcher(command):
        rank, size = 0, 1
    if rank is None or "python" not in Path(command[0]).name:
        return None
    master, stack = [env.get("MASTER_ADDR"), env.get("MASTER_PORT")], spy(pid)
    joined = not any("init_process_group" in name for _, _, name in stack)
    return {
        "rank": rank, "world_size": size, "pid": pid, "master": master,
        "host": proc.name_host(env), "began": proc.find_begin(pid),
        "ended": None, "stack": stack, "state": proc.read_state(pid),
        "calls": None, "joined": joined, "message": None, "over": False,
        "connecting": proc.connecting(pid), "oom_kills": 0, "library": "",
        "mpi": False, "written": time.time(), "counts": proc.see_work(pid),
        "answer": "" if joined else proc.try_meeting(*master)}


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
        if proc.read_state(pid) in ("?", "Z", "T"):
            return []  # it has ended, or is stopped
        if again:
            time.sleep(0.2)
            return dump(pid, *options, again=again - 1)
        words = (getattr(error, "stderr", "") or str(error)).strip()
        raise UserError(f"py-spy cannot look into process {pid} "
                        f"({words.splitlines()[0]}): {HOW}") from None
    return next((thread["frames"] for thread in threads
                 if thread.get("os_thread_id") == pid), [])
