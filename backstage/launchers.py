"""Each launcher has its own names for the ranks; the stages read torchrun's.

This needs only the standard library, from Python 3.9 on; finding the local
ranks where a launcher does not say them needs torch.
"""

import contextlib
import os
import re
import socket
import sys
import time
from pathlib import Path

from backstage.errors import UserError, require

# torchrun's names, and what others call the same. The first launcher whose
# names are all there has started us. mpirun and Hydra may have been started by
# srun's step themselves, so they are asked before srun, which sets PMI's names
# too. A launcher that uses PMI alone does not tell the local ranks.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                           "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID",
             "PALS_LOCAL_SIZE"),
    "Cray's PMI": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK",
                   "PMI_LOCAL_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
# Files that name the nodes; the first one has rank 0.
NODE_FILES = ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "PBS_NODEFILE")
STORES = []  # rank 0's, which torch.distributed goes on using


def find_launcher(env):
    """(its name, how many processes it has started); ("", 1) without one.

    A SLURM allocation's shells have SLURM_PROCID and SLURM_NTASKS, too:
    SLURM_STEP_NUM_TASKS tells whether srun started us.
    """
    for launcher, names in LAUNCHERS.items():
        if all(name in env for name in names):
            return launcher, int(env[names[1]])
    require("PALS_RANKID" not in env, "PALS has started this process but does "
            "not say how many there are (PMI_SIZE): start it with mpiexec "
            "--pmi=cray")
    return "", 1


def count_processes(started=1, env=os.environ):
    """How many processes there are: on this node, and in all.

    started: how many there will be if no launcher has started them.
    """
    world_size = int(env.get("WORLD_SIZE", started))
    # a launcher that does not say it: as if all were here
    on_node = int(env.get("LOCAL_WORLD_SIZE", world_size))
    return max(1, on_node), max(1, world_size)


def is_one_of_several(env=os.environ):
    """Whether torchrun or another launcher has started several processes."""
    return (int(env.get("WORLD_SIZE", 1)) > 1
            and ("TORCHELASTIC_RUN_ID" in env or find_launcher(env)[1] > 1))


def name_ranks(env=os.environ):
    """Set torchrun's RANK, LOCAL_RANK and WORLD_SIZE for other launchers.

    Without a launcher they stay unset: plain python is one process, also
    inside a SLURM allocation. Raises a `UserError` if MPI has started several
    processes: `join_world` names their ranks.
    """
    if "RANK" in env:
        return
    if "LOCAL_RANK" in env and "NODE_RANK" in env:  # started by Lightning
        env["RANK"] = env["LOCAL_RANK"]
        return
    launcher, size = find_launcher(env)
    if launcher == "srun" and size > 1:
        name_step_ranks(env)
    elif size > 1:
        env["RANK"] = env[LAUNCHERS[launcher][0]]
        stop_all(f"{launcher} has started {size} processes, and each would "
                 "work alone: put `-m workshop.mpi` between python and the "
                 f"script (mpirun -n {size} python -m workshop.mpi "
                 "code/train_gpt2.py)", env)


def join_world(env=os.environ):
    """Set torchrun's variables under any launcher; returns its name.

    Raises a `UserError` if there is no launcher, or if this machine cannot
    find rank 0: without that all would wait for one another.
    """
    if "RANK" in env:
        return "torchrun"
    launcher, size = find_launcher(env)
    if launcher == "srun" and size > 1:
        name_step_ranks(env)
        return launcher
    require(launcher, "no launcher has started this process: start it with "
            "one, as in mpirun -n 4 python -m workshop.mpi "
            "code/train_gpt2.py")
    if launcher == "srun":
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                   LOCAL_WORLD_SIZE="1")
    else:
        name_mpi_ranks(env, launcher)
    find_rank_0(env)
    if "LOCAL_RANK" not in env:
        count_on_node(env)
    return launcher


