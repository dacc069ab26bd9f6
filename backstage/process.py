"""Set up a process: the variables of its rank, its cores and memory.

Each launcher has its own names for the ranks; the stages read torchrun's.
Those of srun are translated here, those of MPI in backstage/mpi.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import math
import os
import re
import resource
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import NoReturn

from backstage.errors import UserError, require, to_count

# Who has started this process: the first whose variables, for the rank and the
# number of processes, are there. mpirun and Hydra may have been started by
# srun's step themselves, so they come before srun, which sets PMI's, too.
RANK_VARIABLES: dict[str, tuple[str, ...]] = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "PALS": ("PALS_RANKID", "PMI_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
SCHEDULERS = {"SLURM": "SLURM_JOB_ID", "PBS": "PBS_JOBID"}
# torchrun's names: a process has all that are NEEDED, or none of SIZES.
SIZES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
NEEDED = (*SIZES[:3], "MASTER_ADDR", "MASTER_PORT")
# The nodes of a cluster on one machine say by this variable that neither their
# GPUs nor most of their cores are real
GPUS, SIMULATED = "WORKSHOP_GPUS", "simulated"
CHOSEN: list[str] = []  # what `use_cores` has set OMP_NUM_THREADS to


def prepare_process() -> None:
    """Prepare this process for its work; a script's first line. All ranks."""
    import torch

    # torch's objects stay: the collections during the imports that follow,
    # of which the optimizer's are the largest, need not look at them
    gc.freeze()
    name_ranks()
    add_library("/backstage/")
    files = resource.RLIMIT_NOFILE  # open shards
    soft, hard = resource.getrlimit(files)
    resource.setrlimit(files, (max(soft, min(hard, 2**16)), hard))
    use_cores(count_processes()[0])
    if not torch.accelerator.is_available():
        keep_memory()


def add_library(pattern: str) -> None:
    """Tell rankcheck that files matching the pattern belong to a library."""
    known = os.environ.get("RANKCHECK_LIBRARY", "")
    patterns = known.split("|") if known else []
    if pattern not in patterns:
        os.environ["RANKCHECK_LIBRARY"] = "|".join([*patterns, pattern])


def find_launcher(env: Mapping[str, str]) -> tuple[str, int]:
    """(its name, how many processes it has started); ("", 1) without one.

    A SLURM allocation's shells have SLURM_PROCID and SLURM_NTASKS, too:
    SLURM_STEP_NUM_TASKS tells whether srun started us.
    """
    for launcher, names in RANK_VARIABLES.items():
        counts = [to_count(env.get(name, "")) for name in names]
        size = counts[1]
        if size is not None and None not in counts:
            return launcher, size
    require("PALS_RANKID" not in env, "PALS has started this process without "
            "the world size (PMI_SIZE); fix: start it with mpiexec --pmi=cray")
    return "", 1


