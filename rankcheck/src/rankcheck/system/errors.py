"""User-facing errors: one line with what is wrong and how to fix it."""

from __future__ import annotations

import errno
import os
import stat
import traceback
from pathlib import Path

TYPE_CHECKING = False  # without importing typing where a script is guarded
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

KILLED = ("the system killed a process, most likely because memory is full; "
          "fix: end other programs, or request more memory")


class UserError(Exception):
    """An error that the user can fix: shown as one line, no traceback."""

    status = 1  # for a program that calls rankcheck, as its exit status


class InternalError(UserError):
    """rankcheck itself failed in a rank, so the run proves nothing.
    """


class NotCompared(UserError):
    """The ranks of a run were idle for too long."""

    # What was found without this run, each a `Finding` of the engine, which
    # this package does not import
    findings: Sequence[Any] = ()


def require(condition: object, message: str) -> None:
    """Raise a `UserError` with `message` unless `condition` is true.

    Args:
        condition: any value: Python's own rules say whether it is true.
    """
    if not condition:
        raise UserError(message)


def show_path(path: str | os.PathLike[str]) -> str:
    """Return the path as a user types it: relative in the working folder."""
    folder = str(Path.cwd() / "_")[:-1]  # with the separator, also of "/"
    return os.path.abspath(path).removeprefix(folder)


def describe_error(error: BaseException) -> str:
    """Return an error's type, message and innermost place, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:200]
    return (f"{type(error).__name__}: {message} ({place.filename}, "
            f"line {place.lineno})")


def read_regular(path: str | os.PathLike[str], most: int = -1,
                 flags: int = 0) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        most: how many bytes to read at most; -1 for all.
        flags: further flags of `os.open`, as O_NOFOLLOW.

    Raises:
        OSError: the file cannot be read, or something else has its name: a
            FIFO, which would wait for a writer, a device, which may never
            end, a folder, a socket.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(file, "rb", closefd=False) as opened:
            return opened.read(most)
    finally:
        os.close(file)