def name_step_ranks(env):
    """Set torchrun's variables from those of srun's step."""
    tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # "4", "4(x2)" or "2,1"
    require(re.fullmatch(r"\d+(\(x\d+\))?", tasks), "srun started "
            f"{tasks} tasks on the nodes: start as many on each, with "
            "--ntasks-per-node")
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    env.update(
        RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
        WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
        LOCAL_WORLD_SIZE=tasks.split("(")[0])
    env.setdefault("MASTER_ADDR", first_node(env["SLURM_STEP_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + (job + step) % 10000))


def name_mpi_ranks(env, launcher):
    """Set torchrun's variables from those of a launcher of MPI.

    On several nodes rank 0 is on the first node of the file or list that the
    batch system or the launcher names. Raises a `UserError` without one.
    """
    for name, its in zip(TORCHRUN, LAUNCHERS[launcher]):
        env[name] = env[its]
    job = re.match(r"\d*", env.get("PBS_JOBID") or env.get("SLURM_JOB_ID", ""))
    env.setdefault("MASTER_PORT", str(
        20000 + int(job[0]) % 10000 if job[0] else 29500))
    if "MASTER_ADDR" in env:
        return
    if env["WORLD_SIZE"] in ("1", env.get("LOCAL_WORLD_SIZE")):
        env["MASTER_ADDR"] = "127.0.0.1"
        return
    for name in NODE_FILES:
        if name in env:
            env["MASTER_ADDR"] = first_host(name, env[name])
            return
    if "SLURM_JOB_NODELIST" not in env:
        stop_all(f"{launcher} does not say on which host rank 0 of its "
                 f"{env['WORLD_SIZE']} processes is, and they may be on "
                 "several nodes: before it, `export MASTER_ADDR=HOST`, the "
                 "first of its hosts (Open MPI's mpirun needs -x MASTER_ADDR, "
                 "too)", env)
    env["MASTER_ADDR"] = first_node(env["SLURM_JOB_NODELIST"])


def first_node(nodes):
    """The first of "gpu[03-04,07]" or "gpu03,gpu04"."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def first_host(name, file):
    """The first host of the node file that the variable `name` names."""
    try:
        words = Path(file).read_text().split()
    except OSError as error:  # PBS writes it on the first node alone
        raise UserError(
            f"{name} is {file}, which this node cannot read: in the job's "
            f'script `export MASTER_ADDR=$(head -n 1 "${name}")`') from error
    require(words, f"{file} ({name}) names no host: export MASTER_ADDR=HOST, "
            "where rank 0 is")
    return words[0].split(":")[0]  # "node1:4" has four slots


def find_rank_0(env):
    """Raise a `UserError` unless rank 0 can be at MASTER_ADDR."""
    host = env["MASTER_ADDR"]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"rank 0 should be on {host}, which is no host that "
            f"{socket.gethostname()} knows: export MASTER_ADDR=HOST, by a "
            "name or address that all nodes know") from error
    if env["RANK"] != "0":
        return
    for family, kind, _, _, address in found:  # which of them are ours?
        with contextlib.suppress(OSError), socket.socket(family, kind) as mine:
            mine.bind(address)
            return
    raise UserError(
        f"rank 0 is on {socket.gethostname()}, but all will look for it on "
        f"{host}: export MASTER_ADDR={socket.gethostname()}, or start rank 0 "
        f"on {host}")


def count_on_node(env):
    """Set LOCAL_RANK and LOCAL_WORLD_SIZE from all ranks' host names.

    All ranks call this. They meet where torch.distributed will meet, and it
    goes on using rank 0's store.
    """
    from torch.distributed import TCPStore

    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), size,
                     is_master=rank == 0, multi_tenant=True)
    STORES.append(store)
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{other}") for other in range(size)]
    env["LOCAL_RANK"] = str(hosts[:rank].count(hosts[rank]))
    env["LOCAL_WORLD_SIZE"] = str(hosts.count(hosts[rank]))


def stop_all(message, env=os.environ):
    """An error that every rank has, and rank 0 says. Never returns."""
    if env["RANK"] != "0":
        time.sleep(5)  # a launcher that ends all may do so at the first end
        sys.exit(1)
    raise UserError(message)


@contextlib.contextmanager
def without_slurm(environment=os.environ):
    """Inside this no variable of SLURM is set.

    In an allocation's shell Open MPI would take a process that plain python
    has started for one of srun's, and end it.
    """
    hidden = {name: environment.pop(name) for name in list(environment)
              if name.startswith("SLURM_")}
    try:
        yield
    finally:
        environment.update(hidden)
