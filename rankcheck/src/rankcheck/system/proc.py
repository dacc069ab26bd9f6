"""What Linux reports about processes, threads and connections.

Only the standard library: it is loaded into any script, by watcher.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # without importing typing in each process
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    # ("thread" or "process", its id) -> its name, its state, the CPU time that
    # it has used, in ticks, and what /proc says of its I/O
    WorkTimes = dict[tuple[str, int], tuple[str, str, int, str]]

WORKS = 0.02  # of a core: less is only asking whether something is there
EXEC = 1.0  # seconds in which an execve ends, also on a busy machine
ENV_END = 48  # where env_end is in what read_stat returns: 0 until it is known
SET_CHILD_SUBREAPER = 36  # of prctl(2)
SPACE = os.path.basename(os.path.realpath("/proc/self/ns/pid"))  # of PIDs


def read_text(file: str | os.PathLike[str]) -> str:
    """Return a file's text; "" if it is gone or another user's."""
    try:
        return Path(file).read_text(errors="replace")
    except OSError:  # its process has ended, or is another user's
        return ""


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on.

    Args:
        pid: PID, or PID/task/THREAD.

    Returns:
        The fields 3 and following of proc_pid_stat(5); none if it is gone.
    """
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def read_state(pid: int | str) -> str:
    """Return the main thread's state: R runs, S sleeps, D waits for a device;
    ? if it is gone.
    """
    return (read_stat(pid) or "?")[0]


def read_command(pid: int | str) -> list[str]:
    """Return a process's command line."""
    return read_text(f"/proc/{pid}/cmdline").split("\0")


def read_variables(pid: int | str) -> list[str] | None:
    """Return a process's environment, as NAME=value; None if it is gone or
    another user's.

    A process in the middle of execve(2) has no variables yet, for up to 20 ms
    on a busy machine. They are waited for.
    """
    end = time.monotonic() + EXEC
    has_program = False  # then it has no variables, if none are read again
    while True:
        try:
            text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        except OSError:
            return None
        if text or has_program or time.monotonic() > end:
            return [line for line in text.split("\0") if line]
        has_program = not is_in_exec(pid)
        if not has_program:
            time.sleep(0.002)


def is_in_exec(pid: int | str) -> bool:
    """Say whether a process is about to run a program, and has no variables
    yet. The kernel's own threads and zombies are not.
    """
    try:
        os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    stat = read_stat(pid)
    return len(stat) > ENV_END and stat[ENV_END] == "0"


def find_begin(pid: int | str) -> float:
    """Return when a process began, in seconds since 1970; 0 if it is gone."""
    stat, uptime = read_stat(pid), read_text("/proc/uptime").split()
    if not stat:
        return 0
    booted = time.time() - float(uptime[0])
    return booted + float(stat[19]) / os.sysconf("SC_CLK_TCK")


