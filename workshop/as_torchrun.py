"""Let any launcher start a script that reads torchrun's variables.

    mpirun -n 4 python -m workshop.as_torchrun code/train_gpt2.py --preset nano

mpirun, mpiexec or srun starts the processes and numbers them. The script reads
RANK, LOCAL_RANK and WORLD_SIZE, and finds the other processes at MASTER_ADDR
and MASTER_PORT. With -v before the script, each rank prints its rank and host.
"""

import os
import runpy
import socket
import sys
from pathlib import Path

from backstage.errors import require, run_main
from backstage.launchers import join_world


def main():
    words = sys.argv[1:]
    verbose = words[:1] == ["-v"]
    words = words[verbose:]
    require(words, "name a script: python -m workshop.as_torchrun SCRIPT")
    launcher = join_world()
    if verbose:
        sys.stdout.write(introduce(launcher, os.environ))
        sys.stdout.flush()
    script = words[0]
    require(Path(script).is_file(), f"{script}: no such script: check the "
            "path")
    sys.argv = words
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def introduce(launcher, env):
    """One line: this process's rank and host, and where rank 0 is."""
    return (f"rank {env['RANK']} of {env['WORLD_SIZE']}, on "
            f"{socket.gethostname()} local rank {env['LOCAL_RANK']} of "
            f"{env['LOCAL_WORLD_SIZE']}, as {launcher} says; rank 0 is at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}\n")


if __name__ == "__main__":
    run_main(main)
