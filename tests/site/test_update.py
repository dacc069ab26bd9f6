"""`python -m workshop update`: the course's newest state, nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import copy_course, git, program, python, workshop

from backstage import ROOT

pytestmark = pytest.mark.whole

LESSON = "notebooks/diff_ddp.ipynb"
WORKING_COPY = "code/train_gpt2.py"
JOB = "batchfiles/job.sh"
BEFORE_THE_MOVE = "0dc12e8f"  # rankcheck had no src/, workshop no diff/
WHO = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER")
       for what in ("NAME", "EMAIL")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    copy_course(folder, "backstage", "workshop", "solutions", "batchfiles",
                LESSON, ".gitignore", WORKING_COPY)
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


def same(clone, course, *but):
    """Check that all files of the course, but these, are in the clone."""
    for name in {*git(course, "ls-files").split()} - {*but}:
        assert (clone / name).read_bytes() == (course / name).read_bytes()


def copied(clone, name):
    """What is in the copy of the file that the update made."""
    file, = (clone / "code" / "backups").glob(f"update-*/{name}")
    return file.read_text()


def test_edits_are_copied_and_those_that_do_not_conflict_stay(course, clone):
    other, gone = "batchfiles/batch-doctor.sh", "batchfiles/torchrun.sh"
    (course / gone).unlink()
    renew(course, JOB, WORKING_COPY, LESSON, "batchfiles/README.md")
    append(clone, "# mine\n", JOB, WORKING_COPY, other, gone)
    (clone / "mine.txt").write_text("mine")
    said = update(clone)
    same(clone, course, WORKING_COPY, other)
    for name in WORKING_COPY, other, gone:
        assert (clone / name).read_text().endswith("# mine\n")
    for name in JOB, WORKING_COPY, other, gone:
        assert copied(clone, name).endswith("# mine\n")
    assert "# mine" in git(clone, "stash", "show", "-p")
    assert copied(clone, LESSON) + "# new\n" == (clone / LESSON).read_text()
    conflict, = re.findall("changed by you and by the course: (.*)", said)
    assert conflict.startswith(f"{JOB}; the course's version is there, "
                               "yours is in code/backups/update-")
    assert git(clone, "status", "--short") == (
        f"M  {other}\n M {WORKING_COPY}\n?? {gone}\n?? mine.txt\n")
    assert "origin/main" in said and "source activate.sh" in said
    assert "nothing new" in update(clone)


def test_a_notebooks_outputs_stay(course, clone):
    """Git sees none, by its filter; an edit elsewhere is put back around it.
    """
    (clone / ".git/info/attributes").write_text("*.ipynb filter=strip\n")
    git(clone, "config", "filter.strip.clean", "sed /^ran/d")
    append(clone, "ran\n", LESSON)
    append(clone, "# mine\n", WORKING_COPY, JOB)
    was = (clone / LESSON).read_text()
    renew(course, "workshop/instructor/update.py")
    update(clone)
    assert (clone / LESSON).read_text() == was
    assert (clone / JOB).read_text().endswith("# mine\n")


def test_it_says_at_once_what_it_does(course, clone):
    """Before git has done anything: on a busy node that takes long."""
    renew(course, JOB)
    said = update(clone).splitlines()
    steps = ["checking this clone", "fetching origin/main",
             "copying what you edited", "merging origin/main"]
    assert [line for line in said if line in steps] == steps
    programs = clone / "programs"
    programs.mkdir()
    program(programs / "git", "#!/bin/sh\nsleep 600\n")
    slow = subprocess.Popen(
        [sys.executable, "-m", "workshop", "update"], cwd=clone,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(clone),
             "PYTHONPATH": f"{clone}:{clone}/rankcheck/src"})
    try:
        assert slow.stdout.readline() == "checking this clone\n"
        assert slow.poll() is None
    finally:
        os.killpg(slow.pid, signal.SIGKILL)
        slow.wait()


def run_cell(notebook):
    """Give the first code cell of a notebook an output, as running it does."""
    lesson = json.loads(notebook.read_text())
    cell = next(cell for cell in lesson["cells"]
                if cell["cell_type"] == "code")
    cell["outputs"] = [{"output_type": "stream", "name": "stdout",
                        "text": "what this cell has printed"}]
    notebook.write_text(json.dumps(lesson, indent=1))


def test_a_clone_goes_on_after_modules_have_moved(tmp_path, data):
    """With its edits, its run, its outputs, and before activate.sh is read."""
    try:
        git(ROOT, "cat-file", "-e", BEFORE_THE_MOVE)
    except subprocess.CalledProcessError:
        pytest.skip("this clone has no history: git fetch --unshallow")
    newest = git(ROOT, "rev-parse", "HEAD").strip()
    course, clone = tmp_path / "course", tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(ROOT), "course")
    git(course, "checkout", "-q", "-B", "main", BEFORE_THE_MOVE)
    git(tmp_path, "clone", "-q", "course", "clone")
    old_shell = {"PYTHONPATH": str(clone), "WORKSHOP_DATA": str(data)}

    workshop(clone, "apply", "ddp", "--all", **old_shell)
    append(clone, "# mine\n", WORKING_COPY, JOB)
    script = (clone / WORKING_COPY).read_text()
    run = [WORKING_COPY, "--preset", "tiny", "--device", "cpu", "--data", data,
           "--run-dir", "runs/mine", "--checkpoint-every", "1"]
    trained = python(clone, *run, "--max-steps", "2", **old_shell)
    assert trained.returncode == 0, trained.stderr
    run_cell(clone / "notebooks" / "diff_lit.ipynb")

    git(course, "checkout", "-q", "-B", "main", newest)
    said = update(clone, **old_shell)
    assert git(clone, "rev-parse", "HEAD").strip() == newest, said
    assert (clone / WORKING_COPY).read_text() == script
    assert (clone / JOB).read_text().endswith("# mine\n")
    assert "what this cell has printed" in copied(
        clone, "notebooks/diff_lit.ipynb")
    assert not (clone / "workshop/lesson/desk.py").exists()

    resumed = python(clone, *run, "--max-steps", "4", "--resume", **old_shell)
    assert resumed.returncode == 0, resumed.stderr
    rows = (clone / "runs/mine/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    for words in (), ("diff", "ddp"), ("script", "ddp"):
        workshop(clone, *words, **old_shell)
    workshop(clone, "reset", "ddp", **old_shell)
    assert script in [file.read_text() for file in (
        clone / "code" / "backups").glob("*.py")]


def test_what_git_does_not_put_back_is_said(course, clone):
    """As where a filter changes a file of the course as soon as it is there.
    """
    (course / ".gitattributes").write_text(f"{LESSON} text eol=lf\n")
    append(course, "# lines of Windows\r\n", LESSON)
    git(course, "add", ".gitattributes", LESSON)
    blob = git(course, "hash-object", "-w", "--no-filters", LESSON).strip()
    git(course, "update-index", "--cacheinfo", f"100644,{blob},{LESSON}")
    git(course, "commit", "-q", "-m", "the newest")
    append(clone, "# mine\n", LESSON)
    out = update(clone)
    assert "# mine" in copied(clone, LESSON)
    assert "# mine" not in (clone / LESSON).read_text()
    assert "could not be restored; they are in code/backups/update-" in out


def test_what_was_staged_is_copied(course, clone):
    renew(course, JOB, WORKING_COPY)
    append(clone, "# staged\n", JOB, WORKING_COPY)
    (clone / "mine.txt").write_text("mine")
    (clone / "batchfiles" / "README.md").unlink()
    git(clone, "add", "-A")
    append(clone, "# and more\n", JOB, WORKING_COPY)
    update(clone)
    same(clone, course, WORKING_COPY, "batchfiles/README.md")
    for name in JOB, WORKING_COPY:
        assert copied(clone, f"staged/{name}").endswith("# staged\n")
        assert copied(clone, name).endswith("# staged\n# and more\n")
    assert (clone / WORKING_COPY).read_text() == copied(clone, WORKING_COPY)
    assert (clone / "mine.txt").read_text() == "mine"
    assert not (clone / "batchfiles" / "README.md").exists()


def test_commits_of_ones_own_are_merged_or_nothing_changes(course, clone):
    append(clone, "# mine\n", JOB)
    commit(clone)
    append(clone, "# mine\n", WORKING_COPY)
    renew(course, WORKING_COPY)
    update(clone, **WHO)
    same(clone, course, WORKING_COPY, JOB)
    renew(course, JOB)
    before = git(clone, "rev-parse", "HEAD")
    assert "your commits change what" in update(clone, status=1, **WHO)
    assert git(clone, "rev-parse", "HEAD") == before
    assert git(clone, "status", "--short") == f" M {WORKING_COPY}\n"
    for name in JOB, WORKING_COPY:
        assert (clone / name).read_text().endswith("# mine\n")


@pytest.mark.parametrize("name", ["KILL", "HUP", "INT"])
def test_a_killed_update_leaves_a_copy_of_the_script(name, course, clone):
    """And is not ended halfway where a terminal closes, or by Ctrl-C."""
    renew(course, WORKING_COPY)
    append(clone, "# mine\n", WORKING_COPY)
    programs = clone / "programs"
    programs.mkdir()
    # ends the update where it asks for the merge
    program(programs / "git", f"""#!/bin/sh
