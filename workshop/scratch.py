"""What the check and verify need before they start a script.

Its bytes, an environment, and a folder, of which nothing is left however they
end.
"""

import ast
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import show_path
from workshop import processes

LARGEST = 1_000_000  # bytes of a script
LONGEST = 48  # characters of a folder in which sockets still have a place
ROOM = 50e6  # bytes that a check may need
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL",
             "TORCHELASTIC_")
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE",
         "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_script(script):
    """Its bytes, read once: what is saved meanwhile is not mixed in."""
    script = Path(script)
    try:
        size = script.stat().st_size
        require(size <= LARGEST, f"{show_path(script)}: {size / 1e6:.0f} MB "
                "are too large for a script: is it another file?")
        data = script.read_bytes()
        ast.parse(data, script.name)
    except FileNotFoundError:
        raise UserError(
            f"{show_path(script)} is not there: was it moved? `python -m "
            "workshop reset std` puts a new one in its place") from None
    except OSError as error:
        raise UserError(f"{show_path(script)}: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        where = getattr(error, "lineno", None)
        raise UserError(f"{show_path(script)}: "
                        + (f"line {where}: " if where else "")
                        + f"{getattr(error, 'msg', error)}") from error
    return data


@contextlib.contextmanager
def scratch_folder(word):
    """Gives a folder, and ends all on Ctrl-C, SIGTERM, or a closed terminal.

    word: bytes that are written then.

    An exception would be lost where Python cannot raise one, as in a clean-up
    or while a module of torch is imported: the handler itself ends the
    processes, removes the folder, and leaves.
    """
    folder, before = None, {}

    def leave(number, frame):
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        for end in (processes.end_all, lambda: folder and remove(folder),
                    lambda: os.write(1, word)):
            with contextlib.suppress(Exception):
                end()
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, leave)
    try:
        folder = make_folder()
        yield folder
    finally:
        if folder:
            remove(folder)
        for number, handler in before.items():
            signal.signal(number, handler)


def remove(folder):
    """Remove a folder, in which a process that is ending may still write."""
    for _ in range(20):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def make_folder():
    """The folder of a check: with room, and not too deep.

    Those of checks that were killed (kill -9) are removed a day later.
    """
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST and os.access("/tmp", os.W_OK):
        parent = "/tmp"  # the address of a socket has 108 characters at most
    for folder in Path(parent).glob("check-*"):
        with contextlib.suppress(OSError):  # it has just been removed
            if time.time() - folder.stat().st_mtime > 24 * 3600:
                shutil.rmtree(folder)
    if shutil.disk_usage(parent).free < ROOM:
        raise full(parent)
    return Path(tempfile.mkdtemp(prefix="check-", dir=parent))


def full(folder):
    return UserError(f"{folder} is full: make room there, or name another "
                     "folder for temporary files, export TMPDIR=...")


def quiet_environment(temporary):
    """The environment, without a launcher's variables and the GPUs."""
    return {key: value for key, value in os.environ.items()
            if key not in NAMES and not key.startswith(LAUNCHERS)} | {
                "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "",
                "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
