"""Let mpirun start a script that reads torchrun's variables.

    mpirun -n 4 python -m workshop.mpi code/train_gpt2.py --preset nano

mpirun starts the processes and numbers them. The script reads RANK,
LOCAL_RANK and WORLD_SIZE, and finds the other processes at MASTER_ADDR and
MASTER_PORT. On several nodes, name the first one: mpirun -x MASTER_ADDR=...
"""

import os
import runpy
import sys
from pathlib import Path

from backstage.errors import require, run_main
from backstage.launchers import name_mpi_ranks


def main():
    require(len(sys.argv) > 1, "name a script: python -m workshop.mpi SCRIPT")
    name_mpi_ranks(os.environ)
    script = sys.argv[1]
    require(Path(script).is_file(), f"{script}: no such script: check the "
            "path")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_main(main)
