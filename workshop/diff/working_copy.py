"""Change the working copy without losing edits: `apply` and `reset`.

What was in the script is kept as a backup: see workshop/diff/backups.py.
And what is done so far, and what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from backstage.errors import UserError, require, visible
from backstage.files import show_path
from rankcheck.system.errors import read_regular
from workshop.diff import passed_checks
from workshop.diff.backups import (
    applied_after,
    backup_label,
    backups,
    lock_working_copy,
    read_script_bytes,
    replace_working_copy,
)
from workshop.diff.diff import (
    Diff,
    RemainingChange,
    Script,
    nearest,
    read_stages,
)
from workshop.results import runs
from workshop.stages import LESSONS, STAGES, WORKING_COPY, find_stage

REOPEN = ("Reopen the script if an editor shows the old one. In JupyterLab, "
          "click into it, then File > Reload Python File from Disk; if "
          "JupyterLab asks, choose Revert. Overwrite would undo this command.")


def changes_passed(diff: Diff) -> list[RemainingChange]:
    """Return the changes that are written differently and pass the check.

    A change that is not made at all may pass a check, too.
    """
    if passed_checks.has_passed(diff.stage, diff.script.data):
        return diff.remaining
    numbers = {item.number for item in diff.remaining}
    return [item for item in diff.remaining
            if diff.own_lines({item.number})
            and passed_checks.has_change_passed(
                diff.stage, item.number,
                diff.apply(numbers - {item.number}).encode())]


@lock_working_copy()
def apply_changes(stage: str, numbers: Sequence[int] = ()) -> None:
    """Make changes of the lesson, by their numbers, or all that are left.

    Of all, those stay as they are that the check has found right.

    Raises:
        UserError: there is no such change, it conflicts with own edits, or
            the script is another stage, which its lines do not fit.
    """
    diff = Diff(stage)
    for number in numbers:
        diff.require_change(number)
    require(not diff.other_stage, diff.advice_to_reset)
    left = {item.number for item in diff.remaining}
    right = {item.number for item in changes_passed(diff)}
    chosen = left & set(numbers) if numbers else left - right
    if not chosen:
        what = "these changes are" if numbers else "all changes are"
        print(f"{what} already made; {show_path(WORKING_COPY)} is unchanged")
        return
    line = 1 + min(edit[0] for item in diff.remaining if item.number in chosen
                   for edit in item.edits)
    text = diff.apply(chosen).encode()
    after = Diff(stage, data=text)
    require({item.number for item in after.remaining} == left - chosen
            and len(after.other_changes) <= len(diff.other_changes)
            and (diff.script.syntax_error or not after.script.syntax_error),
            f"this change conflicts with your edits near line {line}; fix: "
            f"make it by hand, or `python -m workshop reset {stage}`")
    made = "-".join(map(str, sorted(chosen)))
    backup = replace_working_copy(
        text, diff.script.data, f"apply-{stage}-{made}")
    for item in diff.remaining:
        if item.number in chosen:
            print(f"made change {item.number}: {item.title}")
    for item in after.remaining:
        if item.number in right:
            print(f"kept change {item.number} as you wrote it: it has passed "
                  "the check")
    print(f"{len(left - chosen - right)} of {diff.total} changes left in "
          f"{show_path(WORKING_COPY)}")
    taken = diff.own_lines(chosen)
    if taken:
        print("Your lines that the lesson's replaced:")
        for i in taken:
            print(f"{i + 1:>5} {visible(diff.script.lines[i])}")
    if after.other_changes:
        print("Other differences are unchanged: see "
              f"`python -m workshop diff {stage}`")
    if backup:
        print(f"Your previous version: {show_path(backup)}")
    print(REOPEN)  # the last line: after Shift+Enter it is in sight


def reset_to(name: str) -> None:
    """Replace the working copy by a stage, or by the backup of that date."""
    if name in STAGES:
        replace_script(STAGES[name].solution, name)
        return
    for backup in backups():
        if backup_label(backup) == name:
            replace_script(backup, name)
            return
    raise UserError(f"no such stage: {name}; fix: choose from "
                    f"{', '.join(STAGES)}, or a date that `python -m workshop "
                    "reset --list` lists")


def restore_previous() -> None:
    """Restore the previous version of the working copy.

    Done twice, it brings this version back.
    """
    for backup in reversed(backups()):
        if not backup.is_file():  # it cannot be put back
            continue
        try:
            differs = read_regular(backup) != read_working_copy()
        except OSError as error:  # one before it would be another version
            raise UserError(
                f"{show_path(WORKING_COPY)} is unchanged: its previous "
                f"version, {show_path(backup)}, cannot be read "
                f"({error.strerror}); "
                "fix: choose another of `python -m workshop reset --list`"
            ) from error
        if differs:
            replace_script(backup, describe_backup(backup))
            return
    raise UserError("nothing to undo: no backup of "
                    f"{show_path(WORKING_COPY)} differs from it")


def describe_backup(backup: Path) -> str:
    """Say what a backup is: its date, or what `apply` made after it."""
    stage, numbers = applied_after(backup)
    if stage not in LESSONS:
        return backup_label(backup)
    diff = Diff(stage, backup)
    changes = f"{numbers[0]}"
    if len(numbers) > 1:
        changes = f"{numbers[0]} to {numbers[-1]}"
        if numbers[-1] - numbers[0] >= len(numbers):  # some are left out
            changes = ", ".join(map(str, numbers))
    return (f"as it was before `apply {stage} {changes}`, with "
            f"{diff.total - len(diff.remaining)} of {diff.total} changes made")


def replace_script(source: Path, name: str) -> None:
    """Replace the working copy by a copy of `source`."""
    data = read_script_bytes(source, most=-1)
    with lock_working_copy():
        before = read_working_copy()
        if before == data:
            print(f"{show_path(WORKING_COPY)} is already {name}; "
                  "it is unchanged")
            return
        backup = replace_working_copy(data, before)
    print(f"{show_path(WORKING_COPY)} is now {name}")
    if backup:
        print(f"Your previous version: {show_path(backup)} "
              "(`python -m workshop reset --undo` restores it)")
    print(REOPEN)


def read_working_copy() -> bytes | None:
    """Return the bytes of the working copy, or None if it does not exist."""
    if not WORKING_COPY.exists():
        return None
    return read_script_bytes(WORKING_COPY, most=-1)


def undone_changes(diff: Diff) -> list[int]:
    """Return the changes that `apply` made and that are lost again, sorted.

    An editor that shows an older version may have saved that: then one of them
    is as it was, and what `apply` made later has gone with it.
    """
    left = diff.remaining_lines()
    later: set[int] = set()
    found: set[int] = set()
    for backup in reversed(backups()):
        stage, numbers = applied_after(backup)
        if stage != diff.stage:
            break
        again = left.keys() & {*numbers}
        later |= again
        with suppress(UserError):
            before = Diff(stage, backup).remaining_lines() if again else {}
            if any(left[number] == before.get(number) for number in again):
                found |= later
    return sorted(found)


def list_all() -> None:
    """Print the stages and the backups, and what is in each of them."""
    stages = read_stages()
    print(f"stages: {' '.join(stages)}")
    kept = []
    if WORKING_COPY.exists():
        kept.append((show_path(WORKING_COPY), WORKING_COPY))
    kept += [(backup_label(backup), backup) for backup in backups()]
    for name, path in kept:
        try:
            count, stage = nearest(Script(path), stages)
        except UserError as error:
            print(f"{visible(name):20} {visible(str(error))}")
            continue
        print(f"{visible(name):20} {stage}" + (
            f", with {count} lines of code changed" if count else ""))
    if len(kept) > 1:
        print("`python -m workshop reset DATE` restores that version")


def choose_script(stage: str) -> tuple[Path, str]:
    """The script that a batch file trains with, and a line that says why.

    It is the working copy if that has passed the check for the stage. If it
    was edited since, it is used as well, with a warning, but only while it is
    still nearest to that stage and not on its way to the next one.
    """
    shown, solution = show_path(WORKING_COPY), find_stage(stage).solution
    instead = f"script    {show_path(solution)}"
    if stage not in LESSONS:
        return solution, instead
    try:
        script, when = Script(WORKING_COPY), passed_checks.last_passed(stage)
        if passed_checks.has_passed(stage, script.data):
            return WORKING_COPY, (
                f"script    {shown}, which has passed the check")
        require(when, f"{shown} has never passed the check for {stage}")
        _, at = nearest(script, read_stages())
        require(at == stage, f"{shown} is closer to {at} now")
    except UserError as why:
        return solution, f"{instead}, because {why}"
    return WORKING_COPY, (
        f"warning: {shown} was edited after it passed the check, at {when}; "
        f"fix: check it again: `python -m workshop check {stage}`")


# --------------------------------------------------------------- the journey


def lesson_rows() -> list[tuple[str, str, str, int]]:
    """Rows: each lesson, when its check was passed last, how many runs.

    First come those of the path that most lessons go on from.
    """
    found, _ = runs.read_runs(runs.list_folders(runs.RUNS))
    count = Counter(run.stage for run in found)
    together = Counter(map(first_lesson, LESSONS))
    return [(stage, find_stage(stage).title,
             (passed_checks.last_passed(stage) or "")[:16], count[stage])
            for stage in sorted(LESSONS, key=lambda name: -together[
                first_lesson(name)])]


def first_lesson(stage: str) -> str:
    """The lesson that one begins with to come to this stage."""
    before = find_stage(stage).after
    return first_lesson(before) if before in LESSONS else stage


def next_lessons() -> tuple[str, list[str]]:
    """(a line about the script and what comes next, its lessons).

    Raises `UserError` if there is no script.
    """
    script = Script(WORKING_COPY)
    _, stage = nearest(script, read_stages())
    after = sorted((name for name in LESSONS
                    if find_stage(name).after == stage),
                   key=lambda name: -sum(  # first, what most goes on from
                       find_stage(later).after == name for later in LESSONS))
    begun = [diff for diff in (Diff(name, script.path) for name in (
        *[stage][:stage in LESSONS], *after))
             if 0 < len(diff.remaining) < diff.total]
    if begun:
        diff = min(begun, key=lambda diff: len(diff.other_changes))
        return (f"Your script is on its way to {diff.stage}: "
                f"{len(diff.remaining)} of {diff.total} changes are left.",
                [diff.stage])
    if stage in LESSONS and not passed_checks.has_passed(stage, script.data):
        return (f"Your script is {stage}, and this version has not passed the "
                f'check: `python -m workshop check {stage}`', [stage])
    return (f"Your script is {stage}" + ", checked" * (stage in LESSONS)
            + ". Next lessons:" if after else
            f"Your script is {stage}, checked; no lesson follows.", after)
