"""Each launcher has its own names for the ranks; the stages read torchrun's.

This needs only the standard library, from Python 3.9 on.
"""

import contextlib
import os
import re

from backstage.errors import require

# torchrun's names, and those of Open MPI, then of MPICH and Intel MPI.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def name_ranks(env=os.environ):
    """Set torchrun's RANK, LOCAL_RANK and WORLD_SIZE for other launchers.

    Without a launcher they stay unset: plain python is one process, also
    inside a SLURM allocation, although the shells there have SLURM_PROCID and
    SLURM_NTASKS. SLURM_STEP_NUM_TASKS tells whether srun started us.
    """
    if "RANK" in env:
        return
    if "LOCAL_RANK" in env and "NODE_RANK" in env:  # started by Lightning
        env["RANK"] = env["LOCAL_RANK"]
    elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # "4", "4(x2)" or "2,1"
        require(re.fullmatch(r"\d+(\(x\d+\))?", tasks), "srun started "
                f"{tasks} tasks on the nodes: start as many on each, with "
                "--ntasks-per-node")
        # the first of "gpu[03-04,07]" or "gpu03,gpu04"
        node = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"])
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.update(
            RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
            WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
            LOCAL_WORLD_SIZE=tasks.split("(")[0])
        env.setdefault("MASTER_ADDR", node.split(",")[0])
        env.setdefault("MASTER_PORT", str(20000 + (job + step) % 10000))


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


def name_mpi_ranks(environment):
    """Set torchrun's variables from MPI's, in a mapping like os.environ."""
    found = [names for names in NAMES
             if all(name in environment for name in names)]
    require(found, "there is no rank from MPI: start it with mpirun -n 4 "
            "python -m workshop.mpi code/train_gpt2.py")
    for name, mpi_name in zip(TORCHRUN, found[0], strict=True):
        environment[name] = environment[mpi_name]
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", "29500")
