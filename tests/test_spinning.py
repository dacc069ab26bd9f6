"""Threads that wait: asleep beside other work, spinning on an idle machine."""

import os
import subprocess
import sys

import pytest

from backstage import ROOT

# What a process prints when torch is loaded as a user's Python loads it.
PROGRAM = """
import ctypes, os, threading, time, torch
from backstage import spinning
torch.set_num_threads(2)
openmp = ctypes.CDLL(None)
too_many = openmp.omp_get_num_procs()  # and this thread has two

def computed():
    # seconds that the threads compute while the program sleeps
    x, begin = torch.ones(100_000), time.process_time()
    for _ in range(100):
        x.add_(1)
        time.sleep(0.003)
    return time.process_time() - begin

def threads():
    return len(os.listdir("/proc/self/task"))

def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
    return True
"""


@pytest.fixture(scope="module", autouse=True)
def system():
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("the system does not say how long a process waits")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")


def python(program):
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True,
        text=True, env={**env, "PYTHONPATH": str(ROOT)}, timeout=90)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_more_threads_than_cores_do_not_spin():
    """What the module relies on, measured in CPU time; and its end."""
    spinning_before, asleep, spinning_after, left = python("""
computed()
print(computed())
before = threads()
enough = threading.Event()
helper = threading.Thread(
    target=spinning.keep_threads, args=(openmp, too_many, enough))
helper.start()
wait_for(lambda: threads() >= before + too_many)
print(computed())
enough.set()
helper.join()
wait_for(lambda: threads() == before)
print(computed())
print(threads() - before)
""")
    assert asleep < spinning_before / 2
    assert asleep < spinning_after / 2
    assert left == 0


def test_it_goes_by_how_long_the_process_waits():
    """Real other work on its core, and then none."""
    busy, idle = python("""
import subprocess, sys
torch.set_num_threads(1)
spinning.share_cores()
assert threading.active_count() == 1  # one thread waits for nobody
torch.set_num_threads(2)
spinning.KEEP, spinning.LONG = 1, 0.3
spinning.share_cores()
before = threads()
# this thread, and whom it starts, share one core
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
          for _ in range(2)]
while threads() < before + too_many:
    sum(range(10_000))
print(threads() - before)
for other in others:
    other.kill()
    other.wait()
wait_for(lambda: threads() == before)  # a thread that sleeps waits for no core
print(threads() - before)
""")
    assert busy > 1 and idle == 0
