"""Asks verify about the edits that notebooks/your_model.ipynb shows.

    python -m notebooks.experiments.your_model EDITS MISTAKE FLAGS...

It makes the first EDITS edits in a copy of notebooks/your_model.py, and the
mistake with that number under "Break it", or none if it is 0. These are the
blocks of ```diff in the lesson. In a block, @@ stands between two places.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from workshop.errors import run_tool

SCRIPT = ROOT / "notebooks" / "your_model.py"


def read_lesson():
    """The edits, and the mistakes: lists of blocks of lines."""
    cells = json.loads(SCRIPT.with_suffix(".ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells
                     if cell["cell_type"] == "markdown")
    return [re.findall(r"```diff\n(.*?)```", part, re.DOTALL)
            for part in text.split("## Break it")]


def apply(block, text):
    for place in block.split("@@\n"):
        lines = place.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign)
                    for sign in "+-")
        require(text.count(old) == 1, "notebooks/your_model.py is not as it "
                f"was: git checkout brings it back. It lacks:\n{old}")
        text = text.replace(old, new)
    return text


def edited(number, mistake=0):
    """The script with the edits 1 to `number`, and with a mistake or 0."""
    edits, mistakes = read_lesson()
    require(number in range(len(edits) + 1)
            and mistake in range(len(mistakes) + 1),
            f"there are {len(edits)} edits and {len(mistakes)} mistakes")
    text = SCRIPT.read_text()
    for block in edits[:number] + mistakes[mistake - 1:mistake]:
        text = apply(block, text)
    return text


def ask(number, mistake, flags, events=False):
    from rankcheck.verification.command import verify

    text = edited(number, mistake)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, SCRIPT.name)
        script.write_text(text)
        verify([str(script), *flags], 2, 4, events=events)


def main():
    number, mistake, *flags = sys.argv[1:]
    ask(int(number), int(mistake), flags, events=True)


if __name__ == "__main__":
    run_tool(main)
