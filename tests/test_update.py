"""`python -m workshop update`: the course's newest state, nothing lost."""

import json
import os
import re
import shutil

import pytest
from conftest import copy_course, git, program, python, workshop

LESSON = "notebooks/diff_ddp.ipynb"
DESK = "code/train_gpt2.py"
JOB = "batchfiles/job.sh"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    copy_course(folder, "backstage", "workshop", "solutions", "batchfiles",
                LESSON, ".gitignore", DESK)
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


@pytest.fixture
def course(made, tmp_path):
    return shutil.copytree(made, tmp_path / "course")


@pytest.fixture
def clone(course, tmp_path):
    git(tmp_path, "clone", "-q", "course", "clone")
    return tmp_path / "clone"


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "the newest")


def append(folder, text, *names):
    for name in names:
        with open(folder / name, "a") as file:
            file.write(text)


def renew(course, *names):
    """Let the newest course have a line more in these."""
    append(course, "# new\n", *names)
    commit(course)


def update(clone, status=0, **variables):
    return workshop(clone, "update", status=status, **{
        "PATH": "/usr/bin:/bin", "HOME": str(clone)} | variables)


def same(clone, course, but=""):
    """Check that all files of the course, but for one, are in the clone."""
    for name in git(course, "ls-files").split():
        assert name == but or (clone / name).read_bytes() == (
            course / name).read_bytes(), name


def kept(clone, name):
    """What was set aside of the file."""
    path = clone / name
    file, = (path.parent.glob("backups/20*.py") if name == DESK else
             path.parent.glob(f"{path.stem}.20*{path.suffix}"))
    return file


