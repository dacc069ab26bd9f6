"""Threads that wait: asleep beside other work, spinning on an idle machine."""

import os
import subprocess
import sys

import pytest

from backstage import ROOT

# Real other work on the process's core, and then none.
PROGRAM = """
import ctypes, os, subprocess, sys, threading, time, torch
from backstage import spinning
too_many = ctypes.CDLL(None).omp_get_num_procs()  # and this thread has two

def threads():
    return len(os.listdir("/proc/self/task"))

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
for other in others:
    other.kill()
    other.wait()
while threads() > before:  # a thread that sleeps waits for no core
    time.sleep(0.5)
print("as before")
"""


@pytest.mark.whole
def test_it_goes_by_how_long_the_process_waits():
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("the system does not say how long a process waits")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("OMP_", "GOMP_"))}  # as a user's Python
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True,
        env={**env, "PYTHONPATH": str(ROOT)}, timeout=400)
    assert done.stdout == "as before\n", done.stderr