def count_processes(started: int = 1,
                    env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of processes: on this node, and in total.

    started: how many there will be if no launcher has started them.
    """
    world_size = int(env.get("WORLD_SIZE", started))
    # a launcher that does not say it: as if all were here
    return int(env.get("LOCAL_WORLD_SIZE", world_size)), world_size


def find_start(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what started this process, for the run's record.

    The command is that of a process above this one that knows the script's
    name; where none is seen, as under srun, it is our own.
    """
    import psutil

    launcher, size = find_launcher(env)
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif size == 1:
        alone = "lightning" not in sys.modules or "NODE_RANK" not in env
        launcher = "python" if alone else "Lightning"
    command = ["python", *sys.argv]
    with contextlib.suppress(psutil.Error):  # the system hides them
        for above in psutil.Process().parents():
            line = above.cmdline()
            if sys.argv[0] in line:
                command = line
                break
    scheduler = next((f"{name} job {env[job]}" for name, job in
                      SCHEDULERS.items() if job in env), "no scheduler")
    return {"scheduler": scheduler, "launcher": launcher,
            "command": shlex.join(command)}


def seconds_since_start() -> float | None:
    """Return the age of this process; None if the system hides it."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return (time.clock_gettime(time.CLOCK_BOOTTIME)
                - int(stat[19]) / os.sysconf("SC_CLK_TCK"))
    return None


def name_ranks(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's names, if a launcher has started this process.

    Afterwards all that are NEEDED are there and make sense, or none of SIZES:
    plain python is one process, also inside a SLURM allocation. Raises a
    `UserError` if they make no sense, or if MPI has started several processes.
    """
    if "RANK" not in env:
        translate_names(env)
    check_names(env)
    # torchrun lets the ranks of one node meet at the machine's name, which a
    # laptop in a strange network may not know itself: they would wait for ever
    if "RANK" in env and env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        env["MASTER_ADDR"] = "127.0.0.1"
        require_loopback()
    # torch.distributed.launch, which is older, passes it as a flag, too
    again = f"--local-rank={env.get('LOCAL_RANK')}"
    sys.argv[:] = [word for word in sys.argv if word != again]


def require_loopback() -> None:
    """Raise a `UserError` if a node's ranks cannot connect by loopback.

    They would wait for each other for minutes.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise UserError(
            "this machine, or container, has no loopback address 127.0.0.1 "
            f"({os.strerror(error.errno or errno.ETIMEDOUT)}), through which "
            "its processes connect; fix: as root, `ip addr add 127.0.0.1/8 "
            "dev lo; ip link set lo up`; or start a single process"
            ) from error


def translate_names(env: MutableMapping[str, str]) -> None:
    """Set torchrun's names from those of another launcher."""
    launcher, size = find_launcher(env)
    if "LOCAL_RANK" in env and "NODE_RANK" in env:  # started by Lightning
        env["RANK"] = env["LOCAL_RANK"]
    elif launcher == "srun" and size > 1:
        name_step_ranks(env)
    elif size > 1:
        env["RANK"] = env[RANK_VARIABLES[launcher][0]]
        stop_all(f"{launcher} has started {size} processes, and each would "
                 "train independently; fix: start them with `torchrun "
                 f"--nproc-per-node {size} {shlex.quote(sys.argv[0])}`, or "
                 f"set {', '.join(NEEDED)} for each process", env)


def check_names(env: Mapping[str, str]) -> None:
    """Raise a `UserError` if torchrun's variables describe no rank."""
    given = [name for name in SIZES if name in env]
    if not given:  # pods of Kubernetes have some, and old shells may
        return
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"]
    if "LOCAL_WORLD_SIZE" in env:
        names.append("LOCAL_WORLD_SIZE")
    counts = [to_count(env.get(name, "")) for name in names]
    numbers = [count for count in counts if count is not None]
    right = False
    if env.get("MASTER_ADDR") and len(numbers) == len(names):
        rank, local_rank, size, port = numbers[:4]
        on_node = numbers[-1] if "LOCAL_WORLD_SIZE" in env else size
        right = (rank < size and local_rank < on_node <= size
                 and port < 2**16)
    require(right, "these variables do not say which rank this process is: "
            + show(dict.fromkeys((*given, *NEEDED)), env)
            + "; fix: start it with torchrun, which sets them; to run a "
            f"single process: unset {' '.join(given)}")


def show(names: Iterable[str], env: Mapping[str, str]) -> str:
    """The variables as NAME=VALUE, each short and in one line."""
    return ", ".join(f"{name}={' '.join(env[name].split())[:60]}"
                     if name in env else f"no {name}" for name in names)


def name_step_ranks(env: MutableMapping[str, str]) -> None:
    """Set torchrun's names from those of srun's step."""
    names = ("SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID",
             "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    *numbers, tasks, nodes = (env.get(name, "") for name in names)
    local, job, step = map(to_count, numbers)
    if local is None or job is None or step is None or not (tasks and nodes):
        raise UserError(
            "srun's variables do not say which rank this is: "
            f"{show(names, env)}; fix: to run a single process, unset "
            "SLURM_STEP_NUM_TASKS")
    # tasks: "4", "4(x2)" or "2,1"
    require(re.fullmatch(r"\d+(\(x\d+\))?", tasks), "srun started different "
            f"numbers of tasks on the nodes ({tasks}); fix: start equally "
            "many on each, with --ntasks-per-node")
    env.update(
        RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
        WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
        LOCAL_WORLD_SIZE=tasks.split("(")[0])
    # nodes: "gpu[03-04,07]" or "gpu03,gpu04"
    env.setdefault("MASTER_ADDR", re.sub(
        r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0])
    env.setdefault("MASTER_PORT", str(20000 + (job + step) % 10000))


def stop_all(message: str, env: Mapping[str, str] = os.environ) -> NoReturn:
    """End all ranks with an error that rank 0 prints. Never returns."""
    if env["RANK"] != "0":
        time.sleep(5)  # a launcher that ends all may do so at the first end
        sys.exit(1)
    raise UserError(message)


def use_cores(processes: int = 1) -> None:
    """Let torch compute with this process's share of the cores.

    processes: how many of a node share them; a second call counts anew. torch
    would take each core that it sees, also where a container may use two of
    64. OMP_NUM_THREADS, if it is set, is obeyed, but not where SLURM counts
    cores that are not there.
    """
    import torch

    if (os.environ.get("OMP_NUM_THREADS", "") in ("", *CHOSEN)
            or os.environ.get(GPUS) == SIMULATED):
        threads = min(torch.get_num_threads(), count_cores(processes))
        torch.set_num_threads(threads)
        # for what this process starts, and for Lightning, which would take
        # all cores otherwise
        os.environ["OMP_NUM_THREADS"] = str(threads)
        CHOSEN[:] = [str(threads)]


def count_cores(processes: int = 1, root: Path = Path("/")) -> int:
    """This process's share of the cores, 1 or more. root: as in `quota`."""
    cores = affinity(0)
    # A launcher may have bound each process to cores of its own. If this one
    # may use what its parent may, all processes share these cores.
    if cores >= affinity(os.getppid()):
        cores = cores // processes
    return max(1, min(cores, int(quota(root) / processes)))


def affinity(process: int) -> int:
    """The number of cores that a process may run on; 0 is this process."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # macOS has none
        return os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float:
    """Return how many cores the cgroups allow: the minimum of all.

    The limits of those around it hold as well. In a container the path may be
    the host's; then its own cgroup is the root. root: of /proc and /sys.
    """
    limits: list[float] = [os.cpu_count() or 1]
    with contextlib.suppress(OSError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            # 0::/path, and in version 1 4:cpu,cpuacct:/path
            number, controllers, path = line.split(":", 2)
            if number == "0" or "cpu" in controllers.split(","):
                top = root / "sys/fs/cgroup" / ("" if number == "0" else "cpu")
                folder = top / path.strip("/")
                limits += map(read_limit, (folder, *folder.parents))
    return min(limits)


def read_limit(folder: Path) -> float:
    """How many cores a cgroup allows: infinitely many without a limit."""
    for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            allowed, period = " ".join(
                (folder / name).read_text() for name in names).split()
            if int(allowed) > 0:
                return int(allowed) / int(period)
    return math.inf


def keep_memory() -> None:
    """Reuse the memory of freed tensors for the next ones, on a CPU.

    The GNU C library would give large blocks back to the system, which clears
    each page of 4 KB: 12,000 in a step of 4 layers, 192 wide, a sixth of its
    time.
    """
    with contextlib.suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(-4, 0)  # M_MMAP_MAX: no block has pages of its own
        set_option(-1, -1)  # M_TRIM_THRESHOLD: nothing is given back