def test_what_was_edited_is_kept_under_a_dated_name(course, clone):
    append(course, "# new\n", JOB, DESK)
    append(course, "\n", LESSON)
    (course / "batchfiles" / "batch-doctor.sh").unlink()
    (course / "notebooks" / "more.ipynb").write_text("{}")
    (course / "slides").mkdir()
    (course / "slides" / "one.md").write_text("new")
    commit(course)

    append(clone, "# mine\n", JOB, "batchfiles/batch-doctor.sh", DESK)
    (clone / "notebooks" / "more.ipynb").write_text("my own")
    (clone / "slides").write_text("a file where a folder comes")
    notebook = json.loads((clone / LESSON).read_text())
    cell = next(c for c in notebook["cells"] if c["cell_type"] == "code")
    cell["outputs"] = [{"output_type": "stream", "name": "stdout",
                        "text": ["what I saw"]}]
    (clone / LESSON).write_text(json.dumps(notebook))
    mine = {name: (clone / name).read_bytes() for name in (
        JOB, "batchfiles/batch-doctor.sh", LESSON,
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
    append(clone, "# mine\n", DESK, JOB)
    commit(clone)
    renew(course, JOB)
    mine = git(clone, "rev-parse", "HEAD")
    said = update(clone)
    branch, = re.findall(r"in the branch (mine-\S+)", said)
    assert git(clone, "rev-parse", branch) == mine
    same(clone, course, but=DESK)
    assert "# mine" in (clone / DESK).read_text()


def test_what_the_newest_course_has_not_changed_stays_in_its_place(
        course, clone):
    renew(course, "batchfiles/README.md")
    append(clone, "# mine\n", JOB, DESK)
    mine = clone / "tmp" / "check-1" / "script.py"  # where TMPDIR may be
    mine.parent.mkdir(parents=True)
    mine.touch()
    update(clone, TMPDIR=str(clone / "tmp"))
    assert git(clone, "status", "--short") == (
        f" M batchfiles/job.sh\n M {DESK}\n?? tmp/\n")
    assert [*mine.parent.parent.rglob("*.py")] == [mine]
    assert (clone / JOB).read_text().endswith("# mine\n")


def test_what_was_staged_is_kept(course, clone):
    renew(course, JOB, DESK)
    append(clone, "# staged\n", JOB)
    append(clone, "# mine\n", DESK)
    (clone / "mine.txt").write_text("mine")
    git(clone, "add", "-A")
    append(clone, "# and more\n", JOB)
    said = update(clone)
    same(clone, course, but=DESK)
    assert "git stash list" in said
    assert git(clone, "show", "stash^2:batchfiles/job.sh").endswith(
        "# staged\n")
    assert kept(clone, JOB).read_text().endswith(
        "# staged\n# and more\n")
    assert (clone / "mine.txt").read_text() == "mine"
    assert (clone / DESK).read_text().endswith("# mine\n")


def test_a_killed_update_leaves_the_script_under_a_dated_name(course, clone):
    renew(course, DESK)
    append(clone, "# mine\n", DESK)
    programs = clone / "programs"
    programs.mkdir()
    # ends the update where it asks for the reset
    program(programs / "git", """#!/bin/sh
case "$*" in *--keep*) kill -9 $PPID; exit;; esac
exec /usr/bin/git "$@"
""")
    python(clone, "-m", "workshop", "update", PATH=f"{programs}:/usr/bin:/bin")
    assert kept(clone, DESK).read_text().endswith("# mine\n")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_script_that_is_a_link_stays_one(course, clone, tmp_path, link):
    renew(course, DESK)
    mine = tmp_path / "mine.py"
    (clone / DESK).rename(mine)
    append(tmp_path, "# mine\n", "mine.py")
    link(os.path.relpath(mine, (clone / DESK).parent) if link is os.symlink
         else mine, clone / DESK)
    update(clone)
    assert (clone / DESK).samefile(mine)
    assert kept(clone, DESK).read_text() == mine.read_text()
    assert mine.read_text().endswith("# mine\n")


def test_a_link_in_the_place_of_a_folder_leads_to_nothing_that_changes(
        course, clone, tmp_path):
    append(course, "\n", LESSON)
    commit(course)
    mine = tmp_path / "my-notebooks"
    (clone / "notebooks").rename(mine)
    (clone / "notebooks").symlink_to(mine)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    update(clone)
    assert before == {path.name: path.read_bytes() for path in mine.iterdir()}
    same(clone, course)


# --------------------------------------------- no repository but the clone


@pytest.fixture
def theirs(tmp_path):
    """Somebody's repository, with an upstream, and edits of a day in it."""
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "origin.git")
    git(tmp_path, "clone", "-q", "origin.git", "theirs")
    theirs = tmp_path / "theirs"
    (theirs / "thesis.tex").write_text("a year")
    commit(theirs)
    git(theirs, "push", "-q", "-u", "origin", "HEAD:main")
    (theirs / "thesis.tex").write_text("a year and a day")
    yield theirs
    assert (theirs / "thesis.tex").read_text() == "a year and a day"
    assert git(theirs, "status", "--short", "-uno") == " M thesis.tex\n"


@pytest.mark.parametrize("place", [
    "course", "a/b/course", "link", "worktree", "ignored", "submodule's"])
def test_the_repository_around_a_course_without_git_is_left_alone(
        place, theirs, course, tmp_path):
    around, name = theirs, "course"
    if place == "a/b/course":
        name = place
    elif place == "worktree":
        around = tmp_path / "around"
        git(theirs, "worktree", "add", "-q", "--track", "-b", "more",
            str(around), "origin/main")
    elif place == "ignored":
        (theirs / ".git" / "info" / "exclude").write_text("course\n")
    elif place == "submodule's":
        around = theirs / "sub"
        git(theirs, "-c", "protocol.file.allow=always", "submodule", "add",
            "-q", str(tmp_path / "origin.git"), "sub")
        git(theirs, "reset", "-q")
    shutil.copytree(course, around / name,
                    ignore=shutil.ignore_patterns(".git"))
    if place == "link":
        (tmp_path / "link").symlink_to(around)
        around = tmp_path / "link"
    precious = around / "precious.txt"
    precious.write_text("not committed")
    said = update(around / name, status=1)
    assert "a folder in the repository" in said
    assert precious.read_text() == "not committed"


def test_gits_variables_do_not_lead_elsewhere(theirs, course, clone):
    renew(course, JOB)
    assert "have changed" in update(
        clone, GIT_DIR=f"{theirs}/.git", GIT_WORK_TREE=str(theirs),
        GIT_INDEX_FILE=f"{theirs}/.git/index", GIT_COMMON_DIR=f"{theirs}/.git",
        GIT_OBJECT_DIRECTORY=f"{theirs}/.git/objects", GIT_PREFIX="")
    same(clone, course)


@pytest.mark.parametrize("kind", ["nested", "worktree", "sparse"])
def test_other_kinds_of_clones_are_updated(
        kind, theirs, course, clone, tmp_path):
    if kind == "nested":
        inner = theirs / "course"
        git(theirs, "clone", "-q", str(course), "course")
    elif kind == "worktree":
        inner = tmp_path / "second"
        git(clone, "worktree", "add", "-q", "--track", "-b", "second",
            str(inner), "origin/main")
    else:
        inner = clone
        git(clone, "sparse-checkout", "set", "backstage", "rankcheck",
            "workshop", "code")
    renew(course, "backstage/__init__.py")
    assert "have changed" in update(inner)
    assert (inner / "backstage" / "__init__.py").read_bytes() == (
        course / "backstage" / "__init__.py").read_bytes()


def test_a_clone_whose_files_are_elsewhere_is_left_alone(
        theirs, course, clone):
    git(clone, "config", "core.worktree", str(theirs))
    assert "a folder in the repository" in update(clone, status=1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_owner_that_git_doubts_is_said(clone):
    for path in (clone, clone / ".git"):
        os.chown(path, 65534, 65534)
    assert "dubious ownership" in update(clone, status=1)


def test_if_git_fails_the_script_is_there(course, clone):
    renew(course, DESK, JOB)
    append(clone, "# mine\n", DESK, JOB)
    (clone / ".git" / "index.lock").touch()  # another git is at work
    assert "index.lock" in update(clone, status=1)
    assert "# mine" in (clone / DESK).read_text()
    (clone / ".git" / "index.lock").unlink()
    update(clone)
    same(clone, course, but=DESK)
    assert "# mine" in kept(clone, JOB).read_text()


def test_a_merge_goes_on_where_it_was(course, clone):
    """Without a conflict, too: git would forget what is being merged."""
    renew(course, JOB)
    git(clone, "switch", "-q", "-c", "side")
    append(clone, "# mine\n", DESK)
    commit(clone)
    git(clone, "switch", "-q", "main")
    git(clone, "merge", "-q", "--no-commit", "--no-ff", "side")
    assert "a merge is not finished" in update(clone, status=1)
    git(clone, "commit", "-q", "-m", "merged")
    assert "# mine" in git(clone, "show", "HEAD^2:" + DESK)


def test_without_edits_it_is_the_new_one_and_what_fails_is_one_line(
        course, clone, tmp_path):
    renew(course, DESK)
    said = update(clone)
    same(clone, course)
    assert git(clone, "status", "--short") == "" and "your code" not in said
    course.rename(tmp_path / "gone")
    assert "git fetch failed" in update(clone, status=1)
    git(clone, "checkout", "-q", "--detach")
    assert "git switch main" in update(clone, status=1)
    shutil.rmtree(clone / ".git")
    assert "not a git clone" in update(clone, status=1)
