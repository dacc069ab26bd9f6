"""The questions of the lessons with their answers, for an instructor.

    python -m workshop answers ddp > answers.md

Nothing is written twice: "Predict" is taken from workshop/lessons, "Break
it" and the other questions from the notebooks, where the answers are folded.
"""

import json
import re

from backstage import ROOT
from backstage.errors import require
from workshop.diff.diff import load_lesson
from workshop.stages import LESSONS

FOLDED = re.compile(
    r"<details><summary>Answer</summary>\n(.*?)</details>", re.S)


def predictions(stage):
    """The Markdown of a lesson's questions, by change."""
    return [f"## {number}. {change.title}\n\n**Predict.** {change.predict}"
            f"\n\n**Answer.** {change.answer}"
            for number, change in enumerate(load_lesson(stage).changes, 1)
            if change.predict]


def unfolded(notebook):
    """The Markdown of the cells that have folded answers.

    notebook: its path.
    """
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells
             if cell["cell_type"] == "markdown"]
    return [FOLDED.sub(r"**Answer.**\n\1", text).strip()
            for text in texts if FOLDED.search(text)]


def add_arguments(parser):
    parser.add_argument("lesson", nargs="?", help="ddp, collectives, ...")


def main(args):
    """Print the answers of all lessons, or of one: a stage or a notebook."""
    lesson, texts = args.lesson, {}  # of each lesson: its questions
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if ".20" not in path.name:
            name = path.stem.removeprefix("diff_")
            texts[name] = predictions(name) if name in LESSONS else []
            texts[name] += unfolded(path)
    texts = {name: found for name, found in texts.items() if found}
    require(not lesson or lesson in texts, f"no lesson with answers is called "
            f"{lesson}: choose from {', '.join(texts)}")
    print("# The answers, for the instructor")
    for name in [lesson] if lesson else texts:
        print(f"\n# {name}", *texts[name], sep="\n\n")