case "$*" in *--autostash*) kill -{name} $PPID $$ || exit;; esac
exec /usr/bin/git "$@"
""")
    python(clone, "-m", "workshop", "update", PATH=f"{programs}:/usr/bin:/bin")
    assert copied(clone, WORKING_COPY).endswith("# mine\n")
    if name != "KILL":
        text = (clone / WORKING_COPY).read_text()
        assert text == copied(clone, WORKING_COPY)


KILLED_GIT = """#!/bin/sh
case "$*" in *"{words}"*)
    [ {when} = before ] || /usr/bin/git "$@"
    kill -KILL $PPID $$;;
esac
exec /usr/bin/git "$@"
"""


@pytest.mark.parametrize("words", ["checkout HEAD", "merge -q"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("later", ["nothing", "an edit"])
def test_the_next_update_gives_back_what_a_killed_one_moved_away(
        words, when, later, course, clone):
    """The script is the attendee's again, or, if edited since, a backup."""
    renew(course, WORKING_COPY, JOB)
    append(clone, "# mine\n", WORKING_COPY)
    mine = (clone / WORKING_COPY).read_text()
    programs = clone / "programs"
    programs.mkdir()
    program(programs / "git", KILLED_GIT.format(words=words, when=when))
    killed = python(clone, "-m", "workshop", "update",
                    PATH=f"{programs}:/usr/bin:/bin")
    assert killed.returncode == -9
    if later == "an edit":
        (clone / WORKING_COPY).write_text("# of today\n")
    said = update(clone)
    assert "an earlier update was killed" in said
    if later == "nothing":
        assert (clone / WORKING_COPY).read_text() == mine
    else:
        assert (clone / WORKING_COPY).read_text() == "# of today\n"
        backup, = (clone / "code" / "backups").glob("2*.py")
        assert backup.read_text() == mine and backup.name in said
    assert not (clone / "code" / "backups" / "aside").exists()
    assert "killed" not in update(clone)
    assert (clone / JOB).read_bytes() == (course / JOB).read_bytes()


