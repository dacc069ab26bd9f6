"""Give MPI's variables the names that torchrun gives them.

    mpirun -n 4 python -m workshop.mpi code/train_gpt2.py --preset nano

mpirun starts the processes and numbers them; the script reads RANK,
LOCAL_RANK and WORLD_SIZE, and finds the others at MASTER_ADDR and
MASTER_PORT. On several nodes name the first one: mpirun -x MASTER_ADDR=...
"""

import os
import runpy
import sys
from pathlib import Path

from workshop.errors import check, start

# What torchrun names and how Open MPI, then MPICH and Intel MPI, call it.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def map_variables(environment):
    """Set torchrun's variables from MPI's, in a mapping like os.environ."""
    found = [names for names in NAMES
             if all(name in environment for name in names)]
    check(found, "no rank from MPI is here: mpirun -n 4 "
          "python -m workshop.mpi code/train_gpt2.py")
    for name, mpi_name in zip(TORCHRUN, found[0], strict=True):
        environment[name] = environment[mpi_name]
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", "29500")


def main():
    check(len(sys.argv) > 1, "which script? python -m workshop.mpi SCRIPT")
    map_variables(os.environ)
    script = sys.argv[1]
    check(Path(script).is_file(), f"{script}: there is no such script")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    start(main)
