"""The tests' own protections: rankcheck_testing.isolation, and cleanup."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankcheck_testing import cleanup
from rankcheck_testing.support import HOUSE, program, python


@pytest.fixture
def place():
    """A folder with a short name, for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="c"))
    folder.chmod(0o755)
    return folder


def test_somebody_elses_process_stays(place):
    """Also one that shows a file in the folder, in a shell that is there."""
    (place / "file").write_text("text")
    other = subprocess.Popen(
        ["tail", "-f", place / "file"], cwd=place, stdout=subprocess.DEVNULL,
        env={"PWD": str(place), "PATH": os.environ["PATH"]})
    mine = subprocess.Popen(["sleep", "99"], env={"HERE": str(place / "x")})
    try:
        cleanup.end_processes(place)
        assert mine.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_login_shell_reads_no_profile_of_the_user(place):
    """A test may kill it: then nothing of the user's is half done."""
    (place / ".profile").write_text("echo the profile of the user\n")
    test = place / "test_login.py"
    test.write_text("import subprocess\n\n\ndef test():\n    print(subprocess"
                    ".run(['bash', '-lc', 'echo a login shell'], text=True,"
                    " stdout=subprocess.PIPE).stdout)\n")
    out = subprocess.run(
        [sys.executable, "-m", "pytest", "-sq", "-p", "no:cacheprovider",
         "-p", "rankcheck_testing.isolation", test], cwd=place, text=True,
        check=True, env={**os.environ, "HOME": str(place), "PYTHONPATH":
                         f"{HOUSE}/src{os.pathsep}{HOUSE}/tests"},
        stdout=subprocess.PIPE).stdout
    assert "a login shell" in out and "the profile" not in out


ISOLATED = "-m", "pytest", "-q", "-p", "rankcheck_testing.isolation"
TESTS = """\
import subprocess
import sys

import pytest


@pytest.mark.whole
def test_long():
    pass


@pytest.mark.table
def test_of_a_table():
    pass


def test_short():
    pass
"""


def run_isolated(folder, text, *words):
    """Run pytest on this text alone; what it prints, and its status."""
    program(folder / "test_them.py", text)
    return python(folder, *ISOLATED, *words, TMPDIR=str(folder),
                  PYTHONPATH=f"{HOUSE}/src{os.pathsep}{HOUSE}/tests")


@pytest.mark.parametrize(("words", "passed"), [
    ("", 1), ("--whole", 2), ("--whole --tables", 3), ("test_them.py", 2)])
def test_which_tests_run(words, passed, place):
    end = run_isolated(place, TESTS, *words.split())
    assert end.returncode == 0 and f"{passed} passed" in end.stdout, end
    assert ("Left out is" in end.stdout) == (words == "")


@pytest.mark.whole
def test_a_process_that_is_left_behind_is_a_failure(place):
    end = run_isolated(place, """\
import subprocess


def test_them():
    subprocess.Popen(["sleep", "99"])
""", "test_them.py")
    assert end.returncode == pytest.ExitCode.TESTS_FAILED, end
    assert "left behind by a test: process" in end.stdout
    assert "sleep 99" in end.stdout


def test_of_the_folders_of_failed_tests_the_last_ones_stay(tmp_path):
    texts = {f"ours{i}": cleanup.KEPT_TEXT for i in range(5)}
    texts |= {"theirs": "", "another": "kept: do not remove\n"}
    for age, (name, text) in enumerate(texts.items()):
        (tmp_path / name).mkdir()
        file = tmp_path / name / cleanup.KEPT
        file.write_text(text)
        os.utime(file, (age, age))
    (tmp_path / "unmarked").mkdir()
    cleanup.remove_older(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "another", "ours2", "ours3", "ours4", "theirs", "unmarked"]
