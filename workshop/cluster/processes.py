"""Finds the processes of a cluster, by a variable that they have inherited.

Nothing is remembered: a PID may be another process's by now.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from backstage.errors import require
from rankcheck.system import proc
from workshop.cluster.settings import ClusterFolder

PART_VARIABLE = "WORKSHOP_CLUSTER_PART"  # whose value is the cluster's folder
# a variable: the text of Place.start_id
CLUSTER_START_VARIABLE = "WORKSHOP_CLUSTER_START"
INSIDE = "workshop.cluster.inside"
END_SECONDS = 20  # seconds in which killed processes have to be gone


@dataclass(frozen=True)
class Process:
    """A process of a cluster, as this process's /proc shows it."""

    pid: int
    command: list[str]

    @property
    def program(self) -> str:
        return os.path.basename(self.command[0])

    def holds_namespaces(self, *arguments: str) -> bool:
        """Say whether this is the process that has made the namespaces of
        one.
        """
        return self.program == "unshare" and self.command[
            -2 - len(arguments):] == [INSIDE, *arguments, ""]


def find_processes(place: ClusterFolder) -> list[Process]:
    """Return the processes of a cluster, but those of its jobs."""
    mark = f"{PART_VARIABLE}={place.folder}"
    found = []
    for pid in proc.list_processes():
        if pid == os.getpid() or not is_mine(pid):
            continue
        if mark in (proc.read_variables(pid) or []):
            command = proc.read_command(pid)
            if proc.read_state(pid) not in "ZX?":
                found.append(Process(pid, command))
    return found


def is_mine(pid: int) -> bool:
    """Say whether a process is this user's: root can read all variables."""
    status = proc.read_text(f"/proc/{pid}/status")
    return f"\nUid:\t{os.getuid()}\t" in status


def find_holder(processes: list[Process], *arguments: str) -> Process | None:
    """Return the one that holds the namespaces of a part, if it runs."""
    for process in processes:
        if process.holds_namespaces(*arguments):
            return process
    return None


def find_daemon(processes: list[Process], name: str) -> Process | None:
    """Return munged, slurmctld, or the slurmd of a node, if it runs."""
    for process in processes:
        if process.program == name or (
                process.program == "slurmd" and name in process.command):
            return process
    return None


def kill(processes: list[Process]) -> None:
    """Send them SIGKILL."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def kill_all(place: ClusterFolder) -> None:
    """Kill all processes of a cluster; its jobs end with their namespaces.

    Raises:
        UserError: one does not end.
    """
    end = time.monotonic() + END_SECONDS
    while found := find_processes(place):
        first = found[0]
        require(time.monotonic() < end, f"process {first.pid} "
                f"({first.program}) does not end, perhaps because it waits "
                "for a disk; fix: look at it with ps, then try again")
        kill(found)
        time.sleep(0.05)


def same_namespace(pid: int, kind: str) -> bool:
    """Say whether a process shares this one's namespace of a kind."""
    with contextlib.suppress(OSError):
        mine = Path("/proc/self/ns", kind).readlink()
        return Path(f"/proc/{pid}/ns", kind).readlink() == mine
    return True
