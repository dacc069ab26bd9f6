"""A solution or a lesson that was edited is not taken for the course's."""

import shutil

import pytest
from conftest import commit_all, copy_clone, git, python, workshop

from backstage import ROOT

SOLUTION = "solutions/train_gpt2_ddp.py"
COMMANDS = [("diff", "ddp"), ("apply", "ddp", "5"), ("reset", "ddp"),
            ("check", "ddp")]


@pytest.fixture
def clone(tmp_path):
    repo = copy_clone(tmp_path / "clone", ".gitignore")
    git(repo, "init", "-q")
    commit_all(repo)
    return repo


def slip(repo, name=SOLUTION):
    """An edit there, such as a slip of the keyboard."""
    file = repo / name
    file.write_text(file.read_text().replace(
        "i + self.offset", "i - self.offset").replace("is your work", "is"))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_an_edited_solution_is_named(clone, words):
    script = clone / "code" / "train_gpt2.py"
    before = script.read_text()
    slip(clone)
    said = workshop(clone, *words, status=1)
    assert said.startswith(f"error: {SOLUTION} was edited")
    assert f"fix: `git restore {SOLUTION}`" in said
    assert script.read_text() == before


def test_it_is_accepted_once_it_is_restored_or_staged(clone):
    slip(clone)
    workshop(clone, "diff", "ddp", status=1)
    git(clone, "add", SOLUTION)  # by those who change the course
    assert "i - self.offset" in workshop(clone, "diff", "ddp", "6")
    git(clone, "restore", "--staged", SOLUTION)
    git(clone, "restore", SOLUTION)
    assert "13 of 13 changes left" in workshop(clone, "diff", "ddp")


@pytest.mark.whole
def test_an_edited_lesson_and_what_the_doctor_says(clone):
    slip(clone, "workshop/lessons/ddp.md")
    said = python(clone, "-m", "workshop", "doctor").stdout
    assert "FAIL   course: workshop/lessons/ddp.md was edited" in said


@pytest.mark.whole
def test_a_copy_without_git_knows_what_it_was(clone):
    shutil.rmtree(clone / ".git")
    record = clone / "code" / ".originals.json"
    workshop(clone, "diff", "ddp")
    assert record.exists()
    slip(clone)
    said = workshop(clone, "apply", "ddp", "5", status=1)
    assert f"fix: copy {SOLUTION} from the course again" in said
    shutil.copy(ROOT / SOLUTION, clone / SOLUTION)
    workshop(clone, "diff", "ddp")
    (clone / SOLUTION).unlink()
    assert SOLUTION in workshop(clone, "diff", "ddp", status=1)
    record.write_text("[]")  # damaged: it begins anew
    shutil.copy(ROOT / SOLUTION, clone / SOLUTION)
    workshop(clone, "diff", "ddp")


def test_what_an_editor_adds_is_none_of_the_course(clone):
    shutil.rmtree(clone / ".git")
    swap = clone / "workshop" / "lessons" / ".ddp.md.swp"
    swap.write_text("what is being edited")
    workshop(clone, "diff", "ddp")
    swap.unlink()
    (clone / "solutions" / ".ipynb_checkpoints").mkdir()  # JupyterLab's
    workshop(clone, "diff", "ddp")


def test_a_copy_that_can_only_be_read_has_no_record(clone):
    shutil.rmtree(clone / ".git")
    (clone / "code" / ".originals.json").mkdir()  # it cannot be written
    workshop(clone, "diff", "ddp")
