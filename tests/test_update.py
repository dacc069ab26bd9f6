"""`python -m workshop update`: the course's newest state, nothing lost."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import copy_course, git

LESSON = "notebooks/diff_ddp.ipynb"
DESK = "code/train_gpt2.py"


@pytest.fixture
def course(tmp_path):
    """Where the course is developed."""
    course = tmp_path / "course"
    copy_course(course, "backstage", "workshop", "solutions", "batchfiles",
                LESSON, ".gitignore", DESK)
    git(course, "init", "-q", "-b", "main")
    commit(course)
    return course


@pytest.fixture
def clone(course, tmp_path):
    git(tmp_path, "clone", "-q", "course", "clone")
    return tmp_path / "clone"


def commit(folder):
    """Commit all that is there."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "the newest")


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def update(clone, status=0):
    end = subprocess.run([sys.executable, "-m", "workshop", "update"],
                         cwd=clone, capture_output=True, text=True,
                         env={"PATH": "/usr/bin:/bin", "HOME": str(clone)})
    assert end.returncode == status, end.stdout + end.stderr
    if status:
        assert re.fullmatch(r"error: [^\n]+\n", end.stderr), end.stderr
        return end.stderr
    return end.stdout


def same(clone, course, but=""):
    """Check that all files of the course, but for one, are in the clone."""
    for name in git(course, "ls-files").split():
        assert name == but or (clone / name).read_bytes() == (
            course / name).read_bytes(), name


def kept(clone, name):
    """What was set aside of the file."""
    path = clone / name
    file, = path.parent.glob(f"{path.stem}.20*{path.suffix}")
    return file


def test_what_was_edited_is_kept_under_a_dated_name(course, clone):
    append(course / "batchfiles" / "job.sh", "# new\n")
    append(course / LESSON, "\n")
    (course / "batchfiles" / "batch-doctor.sh").unlink()
    (course / "notebooks" / "more.ipynb").write_text("{}")
    (course / "slides").mkdir()
    (course / "slides" / "one.md").write_text("new")
    append(course / DESK, "# a new std\n")
    commit(course)

    append(clone / "batchfiles" / "job.sh", "# mine\n")
    append(clone / "batchfiles" / "batch-doctor.sh", "# mine\n")
    append(clone / DESK, "# my script\n")
    (clone / "notebooks" / "more.ipynb").write_text("my own")
    (clone / "slides").write_text("a file where a folder comes")
    notebook = json.loads((clone / LESSON).read_text())
    cell = next(c for c in notebook["cells"] if c["cell_type"] == "code")
    cell["outputs"] = [{"output_type": "stream", "name": "stdout",
                        "text": ["what I saw"]}]
    (clone / LESSON).write_text(json.dumps(notebook))
    mine = {name: (clone / name).read_bytes() for name in (
        "batchfiles/job.sh", "batchfiles/batch-doctor.sh", LESSON,
        "notebooks/more.ipynb", "slides", DESK)}

    said = update(clone)
    same(clone, course, but=DESK)
    assert not (clone / "batchfiles" / "batch-doctor.sh").exists()
    for name, data in mine.items():
        assert kept(clone, name).read_bytes() == data
        assert name == "slides" or f"your {name} is" in said
    assert git(clone, "status", "--short") == f" M {DESK}\n"
    assert "origin/main" in said and "source activate.sh" in said
    again = update(clone)
    assert "nothing new" in again and "job.sh" not in again
    assert (clone / DESK).read_bytes() == mine[DESK]


def test_commits_of_ones_own_become_a_branch(course, clone):
    append(clone / DESK, "# my script\n")
    append(clone / "batchfiles" / "job.sh", "# mine\n")
    commit(clone)
    append(course / "batchfiles" / "job.sh", "# new\n")
    commit(course)
    mine = git(clone, "rev-parse", "HEAD")
    said = update(clone)
    branch, = re.findall(r"in the branch (mine-\S+)", said)
    assert git(clone, "rev-parse", branch) == mine
    same(clone, course, but=DESK)
    assert "# my script" in (clone / DESK).read_text()


def test_if_git_fails_the_script_is_there(course, clone):
    append(course / DESK, "# a new std\n")
    append(course / "batchfiles" / "job.sh", "# new\n")
    commit(course)
    append(clone / DESK, "# my script\n")
    append(clone / "batchfiles" / "job.sh", "# mine\n")
    (clone / ".git" / "index.lock").touch()  # another git is at work
    assert "index.lock" in update(clone, status=1)
    assert "# my script" in (clone / DESK).read_text()
    (clone / ".git" / "index.lock").unlink()
    update(clone)
    same(clone, course, but=DESK)
    assert "# mine" in kept(clone, "batchfiles/job.sh").read_text()


def test_without_edits_it_is_the_new_one_and_what_fails_is_one_line(
        course, clone, tmp_path):
    append(course / DESK, "# a new std\n")
    commit(course)
    said = update(clone)
    same(clone, course)
    assert git(clone, "status", "--short") == "" and "your code" not in said
    course.rename(tmp_path / "gone")
    assert "git fetch failed" in update(clone, status=1)
    git(clone, "checkout", "-q", "--detach")
    assert "git switch main" in update(clone, status=1)
    shutil.rmtree(clone / ".git")
    assert "not a git clone" in update(clone, status=1)
