"""Which process is a rank, which a launcher, and what a launcher says.

Only the standard library: it is loaded into any script, by witness.py.
"""

import json
import os
import re
import signal
import sys
import time

from . import proc

# Whichever is there: torchrun's name, Open MPI's, srun's, PMI's
RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
         ("PMI_RANK", "PMI_SIZE"))
# A launcher's agent is no rank, whatever srun has told it
LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate-launch", "accelerate.commands.launch",
             "deepspeed", "deepspeed.launcher.launch",
             "deepspeed.launcher.runner"}


def find_error():
    """The error that ends the script; Python leaves it there, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def read_message(error: BaseException, most: int = 9000) -> str:
    """Its message, in Python's own words where it has none: the script's
    function that makes it may fail.
    """
    try:
        return str(error)[:most]
    except BaseException:  # as Python itself does, also of SystemExit
        return "<exception str() failed>"


def find_torch():
    """torch.distributed, once this process has joined a group; else None."""
    torch = sys.modules.get("torch.distributed")
    # while it is imported, and in a build without it, names are missing
    return torch if getattr(torch, "is_initialized", bool)() else None


def find_rank():
    """(rank, world size), None where the process does not know them yet."""
    torch = find_torch()
    if torch:
        return torch.get_rank(), torch.get_world_size()
    rank, size = read_rank(os.environ, read_command())
    return (find_spawned() if rank is None else rank), size


def find_spawned():
    """The number on its node that mp.spawn has given to this process."""
    process = getattr(sys.modules.get("multiprocessing.process"),
                      "_current_process", None)  # while it is imported
    target = getattr(process, "_target", None)
    return process._args[1] if getattr(target, "__module__", "") == (
        "torch.multiprocessing.spawn") else None


def read_rank(env, command):
    """(rank, world size) as a process's launcher told it, None if none did.

    env: the process's variables; command: its command line, a list. A launcher
    itself may be the only process of srun or mpirun.
    """
    if not is_launcher(command):
        for names in RANKS:
            rank, size = (env.get(name, "") for name in names)
            if rank.isdigit() and size.isdigit() and (
                    names[0] == "RANK" or int(size) > 1):
                return int(rank), int(size)
    return None, None


def read_command():
    """This process's command line; sys.orig_argv is new in Python 3.10."""
    return getattr(sys, "orig_argv", None) or proc.read_command("self")


def is_launcher(command):
    """Whether Python runs a launcher, as its script or its module."""
    words = iter(command[1:])
    for word in words:
        module = re.fullmatch("-[a-zA-Z]*m(.*)", word)
        if module or not word.startswith("-"):
            name = (module[1] or next(words, "")) if module else word
            return os.path.basename(name) in LAUNCHERS
        if word in ("-W", "-X"):
            next(words, None)
    return False


def keep_exits(folder):
    """Write how its processes and it have ended, where this is a launcher.

    As the error says with which torchrun or mp.spawn ends: {pid: status},
    negative for a signal, with what an error of mp.spawn quotes; "launcher":
    the error that has none of a process, or the signal that it has got.
    """
    error, now = find_error(), time.time()
    exits = {failure.pid: {"rank": rank, "status": failure.exitcode,
                           "time": failure.timestamp}
             for rank, failure in getattr(error, "failures", {}).items()}
    words = {"error": type(error).__name__, "message": read_message(error)}
    if hasattr(error, "error_pid"):
        status = getattr(error, "exit_code", None)
        exits[error.error_pid] = ({} if status else words) | {
            "rank": error.error_index, "status": status or 1, "time": now}
    if error and not exits and is_launcher(read_command()):
        exits["launcher"] = {"time": now, **words, "signal": (
            signal.SIGINT if isinstance(error, KeyboardInterrupt)
            else getattr(error, "sigval", None))}
    if exits:
        name = f"{proc.name_process(os.environ)}.exits"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(exits))
