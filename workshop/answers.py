"""The questions of the lessons with their answers, for an instructor.

    python -m workshop.answers > answers.md

Nothing is written twice: "Predict" is taken from workshop/lessons, "Break
it" and the other questions from the notebooks, where the answers are folded.
"""

import json
import re

from backstage import ROOT
from workshop.lesson.diff import load_lesson
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


def main():
    print("# The answers, for the instructor")
    for stage in LESSONS:
        if found := predictions(stage):
            print(f"\n# Predict: {stage}", *found, sep="\n\n")
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if ".20" not in notebook.name and (found := unfolded(notebook)):
            print(f"\n# The notebook {notebook.stem}", *found, sep="\n\n")


if __name__ == "__main__":
    main()
