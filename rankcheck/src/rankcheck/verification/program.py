"""The program to verify, as typed: a script, or a module of a package.

A launcher before it is left out, as verify is one itself: `torchrun x.py`.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankcheck.system.errors import UserError, require
from rankcheck.system.launchers import LAUNCHER_PROGRAMS

USAGE = "rankcheck verify -n 2 -- train.py --its-flags"
# What a launcher gives each process beside the environment
LAUNCHER_FLAGS = {"deepspeed": ["--local_rank={rank}"],
                  "torch.distributed.launch": ["--local-rank={rank}"]}


@dataclass(frozen=True)
class Program:
    """What is to be verified.

    Attributes:
        script: the file that is run.
        flags: its own.
        module: its name, as after python -m; or "".
        launcher: the one that was left out, with its own flags; or "".
    """

    script: Path
    flags: tuple[str, ...]
    module: str = ""
    launcher: str = ""

    @property
    def name(self) -> str:
        return f"-m {self.module}" if self.module else self.script.name

    def with_size(self, size: int, run: str, more: Iterable[str] = ()
                  ) -> list[str]:
        """Return its flags, with {n}, {16/n}, {2*n} and {run} replaced.

        Args:
            size: the number of processes, n.
            run: the name of the run.
            more: further flags.

        Raises:
            UserError: a number is not divisible by the size.
        """
        def value(found: re.Match[str]) -> str:
            number, sign = int(found[1] or 1), found[2] or "*"
            if sign == "*":
                return str(number * size)
            require(number % size == 0, f"{found[0]}: {number} is not "
                    f"divisible by {size}")
            return str(number // size)

        return [re.sub(r"\{(?:(\d+)([*/]))?n\}", value, flag).replace(
            "{run}", run) for flag in (*self.flags, *more)]


def read_program(command: Iterable[str]) -> Program:
    """Read a command line, of which one -- is verify's.

    It comes before the script, or else right behind it.

    Raises:
        UserError: it names no script that can be verified.
    """
    command = [*command]
    before = command[:1] == ["--"]
    if before:
        del command[0]
    launcher = ""
    launcher_flags: list[str] = []
    while command:
        name, module = Path(command[0]).name, command[0] == "-m"
        if re.fullmatch(r"python[\d.]*", name):
            command.pop(0)
            while command and re.fullmatch("-[^mc].*", command[0]):
                del command[:2 if command[0] in ("-W", "-X") else 1]
        elif name in LAUNCHER_PROGRAMS or (
                module and command[1:] and command[1] in LAUNCHER_PROGRAMS):
            launcher = command[1] if module else name
            launcher_flags = LAUNCHER_FLAGS.get(launcher, [])
            command = after_flags(command[2 if module else 1:], launcher)
        else:
            break
    require(command, f"no script is named; fix: {USAGE}")
    require(command[0] != "-c", "verify cannot run -c; fix: put the script "
            "into a file")
    end = 2 if module else 1
    if not before and command[end:end + 1] == ["--"]:
        del command[end]
    if module:
        require(command[1:], "no module is named; fix: name it behind -m")
        return Program(find_module(command[1]),
                       (*launcher_flags, *command[2:]), command[1], launcher)
    script = Path(command[0]).absolute()
    require(not is_program(command[0]), f"{command[0]} is a program, and "
            "verify starts the processes itself; fix: name the script that "
            f"it starts: {USAGE}")
    require(os.path.lexists(script), f"{command[0]} does not exist; fix: "
            "name the script as seen from this folder")
    require(script.is_file(), f"{command[0]} is not a file")
    return Program(script, (*launcher_flags, *command[1:]), launcher=launcher)


def is_program(path: str) -> bool:
    """Return whether it is an executable that is not a Python script.
    """
    if not os.path.isfile(path):
        return bool(shutil.which(path))
    if path.endswith(".py") or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return b"python" not in file.readline()


def after_flags(arguments: list[str], launcher: str) -> list[str]:
    """Return what follows a launcher's flags: a script, or -m and a module.
    """
    for i, argument in enumerate(arguments):
        if argument in ("-m", "--module"):
            return ["-m", *arguments[i + 1:]]
        if argument.endswith(".py"):
            return arguments[i:]
    raise UserError(f"no script is found behind {launcher}; fix: name it "
                    f"without the launcher: {USAGE}")


def find_module(name: str) -> Path:
    """Return the file that `python -m NAME` runs here."""
    path = [os.getcwd(), *sys.path]
    for part in (*name.split("."), "__main__"):
        found = importlib.machinery.PathFinder.find_spec(part, path)
        if found is None:
            raise UserError(
                f"there is no module {name}: {part} is neither in the current "
                "folder nor installed")
        folders = found.submodule_search_locations
        if folders is None and found.origin is not None:
            return Path(found.origin)
        path = list(folders or ())
    raise UserError(f"{name} is a package without a __main__.py; fix: name "
                    "one of its modules")
