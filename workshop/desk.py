"""Changes to the attendee's script that lose nothing: `apply` and `reset`.

Whatever stood in the script stays beside it, as a backup with the date in its
name: `code/train_gpt2.20261231-235959.py`.
"""

import os
import re
import shutil
import time

from workshop.diff import DESK, Diff, Script, differences, show, solution
from workshop.errors import UserError, check

STAGES = ("std", "ddp", "lit")
REOPEN = ("If it is open in an editor, reopen it there (JupyterLab: File > "
          "Reload Python File from Disk).")


def apply(stage, numbers=()):
    """Make changes of the lesson, by their numbers, or all that are left."""
    diff = Diff(stage)
    left = {item.number for item in diff.left}
    for number in numbers:
        check(1 <= number <= diff.total, f"there is no change {number}: "
              f"{stage} has changes 1 to {diff.total}")
    chosen = left & set(numbers) if numbers else left
    if not chosen:
        what = "those changes are" if numbers else "every change is"
        print(f"{what} made already; {show(DESK)} stays as it was")
        return
    text = diff.apply(chosen).encode()
    after = Diff(stage, data=text)
    check({item.number for item in after.left} == left - chosen
          and len(after.others) <= len(diff.others)
          and (diff.yours.syntax_error or not after.yours.syntax_error),
          f"your changes around line {first_line(diff, chosen)} are in the "
          f"way: make this one by hand, or `python -m workshop reset {stage}`")
    backup = replace(text)
    for item in diff.left:
        if item.number in chosen:
            print(f"made change {item.number}: {item.title}")
    print(f"{len(after.left)} of {diff.total} changes left in {show(DESK)}")
    if after.others:
        print("What differs for other reasons stays as it was: see "
              f"`python -m workshop diff {stage}`")
    print(f"The script as it was: {show(backup)}")
    print(REOPEN)


def first_line(diff, numbers):
    """Where in the script the first of these changes begins, from 1."""
    return 1 + min(edit[0] for item in diff.left if item.number in numbers
                   for edit in item.edits)


def reset(name):
    """Put a stage, or the backup of that date, on the desk."""
    source = solution(name) if name in STAGES else find_backup(name)
    check(source.is_file(), f"there is no {show(source)}: "
          "`python -m workshop reset --list` shows what there is")
    put_back(source, name)


def undo():
    """Put back what the desk's script was before; twice is as it is now."""
    now = DESK.read_bytes() if DESK.exists() else None
    for backup in reversed(backups()):
        if backup.read_bytes() != now:
            put_back(backup, date(backup))
            return
    raise UserError(f"there is nothing to undo: no backup of {show(DESK)} "
                    "differs from it")


def put_back(source, name):
    """Let the desk's script be a copy of `source`."""
    data = source.read_bytes()
    if DESK.exists() and DESK.read_bytes() == data:
        print(f"{show(DESK)} is {name} already; it stays as it was")
        return
    backup = replace(data)
    print(f"{show(DESK)} is {name} now")
    if backup:
        print(f"The script as it was: {show(backup)} "
              "(`python -m workshop reset --undo` puts it back)")
    print(REOPEN)


def list_all():
    """Print the stages and the backups, and what each holds."""
    stages = {stage: Script(solution(stage)) for stage in STAGES
              if solution(stage).exists()}
    print(f"stages: {' '.join(stages)}")
    kept = [(show(DESK), DESK)] if DESK.exists() else []
    kept += [(date(backup), backup) for backup in backups()]
    for name, path in kept:
        code = Script(path).code
        count, stage = min(
            (sum(i2 - i1 + j2 - j1 for i1, i2, j1, j2 in
                 differences(script.code, code)), stage)
            for stage, script in stages.items())
        print(f"{name:20} {stage}" + (
            f", with {count} lines of code changed" if count else ""))
    if len(kept) > 1:
        print("`python -m workshop reset DATE` puts the one of that date back")


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
    """The date in a backup's name."""
    return backup.stem.split(".", 1)[1]


def find_backup(name):
    """The backup of that date."""
    check(re.fullmatch(r"[\d-]+", name), f"there is no stage {name}: choose "
          f"from {', '.join(STAGES)}, or a date that `reset --list` shows")
    return DESK.with_name(f"{DESK.stem}.{name}{DESK.suffix}")


def replace(data):
    """Write the desk's script, whole or not at all; returns the backup.

    Raises `UserError` where there is no room for both.
    """
    part = DESK.with_name(f".{DESK.name}.{os.getpid()}")
    try:
        DESK.parent.mkdir(exist_ok=True)
        part.write_bytes(data)
        backup = None
        if DESK.exists():
            shutil.copymode(DESK, part)
            backup = back_up()
        os.replace(part, DESK)
        return backup
    except OSError as error:
        raise UserError(f"{show(DESK)} stays as it was ({error})") from error
    finally:
        if part.exists():
            part.unlink()


def back_up():
    """Copy the desk's script to a name that is not taken; returns it."""
    now = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        name = now if number == 1 else f"{now}-{number}"
        backup = DESK.with_name(f"{DESK.stem}.{name}{DESK.suffix}")
        try:
            with open(backup, "xb") as copy:
                copy.write(DESK.read_bytes())
            return backup
        except FileExistsError:
            number += 1
        except OSError:
            backup.unlink(missing_ok=True)  # half of a copy is none
            raise
