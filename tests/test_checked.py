"""What is recorded of a script that passed the check, and who asks for it."""

import os
import re

import conftest
import pytest
from conftest import copy_course, edit

from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.stages import STAGES

STD, DDP, LIT = (STAGES[stage].solution.read_text()
                 for stage in ("std", "ddp", "lit"))
OWN = edit(DDP, ("import math\n", "import math\n\nprint('mine')\n"))
STYLE = edit(DDP, ('local_rank = int(os.environ["LOCAL_RANK"])',
                   'local_rank = int(os.environ.get("LOCAL_RANK"))'))


@pytest.fixture
def repo(tmp_path):
    """A copy of what the tools work on, with no script on the desk."""
    copy_course(tmp_path, "backstage", "workshop", "solutions")
    (tmp_path / "code").mkdir()
    return tmp_path


def python(repo, *words):
    end = conftest.python(repo, *words)
    assert end.returncode == 0, end.stderr
    return end


def write(repo, text):
    (repo / "code" / "train_gpt2.py").write_text(text)


RECORD = ("import sys; from workshop.stages import DESK\n"
          "from workshop.lesson.checked import record\n"
          "record(sys.argv[1], sys.argv[2].encode() if sys.argv[2:] else "
          "DESK.read_bytes())")


def passes(repo, text, stage="ddp"):
    """Put the script on the desk, and let it have passed the check."""
    write(repo, text)
    return python(repo, "-c", RECORD, stage)


def state(repo, stage="ddp"):
    return python(repo, "-c", "from workshop.lesson.checked import state\n"
                  "from workshop.stages import DESK\n"
                  f"print(state({stage!r}, DESK.read_bytes()))").stdout.strip()


def chosen(repo, stage="ddp"):
    """(the script that a batch file trains with, what the log says)."""
    end = python(repo, "-m", "workshop", "script", stage)
    path, = end.stdout.splitlines()
    assert end.stderr.count("\n") == 1, end.stderr
    return os.path.relpath(path, repo), end.stderr


def test_a_script_passes_is_edited_and_passes_again(repo):
    write(repo, DDP)
    assert state(repo) == "never checked"
    assert not passes(repo, DDP).stderr
    assert state(repo) == "passed" and state(repo, "lit") == "never checked"
    write(repo, OWN)
    assert state(repo) == "edited since"
    passes(repo, OWN)
    assert state(repo) == "passed"
    write(repo, DDP)  # what has passed once is right
    assert state(repo) == "passed"
    names = {path.name for path in (repo / "code").iterdir()}
    assert names == {"train_gpt2.py", ".checked.json"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ddp": 1}', "\0", "null",
                                  '{"ddp": {"x": null}}'])
def test_a_damaged_record_is_none(repo, text):
    write(repo, DDP)
    (repo / "code" / ".checked.json").write_text(text)
    assert state(repo) != "passed"
    passes(repo, DDP)
    assert state(repo) == "passed"


def test_a_record_that_cannot_be_written_is_one_line(repo):
    (repo / "code" / ".checked.json").mkdir()
    said = passes(repo, DDP).stderr
    assert said.startswith("warning: code/.checked.json does not know")
    assert said.count("\n") == 1
    assert state(repo) == "never checked"
    assert chosen(repo)[0] == "solutions/train_gpt2_ddp.py"


# ------------------------------------------------------------------ the diff


@pytest.mark.whole
def test_the_diff_of_a_checked_script_says_that_it_is_right(repo):
    words = "checked: right; what remains is style"
    html = "from workshop.notebook.cells import diff; print(diff('ddp').html)"
    for text in (STYLE, OWN):
        write(repo, text)
        assert words not in python(repo, "-m", "workshop", "diff",
                                   "ddp").stdout
        passes(repo, text)
        shown = python(repo, "-m", "workshop", "diff", "ddp").stdout
        assert words in shown.splitlines()[0]
        assert "train_gpt2.py" in shown.splitlines()[0]
        page = re.sub("</?a.*?>", "", python(repo, "-c", html).stdout)
        assert f'<p class="good"><strong>code/train_gpt2.py is {words}' in page
        assert "<h3" not in page and page.count('class="made"') == len(
            documents.load("ddp"))
    # so is one that was tried alone, but not one that was left out
    left = edit(STYLE, ('Run("ddp"', 'Run("std"'))
    diffs = [Diff("ddp", data=text.encode()) for text in (STYLE, left)]
    (own, *_), (_, other) = (diff.left for diff in diffs)
    passes(repo, STYLE, f"ddp {own.number}")
    passes(repo, edit(DDP, ('Run("ddp"', 'Run("std"')), f"ddp {other.number}")
    write(repo, left)
    assert "code/train_gpt2.py: 1 of " in python(
        repo, "-m", "workshop", "diff", "ddp").stdout
    page = python(repo, "-c", html).stdout
    assert f">{other.number} of " in page.split("<details")[0]
    assert "(right, as you wrote it)" in page
    passes(repo, DDP)
    shown = python(repo, "-m", "workshop", "diff", "ddp").stdout
    assert shown.startswith(f"Done: all {len(documents.load('ddp'))}")
    assert words not in shown


# ----------------------------------------------------------- the batch files


def test_a_script_that_passed_is_trained_with(repo):
    passes(repo, OWN)
    script, said = chosen(repo)
    assert script == "code/train_gpt2.py"
    assert "code/train_gpt2.py, which has passed the check" in said


def test_one_that_was_edited_since_is_trained_with_and_the_log_warns(repo):
    passes(repo, DDP)
    write(repo, OWN)
    script, said = chosen(repo)
    assert script == "code/train_gpt2.py"
    assert said.startswith("warning: code/train_gpt2.py was edited after it ")
    assert "check ddp" in said


@pytest.mark.parametrize("text", [DDP, STD, OWN, "def main()\n", "\0"])
def test_one_that_was_never_checked_is_not(repo, text):
    write(repo, text)
    script, said = chosen(repo)
    assert script == "solutions/train_gpt2_ddp.py"
    assert "never passed the check for ddp" in said or "null byte" in said


def test_one_on_its_way_to_the_next_stage_is_not(repo):
    """The batch file of the previous stage does not train half a lesson."""
    passes(repo, DDP)
    write(repo, LIT)
    script, said = chosen(repo)
    assert script == "solutions/train_gpt2_ddp.py"
    assert "is nearer to lit" in said
    passes(repo, LIT, "lit")
    assert chosen(repo)[0] == "solutions/train_gpt2_ddp.py"
    assert chosen(repo, "lit")[0] == "code/train_gpt2.py"


def test_without_a_script_or_a_lesson_it_is_the_solution(repo):
    passes(repo, STD, "std")
    script, said = chosen(repo, "std")
    assert script == "solutions/train_gpt2_std.py"
    (repo / "code" / "train_gpt2.py").unlink()
    script, said = chosen(repo)
    assert script == "solutions/train_gpt2_ddp.py"
    assert "is not there: was it moved" in said
