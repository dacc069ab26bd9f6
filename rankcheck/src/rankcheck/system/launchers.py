"""Which process is a rank or a launcher, and what launchers report.

Only the standard library: it is loaded into any script, by watcher.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from . import proc

TYPE_CHECKING = False  # without importing typing in each process
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import ModuleType
    from typing import Any

# Whichever is there: torchrun's name, Open MPI's, srun's, PMI's
RANK_PAIRS = (
    ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "PMI_SIZE"))
# A launcher's agent is no rank, whatever srun has told it
LAUNCHER_PROGRAMS = {
    "torchrun", "torch.distributed.run", "torch.distributed.launch",
    "accelerate", "accelerate-launch", "accelerate.commands.launch",
    "deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner"}


def find_error() -> BaseException | None:
    """Return the error that ends the script, where Python leaves it."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def read_message(error: BaseException, most: int = 9000) -> str:
    """Return an error's message, at most so many characters of it.

    Where the script's function that makes it fails, it is Python's own text
    for that.
    """
    try:
        return str(error)[:most]
    except BaseException:  # as Python itself does, also of SystemExit
        return "<exception str() failed>"


def find_torch() -> ModuleType | None:
    """Return the module torch.distributed, or None.

    It is None until this process has joined a group.
    """
    torch = sys.modules.get("torch.distributed")
    # while it is imported, and in a build without it, names are missing
    return torch if getattr(torch, "is_initialized", bool)() else None


def find_rank() -> tuple[int | None, int | None]:
    """Return (rank, world size), None where they are not known yet."""
    torch = find_torch()
    if torch:
        return torch.get_rank(), torch.get_world_size()
    rank, size = read_rank(os.environ, read_own_command())
    if rank is None:
        rank = find_spawned()
    return rank, size


def find_spawned() -> int | None:
    """Return the local rank that mp.spawn has given to this process."""
    process = getattr(sys.modules.get("multiprocessing.process"),
                      "_current_process", None)  # while it is imported
    target = getattr(process, "_target", None)
    if process is None or (getattr(target, "__module__", "")
                           != "torch.multiprocessing.spawn"):
        return None
    rank: int = process._args[1]
    return rank


def read_rank(
        env: Mapping[str, str],
        command: Sequence[str]) -> tuple[int | None, int | None]:
    """Return (rank, world size) as a launcher told them to a process.

    Both are None if none did, and of a launcher, which may itself be the only
    process of srun or mpirun.

    Args:
        env: the process's environment variables.
        command: its command line.
    """
    if is_launcher(command):
        return None, None
    for rank_name, size_name in RANK_PAIRS:
        rank, size = env.get(rank_name, ""), env.get(size_name, "")
        if rank.isdigit() and size.isdigit() and (
                rank_name == "RANK" or int(size) > 1):
            return int(rank), int(size)
    return None, None


def read_own_command() -> list[str]:
    """Return this process's command line."""
    # new in Python 3.10
    return getattr(sys, "orig_argv", None) or proc.read_command("self")


def is_launcher(command: Sequence[str]) -> bool:
    """Whether Python runs a launcher, as its script or its module."""
    arguments = iter(command[1:])
    for argument in arguments:
        module = re.fullmatch("-[a-zA-Z]*m(.*)", argument)
        if module:
            name = module[1] or next(arguments, "")
            return os.path.basename(name) in LAUNCHER_PROGRAMS
        if not argument.startswith("-"):
            return os.path.basename(argument) in LAUNCHER_PROGRAMS
        if argument in ("-W", "-X"):
            next(arguments, None)
    return False


def keep_exits(folder: Path) -> None:
    """Write how a launcher and its processes have ended, if this is one.

    Nothing is written of any other process.
    """
    exits = read_exits()
    if exits:
        name = f"{proc.name_process(os.environ)}.exits"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(exits))


def read_exits() -> dict[int | str, dict[str, Any]]:
    """Return how a launcher's processes and it have ended.

    The error says so with which torchrun or mp.spawn ends.

    Returns:
        PID -> its rank, status, which is negative for a signal, and time in
        seconds since 1970, with the message of the error if mp.spawn quotes
        one. "launcher" -> the error that is about no process, or the signal
        that it has got. Nothing if this is no launcher.
    """
    error, now = find_error(), time.time()
    exits: dict[int | str, dict[str, Any]] = {}
    if error is None:
        return exits
    for rank, failure in getattr(error, "failures", {}).items():
        exits[failure.pid] = {"rank": rank, "status": failure.exitcode,
                              "time": failure.timestamp}
    quoted = {"error": type(error).__name__, "message": read_message(error)}
    spawned: Any = error  # of mp.spawn, which has these attributes
    if hasattr(spawned, "error_pid"):
        status = getattr(spawned, "exit_code", None)
        known = {} if status else quoted
        exits[spawned.error_pid] = {
            **known, "rank": spawned.error_index, "status": status or 1,
            "time": now}
    if not exits and is_launcher(read_own_command()):
        interrupted = isinstance(error, KeyboardInterrupt)
        exits["launcher"] = {
            "time": now, **quoted, "signal": (
                signal.SIGINT if interrupted
                else getattr(error, "sigval", None))}
    return exits