def test_the_script_is_given_back_where_a_conflict_is_left(course, clone):
    renew(course, WORKING_COPY, JOB)
    append(clone, "# mine\n", WORKING_COPY, JOB)
    programs = clone / "programs"
    programs.mkdir()
    program(programs / "git", KILLED_GIT.format(words="merge -q",
                                                when="after"))
    python(clone, "-m", "workshop", "update",
           PATH=f"{programs}:/usr/bin:/bin")
    end = python(clone, "-m", "workshop", "update", PATH="/usr/bin:/bin")
    assert end.returncode == 1 and "a merge is not finished" in end.stderr
    assert "is restored" in end.stdout
    assert (clone / WORKING_COPY).read_text().endswith("# mine\n")


def test_edits_that_git_had_put_away_are_in_the_stash(course, clone):
    """Where a machine is lost in the middle of the merge."""
    renew(course, WORKING_COPY, "batchfiles/README.md")
    append(clone, "# mine\n", WORKING_COPY, JOB)
    programs = clone / "programs"
    programs.mkdir()
    program(programs / "git", KILLED_GIT.format(words="merge -q",
                                                when="before"))
    python(clone, "-m", "workshop", "update",
           PATH=f"{programs}:/usr/bin:/bin")
    stash = git(clone, "stash", "create")
    (clone / ".git" / "MERGE_AUTOSTASH").write_text(stash)
    git(clone, "checkout", "HEAD", "--", JOB)
    said = update(clone)
    assert "an earlier merge was killed" in said and "git stash list" in said
    assert "# mine" in git(clone, "stash", "show", "-p")
    assert copied(clone, JOB).endswith("# mine\n")
    assert (clone / WORKING_COPY).read_text().endswith("# mine\n")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_script_that_is_a_link_stays_one(course, clone, tmp_path, link):
    renew(course, WORKING_COPY)
    mine = tmp_path / "mine.py"
    (clone / WORKING_COPY).rename(mine)
    append(tmp_path, "# mine\n", "mine.py")
    target = mine
    if link is os.symlink:
        target = os.path.relpath(mine, (clone / WORKING_COPY).parent)
    link(target, clone / WORKING_COPY)
    update(clone)
    assert (clone / WORKING_COPY).samefile(mine)
    assert copied(clone, WORKING_COPY) == mine.read_text()
    assert mine.read_text().endswith("# mine\n")


@pytest.mark.parametrize("name, kind, staged", [
    ("notebooks", "link", False), (JOB, "folder", False),
    (JOB, "folder", True), ("batchfiles", "file", False),
    ("batchfiles/new.sh", "new", False), ("runs/new.sh", "new", False),
    ("runs/new.sh", "new", True)])  # with a commit of one's own
