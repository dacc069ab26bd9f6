"""The desk's script, while it is replaced: one process at a time, and dated.
"""

import fcntl
import itertools
import os
import time
from contextlib import contextmanager
from pathlib import Path

from workshop.stages import DESK


@contextmanager
def locked_desk():
    """Let only one process at a time read the script and replace it.

    The lock is on the file itself, so that no other file is left behind.
    Where the file system has no locks, or there is no file, none is taken.
    """
    file = open_locked(DESK)
    try:
        yield
    finally:
        if file:
            file.close()


def open_locked(path):
    """The open file with the lock on it, or None where it cannot be opened."""
    while True:
        try:
            file = open(path, "r+b")  # NFS locks only what may be written
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = os.stat(path)
        except FileNotFoundError:  # removed while we waited
            file.close()
            continue
        except OSError:
            return file
        if os.path.samestat(os.fstat(file.fileno()), now):
            return file
        file.close()  # replaced while we waited: lock the new one


def dated_names(path):
    """`name.DATE.suffix` beside the file, then `name.DATE-2.suffix`, ..."""
    path, now = Path(path), time.strftime("%Y%m%d-%H%M%S")
    yield path.with_name(f"{path.stem}.{now}{path.suffix}")
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}.{now}-{number}{path.suffix}")
