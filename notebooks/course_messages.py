"""The messages between a notebook's kernel and the course's own Python.

The kernel's process (`course_process.py`) and the server that it starts
(`workshop/notebook/server.py`) both import this, so it runs on any Python
from 3.9 on, with the standard library alone. A message is a line of JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Union

# One output of a cell, by MIME type: what Jupyter calls a MIME bundle.
Bundle = dict[str, str]

# The type by which docs/rehearse.sh finds what failed in a notebook.
COMPLAINT = "application/x-workshop-complaint"

# What follows a function's name if an argument is neither: often all or next
# without quotes, which are functions of Python's.
ARGUMENTS_FIX = ('takes texts and numbers; fix: write a text in quotes, such '
                 'as "all" or "next"')

# What the server's process exits with if it is not the course's Python.
NOT_THE_COURSES_PYTHON = 77


# ------------------------------------------------ from the kernel's process


@dataclass(frozen=True)
class Call:
    """A cell calls a function, or runs a magic.

    Attributes:
        name: of the function, or "%%ranks", "%%mpi" or "%load_ext".
        arguments: texts and numbers; anything else arrives as a list or a
            dict, which no cell takes.
        options: the arguments that are given by name.
        folder: the kernel's working directory, or "" if that is gone.
        environment: the variables that have changed since the server began.
    """

    name: str
    arguments: list[object]
    options: dict[str, object]
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Interrupt:
    """The kernel's stop button: the call in progress is to end."""


@dataclass(frozen=True)
class Answer:
    """What was answered to a `Question`; "" if nothing was."""

    text: str


# -------------------------------------------------------- from the server


@dataclass(frozen=True)
class Cells:
    """The server's first message: what a cell can call.

    Attributes:
        docs: of each function's name, how to call it and what it does.
    """

    docs: dict[str, str]


@dataclass(frozen=True)
class Display:
    """An output of the cell that runs; its `Update`s replace it."""

    bundle: Bundle
    display_id: str


@dataclass(frozen=True)
class Update:
    """What takes the place of that output, also after the call has ended."""

    bundle: Bundle
    display_id: str


@dataclass(frozen=True)
class Printed:
    """A text that was printed."""

    text: str


@dataclass(frozen=True)
class Question:
    """What the user is asked; `Answer` follows.

    Attributes:
        seconds: how long an answer is waited for.
    """

    text: str
    seconds: float


@dataclass(frozen=True)
class Result:
    """The call has ended. bundle: what the function returned, or None."""

    bundle: Bundle | None


Message = Union[Call, Interrupt, Answer, Cells, Display, Update, Printed,
                Question, Result]
KINDS = {kind.__name__: kind for kind in (
    Call, Interrupt, Answer, Cells, Display, Update, Printed, Question,
    Result)}


def encode(message: Message) -> str:
    """Return the message as a line.

    Raises:
        ValueError, RecursionError: an argument cannot be written as JSON.
    """
    return json.dumps([type(message).__name__, asdict(message)],
                      default=simplify) + "\n"


def simplify(value: object) -> object:
    """Return what stands for a value that JSON does not know."""
    if isinstance(value, os.PathLike):
        return str(value)
    return {}


def decode(line: str) -> Message:
    """Return the message that a line holds.

    Raises:
        ValueError: the line is no message, but for example a greeting that a
            shell's profile prints.
    """
    try:
        name, fields = json.loads(line)
        return KINDS[name](**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no message: {line!r}") from error
