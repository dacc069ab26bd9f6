"""Let any launcher start a script that reads torchrun's variables.

    mpirun -n 4 python -m workshop.as_torchrun code/train_gpt2.py --preset nano

mpirun, mpiexec or srun starts the processes and numbers them. The script reads
RANK, LOCAL_RANK and WORLD_SIZE, and finds the other processes at MASTER_ADDR
and MASTER_PORT. With -v before the script, each rank prints its rank and host.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from backstage.errors import UserError, require, run_main
from backstage.process import find_launcher, name_ranks


def main() -> None:
    arguments = sys.argv[1:]
    verbose = arguments[:1] == ["-v"]
    command = arguments[verbose:]
    require(command, "no script is named; fix: python -m workshop.as_torchrun "
            "SCRIPT")
    launcher = join_world()
    if verbose:
        env = os.environ
        sys.stdout.write(
            f"rank {env['RANK']} of {env['WORLD_SIZE']}, on "
            f"{socket.gethostname()} local rank {env['LOCAL_RANK']} of "
            f"{env['LOCAL_WORLD_SIZE']}, as {launcher} says; rank 0 is at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}\n")
        sys.stdout.flush()
    script = command[0]
    require(Path(script).is_file(), f"{script}: no such script; fix: check "
            "the path")
    sys.argv = command
    # in place of this folder, which PYTHONSAFEPATH leaves out
    sys.path[:not getattr(sys.flags, "safe_path", False)] = [
        str(Path(script).resolve().parent)]
    runpy.run_path(script, run_name="__main__")


def join_world(env: MutableMapping[str, str] = os.environ) -> str:
    """Set torchrun's variables under any launcher; return its name.

    All ranks. Raises a `UserError` if there is no launcher, or if this machine
    cannot find rank 0: without that all would wait for one another.
    """
    if "RANK" in env:
        name_ranks(env)
        return "torchrun"
    launcher, size = find_launcher(env)
    if launcher == "srun" and size > 1:
        name_ranks(env)
        return launcher
    require(launcher, "no launcher has started this process; fix: start it "
            "with one: mpirun -n 4 python -m workshop.as_torchrun "
            "code/train_gpt2.py")
    from backstage import mpi

    MPI = mpi.join_mpi(env)
    mpi.name_mpi_ranks(MPI, env)
    find_rank_0(env)
    return MPI.get_vendor()[0]


def find_rank_0(env: Mapping[str, str]) -> None:
    """Raise a `UserError` unless rank 0 can be at MASTER_ADDR."""
    host = env["MASTER_ADDR"]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"rank 0 should be on {host}, which {socket.gethostname()} "
            "cannot resolve; fix: export MASTER_ADDR=HOST, a name or address "
            "that all nodes know") from error
    if env["RANK"] != "0":
        return
    for family, kind, _, _, address in found:  # which of them are ours?
        with contextlib.suppress(OSError), socket.socket(family, kind) as mine:
            mine.bind(address)
            return
    raise UserError(
        f"rank 0 is on {socket.gethostname()}, but all ranks will connect to "
        f"{host}; fix: export MASTER_ADDR={socket.gethostname()}, or start "
        f"rank 0 on {host}")


if __name__ == "__main__":
    run_main(main)
