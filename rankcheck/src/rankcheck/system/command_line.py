"""Command lines with several commands, and errors of one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rankcheck.system.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command of a program.

    Attributes:
        module: is imported when the command is called. It has `main(args)`,
            which returns the exit status, and `add_arguments(parser)` if the
            command takes any.
        about: what --help says of it.
    """

    module: str
    about: str


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s."""

    after = ""  # whose arguments follow --, as in "the script's own", if any

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise UserError(f"{message}; fix: see {self.prog} --help")

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise a `UserError` for arguments that are not known."""
        message = f"unrecognized arguments: {' '.join(unknown)}"
        if self.after:
            message += f" ({self.after} come after --)"
        self.error(message)

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return what the arguments say; `flags` has those that follow --."""
        end = len(arguments)
        if self.after and "--" in arguments:
            end = arguments.index("--")
        args, unknown = self.parse_known_args(arguments[:end])
        if unknown:
            self.refuse(unknown)
        for name, value in vars(args).items():  # a shell leaves it in -o=~/x
            if isinstance(value, str):
                setattr(args, name, os.path.expanduser(value))
        args.flags = unknown + arguments[end + 1:]
        return args


def parse(program: str, about: str,
          commands: Mapping[str, Command]) -> argparse.Namespace:
    """Return what the command line says; `function` is the command's.

    Args:
        program: how the program is started.
        about: what --help says of it.
        commands: by their names.

    Raises:
        UserError: the command line is wrong.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        show_help(program, about, {"commands": commands})
        sys.exit()
    if name not in commands:
        raise unknown_command(program, name)
    command = commands[name]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"{program} {name}", description=command.about)
    add_arguments: Callable[[Parser], None] | None = getattr(
        module, "add_arguments", None)
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse(arguments)
    args.function = module.main
    return args


def exit_with(run: Callable[[], int]) -> NoReturn:
    """Run a program, and exit with the status that it returns.

    An error is 2, for a failure that was found is 1.
    """
    try:
        sys.exit(run())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # of `| head`, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            print(f"error: {sys.executable} has no torch; fix: start "
                  "rankcheck with the Python that trains", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.exit(2)  # also for a bug of ours: Python's own status would be 1


def unknown_command(program: str, name: str) -> UserError:
    """Return the error for an unknown command."""
    return UserError(f"no such command: {name}; fix: see {program} --help")


def show_help(program: str, about: str,
              groups: Mapping[str, Mapping[str, Command]]) -> None:
    """Print how to use a program, and its commands under a title each."""
    print(f"usage: {program} COMMAND ...\n\n{textwrap.fill(about, 79)}")
    for title, commands in groups.items():
        print(f"\n{title}:")
        for name, command in commands.items():
            print(textwrap.fill(command.about, 79,
                                initial_indent=f"  {name:10}",
                                subsequent_indent=12 * " "))
