"""A pytest that is killed leaves no process, no folder and no mount."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import needs

from backstage import ROOT
from rankcheck_testing import cleanup
from rankcheck_testing.support import HOUSE


def start_pytest(place, *words):
    """A pytest whose temporary files are in a folder in this place."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    assert condition()


@pytest.fixture
def place():
    """A folder with a short name, for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="c"))
    folder.chmod(0o755)
    return folder


@pytest.mark.whole
@pytest.mark.parametrize("number", [
    signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_a_cluster_goes_with_its_pytest(number, place):
    """It has daemons, and namespaces with mounts, which nobody waits for."""
    needs("slurmctld", "munged")
    process = start_pytest(place, "-n", "1", "tests/site/test_slurm.py", "-k",
                           "accepts_every_file or says_the_size")

    def has_daemon():
        return any("slurmctld" in Path(f"/proc/{pid}/comm").read_text()
                   for pid in cleanup.find_processes(place)
                   if Path(f"/proc/{pid}").exists())

    wait_until(has_daemon, 120)
    time.sleep(random.random())
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: not [*place.iterdir()], 60)
    wait_until(lambda: not [*cleanup.find_processes(place)], 10)
    assert str(place) not in Path("/proc/self/mounts").read_text()


@pytest.mark.whole
def test_ranks_go_with_their_pytest(place):
    """At a random moment of a suite with forked ranks, by several workers."""
    process = start_pytest(place, "-n", "2", "tests/stages/test_std.py")
    time.sleep(random.uniform(1, 15))
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    wait_until(lambda: not [*place.iterdir()], 60)
    wait_until(lambda: not [*cleanup.find_processes(place)], 10)


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
         "-p", "rankcheck_testing.isolation", test], cwd=ROOT, text=True,
        check=True, env={**os.environ, "HOME": str(place), "PYTHONPATH":
                         f"{HOUSE}/src{os.pathsep}{HOUSE}/tests"},
        stdout=subprocess.PIPE).stdout
    assert "a login shell" in out and "the profile" not in out
