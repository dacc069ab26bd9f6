"""Command lines with several commands, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rankcheck.system.errors import UserError

# of a write that finds no room
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        args, unknown = self.parse_mixed(arguments[:end])
        if unknown:
            self.refuse(unknown)
        for name, value in vars(args).items():  # a shell leaves it in -o=~/x
            if isinstance(value, str):
                setattr(args, name, os.path.expanduser(value))
        args.flags = unknown + arguments[end + 1:]
        return args

    def parse_mixed(self, arguments: list[str]
                    ) -> tuple[argparse.Namespace, list[str]]:
        """Return what is known, and the rest; options may stand anywhere."""
        try:  # `check ddp -v 7`: parse_known_args takes `ddp` alone
            return self.parse_known_intermixed_args(arguments)
        except TypeError:  # not with REMAINDER, nor a choice of positionals
            return self.parse_known_args(arguments)


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

    An error is 2, for a failure that was found is 1. An output that cannot
    be written is an error as well: its reader would miss the answer.
    """
    open_closed_streams()
    message = ""
    try:
        status = run()
        sys.stdout.flush()  # Python's own status would be 120
    except KeyboardInterrupt:
        status, message = 130, "\ninterrupted"
    except Exception as error:
        # also for a bug of ours: Python's own status would be 1
        status, message = 2, explain_end(error)
    if message:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)
    for stream in sys.stdout, sys.stderr:
        try:
            stream.flush()
        except OSError:  # Python would try once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def open_closed_streams() -> None:
    """Let what is printed go nowhere if the caller has closed a stream."""
    open_closed_descriptors()
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, closefd=False))


def open_closed_descriptors() -> None:
    """Open /dev/null as 0, 1 and 2 where the caller has closed them.

    Otherwise the next files that are opened would get these numbers, and a
    process that is started would have no stream of that name.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)


def explain_end(error: Exception) -> str:
    """Return what is printed of an error that ends a program, "" if nothing.
    """
    if isinstance(error, UserError):
        return f"error: {error}"
    if isinstance(error, BrokenPipeError):  # of `| head`, for example
        return ""
    if isinstance(error, OSError) and error.errno in FULL and (
            error.filename is None):
        return (f"error: {error.strerror}, for the output or a temporary "
                "file; fix: make room, or redirect the output to another disk")
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return (f"error: {sys.executable} has no torch; fix: start "
                "rankcheck with the Python that trains")
    return "".join(traceback.format_exception(error)).rstrip()


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
