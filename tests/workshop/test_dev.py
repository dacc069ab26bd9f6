"""`workshop dev check`: what does not fit together in a lesson is named."""

import json
import shutil

import pytest
from conftest import copy_course, edit, python

from backstage import ROOT
from workshop.stages import LESSONS, STAGES


@pytest.fixture
def clone(tmp_path):
    copy_course(tmp_path, "backstage", "workshop", "solutions", "notebooks",
                "batchfiles")
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


SCRIPT, LESSON, NOTEBOOK = ("solutions/train_gpt2_ddp.py",
                            "workshop/lessons/ddp.md",
                            "notebooks/diff_ddp.ipynb")


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda clone: (clone / SCRIPT).unlink(), f"{SCRIPT} is missing"),
    (lambda clone: (clone / LESSON).unlink(), f"{LESSON} is missing"),
    (lambda clone: (clone / NOTEBOOK).unlink(), f"{NOTEBOOK} is missing"),
    (lambda clone: (clone / NOTEBOOK).write_text("{"), "is not a notebook"),
    (without_cell, 'has no cell diff("ddp")'),
    (no_batch_file, "batchfiles/ has no batch-ddp.sh"),
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
    assert status and out.startswith("error: no such stage: ddq")


def test_a_new_stage_is_checked_by_the_same_command(clone):
    """As CONTRIBUTING has it: its parts, one after the other."""
    registry = clone / "workshop" / "stages.py"
    change(registry, ")}\nFIRST", '    Stage("mine", "std", "mine", "#123456",'
           ' "torchrun", ((1, 1, 1),)),\n)}\nFIRST')
    for make, lacks in (
            (None, "solutions/train_gpt2_mine.py is missing"),
            (SCRIPT, "workshop/lessons/mine.md is missing"),
            (LESSON, "notebooks/diff_mine.ipynb is missing"),
            (NOTEBOOK, "batchfiles/ has no batch-mine.sh")):
        if make:
            path = clone / make.replace("ddp", "mine")
            shutil.copy(clone / make, path)
            path.write_text(path.read_text().replace(
                '"ddp"', '"mine"').replace('\\"ddp\\"', '\\"mine\\"'))
        status, out = check(clone, "mine")
        assert status == 1 and lacks in out, (make, out)
    shutil.copy(clone / "batchfiles" / "batch-ddp-1n1g.sh",
                clone / "batchfiles" / "batch-mine.sh")
    assert check(clone, "mine") == (
        0, check(clone, "ddp")[1].replace("ddp", "mine"))
    assert "mine" not in LESSONS
