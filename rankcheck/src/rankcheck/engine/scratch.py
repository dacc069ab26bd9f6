"""Prepares a script's run: its source, a clean environment, and a temporary
folder that is always removed.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rankcheck.engine import fork_server
from rankcheck.system import proc
from rankcheck.system.errors import UserError, read_regular, require, show_path

LARGEST_SCRIPT = 1_000_000  # bytes of a script
PREFIX = "rankcheck-run-"  # begins the name of each folder
LONGEST_PATH = 40  # characters of a folder in which sockets still have a place
SPACE_NEEDED = 50e6  # bytes that a run may need
MARK = ".rankcheck"  # the file in each folder that is ours to remove,
OURS = "made by rankcheck; removed once its process has ended\n"
# Variables that a launcher has set for this process: how they begin, and names
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL",
                     "TORCHELASTIC_")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK",
                      "WORLD_SIZE",
                      "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def read_script(script: str | Path) -> bytes:
    """Return a script's content, read once, so later saves do not matter.

    Raises:
        UserError: it cannot be read, or is no script.
    """
    name = show_path(script)
    try:
        data = read_regular(script, LARGEST_SCRIPT + 1)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error
    require(len(data) <= LARGEST_SCRIPT, f"{name} has more than "
                                         f"{LARGEST_SCRIPT:,} "
            "bytes, too many for a script; fix: check that it is the file "
            "that you mean")
    require_python(script, data)
    return data


def require_python(script: str | Path, data: bytes) -> None:
    """Raise a `UserError` unless these bytes of a script can be parsed."""
    name = show_path(script)
    try:
        ast.parse(data, Path(script).name)
    except (SyntaxError, ValueError) as error:
        place, line = name, getattr(error, "lineno", None)
        if line:
            place = f"{name}: line {line}"
        message = getattr(error, "msg", error)
        raise UserError(f"{place}: {message}") from error
    except (RecursionError, MemoryError) as error:
        raise UserError(f"{name}: an expression is nested too deeply, or the "
                        "memory is full") from error


@contextlib.contextmanager
def scratch_folder(word: bytes) -> Iterator[Path]:
    """Provide a folder; end all on Ctrl-C, SIGTERM, or a closed terminal.

    word: what is written to stdout then.

    An exception would be lost where Python cannot raise one, as in a clean-up
    or while a module of torch is imported: the handler itself ends the
    processes, removes the folder, and leaves.
    """
    folder: Path | None = None
    before: dict[int, Any] = {}  # the handler of each signal, or SIG_DFL, ...

    def leave(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        with contextlib.suppress(Exception):
            fork_server.end_all()
        with contextlib.suppress(Exception):
            if folder:
                end_leftovers(folder)
                remove(folder)
        with contextlib.suppress(Exception):
            os.write(1, word)
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, leave)
    try:
        folder = make_folder()
        yield folder
    finally:
        if folder:
            end_leftovers(folder)
            remove(folder)
        for known, handler in before.items():
            signal.signal(known, handler)


def end_leftovers(folder: Path) -> None:
    """Kill the programs that a script has started in sessions of their own.

    They outlive the ranks. Their environment has the TMPDIR of the ranks,
    which is below this folder: see `quiet_environment`.
    """
    mark = f"TMPDIR={folder}/"
    for pid in proc.list_processes():
        variables = proc.read_variables(pid) or []
        if any(variable.startswith(mark) for variable in variables):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)


def remove(folder: Path) -> None:
    """Remove a folder, in which a process that is ending may still write."""
    for _ in range(20):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def make_folder() -> Path:
    """Make a new folder: with room, and not too deep.

    It holds a mark, which is locked while this process lives. Folders whose
    mark nobody holds any more are of processes that were killed (kill -9),
    and are removed.
    """
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST_PATH and os.access("/tmp", os.W_OK):
        parent = "/tmp"  # the address of a socket has 108 characters at most
    for mark in Path(parent).glob(f"{PREFIX}*/{MARK}"):
        with contextlib.suppress(OSError), open(mark, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (file.read(len(OURS)) == OURS
                    and mark.parent.stat().st_uid == os.getuid()):
                shutil.rmtree(mark.parent)
    if shutil.disk_usage(parent).free < SPACE_NEEDED:
        raise full(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    own = os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(own, fcntl.LOCK_EX)  # until this process ends
    os.write(own, OURS.encode())
    return folder


def full(folder: str | Path) -> UserError:
    """Return the error that the folder's disk is full."""
    return UserError(f"{folder} is full; fix: make room there, or name "
                     "another folder for temporary files: export TMPDIR=...")


HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}  # all GPUs


def quiet_environment(temporary: str | Path,
                      hidden: Mapping[str, str] = HIDDEN_GPUS) -> dict[str,
                                                                       str]:
    """Return the environment, without a launcher's variables and the GPUs.

    The processes are on one machine, which may lack the network that the site
    names for its nodes: they meet on the loopback interface.

    Args:
        temporary: the folder for temporary files.
        hidden: variables that hide GPUs.
    """
    env = {key: value for key, value in os.environ.items()
           if key not in LAUNCHER_VARIABLES
           and not key.startswith(LAUNCHER_PREFIXES)}
    return {**env, **hidden, "GLOO_SOCKET_IFNAME": LOOPBACK,
            "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
