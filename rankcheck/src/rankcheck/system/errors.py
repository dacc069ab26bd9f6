"""Errors for people: one line that says what is wrong and what to do.

Only the standard library, from Python 3.9 on.
"""

import errno
import os
import stat
import traceback
from pathlib import Path

KILLED = ("the system ended a process, most likely because the memory is "
          "full: end other programs, or ask for more")


class UserError(Exception):
    """Something that the user can fix: shown as one line, no traceback."""


class InternalError(UserError):
    """rankcheck itself failed in a rank: the run says nothing of the script.
    """


class NotCompared(UserError):
    """The ranks of a run were idle for too long."""

    findings = ()  # what was found without this run


def require(condition, message):
    """Raise a `UserError` with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def show_path(path):
    """The path as somebody would type it: short in the working folder."""
    path = os.path.abspath(path)
    return path.removeprefix(str(Path.cwd() / "_")[:-1])


def describe_error(error: BaseException) -> str:
    """Return an error's type, message and innermost place, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())[:200]
    return (f"{type(error).__name__}: {words} ({place.filename}, "
            f"line {place.lineno})")


def read_regular(path, most=-1, flags=0):
    """The bytes of a file, so many at most; flags: further ones of `os.open`.

    Whatever else has that name is an `OSError`: a FIFO, which would wait for
    a writer, a device, which may never end, a folder, a socket.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(file, "rb", closefd=False) as opened:
            return opened.read(most)
    finally:
        os.close(file)
