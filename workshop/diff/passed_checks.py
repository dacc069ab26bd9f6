"""A record of the scripts that have passed the check.

A small file next to the working copy holds a hash of each of them:

    {"<stage>": {"<SHA-256 of the script>": "2026-12-31 23:59:59"}}

A change that was tried alone is a stage of its own here, "<stage> <number>":
with all others made, its script says nothing of them. Its hash is that of the
code without comments, since those of other changes may be the attendee's own.
"""

from __future__ import annotations

import hashlib
import json
import time

from backstage.errors import UserError, warn
from backstage.files import show_path, write_atomically
from rankcheck.system.errors import read_regular
from workshop.diff.backups import lock_working_copy
from workshop.diff.diff import Script
from workshop.stages import WORKING_COPY

PASSED_FILE = WORKING_COPY.with_name(".checked.json")


def record(stage: str, data: bytes) -> None:
    """Remember that the script with these bytes has passed for the stage.

    If the record cannot be written, it warns in one line and continues.
    """
    try:
        with lock_working_copy():  # another check may be ending, too
            passed = load_passed()
            passed.setdefault(stage, {})[digest(data)] = time.strftime(
                "%Y-%m-%d %H:%M:%S")
            text = json.dumps(passed, indent=1) + "\n"
            write_atomically(PASSED_FILE, text.encode())
    except (OSError, UserError) as error:
        if has_passed(stage, data):  # it is written, as the error says
            warn(str(error))
            return
        warn(f"this check is not recorded in {show_path(PASSED_FILE)} "
             f"({error}), so batch files will not train with this script")


def has_passed(stage: str, data: bytes) -> bool:
    """Whether the script with these bytes has passed for the stage."""
    return digest(data) in read_passed().get(stage, {})


def record_change(stage: str, number: int, data: bytes) -> None:
    """Remember that a change has passed, in a script with all others made."""
    record(f"{stage} {number}", code_of(data))


def has_change_passed(stage: str, number: int, data: bytes) -> bool:
    """Whether the change has passed, in a script with all others made."""
    return has_passed(f"{stage} {number}", code_of(data))


def code_of(data: bytes) -> bytes:
    """Return the code of a script, without its comments and their layout.

    Returns the bytes as they are if they are no Python.
    """
    tree = Script(WORKING_COPY, data).tree
    return data if tree is None else tree.encode()


def last_passed(stage: str) -> str | None:
    """When a script last passed for the stage, as text, or None."""
    return max(read_passed().get(stage, {}).values(), default=None)


def read_passed() -> dict[str, dict[str, str]]:
    """Return the record; empty if the file is corrupt or unreadable."""
    try:
        return load_passed()
    except OSError:
        return {}


def load_passed() -> dict[str, dict[str, str]]:
    """Return the record; empty if there is no file, or it is corrupt.

    Raises `OSError` if it cannot be read: what is in it may be needed later.
    """
    try:
        data = read_regular(PASSED_FILE)
    except FileNotFoundError:
        return {}
    try:
        passed = json.loads(data)
        return {stage: {str(key): str(when) for key, when in hashes.items()}
                for stage, hashes in passed.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
