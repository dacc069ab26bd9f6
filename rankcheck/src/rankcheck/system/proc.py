"""What Linux says of processes, their threads and their connections.

Only the standard library: it is loaded into any script, by witness.py.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

WORKS = 0.02  # of a core: less is only asking whether something is there
SPACE = os.path.basename(os.path.realpath("/proc/self/ns/pid"))  # of PIDs


def read_text(file):
    try:
        return Path(file).read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def read_stat(pid):
    """What Linux says of PID or PID/task/THREAD, from its state on; or []."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def read_state(pid):
    """The main thread's state: R runs, S sleeps, D waits for a device."""
    return (read_stat(pid) or "?")[0]


def read_command(pid):
    """A process's command line, a list."""
    return read_text(f"/proc/{pid}/cmdline").split("\0")


def find_begin(pid):
    """When a process began, in seconds since 1970; 0 if it is gone."""
    stat, up = read_stat(pid), read_text("/proc/uptime").split()
    return time.time() - float(up[0]) + float(stat[19]) / os.sysconf(
        "SC_CLK_TCK") if stat else 0


def list_folder(path):
    """The names in it; none if it is gone, or where there is no /proc."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def list_processes():
    return map(int, filter(str.isdigit, list_folder("/proc")))


def descendants(root):
    """A process and all that it has started, itself first: also what has lost
    its parent, if it is in the session that the process leads.
    """
    stats = {pid: read_stat(pid) for pid in list_processes()}
    found = [root]
    for parent in found:
        found += [pid for pid, stat in stats.items()
                  if stat and pid not in found  # else it has ended
                  and (int(stat[1]) == parent or int(stat[3]) == root)]
    return found


def see_work(pid, but=None):
    """{(what, its id): [name, state, ticks, bytes]} of each thread of a
    process, without the thread `but`, and of each process that it started.
    """
    places = {("thread", int(task)): f"{pid}/task/{task}"
              for task in list_folder(f"/proc/{pid}/task") if task != str(but)}
    places |= {("process", child): child for child in descendants(pid)[1:]}
    return {key: [read_text(f"/proc/{place}/comm").strip(), stat[0],
                  sum(map(int, stat[11:15])), read_text(f"/proc/{place}/io")]
            for key, place in places.items() if (stat := read_stat(place))}


def describe_work(before, now, seconds, lines=()):
    """[what, its id, its name, its state, whether it has worked, its line].

    lines: {the id of a thread: [its name, its line]} of those that run
    Python. The others are told what a message brings, and read that.
    """
    ticks, lines = WORKS * seconds * os.sysconf("SC_CLK_TCK"), dict(lines)
    found = []
    for (what, number), (name, state, used, read) in now.items():
        # who was not there before has worked: it began
        _, _, earlier, then = before.get(
            (what, number), (name, state, float("-inf"), read))
        moved = what == "process" or number in lines
        name, line = lines.get(number, (name, None))
        found.append([what, number, name, state, state != "Z" and (
            used - earlier > ticks or (moved and read != then)), line])
    return found


def count_oom_kills():
    """How many processes the kernel has ended as the memory was full."""
    found = re.search(r"^oom_kill (\d+)", read_text("/proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def name_host(env):
    """What SLURM calls this node in its lists, or its own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def name_space() -> str:
    """A name that all processes have who see the same one under a PID.

    Containers may have one host name, and so may machines: it holds the
    kernel's own number since it booted, and that of the PID namespace.
    """
    boot = read_text("/proc/sys/kernel/random/boot_id")[:8]
    # not SPACE: a child may have been forked into a new one
    space = os.path.realpath("/proc/self/ns/pid")
    return boot + "".join(filter(str.isdigit, os.path.basename(space)))


def name_process(env: Mapping[str, str]) -> str:
    """What no other process is called, on any machine, while this one lives:
    HOST-PID@ and `name_space()`.
    """
    return f"{name_host(env)}-{os.getpid()}@{name_space()}"


def read_ticks(pid: "int | str") -> int:
    """When a process began, in the kernel's ticks since it booted; 0 if it is
    gone. With the PID it names a process: a later one has another.
    """
    stat = read_stat(pid)
    return int(stat[19]) if stat else 0


def connecting(pid):
    """"HOST:PORT" of each TCP connection that nobody has answered yet."""
    mine, found = set(), []
    for name in list_folder(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed by now
            mine.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = read_text(f"/proc/{pid}/net/tcp").splitlines()
    for fields in map(str.split, lines[1:]):
        if fields[3] == "02" and f"socket:[{fields[9]}]" in mine:  # SYN_SENT
            host, port = fields[2].split(":")
            host = int(host, 16).to_bytes(4, sys.byteorder)
            found.append(f"{socket.inet_ntoa(host)}:{int(port, 16)}")
    return found


def try_meeting(host, port):
    """Whether somebody answers where rank 0 should be: "" or the problem."""
    if not host or not (port or "").isdigit():
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
        return ("no answer" if isinstance(error, TimeoutError)
                else error.strerror or str(error))
