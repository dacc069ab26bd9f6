"""Starts a job whose ranks leave evidence: rankcheck why run -- X"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from rankcheck.errors import UserError
from rankcheck.why.witness import BEGIN, FOLDER, MARK

HOOK = Path(__file__).resolve().parent / "hook"
KEPT = 20  # starts
OURS = "made by rankcheck why run, which keeps the newest starts\n"


def find_starts():
    """Where each start has a folder: in the user's cache."""
    home = os.path.expanduser("~")  # as it is, if nothing says where that is
    return (Path(home, ".cache", "rankcheck") if home[:1] == "/" != home
            else Path(tempfile.gettempdir(), f"rankcheck-{os.getuid()}"))


STARTS = find_starts()


def switch_on(env):
    """These variables, with which what a launcher starts is watched, in the
    folder that they name already or in a new one.
    """
    name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    return {FOLDER: str(STARTS / name), **env, "PYTHONPATH": with_hook(env)}


def with_hook(env):
    """A PYTHONPATH by which every Python imports the hook."""
    return os.pathsep.join(dict.fromkeys([str(HOOK), *filter(
        None, env.get("PYTHONPATH", "").split(os.pathsep))]))


def make_folder(folder):
    """Make and mark the folder of a start, if it is one of `STARTS`; remove
    the oldest ones there, unless a process of theirs lives.
    """
    folder = Path(folder)
    if folder.parent != STARTS:
        return
    with contextlib.suppress(OSError):  # the ranks say what is wrong
        folder.mkdir(parents=True)
        (folder / MARK).write_text(OURS)
    for mark in sorted(STARTS.glob(f"*/{MARK}"))[:-KEPT]:
        with contextlib.suppress(OSError), mark.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == OURS:
                shutil.rmtree(mark.parent)


def run(command):
    """Become this command, in a folder that its ranks write to."""
    env = switch_on(os.environ)
    print("while it runs, or afterwards: rankcheck why "
          f"{shlex.quote(env[FOLDER])}", flush=True)
    make_folder(env[FOLDER])
    output = os.path.realpath("/proc/self/fd/2")
    with contextlib.suppress(OSError):  # the ranks say what is wrong
        Path(env[FOLDER]).mkdir(parents=True, exist_ok=True)
        Path(env[FOLDER], BEGIN).write_text(json.dumps({
            "command": command, "pid": os.getpid(), "time": time.time(),
            "output": output if os.path.isfile(output) else None}))
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from error
