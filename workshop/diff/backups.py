"""Read scripts; lock, back up and replace the working copy.

What was in the working copy is kept in code/backups/, under a date and a
running number: 20261231-235959-7.py. The number alone gives the order, since
clocks are set back and time zones differ. What came after a backup stands in
its name, too, if that was `apply`: 20261231-235959-7.apply-ddp-1-2.py.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import (
    StrPath,
    show_path,
    sync_folder,
    write_atomically,
)
from rankcheck.system.errors import read_regular
from workshop.stages import FIRST_STAGE, STAGES, WORKING_COPY, require_writable

BACKUPS = WORKING_COPY.with_name("backups")
LARGEST_BACKUP = 500_000  # bytes of a script: comparing more takes minutes


def read_script_bytes(path: StrPath, most: int = LARGEST_BACKUP) -> bytes:
    """The bytes of a script, read once; raises `UserError` if it cannot be.

    Every command that looks at a script reads it here.
    """
    name = show_path(path)
    try:
        data = read_regular(path, most + (most > 0))
    except FileNotFoundError:
        raise UserError(
            f"{name} does not exist; fix: move it back, or make a new one: "
            f"`python -m workshop reset {FIRST_STAGE}`; `reset --list` lists "
            "its earlier versions") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    require(most < 0 or len(data) <= most, f"{name} has more than {most:,} "
            "bytes, too many for a script; fix: check that it is your script")
    return data


# --------------------------------------------------------- the working copy


# What a copied line of a diff begins with, in git's or the lesson's own form.
SIGN = re.compile(r"(?:[ \d]{5} )?([-+])(?=[ \t\w@#)\"'])")


def explain_syntax(error: SyntaxError, lines: list[str]) -> str:
    """Why a script is not Python: a diff's sign, or what Python says.

    The sign may stand in the line above, where it made an expression.
    """
    last = error.lineno or 0
    for number in (last, last - 1):
        for line in lines[max(number - 1, 0):number]:
            if sign := SIGN.match(line):
                return (f"line {number} begins with the {sign[1]} of a diff: "
                        "remove the lines with -, and the + of the others")
    return f"line {error.lineno}: {error.msg}"


@contextmanager
def lock_working_copy() -> Iterator[None]:
    """Let one process at a time read and replace the script.

    None is locked where the file system has no locks, or is only read.
    """
    with ExitStack() as opened:
        with suppress(OSError):
            BACKUPS.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(open(BACKUPS / ".lock", "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_working_copy(data: bytes, before: bytes | None,
                         what: str = "") -> Path | None:
    """Write the working copy, whole or not at all; returns the backup.

    before: the bytes that are there, as far as the caller knows, or None if
    it is not. what: follows the backup, for its name. Raises `UserError` if
    there is no room for both, or if an editor has saved the script meanwhile:
    then it stays as it is.
    """
    target = Path(os.path.realpath(WORKING_COPY))  # a link stays one
    name = show_path(WORKING_COPY)
    for stage in STAGES.values():
        require(not (target.exists() and stage.solution.exists()
                     and target.samefile(stage.solution)),
                f"{name} is a link to {show_path(stage.solution)},"
                f" which must not change; fix: `rm {name}`, then "
                f"`python -m workshop reset {stage.name}`")

    def require_the_same(found: bytes | None) -> None:
        require(found == before, f"{name} was saved meanwhile and "
                "is unchanged; fix: try again")

    backup: Path | None = None
    require_writable()
    try:
        target.parent.mkdir(exist_ok=True)
        require_the_same(read_regular(target) if target.exists() else None)
        if before is not None:
            backup = back_up(before)
        if backup and target.stat().st_nlink > 1:
            write_through(target, data, require_the_same, backup)
        else:
            # An editor's save after this last look is lost: microseconds.
            write_atomically(target, data, last_look=lambda: require_the_same(
                read_regular(target) if target.exists() else None))
    except (OSError, UserError) as error:
        with suppress(OSError):  # a disk may fail after the replacement, too
            if (backup and not isinstance(error, WrittenInPart)
                    and read_regular(target) != data):
                backup.unlink()
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} is unchanged ({error})") from error
    if backup and what:
        named = backup.with_name(f"{backup.stem}.{what}{backup.suffix}")
        with suppress(OSError):  # which a server may say after it, too
            backup.rename(named)
        if named.exists():
            backup = named
    return backup


class WrittenInPart(UserError):
    """The script was written only in part; its backup is complete."""


def write_through(path: Path, data: bytes, check: Callable[[bytes], object],
                  backup: Path) -> None:
    """Write into the file itself, to which another name is linked, too.

    check: a function that gets what is there just before. If there is no
    room, what was there is put back: that has its place already.
    """
    with open(path, "r+b", buffering=0) as file:
        def write(rest: bytes) -> None:
            file.seek(0)
            while rest:
                rest = rest[file.write(rest):]
            file.truncate()
            os.fsync(file)

        found = file.read()
        check(found)
        try:
            write(data)
        except OSError:
            try:
                write(found)
            except OSError as error:
                raise WrittenInPart(
                    f"{show_path(path)} could be written only in part "
                    f"({error.strerror}): your version is "
                    f"{show_path(backup)}") from error
            raise


# ------------------------------------------------------------------- backups


def numbered() -> list[tuple[int, Path]]:
    """[(number, path)] of the backups in their folder, the oldest first."""
    return sorted(
        (int(number), path) for path in BACKUPS.glob("*.py")
        for number in re.findall(r"^\d{8}-\d{6}-(\d+)$", backup_label(path)))


def backups() -> list[Path]:
    """The backups of the working copy, the oldest first.

    Those beside it are from before they had a folder and numbers.
    """
    pattern = f"{WORKING_COPY.stem}.*{WORKING_COPY.suffix}"
    beside = [(date, int(number or 1), path)
              for path in WORKING_COPY.parent.glob(pattern)
              for date, number in re.findall(
                  r"\.(\d{8}-\d{6})(?:-(\d+))?$", path.stem)]
    return [path for *_, path in sorted(beside) + numbered()]


def backup_label(backup: Path) -> str:
    """The backup's date and number, by which people name it."""
    parts = backup.name.split(".")
    return parts[0] if backup.parent == BACKUPS else parts[1]


def applied_after(backup: Path) -> tuple[str, list[int]]:
    """(stage, numbers of changes): what `apply` made then, or ("", [])."""
    found = re.search(r"\.apply-(\w+)-([\d-]+)\.py$", backup.name)
    return (found[1], [*map(int, found[2].split("-"))]) if found else ("", [])


def back_up(data: bytes) -> Path:
    """Keep these bytes in a new backup; returns it."""
    BACKUPS.mkdir(exist_ok=True)
    first = 1 + max(dict(numbered()), default=0)
    for number in itertools.count(first):
        backup = BACKUPS / time.strftime(f"%Y%m%d-%H%M%S-{number}.py")
        try:
            copy = open(backup, "xb")
        except FileExistsError:  # where there are no locks
            continue
        try:
            with copy:
                copy.write(data)
                copy.flush()
                os.fsync(copy)  # a power cut may follow the replacement
            sync_folder(backup.parent)
            return backup
        except OSError:
            backup.unlink()  # half a copy is no backup
            raise
    raise AssertionError  # no number is the last
