"""Changes to the attendee's script that lose nothing: `apply` and `reset`.

What was in the script is kept next to it, as a backup with the date in its
name: `code/train_gpt2.20261231-235959.py`.
"""

import os
import re

from backstage.errors import UserError, require
from backstage.files import show_path, write_atomically
from workshop.backups import dated_names, locked_desk
from workshop.lesson import checked
from workshop.lesson.diff import Diff, Script, nearest, read_stages
from workshop.stages import DESK, LESSONS, STAGES, find

REOPEN = ("Reopen the script if an editor shows it. In JupyterLab, click into "
          "it, then File > Reload Python File from Disk; should JupyterLab "
          "ask, take Revert: Overwrite throws these changes away.")


@locked_desk()
def apply(stage, numbers=()):
    """Make changes of the lesson, by their numbers, or all that are left."""
    diff = Diff(stage)
    left = {item.number for item in diff.left}
    for number in numbers:
        diff.require_change(number)
    chosen = left & set(numbers) if numbers else left
    if not chosen:
        what = "those changes are" if numbers else "every change is"
        print(f"{what} already made; {show_path(DESK)} is unchanged")
        return
    line = 1 + min(edit[0] for item in diff.left if item.number in chosen
                   for edit in item.edits)
    text = diff.apply(chosen).encode()
    after = Diff(stage, data=text)
    require({item.number for item in after.left} == left - chosen
            and len(after.others) <= len(diff.others)
            and (diff.yours.syntax_error or not after.yours.syntax_error),
            f"your changes around line {line} are in the way: make this one "
            f"by hand, or `python -m workshop reset {stage}`")
    backup = replace(text, diff.yours.data)
    print(REOPEN)
    for item in diff.left:
        if item.number in chosen:
            print(f"made change {item.number}: {item.title}")
    print(f"{len(after.left)} of {diff.total} changes left in "
          f"{show_path(DESK)}")
    taken = diff.own_lines(chosen)
    if taken:
        print("These lines of yours were replaced by the lesson's:")
        for i in taken:
            print(f"{i + 1:>5} {diff.yours.lines[i]}")
    if after.others:
        print("Other differences are left as they were: see "
              f"`python -m workshop diff {stage}`")
    print(f"Your previous version: {show_path(backup)}")


def reset(name):
    """Put a stage, or the backup with that date, on the desk."""
    source = STAGES[name].solution if name in STAGES else find_backup(name)
    require(source.is_file(), f"there is no {show_path(source)}: "
            "`python -m workshop reset --list` shows what there is")
    put_back(source, name)


def undo():
    """Put back the previous version of the desk's script.

    Done twice, it brings this version back.
    """
    now = DESK.read_bytes() if DESK.exists() else None
    for backup in reversed(backups()):
        try:
            differs = backup.read_bytes() != now
        except OSError:  # it cannot be put back
            continue
        if differs:
            put_back(backup, date(backup))
            return
    raise UserError("there is nothing to undo: no backup of "
                    f"{show_path(DESK)} differs from it")


def put_back(source, name):
    """Make the desk's script a copy of `source`."""
    data = source.read_bytes()
    with locked_desk():
        if DESK.exists() and DESK.read_bytes() == data:
            print(f"{show_path(DESK)} is already {name}; it is unchanged")
            return
        backup = replace(data)
    print(REOPEN)
    print(f"{show_path(DESK)} is now {name}")
    if backup:
        print(f"Your previous version: {show_path(backup)} "
              "(`python -m workshop reset --undo` puts it back)")


def list_all():
    """Print the stages and the backups, and what is in each of them."""
    stages = read_stages()
    print(f"stages: {' '.join(stages)}")
    kept = [(show_path(DESK), DESK)] if DESK.exists() else []
    kept += [(date(backup), backup) for backup in backups()]
    for name, path in kept:
        try:
            count, stage = nearest(Script(path), stages)
        except UserError as error:
            print(f"{name:20} {error}")
            continue
        print(f"{name:20} {stage}" + (
            f", with {count} lines of code changed" if count else ""))
    if len(kept) > 1:
        print("`python -m workshop reset DATE` puts that version back")


def choose(stage):
    """The script that a batch file trains with, and a line that says why.

    It is the desk's if that has passed the check for the stage. If it was
    edited since, it is used as well, with a warning, but only while it is
    still nearest to that stage and not on its way to the next one.
    """
    desk, solution = show_path(DESK), find(stage).solution
    instead = f"script    {show_path(solution)}, because {desk}"
    if stage not in LESSONS:
        return solution, f"script    {show_path(solution)}"
    try:
        script = Script(DESK)
        state = checked.state(stage, script.data)
        if state == checked.NEVER:
            return solution, (f"{instead} has never passed the check for "
                              f"{stage}")
        if state == checked.PASSED:
            return DESK, f"script    {desk}, which has passed the check"
        _, at = nearest(script, read_stages())
    except UserError as error:
        return solution, f"script    {show_path(solution)}, because {error}"
    if at != stage:
        return solution, f"{instead} is nearer to {at} now"
    return DESK, (f"warning: {desk} was edited after it passed the check, at "
                  f"{checked.last_passed(stage)}: is it still right? `python "
                  f"-m workshop check {stage}`")


# ------------------------------------------------------------------ backups


def backups():
    """The backups of the desk's script, the oldest first."""
    found = []
    for path in DESK.parent.glob(f"{DESK.stem}.20*{DESK.suffix}"):
        parts = re.fullmatch(r"(\d{8}-\d{6})(?:-(\d+))?", date(path))
        if parts:
            found.append((parts[1], int(parts[2] or 1), path))
    return [path for *_, path in sorted(found)]


def date(backup):
    return backup.stem.split(".", 1)[1]


def find_backup(name):
    require(re.fullmatch(r"[\d-]+", name), f"there is no stage {name}: choose "
            f"from {', '.join(STAGES)}, or a date that `reset --list` shows")
    return DESK.with_name(f"{DESK.stem}.{name}{DESK.suffix}")


def replace(data, expected=None):
    """Write the desk's script, whole or not at all; returns the backup.

    Raises `UserError` if there is no room for both, or if an editor has
    saved the script since it was read (as `expected`).
    """
    try:
        DESK.parent.mkdir(exist_ok=True)
        backup = back_up() if DESK.exists() else None
        found = backup.read_bytes() if backup else None
        if expected is not None and found != expected:
            if backup:
                backup.unlink()
            raise UserError(f"{show_path(DESK)} was saved meanwhile and "
                            "is left as it is: try again")
        write_atomically(DESK, data)
        return backup
    except OSError as error:
        raise UserError(f"{show_path(DESK)} is unchanged ({error})") from error


def back_up():
    """Copy the desk's script to a name that is not taken; returns it."""
    for backup in dated_names(DESK):
        try:
            copy = open(backup, "xb")
        except FileExistsError:
            continue
        try:
            with copy:
                copy.write(DESK.read_bytes())
                copy.flush()
                os.fsync(copy)  # a power cut may follow the replacement
            return backup
        except OSError:
            backup.unlink()  # half a copy is no backup
            raise
