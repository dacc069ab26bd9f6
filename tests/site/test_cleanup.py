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
