"""The command line of the course's tools: groups of commands, some hidden.

rankcheck's parser reads the arguments of one command.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankcheck.system import command_line


@dataclass(frozen=True)
class CourseCommand(command_line.Command):
    """A command of the course, several of which may share a module.

    Attributes:
        function: the command's, in place of `main`. It takes the arguments
            that `add_<function>` adds, if the module has that.
    """

    function: str = ""


class Parser(command_line.Parser):
    """A parser that may also pass on what it does not know."""

    passes_on = False

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise a `UserError` for arguments that are neither of the two."""
        if not self.passes_on:
            super().refuse(unknown)


def parse(program: str, about: str,
          groups: Mapping[str, Mapping[str, CourseCommand]],
          hidden: Mapping[str, CourseCommand]) -> argparse.Namespace:
    """Return what the command line says; `function` is the command's.

    Args:
        program: how the program is started.
        about: what --help says of it.
        groups: the commands, under a title each.
        hidden: commands that --help does not show; "" is no command at all.

    Raises:
        UserError: the command line is wrong.
    """
    known = dict(hidden)
    for commands in groups.values():
        known.update(commands)
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        command_line.show_help(program, about, groups)
        sys.exit()
    if name not in known:
        raise command_line.unknown_command(program, name)
    command = known[name]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"{program} {name}", description=command.about)
    add_arguments = getattr(
        module, f"add_{command.function or 'arguments'}", None)
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse(arguments)
    args.command = name
    args.function = getattr(module, command.function or "main")
    return args
