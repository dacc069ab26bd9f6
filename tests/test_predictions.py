"""The lessons' questions: each has an answer, and the check's are true."""

import contextlib
import io
import json
import re

import pytest
from conftest import edit

from backstage import ROOT
from workshop.check.command import main
from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.notebook import ranks
from workshop.stages import LESSONS, STAGES

# What the check has to print, quoted in an answer: "The check says: `...`",
# or "The check looks at this and that, and says: `...`".
QUOTE = re.compile(r"The check\b[^`]*\bsays: `([^`]+)`")
QUESTIONS = [(stage, number, change) for stage in LESSONS
             for number, change in enumerate(documents.load(stage), 1)
             if change.predict]
CHECKED = [case for case in QUESTIONS if case[2].checked]
AT_ONCE = [case for case in CHECKED if case[0] == "ddp"][:1]
def undo(stage, number):
    """The stage's script without this change of its lesson."""
    diff = Diff(stage, STAGES[STAGES[stage].after].solution)
    assert not diff.others
    return diff.apply(set(range(1, diff.total + 1)) - {number})


def first_failure(stage, script, number):
    """What `python -m workshop check STAGE NUMBER` prints after FAIL."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        right = main(stage, script, change=number)
    found = re.search("^  FAIL  (.*)$", out.getvalue(), re.MULTILINE)
    assert found and not right, out.getvalue()
    return found[1]


@pytest.mark.parametrize("stage", LESSONS)
def test_every_question_has_an_answer(stage):
    changes = [change for name, _, change in QUESTIONS if name == stage]
    assert changes
    for change in changes:
        assert change.predict.endswith(("?", ".")) and "?" in change.predict
        assert change.answer.endswith(".")
        assert len(QUOTE.findall(change.answer)) == change.checked


@pytest.mark.parametrize("stage, number, change", [
    pytest.param(*case, id=f"{case[0]}-{case[1]}",
                 marks=() if case in AT_ONCE else pytest.mark.whole)
    for case in CHECKED])
def test_the_check_says_what_the_answer_quotes(
        stage, number, change, tmp_path):
    script = tmp_path / "train_gpt2.py"
    script.write_text(undo(stage, number))
    assert QUOTE.search(change.answer)[1] in first_failure(
        stage, script, number)


# ------------------------------------------------------- how they are written


TEXT = """# Title

About it.

## 1. One

Why.

**Predict.** What
happens?

**Answer.** This. And
**Answer.** that.

```diff
+a = 1
```
"""


def test_a_question_and_its_answer_are_read():
    one, = documents.parse(TEXT, "x.md")
    assert one == documents.Change(
        "One", "Why.", ("+a = 1",), "What happens?",
        "This. And **Answer.** that.", False)
    checked, = documents.parse(edit(TEXT, ("Predict", "Predict and check")),
                               "x.md")
    assert checked.checked and checked.predict == one.predict
    assert checked.answer == one.answer


@pytest.mark.parametrize("old, new, complaint", [
    ("**Answer.** This", "This",
     r"the question has no answer, '\*\*Answer.\*\* ...'"),
    ("**Predict.** What", "What",
     "the change has an answer without a question"),
    ("**Answer.** that", "that\n\n**Answer.** that",
     "the change has an answer without a question"),
    ("happens?", "happens?\n\n**Predict and check.** What?",
     "the change asks to predict more than one thing"),
])
def test_a_question_without_its_answer_is_refused(old, new, complaint):
    with pytest.raises(ValueError, match=f"^x.md, line 5: {complaint}$"):
        documents.parse(edit(TEXT, (old, new)), "x.md")


# --------------------------------------------------- the cell of the lesson


@pytest.mark.whole
def test_the_small_trainer_of_the_lesson_runs(capsys):
    """A Trainer in 15 lines, as the notebook's cell runs it."""
    book = json.loads((ROOT / "notebooks" / "diff_lit.ipynb").read_text())
    source, = ("".join(cell["source"]) for cell in book["cells"]
               if "".join(cell["source"]).startswith("%%ranks 1"))
    ranks.answer("\n" + source.partition("\n")[2], 1, 60)
    answers = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert {"line": "rank 0: y = 3.00 x + 1.00"} in answers
    assert not any("error" in answer for answer in answers)
    lines = source.split("class ")[1].split("print(")[0].splitlines()
    assert len(list(filter(str.strip, lines))) <= 20
