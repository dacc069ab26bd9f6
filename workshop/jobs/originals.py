"""Are the solutions and the lessons as the course has them?

A script is compared with these. If somebody edits one of them in place of the
working copy, `diff` and `apply` would take that for the course's.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from backstage import ROOT
from backstage.errors import UserError
from backstage.files import show_path, write_atomically
from workshop.jobs import git
from workshop.stages import STAGES, WORKING_COPY

FOLDERS = "solutions", "workshop/lessons"
# where there is no git
ORIGINALS_FILE = WORKING_COPY.with_name(".originals.json")


def require_originals() -> None:
    """Raise a `UserError` that names a solution or a lesson that was edited.

    In a clone, an edit is meant if it is staged. In a copy without git, the
    files are compared with those of the first time that this was asked.
    """
    try:
        edited = git.list_names("diff", "--name-only", "--no-renames", "-z",
                                "--", *FOLDERS)
        fix = "`git restore {0}`, or `git add {0}` if you mean it"
    except UserError:  # no git here, or no clone
        edited = changed_since_recorded()
        fix = ("copy {0} from the course again; if this is a newer copy of "
               f"it, delete {show_path(ORIGINALS_FILE)}")
    if edited:
        name = min(edited)
        raise UserError(f"{name} was edited, and is what your script is "
                        f"compared with; fix: {fix.format(name)}")


def changed_since_recorded() -> set[str]:
    """Return the names of files that differ from the record.

    It is made here if there is none, where that is possible.
    """
    now = {}
    for stage in STAGES.values():
        for path in stage.solution, stage.lesson:
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                now[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    recorded = None
    with suppress(OSError, ValueError):
        recorded = json.loads(ORIGINALS_FILE.read_text("utf-8"))
    if not isinstance(recorded, dict):
        with suppress(OSError, UserError):
            write_atomically(ORIGINALS_FILE,
                             json.dumps(now, indent=1).encode())
        return set()
    return {name for name, digest in recorded.items()
            if now.get(name) != digest}
