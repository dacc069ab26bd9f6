"""`workshop dev check`: what does not fit together in a lesson is named."""

import json
import re
import shutil

import pytest
from conftest import copy_course, edit, python

from backstage import ROOT
from workshop.stages import LESSONS, STAGES


@pytest.fixture
def clone(tmp_path):
    copy_course(tmp_path, "backstage", "workshop", "solutions", "notebooks",
                "batchfiles", "README.md", "docs/INSTRUCTOR.md",
                "docs/lessons", "tests/tables/check")
    return tmp_path


def check(clone, *words):
    """(exit status, output) of `dev check`."""
    end = python(clone, "-m", "workshop", "dev", "check", *words)
    return end.returncode, end.stdout + end.stderr


def test_all_parts_fit():
    status, out = check(ROOT)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["ok", f"{name}:"] for name in STAGES]


def change(path, old, new):
    path.write_text(edit(path.read_text(), (old, new)))


def without_cell(clone):
    path = clone / "notebooks" / "diff_ddp.ipynb"
    book = json.loads(path.read_text())
    book["cells"] = [cell for cell in book["cells"]
                     if 'diff("ddp")' not in "".join(cell["source"])]
    path.write_text(json.dumps(book))


def no_batch_file(clone):
    for path in (clone / "batchfiles").glob("batch-ddp*.sh"):
        path.unlink()


def no_question(clone):
    path = clone / LESSON
    path.write_text(re.sub(r"\*\*(Predict|Predict and check|Answer)\.\*\* ",
                           "", path.read_text()))


def no_planted_mistake(clone):
    shutil.rmtree(clone / "tests" / "tables" / "check" / "ddp")


SCRIPT, LESSON, NOTEBOOK = ("solutions/train_gpt2_ddp.py",
                            "workshop/lessons/ddp.md",
                            "notebooks/diff_ddp.ipynb")
BATCH_FILE, PAGE = "batchfiles/batch-ddp-2n4g.sh", "docs/lessons/ddp.md"


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda clone: (clone / SCRIPT).unlink(), f"{SCRIPT} is missing"),
    (lambda clone: (clone / LESSON).unlink(), f"{LESSON} is missing"),
    (lambda clone: (clone / NOTEBOOK).unlink(), f"{NOTEBOOK} is missing"),
    (lambda clone: (clone / NOTEBOOK).write_text("{"), "is not a notebook"),
    (without_cell, 'has no cell diff("ddp")'),
    (no_batch_file, "batchfiles/ has no batch-ddp.sh"),
    (lambda clone: change(clone / BATCH_FILE, "(stage ddp)", "(stage std)"),
     f"{BATCH_FILE} starts another stage"),
    (lambda clone: change(clone / LESSON, "and shows where it begins.", ""),
     f"{LESSON}: its introduction does not say 'and shows where"),
    (no_question, f"{LESSON}: no change asks a question"),
    (lambda clone: change(clone / "README.md", "| ddp | std |", "| |"),
     "README.md has no row for the stage"),
    (lambda clone: change(clone / "docs/INSTRUCTOR.md",
                          "(../notebooks/diff_ddp.ipynb) |", " |"),
     "docs/INSTRUCTOR.md has no row for the notebook"),
    (lambda clone: (clone / PAGE).unlink(), f"{PAGE} is missing"),
    (no_planted_mistake, "tests/tables/check/ddp has no planted mistake"),
    (lambda clone: change(clone / SCRIPT, 'Run("ddp"', 'Run("other"'),
     f'{SCRIPT} opens no run named "ddp"'),
    (lambda clone: (clone / SCRIPT).write_text("1 +"), f"{SCRIPT}, line 1"),
    (lambda clone: change(clone / SCRIPT, "B, T, _ = x.shape",
                          "B, T, _ = x.size()"), "no change for the hunk"),
    (lambda clone: change(clone / LESSON, "## 2. ", "## 3. "),
     "a change begins with '## 2. '"),
    (lambda clone: change(clone / LESSON, "**Hint.** `i` is",
                          "**Hint.** Think.\n\n**Hint.** `i` is"),
     "a change has one hint")])
def test_what_does_not_fit(clone, spoil, says):
    spoil(clone)
    status, out = check(clone, "ddp")
    assert status == 1 and "Traceback" not in out, out
    first, fix, *_ = out.splitlines()
    assert first.startswith("FAIL  ddp: ") and says in first, out
    assert fix.startswith("      fix: ") and len(fix) > 20


def test_an_unknown_stage_is_a_line():
    status, out = check(ROOT, "ddq")
    assert status and out.startswith(
        "error: no such stage: ddq; fix: add an entry to STAGES in")


def test_a_stage_without_planted_mistakes_is_a_line():
    status, out = check(ROOT, "std", "--mistakes")
    assert status == 1 and "error: no mistake is planted in these" in out


def test_a_new_stage_is_checked_by_the_same_command(clone):
    """As CONTRIBUTING has it: its parts, one after the other."""
    shutil.copy(clone / SCRIPT, clone / "solutions" / "train_gpt2_mine.py")
    status, out = check(clone)
    assert status == 1 and out.startswith(
        "FAIL  solutions/train_gpt2_mine.py belongs to no stage\n      fix: ")
    (clone / "solutions" / "train_gpt2_mine.py").unlink()
    registry = clone / "workshop" / "stages.py"
    change(registry, ")}\nFIRST", '    Stage("mine", "std", "mine", "#123456",'
           ' "torchrun", ((1, 1, 1),)),\n)}\nFIRST')
    batch_file = "batchfiles/batch-ddp-1n1g.sh"
    mistake = "tests/tables/check/ddp/no-no_sync.diff"
    for make, lacks in (
            (None, "solutions/train_gpt2_mine.py is missing"),
            (SCRIPT, "workshop/lessons/mine.md is missing"),
            (LESSON, "notebooks/diff_mine.ipynb is missing"),
            (NOTEBOOK, "batchfiles/ has no batch-mine.sh"),
            (batch_file, "tests/tables/check/mine has no planted mistake"),
            (mistake, "README.md has no row for the stage"),
            ("README.md", "docs/INSTRUCTOR.md has no row for the notebook"),
            ("docs/INSTRUCTOR.md", "docs/lessons/mine.md is missing")):
        if make in ("README.md", "docs/INSTRUCTOR.md"):
            add_row(clone / make)
        elif make:
            add_part(clone, make)
        status, out = check(clone, "mine")
        assert status == 1 and lacks in out, (make, out)
    add_part(clone, PAGE)
    assert check(clone, "mine") == (
        0, check(clone, "ddp")[1].replace("ddp", "mine"))
    assert "mine" not in LESSONS


def add_part(clone, name):
    """Copy a part of the stage ddp, as one of the stage mine."""
    path = clone / name.replace("ddp", "mine")
    path.parent.mkdir(exist_ok=True)
    path.write_text((clone / name).read_text().replace(
        '"ddp"', '"mine"').replace('\\"ddp\\"', '\\"mine\\"').replace(
            "(stage ddp)", "(stage mine)"))


def add_row(path):
    """Copy the row of the stage ddp, as one of the stage mine."""
    row, = (line for line in path.read_text().splitlines(keepends=True)
            if "| ddp | std |" in line or "(../notebooks/diff_ddp" in line)
    change(path, row, row + row.replace("ddp", "mine"))
