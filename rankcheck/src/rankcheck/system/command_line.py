"""Command lines of several commands; what is wrong with one is one line.

Only the standard library, from Python 3.9 on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import NoReturn

from rankcheck.system.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose errors are `UserError`s."""

    after = ""  # whose words follow --, as in "the script's own", if any
    passes_on = False  # whether these are also what the parser does not know

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise UserError(f"{message}: see {self.prog} --help")

    def parse(self, words: list[str]) -> argparse.Namespace:
        """Return what the words say; `flags` has those that follow --."""
        end = len(words)
        if self.after and "--" in words:
            end = words.index("--")
        args, unknown = self.parse_known_args(words[:end])
        if unknown and not self.passes_on:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            if self.after:
                message += f": {self.after} come after --"
            self.error(message)
        for name, value in vars(args).items():  # a shell leaves it in -o=~/x
            if isinstance(value, str):
                setattr(args, name, os.path.expanduser(value))
        args.flags = unknown + words[end + 1:]
        return args


def parse(program: str, about: str,
          groups: Mapping[str, Mapping[str, tuple[str, str]]],
          hidden: Mapping[str, tuple[str, str]] | None = None,
          ) -> argparse.Namespace:
    """Return what the command line says; `function` is the command's.

    Args:
        program: how the program is started.
        about: what --help says of it.
        groups: title -> command -> (its module, what it does). A module has
            `main(args)`, which returns the exit status, and
            `add_arguments(parser)` if it takes any; named with a command, as
            in module:diff, `diff` and `add_diff`. It is imported when the
            command is called.
        hidden: the same of commands that --help does not show, and of "", no
            command at all.

    Raises:
        UserError: the command line is wrong.
    """
    known = dict(hidden or {})
    default = "" if "" in known else "--help"
    command, *words = sys.argv[1:] or [default]
    if command in ("-h", "--help"):
        show_help(program, about, groups)
        sys.exit()
    for commands in groups.values():
        known.update(commands)
    if command not in known:
        raise UserError(f"there is no command {command}: see {program} --help")
    place, about = known[command]
    name, _, function = place.partition(":")
    module = importlib.import_module(name)
    parser = Parser(prog=f"{program} {command}", description=about)
    add_arguments = getattr(module, f"add_{function or 'arguments'}", None)
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse(words)
    args.command, args.function = command, getattr(module, function or "main")
    return args


def show_help(program: str, about: str,
              groups: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
    """Print what `parse` was told about the commands."""
    print(f"usage: {program} COMMAND ...\n\n{textwrap.fill(about, 79)}")
    for title, commands in groups.items():
        print(f"\n{title}:")
        for name, (_, text) in commands.items():
            print(textwrap.fill(text, 79, initial_indent=f"  {name:10}",
                                subsequent_indent=12 * " "))