def list_folder(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder; none where there is no such folder."""
    try:
        return os.listdir(path)
    except OSError:  # it is gone, or there is no /proc
        return []


def read_cwd(pid: int | str) -> Path | None:
    """Return a process's current folder; None if it is gone or another user's.
    """
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None


def list_processes() -> Iterator[int]:
    """Return the PIDs of all processes."""
    return map(int, filter(str.isdigit, list_folder("/proc")))


def adopt_orphans() -> None:
    """Become the parent of all descendants that lose theirs, as on Linux.

    Elsewhere nothing happens.
    """
    import ctypes  # not where scripts are watched

    with contextlib.suppress(AttributeError):  # no prctl
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return a process and all that it has started, itself first.

    Also what has lost its parent, if it is in the session that the process
    leads.
    """
    stats = {pid: read_stat(pid) for pid in list_processes()}
    found = [root]
    for parent in found:
        found += [pid for pid, stat in stats.items()
                  if stat and pid not in found  # else it has ended
                  and (int(stat[1]) == parent or int(stat[3]) == root)]
    return found


def see_work(pid: int, but: int | None = None) -> WorkTimes:
    """Return what a process's threads, and the processes that it started, have
    done so far.

    Args:
        pid: the process.
        but: the id of a thread to leave out.
    """
    places = {("thread", int(task)): f"{pid}/task/{task}"
              for task in list_folder(f"/proc/{pid}/task") if task != str(but)}
    for child in descendants(pid)[1:]:
        places["process", child] = str(child)
    work: WorkTimes = {}
    for key, place in places.items():
        stat = read_stat(place)
        if stat:  # else it has ended
            name = read_text(f"/proc/{place}/comm").strip()
            # user and system time, its own and of children that have ended
            ticks = sum(map(int, stat[11:15]))
            work[key] = name, stat[0], ticks, read_text(f"/proc/{place}/io")
    return work


def compare_work(
        before: WorkTimes, now: WorkTimes, seconds: float,
        lines: Mapping[int, Sequence[Any]] | None = None) -> list[list[Any]]:
    """Tell which threads and processes have worked between two moments.

    Args:
        before: what `see_work` returned first.
        now: what it returned afterwards.
        seconds: the time between the two.
        lines: thread id -> its name and its line, of those that run Python.
            The others are told what a message brings, and read that.

    Returns:
        For each, to be recorded as JSON: what it is, its id, its name, its
        state, whether it has worked, and its line or None.
    """
    ticks = WORKS * seconds * os.sysconf("SC_CLK_TCK")
    python = lines or {}
    found = []
    for (kind, number), (name, state, used, io) in now.items():
        # who was not there before has worked: it began
        _, _, used_before, io_before = before.get(
            (kind, number), (name, state, float("-inf"), io))
        may_do_io = kind == "process" or number in python
        name, line = python.get(number, (name, None))
        worked = state != "Z" and (
            used - used_before > ticks or (may_do_io and io != io_before))
        found.append([kind, number, name, state, worked, line])
    return found


def count_oom_kills() -> int:
    """Return how many processes the kernel has ended as memory was full."""
    found = re.search(r"^oom_kill (\d+)", read_text("/proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def name_host(env: Mapping[str, str]) -> str:
    """Return what SLURM calls this node in its lists, or its own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def name_space() -> str:
    """Return a name that is the same where a PID means the same process.

    Containers may have one host name, and so may machines: it holds the
    kernel's own number since it booted, and that of the PID namespace.
    """
    boot = read_text("/proc/sys/kernel/random/boot_id")[:8]
    # not SPACE: a child may have been forked into a new one
    space = os.path.realpath("/proc/self/ns/pid")
    return boot + "".join(filter(str.isdigit, os.path.basename(space)))


def name_process(env: Mapping[str, str]) -> str:
    """Return a name that no other process has while this one lives, on any
    machine: HOST-PID@ and `name_space()`.
    """
    return f"{name_host(env)}-{os.getpid()}@{name_space()}"


def read_ticks(pid: int | str) -> int:
    """Return when a process began, in the kernel's ticks since it booted.

    With the PID it names a process: a later one has another. It is 0 if the
    process is gone.
    """
    stat = read_stat(pid)
    return int(stat[19]) if stat else 0


def connecting(pid: int | str) -> list[str]:
    """Return "HOST:PORT" of each TCP connection that has no answer yet."""
    opened, found = set(), []
    for name in list_folder(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed by now
            opened.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = read_text(f"/proc/{pid}/net/tcp").splitlines()
    for line in lines[1:]:
        fields = line.split()
        state, socket_name = fields[3], f"socket:[{fields[9]}]"
        if state == "02" and socket_name in opened:  # SYN_SENT
            host, port = fields[2].split(":")
            address = int(host, 16).to_bytes(4, sys.byteorder)
            found.append(f"{socket.inet_ntoa(address)}:{int(port, 16)}")
    return found


def try_meeting(host: str | None, port: str | None) -> str:
    """Try to connect to where rank 0 should be.

    Args:
        host: MASTER_ADDR, if there is one.
        port: MASTER_PORT, if there is one.

    Returns:
        "" if somebody answers, or where there is nothing to be tried; else
        what is wrong.
    """
    if not host or not port or not port.isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), 3).close()
        return ""
    except socket.gaierror:
        return "no such host"
    except ConnectionRefusedError:
        if host == "localhost":
            return "nobody listens there"
        here = try_meeting("localhost", port)
        return here or "nobody listens there, but on this node"
    except OSError as error:
        if isinstance(error, TimeoutError):
            return "no answer"
        return error.strerror or str(error)
