"""Errors for people: one line that says what is wrong and what to do.

Only the standard library, from Python 3.9 on.
"""

import os
from pathlib import Path

KILLED = ("the system ended a process, most likely because the memory is "
          "full: end other programs, or ask for more")


class UserError(Exception):
    """Something that the user can fix: shown as one line, no traceback."""


class NotCompared(UserError):
    """The ranks of a run were idle for too long.

    findings: what was found without this run.
    """

    findings = ()


def require(condition, message):
    """Raise a `UserError` with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def show_path(path):
    """The path as somebody would type it: short in the working folder."""
    path = os.path.abspath(path)
    return path.removeprefix(str(Path.cwd() / "_")[:-1])
