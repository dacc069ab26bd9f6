"""Files that are open in a script, hidden from it.

Only the standard library: it is loaded into any script, by watcher.py.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

HIGH = 100  # from here on are the numbers of our open files


class OpenFile:
    """A file that we have open from the start, under a high number.

    A daemon closes all that are open, and its own file may have the number
    afterwards: then nothing is written.
    """

    def __init__(self, path: Path) -> None:
        self.number = open_high(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.identity = self.identify()

    def identify(self) -> tuple[int, int]:
        """Return device and inode of what is open under the number now."""
        status = os.fstat(self.number)
        return status.st_dev, status.st_ino

    def is_open(self) -> bool:
        """Whether the number still means the file."""
        try:
            return self.identify() == self.identity
        except OSError:
            return False

    def fill(self, content: bytes) -> None:
        """Make this the file's whole content."""
        if self.is_open():
            os.truncate(self.number, os.write(self.number, content))

    def disconnect(self) -> None:
        """Detach the descriptor in a forked process."""
        if not self.is_open():
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.number, inheritable=False)
        os.close(nowhere)


def open_high(path: Path, flags: int) -> int:
    """Open a file under a descriptor that the script never gets.

    The script's first file has the number 3, as without us.

    Args:
        path: the file.
        flags: those of `os.open`.
    """
    low = os.open(path, flags, 0o666)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH)
    finally:
        os.close(low)