def test_what_takes_the_place_of_the_courses_files_is_left_alone(
        name, kind, staged, course, clone, tmp_path):
    """Git's own stash removes a folder that is where a file was."""
    renew(course, LESSON)
    mine, elsewhere = clone / name, tmp_path / "elsewhere"
    if kind == "new":  # what git would overwrite where it is ignored
        (course / name).parent.mkdir(exist_ok=True)
        (course / name).write_text("new")
        git(course, "add", "-f", name)
        commit(course)
        mine.parent.mkdir(exist_ok=True)
    else:
        mine.rename(elsewhere)
    if staged:
        git(clone, "add", "-A")
    if staged and kind == "new":
        append(clone, "# mine\n", JOB)
        commit(clone)
    if kind == "link":
        mine.symlink_to(elsewhere)
    elif kind == "folder":
        mine.mkdir()
        mine /= "mine.txt"
    if kind != "link":
        mine.write_text("mine")

    def states():
        return [(path, path.lstat().st_ino, path.lstat().st_mtime)
                for path in (mine, *elsewhere.rglob("*"))]

    before = states()
    assert name in update(clone, status=1, **WHO)
    assert states() == before


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
    "course", "link", "worktree", "submodule's"])
def test_the_repository_around_a_course_without_git_is_left_alone(
        place, theirs, course, tmp_path):
    around = theirs
    if place == "worktree":
        around = tmp_path / "around"
        git(theirs, "worktree", "add", "-q", "--track", "-b", "more",
            str(around), "origin/main")
    elif place == "submodule's":
        around = theirs / "sub"
        git(theirs, "-c", "protocol.file.allow=always", "submodule", "add",
            "-q", str(tmp_path / "origin.git"), "sub")
        git(theirs, "reset", "-q")
    shutil.copytree(course, around / "course",
                    ignore=shutil.ignore_patterns(".git"))
    if place == "link":
        (tmp_path / "link").symlink_to(around)
        around = tmp_path / "link"
    precious = around / "precious.txt"
    precious.write_text("not committed")
    said = update(around / "course", status=1)
    assert "not a git repository" in said
    assert precious.read_text() == "not committed"


def test_neither_gits_variables_nor_its_settings_lead_elsewhere(
        theirs, course, clone):
    renew(course, JOB)
    git(clone, "config", "core.worktree", str(theirs))
    assert "changed; this clone" in update(
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
    assert "changed; this clone" in update(inner)
    assert (inner / "backstage" / "__init__.py").read_bytes() == (
        course / "backstage" / "__init__.py").read_bytes()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_owner_that_git_doubts_is_said(clone):
    for path in (clone, clone / ".git"):
        os.chown(path, 65534, 65534)
    assert "dubious ownership" in update(clone, status=1)


def test_if_git_fails_the_script_is_there(course, clone):
    renew(course, WORKING_COPY, JOB)
    append(clone, "# mine\n", WORKING_COPY, JOB)
    (clone / ".git" / "index.lock").touch()  # another git is at work
    assert "index.lock" in update(clone, status=1)
    for name in WORKING_COPY, JOB:
        assert (clone / name).read_text().endswith("# mine\n")


def test_a_hook_that_fails_does_not_end_it(course, clone):
    """As one of a template for all of somebody's clones."""
    renew(course, WORKING_COPY)
    append(clone, "# mine\n", WORKING_COPY)
    for name in "post-checkout", "post-merge", "reference-transaction":
        program(clone / ".git" / "hooks" / name, "#!/bin/sh\nexit 1\n")
    update(clone)
    same(clone, course, WORKING_COPY)
    assert (clone / WORKING_COPY).read_text().endswith("# mine\n")


def test_a_merge_goes_on_where_it_was(course, clone):
    """Without a conflict, too: git would forget what is being merged."""
    renew(course, JOB)
    git(clone, "switch", "-q", "-c", "side")
    append(clone, "# mine\n", WORKING_COPY)
    commit(clone)
    git(clone, "switch", "-q", "main")
    git(clone, "merge", "-q", "--no-commit", "--no-ff", "side")
    assert "a merge is not finished" in update(clone, status=1)
    git(clone, "commit", "-q", "-m", "merged")
    assert "# mine" in git(clone, "show", "HEAD^2:" + WORKING_COPY)


def test_without_edits_it_is_the_new_one_and_what_fails_is_one_line(
        course, clone, tmp_path):
    renew(course, WORKING_COPY)
    said = update(clone)
    same(clone, course)
    assert git(clone, "status", "--short") == ""
    assert "copies" not in said
    course.rename(tmp_path / "gone")
    assert "git fetch: " in update(clone, status=1)
    git(clone, "checkout", "-q", "--detach")
    assert "git switch main" in update(clone, status=1)
    shutil.rmtree(clone / ".git")
    assert "git clone" in update(clone, status=1)
