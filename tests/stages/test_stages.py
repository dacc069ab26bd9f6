"""The registry: a stage is its script, its lesson and its entry there."""

import json
import re
import shutil

import pytest
from conftest import copy_course, edit, workshop

from workshop.diff import documents
from workshop.stages import STAGES

ENTRY = '''\
    Stage("other", "std", "a copy of ddp", "#123456", "torchrun",
          ((1, 1, 1), (1, 2, 1))),
'''


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository with one stage more, a copy of ddp."""
    clone = tmp_path_factory.mktemp("clone")
    copy_course(clone, "backstage", "workshop", "solutions", "example-logs")
    (clone / "code").mkdir()
    script = clone / "solutions" / "train_gpt2_other.py"
    script.write_text(edit(STAGES["ddp"].solution.read_text(),
                           ('Run("ddp"', 'Run("other"')))
    lesson = clone / "workshop" / "lessons" / "other.md"
    lesson.write_text(STAGES["ddp"].lesson.read_text().replace(
        'Run("ddp"', 'Run("other"'))
    registry = clone / "workshop" / "stages.py"
    registry.write_text(edit(
        registry.read_text(), (")}\nFIRST", f"{ENTRY})}}\nFIRST")))
    return clone


@pytest.mark.whole
def test_a_new_stage_has_a_lesson_and_can_be_the_working_copy(clone):
    N = len(documents.load_changes("ddp"))
    workshop(clone, "reset", "std")
    assert f"{N - 1} of {N} changes left" in workshop(
        clone, "apply", "other", "7")
    workshop(clone, "apply", "other", "--all")
    assert f"Done: all {N} changes" in workshop(clone, "diff", "other")
    assert f"1 of {N} changes left" in workshop(clone, "diff", "ddp")
    assert (clone / "code" / "train_gpt2.py").read_bytes() == (
        clone / "solutions" / "train_gpt2_other.py").read_bytes()
    listed = workshop(clone, "reset", "--list")
    assert listed.startswith(f"stages: {' '.join([*STAGES, 'other'])}\n")
    assert re.search(r"^code/train_gpt2\.py +other$", listed, re.MULTILINE)
    said = workshop(clone, "script", "other")
    assert said.startswith(f"{clone}/solutions/train_gpt2_other.py\n")
    assert "has never passed the check for other" in said


@pytest.mark.whole
def test_runs_of_a_new_stage_are_drawn_in_its_colour(clone):
    for n in (1, 2):
        run = clone / "runs" / f"other-{n}"
        shutil.copytree(clone / "example-logs" / f"ddp-{n}", run)
        record = json.loads((run / "hyperparameters.json").read_text())
        (run / "hyperparameters.json").write_text(
            json.dumps(record | {"stage": "other"}))
    shutil.copytree(clone / "example-logs" / "lit-1", clone / "runs" / "lit")
    said = workshop(clone, "plot", "-o", "picture.svg")
    # in the order of the registry
    assert said == "picture.svg: lit x 1, other x 1, other x 2\n"
    assert "#123456" in (clone / "picture.svg").read_text()


@pytest.mark.whole
def test_a_new_stage_is_checked(clone):
    workshop(clone, "reset", "other")
    said = workshop(clone, "check", "other")
    assert "Correct on 1 and 2 processes" in said
    said = workshop(clone, "script", "other")
    assert said.startswith(f"{clone}/code/train_gpt2.py\n")


# ------------------------------------------------------------- the documents

GOOD = """# Title

About it.

## 1. One

Why one,
and how.

More of it.

```diff
-a = 1
+    a = 2
```

## 2. Two

```diff
+# not a heading
```

Why two.

**Predict and check.** What
happens?

**Answer.** This. And
**Answer.** that.
"""


def test_a_document_is_read():
    one, two = documents.parse_changes(GOOD, "x.md")
    assert one == documents.Change(
        "One", "Why one, and how.\n\nMore of it.", ("-a = 1", "+a = 2"))
    assert two == documents.Change(
        "Two", "Why two.", ("+# not a heading",), "What happens?",
        "This. And **Answer.** that.", checked=True)


@pytest.mark.parametrize("old, new, complaint", [
    ("# Title", "Title", "line 1: a lesson begins with its title"),
    ("About it.", "", "line 1: a lesson begins with its title"),
    (GOOD[GOOD.index("## 1"):], "", "line 1: a lesson begins with its title"),
    ("## 1. One", "## One", "line 5: a change begins with '## 1. '"),
    ("## 2.", "## 3.", "line 17: a change begins with '## 2. '"),
    ("Why two.", "", "line 17: the change has no why"),
    ("```diff\n-a = 1\n+    a = 2\n```\n", "",
     "line 5: a change has one block of anchors"),
    ("Why two.", "```diff\n+b\n```\nWhy two.",
     "line 17: a change has one block of anchors"),
    ("-a = 1\n+    a = 2\n", "", "line 12: the block of anchors begins"),
    ("-a = 1", "a = 1", "line 13: an anchor is a line of code after"),
    ("-a = 1", "-", "line 13: an anchor is a line of code after"),
    ("```diff\n-a", "```\n-a", "line 12: the block of anchors begins"),
    ("**Answer.** This", "This", "line 17: a change asks one question"),
    ("happens?", "so?\n\n**Predict.** And?", "line 17: a change asks one"),
    (GOOD[GOOD.index("```\n\nWhy two"):], "", "line 17: the change has no"),
    (GOOD[GOOD.index("```\n\n## 2."):], "", "line 12: the block of"),
])
def test_a_document_that_is_none_says_where(old, new, complaint):
    with pytest.raises(ValueError) as error:
        documents.parse_changes(edit(GOOD, (old, new)), "x.md")
    assert str(error.value).startswith(f"x.md, {complaint}")


