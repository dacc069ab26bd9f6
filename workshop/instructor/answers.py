"""The questions of the lessons with their answers, for an instructor.

    python -m workshop answers --minutes 60 > answers.md
    python -m workshop answers ddp

Nothing is written twice: "Predict" is taken from workshop/lessons, "Break
it" and the other questions from the notebooks, where the answers are folded.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from workshop.diff.diff import load_lesson
from workshop.instructor.plan import LENGTHS, read_plan
from workshop.stages import LESSONS

FOLDED_ANSWER = re.compile(
    r"<details><summary>Answer</summary>\n(.*?)</details>", re.S)


def predictions(stage: str) -> list[str]:
    """The Markdown of a lesson's questions, by change."""
    return [f"## {number}. {change.title}\n\n**Predict.** {change.predict}"
            f"\n\n**Answer.** {change.answer}"
            for number, change in enumerate(load_lesson(stage).changes, 1)
            if change.predict]


def unfolded(notebook: Path) -> list[str]:
    """The Markdown of the cells that have folded answers.

    notebook: its path.
    """
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells
             if cell["cell_type"] == "markdown"]
    return [FOLDED_ANSWER.sub(r"**Answer.**\n\1", text).strip()
            for text in texts if FOLDED_ANSWER.search(text)]


def notebooks(minutes: int | None) -> list[Path]:
    """Return the lessons' notebooks in the order of the plan.

    minutes: those of a session of this length alone, one of `LENGTHS`. Without
    it, those that the plan does not name come last.
    """
    found = {path.stem: path
             for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
             if ".20" not in path.name}  # a backup
    names = [name for name, row in read_plan().items()
             if row.where == f"notebooks/{name}.ipynb"
             and (minutes is None or minutes in row.minutes)]
    if minutes is None:
        names += [name for name in found if name not in names]
    return [found[name] for name in names if name in found]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", nargs="?", help="ddp, collectives, ...")
    parser.add_argument("--minutes", type=int, choices=LENGTHS,
                        help="the lessons of a session of this length alone")


def main(args: argparse.Namespace) -> None:
    """Print the answers of all lessons, or of one: a stage or a notebook.

    In the order in which the plan has them.
    """
    lesson, texts = args.lesson, {}  # of each lesson: its questions
    for path in notebooks(args.minutes):
        name = path.stem.removeprefix("diff_")
        texts[name] = predictions(name) if name in LESSONS else []
        texts[name] += unfolded(path)
    texts = {name: found for name, found in texts.items() if found}
    require(not lesson or lesson in texts, f"no lesson {lesson} has answers; "
            f"fix: choose from {', '.join(texts)}")
    print("# The answers, for the instructor")
    for name in [lesson] if lesson else texts:
        print(f"\n# {name}", *texts[name], sep="\n\n")
