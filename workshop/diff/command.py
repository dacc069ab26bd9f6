"""python -m workshop diff | apply | reset | script, and without a command."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from contextlib import suppress

from backstage.errors import require
from workshop.diff import render, working_copy
from workshop.diff.diff import Diff
from workshop.instructor import classroom
from workshop.jobs.originals import require_originals
from workshop.stages import LESSONS, STAGES, find_stage


def journey(args: argparse.Namespace) -> None:
    """Print what comes next, and the command that goes on."""
    line, lessons = working_copy.next_lessons()
    print(line)
    for name in lessons:
        print(f"  python -m workshop lab {name:8}  {find_stage(name).title}")
    print("All commands: python -m workshop --help")


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=LESSONS,
                        help="the stage that the lesson makes")


def add_diff(parser: argparse.ArgumentParser) -> None:
    add_stage(parser)
    parser.add_argument("number", nargs="?", type=int,
                        help="show this change alone")
    parser.add_argument("--hints", action=argparse.BooleanOptionalAction,
                        default=render.wants_hints(),
                        help="show the place and the reason, without the code")


def diff(args: argparse.Namespace) -> None:
    require_originals()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    left = Diff(args.stage)
    classroom.note_diff(left)
    print(render.to_text(left, colour, args.hints, args.number))


def add_apply(parser: argparse.ArgumentParser) -> None:
    add_stage(parser)
    parser.add_argument("numbers", nargs="*", type=int, metavar="number",
                        help="the changes' numbers, as diff shows them")
    parser.add_argument("--all", action="store_true",
                        help="make all that are left")


def apply(args: argparse.Namespace) -> None:
    require(args.all or args.numbers, "no changes are named; fix: give their "
            "numbers, or --all: see python -m workshop apply --help")
    require(not (args.all and args.numbers), "--all makes all changes that "
            "are left; fix: give the numbers alone, or --all alone")
    require_originals()
    working_copy.apply_changes(args.stage, args.numbers)


def add_reset(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("name", nargs="?", metavar="stage|DATE",
                        help=f"{', '.join(STAGES)}, or a backup's date")
    choice.add_argument("--list", action="store_true",
                        help="show the stages, and the backups by their date")
    choice.add_argument("--undo", action="store_true",
                        help="restore your previous version")


def reset(args: argparse.Namespace) -> None:
    if args.list:
        working_copy.list_all()
    elif args.undo:
        working_copy.restore_previous()
    else:
        require_originals()
        working_copy.reset_to(args.name)


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=STAGES,
                        help="the stage of the batch file")


def script(args: argparse.Namespace) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from workshop.jobs.doctor import name_commit

    path, reason = working_copy.choose_script(args.stage)
    print(reason, file=sys.stderr, flush=True)
    print(path, flush=True)
    with suppress(PackageNotFoundError):  # the script says which is missing
        print("software  Python", platform.python_version(), "torch",
              version("torch"), "lightning", version("lightning"), "commit",
              name_commit(), file=sys.stderr)
