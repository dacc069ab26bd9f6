"""How many of the machine's cores a process may use."""

import os
from pathlib import Path

CHOSEN = []  # what `use_cores` has set OMP_NUM_THREADS to


def use_cores(processes=1):
    """Let torch compute with this process's share of the cores.

    processes: how many of a node share them. torch starts a thread for each
    core that it sees, also where a container may use two of 64: then the
    threads wait for one another. OMP_NUM_THREADS, if it is set, is obeyed. A
    second call, with more processes, counts them anew.
    """
    import torch

    if os.environ.get("OMP_NUM_THREADS", "") in ("", *CHOSEN):
        threads = min(torch.get_num_threads(), count_cores(processes))
        torch.set_num_threads(threads)
        # for what this process starts, and for Lightning, which would take
        # all cores otherwise
        os.environ["OMP_NUM_THREADS"] = str(threads)
        CHOSEN[:] = [str(threads)]


def count_cores(processes=1, root=Path("/")):
    """This process's share of the cores, 1 or more.

    root: where /proc and /sys are found.
    """
    cores = affinity(0)
    # A launcher may have bound each process to cores of its own. If this one
    # may use what its parent may, all processes share these cores.
    if cores >= affinity(os.getppid()):
        cores = cores // processes
    return max(1, min(cores, int(quota(root) / processes)))


def affinity(process):
    """The number of cores that a process may run on; 0 is this process."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # macOS has none
        return os.cpu_count() or 1


def quota(root=Path("/")):
    """How many cores the cgroups allow: the least of them all.

    A cgroup limits the time of all its processes: 200 ms of every 100 ms are
    two cores. The limits of those around it hold as well.
    """
    least = float(os.cpu_count() or 1)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return least
    for line in lines:  # 0::/path, and in version 1 4:cpu,cpuacct:/path
        number, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if number != "0":
            if "cpu" not in controllers.split(","):
                continue
            top = top / "cpu"
        folder = top / path.strip("/")
        # In a container the path may be the host's: its own cgroup is at the
        # top then.
        for place in (folder, *folder.parents):
            allowed, period = read_limit(place)
            if allowed > 0:
                least = min(least, allowed / period)
            if place == top:
                break
    return least


def read_limit(folder):
    """A cgroup's microseconds of computing in each so many; -1: no limit."""
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text()
                               for name in ("quota", "period"))
        return (-1 if allowed == "max" else int(allowed)), int(period)
    except (OSError, ValueError):
        return -1, 1
