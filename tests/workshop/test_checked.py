"""What is recorded of a script that passed the check, and who asks for it."""

import re

import pytest
from conftest import copy_course, edit, python

from backstage.files import show_path
from workshop.check.command import make_others
from workshop.diff import documents, passed_checks, render, working_copy
from workshop.diff.diff import Diff
from workshop.stages import STAGES

STD, DDP, LIT = (STAGES[stage].solution.read_text()
                 for stage in ("std", "ddp", "lit"))
OWN = edit(DDP, ("import math\n", "import math\n\nprint('mine')\n"))
STYLE = edit(DDP, ('local_rank = int(os.environ["LOCAL_RANK"])',
                   'local_rank = int(os.environ.get("LOCAL_RANK"))'))
# the change in which STYLE differs from DDP
OWN_CHANGE = Diff("ddp", data=STYLE.encode()).remaining[0].number


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A working copy of its own, which is empty."""
    file = tmp_path / "code" / "train_gpt2.py"
    file.parent.mkdir()
    monkeypatch.setattr(working_copy, "WORKING_COPY", file)
    monkeypatch.setattr(render, "WORKING_COPY", file)
    # WORKING_COPY is in the repository
    monkeypatch.setattr(render, "link", str)
    monkeypatch.setattr(render, "link_lines", str)
    monkeypatch.setattr(passed_checks, "PASSED_FILE",
                        file.with_name(".checked.json"))
    return file


def passes(script, text, stage="ddp"):
    """Make the script the working copy, and let it have passed the check."""
    script.write_text(text)
    passed_checks.record(stage, script.read_bytes())


def has_passed(script, stage="ddp"):
    return passed_checks.has_passed(stage, script.read_bytes())


def test_a_script_passes_is_edited_and_passes_again(script):
    script.write_text(DDP)
    assert not has_passed(script) and not passed_checks.last_passed("ddp")
    passes(script, DDP)
    assert has_passed(script) and passed_checks.last_passed("ddp")
    assert not has_passed(script, "lit")
    script.write_text(OWN)
    assert not has_passed(script)
    passes(script, OWN)
    assert has_passed(script)
    script.write_text(DDP)  # what has passed once is right
    assert has_passed(script)
    names = {path.name for path in script.parent.iterdir()}
    assert names == {"train_gpt2.py", ".checked.json"}


def test_a_record_that_cannot_be_written_is_one_line(script, capsys):
    passed_checks.PASSED_FILE.mkdir()
    passes(script, DDP)
    said = capsys.readouterr().err
    assert re.fullmatch(r"warning: this check is not recorded .*\n", said)
    assert not has_passed(script)
    assert working_copy.choose_script("ddp")[0] == STAGES["ddp"].solution


# ------------------------------------------------------------------ the diff


def test_the_diff_of_a_checked_script_says_that_it_is_right(script):
    words = "passed the check; what remains is style"

    def shown():
        diff = Diff("ddp", script)
        return render.to_text(diff), render.to_html(diff)

    for text in (STYLE, OWN):
        script.write_text(text)
        assert words not in shown()[0]
        passes(script, text)
        said, page = shown()
        assert f"train_gpt2.py has {words}" in said.splitlines()[0]
        assert f'<p class="good"><strong>{show_path(script)} has {words}' in (
            page)
        assert "<h3" not in page and page.count('class="made"') == len(
            documents.load_changes("ddp"))
    # so is one that was tried alone, but not one that was left out
    left = edit(STYLE, ('Run("ddp"', 'Run("std"'))
    diffs = [Diff("ddp", data=text.encode()) for text in (STYLE, left)]
    (own, *_), (_, other) = (diff.remaining for diff in diffs)
    passed_checks.record_change("ddp", own.number, STYLE.encode())
    passed_checks.record_change("ddp", other.number, edit(
        DDP, ('Run("ddp"', 'Run("std"')).encode())
    script.write_text(left)
    said, page = shown()
    assert "train_gpt2.py: 1 of " in said
    assert f">{other.number} of " in page.split("<details")[0]
    assert "(right, as you wrote it)" in page
    passes(script, DDP)
    said, _ = shown()
    assert said.startswith(f"Done: all {len(documents.load_changes('ddp'))}")
    assert words not in said


def test_a_change_that_was_right_alone_stays_right_without_comments(script):
    """Those of other changes, which are made later, by hand."""
    own = edit(DDP, ("# a microbatch on every rank\n", "\n"))
    assert own != DDP
    passed_checks.record_change("ddp", OWN_CHANGE, STYLE.encode())
    text = edit(own, ('local_rank = int(os.environ["LOCAL_RANK"])',
                      'local_rank = int(os.environ.get("LOCAL_RANK"))'))
    script.write_text(text)
    diff, said = Diff("ddp", script), []
    (right,) = working_copy.changes_passed(diff)
    assert right.number == OWN_CHANGE
    # so it is not the next one
    assert make_others(diff, "next", said.append) is None
    assert "no change is left" in said[0]


# ----------------------------------------------------------- the batch files


def test_what_a_batch_file_trains_with(script):
    """Not half a lesson, on the way to the next stage."""
    for text in (DDP, STD, OWN, "def main()\n", "\0"):
        script.write_text(text)
        path, said = working_copy.choose_script("ddp")
        assert path == STAGES["ddp"].solution
        assert "never passed the check for ddp" in said or "null byte" in said
    passes(script, DDP)
    assert working_copy.choose_script("ddp") == (
        script, f"script    {show_path(script)}, which has passed the check")
    script.write_text(OWN)
    path, said = working_copy.choose_script("ddp")
    assert path == script and "check ddp" in said
    assert said.startswith(f"warning: {show_path(script)} was edited after it")
    script.write_text(LIT)
    path, said = working_copy.choose_script("ddp")
    assert path == STAGES["ddp"].solution and "is closer to lit" in said
    passes(script, LIT, "lit")
    assert working_copy.choose_script("ddp")[0] == STAGES["ddp"].solution
    assert working_copy.choose_script("lit")[0] == script
    passes(script, STD, "std")  # which has no lesson
    assert working_copy.choose_script("std")[0] == STAGES["std"].solution
    script.unlink()
    path, said = working_copy.choose_script("ddp")
    assert path == STAGES["ddp"].solution
    assert "does not exist; fix: move it back" in said


def test_the_command_prints_a_path_and_says_why_beside_it(tmp_path):
    copy_course(tmp_path, "backstage", "workshop", "solutions")
    end = python(tmp_path, "-m", "workshop", "script", "ddp")
    assert end.stdout == f"{tmp_path}/solutions/train_gpt2_ddp.py\n"
    _, software = end.stderr.splitlines()
    assert software.startswith("software  Python ") and not end.returncode
