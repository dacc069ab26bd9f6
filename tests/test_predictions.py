"""The lessons' questions: what an answer says of the check is true."""

import contextlib
import io
import json
import re

import pytest

from backstage import ROOT
from workshop.check.command import main
from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.notebook import ranks
from workshop.stages import LESSONS, STAGES

# What the check has to print, quoted in an answer: "The check says: `...`",
# or "The check looks at this and that, and says: `...`".
QUOTE = re.compile(r"The check\b[^`]*\bsays: `([^`]+)`")
CHECKED = [(stage, number, change) for stage in LESSONS
           for number, change in enumerate(documents.load(stage), 1)
           if change.checked]
AT_ONCE = next(case for case in CHECKED if case[0] == "ddp")


@pytest.mark.parametrize("stage, number, change", [
    pytest.param(*case, id=f"{case[0]}-{case[1]}",
                 marks=() if case == AT_ONCE else pytest.mark.whole)
    for case in CHECKED])
def test_the_check_says_what_the_answer_quotes(
        stage, number, change, tmp_path):
    """Of the script without this change of its lesson."""
    diff = Diff(stage, STAGES[STAGES[stage].after].solution)
    script = tmp_path / "train_gpt2.py"
    script.write_text(
        diff.apply(set(range(1, diff.total + 1)) - {number}))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert not main(stage, script, change=number)
    quoted, = QUOTE.findall(change.answer)
    failed = re.search("^  FAIL  (.*)$", out.getvalue(), re.MULTILINE)
    assert quoted in failed[1], out.getvalue()


@pytest.mark.whole
def test_the_small_trainer_of_the_lesson_runs(capsys):
    """As the notebook's cell runs it."""
    book = json.loads((ROOT / "notebooks" / "diff_lit.ipynb").read_text())
    source, = ("".join(cell["source"]) for cell in book["cells"]
               if "".join(cell["source"]).startswith("%%ranks 1"))
    ranks.answer("\n" + source.partition("\n")[2], 1, 60)
    answers = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert {"line": "rank 0: y = 3.00 x + 1.00"} in answers
    assert not any("error" in answer for answer in answers)
