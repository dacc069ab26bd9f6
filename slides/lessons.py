"""The lessons as pages for the web: docs/lessons/<stage>.md.

A lesson's document (workshop/lessons/<stage>.md) has the reason for each
change and the anchors that tie it to the code. Its page shows the whole diff
of the change instead of the anchors, and folds the answers and the hints.
"""

import re
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from slides import text
from workshop.diff import documents
from workshop.diff.diff import load_lesson
from workshop.stages import LESSONS, STAGES

PAGES = ROOT / "docs" / "lessons"
WRITTEN = ("<!-- Written by `python -m slides --markdown` from "
           "workshop/lessons/{name}.md and solutions/: edit these. -->\n\n")
DIFFS = "and shows its whole diff."
PLACES = """\
In a diff, `@@ line 40, main @@` means line 40 of the complete script, which is
in `main`. If lines are only removed there, it means line 40 of the script
before this lesson.

"""

INDEX = """\
<!-- Written by `python -m slides --markdown`: edit slides/lessons.py. -->

# The lessons, to read

A page for each lesson: every change as a whole diff, with its reason, a
question to answer first, and the answer. To make the changes yourself, open
the lesson beside the script with `python -m workshop lab STAGE`.

| lesson | from | what the stage is | changes | lines |
|---|---|---|---:|---:|
"""


def pages() -> dict[Path, str]:
    """Return {path: Markdown} of every lesson's page and of their index."""
    found = {PAGES / f"{name}.md": page(name) for name in LESSONS}
    found[PAGES / "README.md"] = INDEX + "".join(map(index_row, LESSONS))
    return found


def page(stage: str) -> str:
    """Return a lesson's document with whole diffs instead of anchors."""
    document = STAGES[stage].lesson.read_text("utf-8")
    anchors = documents.ANCHORS_SHOWN
    require(anchors in document, f"lesson {stage}: its introduction does not "
            f"say '{anchors}'; fix: add this to a sentence there, which the "
            "lesson's page replaces")
    document = document.replace(anchors, DIFFS)
    head, *changes = re.split(r"(?m)^(?=## \d+\. )", document)
    parts = [WRITTEN.format(name=stage), head, PLACES]
    for number, change in enumerate(changes, 1):
        whole = text.diff_of(stage, number)
        parts.append(documents.BLOCK.sub(
            lambda _, whole=whole: whole, fold_answer(change)))
    return "".join(parts)


def fold_answer(change: str) -> str:
    """Return a change whose answer and hint open with a click."""
    return re.sub(
        r"(?m)^\*\*(Answer|Hint)\.\*\* ((?:.+\n)+)",
        r"<details><summary>\1</summary>\n\n\2\n</details>\n", change)


def index_row(stage: str) -> str:
    """Return a lesson's row of the index."""
    removed, added = text.changed_lines(stage)
    return (f"| [{stage}]({stage}.md) | {STAGES[stage].after} | "
            f"{STAGES[stage].title} | {len(load_lesson(stage).changes)} | "
            f"-{removed} +{added} |\n")
