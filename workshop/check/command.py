"""python -m workshop check: compare the working copy with one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from backstage.errors import UserError, require
from backstage.files import show_path
from rankcheck.engine import fork_server, sandbox
from rankcheck.engine.findings import Report
from rankcheck.engine.progress import (
    LOADING,
    paused_collection,
    saying_that_it_lasts,
)
from rankcheck.engine.report import Events, Quiet
from rankcheck.engine.scratch import require_python
from rankcheck.engine.workspace import open_workspace
from workshop.board import CheckTerminal
from workshop.check import localise
from workshop.check.lines import lines_as_in
from workshop.diff import backups, passed_checks
from workshop.diff.diff import Diff, Script
from workshop.diff.working_copy import changes_passed
from workshop.instructor import classroom
from workshop.jobs.mpirun import require_mpirun
from workshop.jobs.originals import require_originals
from workshop.stages import LESSONS, STAGES, WORKING_COPY, modules_of

ChangeNumber = int | Literal["next"]  # next: the first that is left


def number_or_next(text: str) -> ChangeNumber:
    if text == "next":
        return "next"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number nor next")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=LESSONS,
                        help="the stage that the lesson makes")
    parser.add_argument("change", nargs="?", metavar="number",
                        type=number_or_next, help="check only this change, "
                        "as diff numbers it, with all others made; next: the "
                        "first change that is left")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="show every question, and the effects of a "
                        "mistake")
    parser.add_argument("--events", action="store_true",
                        help=argparse.SUPPRESS)  # for a notebook


def main(args: argparse.Namespace) -> int:
    """Return the exit status: 0, 1 if something is wrong, 2 if the check
    itself failed.
    """
    require_originals()
    report = check_script(args.stage, verbose=args.verbose, events=args.events,
                          change=args.change)
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return report.status


def check_script(stage: str, script: str | Path = WORKING_COPY,
                 verbose: bool = False,
                 events: bool = False,
                 change: ChangeNumber | None = None) -> Report:
    """Check a script, and print what is found as it is found.

    Args:
        stage: the name of the stage that the script should be.
        script: its file.
        verbose: print every question, and what follows from a mistake.
        events: print JSON, for a `Board` elsewhere.
        change: the number of a change of the lesson, to try it alone, as it
            is in the script: quickly, on two processes, with all others made.

    Raises:
        UserError: the script could not be run, or is no Python.
    """
    if STAGES[stage].launcher == "mpirun":
        require_mpirun()
    script = Path(script)
    yours = data = backups.read_script_bytes(script)
    require_no_syntax_error(script, yours)
    out: Quiet = Events() if events else CheckTerminal(verbose)
    with open_workspace(out.interrupted) as workspace:
        require_python(script, data)
        one = None
        if change is not None:
            one = make_others(Diff(stage, script, yours), change, out.say)
            if one is None or one.data is None:  # made as in the lesson
                out.report(right=True)
                return Report(script, ())
            data = one.data
        out.say("Loading PyTorch.")
        # it imports torch while this process does
        fork_server.get_servers(modules_of(stage))
        with saying_that_it_lasts(out.say, LOADING), paused_collection():
            from workshop.check.experiment import StageCheck
            from workshop.check.stage_runs import Bench

        workspace.files.changed()  # by others, while torch was imported
        bench = Bench(workspace, stage, script, data, out.say)
        experiment = StageCheck(bench, out, lines_as_in(yours, data), one,
                                verbose)
        report = experiment.execute()
        # else it was another program, such as a notebook or a run
        if bench.copy.noted("started"):
            if changed := workspace.files.changed():
                out.say(f"warning: {changed}, {sandbox.BY_WHOM}")
    if one is None:
        note_whole_check(stage, data, report)
    elif report.ok and not report.warnings:  # else it would count as made
        passed_checks.record_change(stage, one.number, data)
    return report


def require_no_syntax_error(script: Path, data: bytes) -> None:
    """Raise a `UserError` with the place of a script's syntax error."""
    try:
        broken = Script(script, data).syntax_error
    except UserError:  # `require_python` says what it is
        return
    require(not broken, f"{show_path(script)} is not Python yet, {broken}")


def note_whole_check(stage: str, data: bytes, report: Report) -> None:
    """Record that a script has passed, and report the findings to the class.

    After an error of its own the check does not know whether it is right.
    """
    if report.internal_errors:
        return
    if report.ok:
        passed_checks.record(stage, data)
    titles = [finding.question for finding in report.failures]
    classroom.note_progress(stage, right=report.ok,
                            mistake="".join(titles[:1]))


def make_others(diff: Diff, change: ChangeNumber, say: Callable[[str], None]
                ) -> localise.OneChange | None:
    """Make all other changes as in the lesson.

    Args:
        diff: what is left to change.
        change: the number of the one that stays as it is.
        say: is told which that is.

    Returns:
        The one that stays as it is, or None if the first that is left was
        asked for, and none is: one that has passed is not left.

    Raises:
        UserError: there is no such change, or the others cannot be made.
    """
    if change == "next":
        right = changes_passed(diff)
        numbers = [item.number for item in diff.remaining
                   if item.number and item not in right]
        if not numbers:
            say("Done: no change is left. `python -m workshop check "
                f"{diff.stage}` checks them all.")
            return None
        number = numbers[0]
    else:
        number = change
    diff.require_change(number)
    require(not diff.other_stage, diff.advice_to_reset)
    items = [item for item in diff.remaining if item.number == number]
    if not items:
        say(f"Change {number} is made as in the lesson.")
        return localise.OneChange(number)
    say(f"Change {number} ({items[0].title}) as it is in your script, "
        "with all others made:")
    data = localise.make_without(diff, items, diff.remaining)
    require(data, "your edits conflict with the other changes: `python -m "
            f"workshop diff {diff.stage}` shows them")
    return localise.OneChange(number, locate_change(diff, number), data)


def locate_change(diff: Diff, number: int) -> str:
    """Return ", line N" of a change: where it is one's own, or begins."""
    for item in diff.remaining:
        if item.number == number:
            own = diff.own_lines({number})
            line = own[0] if own else item.edits[0][0]
            return f", line {line + 1}"
    return ""
