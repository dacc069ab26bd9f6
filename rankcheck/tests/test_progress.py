"""What is said while something takes long, and that it costs nothing else."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from rankcheck.engine import progress
from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.progress import (
    Reminder,
    paused_collection,
    saying_that_it_lasts,
)
from rankcheck.engine.run_record import RunRecord, watch_run
from rankcheck.record.recorder import OptimizerSteps
from rankcheck_testing.support import program

STEPS = 3
TRAINS = f"""\
import time
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({STEPS}):
    weight.grad = torch.ones(1)
    optimizer.step()
time.sleep(2)
"""


def begins(log):
    log.begun = True  # steps count without a model


def test_it_is_said_again_and_again_that_something_lasts(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.1)
    monkeypatch.setattr(progress, "REPEATED", 0.2)
    said = []
    threads = threading.active_count()
    with saying_that_it_lasts(said.append, "loading"):
        while len(said) < 3:
            time.sleep(0.01)
    assert said[0] == "        still loading after 0 s"
    assert threading.active_count() == threads
    count = len(said)
    time.sleep(0.3)
    assert len(said) == count


def test_nothing_is_said_of_what_is_quick():
    said = []
    begin = time.monotonic()
    with saying_that_it_lasts(said.append, "loading"):
        pass
    assert not said
    assert time.monotonic() - begin < progress.FIRST  # it does not wait


def test_a_reminder_is_due_once_for_each_time():
    reminder = Reminder(begin=100.0)
    due = [now for now in range(100, 130) if reminder.is_due(now)]
    assert due == [105, 115, 125]


def test_collections_are_as_they_were():
    assert gc.isenabled()
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.whole
def test_a_run_says_how_many_steps_of_all_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "REPEATED", 0.0)
    script, said = program(tmp_path / "script.py", TRAINS), {}
    for steps in STEPS, 0, STEPS - 1:  # known, not known, and too few
        lines = said[steps] = []
        run = watch_run(RunRecord(script), (), tmp_path / str(steps),
                        lines.append, Budget(allowed=60, steps=steps),
                        probes=[begins, OptimizerSteps()], world_size=2)
        assert not run.gave_up
    ends = {steps: lines[-1].partition(": ")[2]
            for steps, lines in said.items()}
    assert ends == {STEPS: f"6 of {2 * STEPS} optimizer steps of 2 processes",
                    0: "6 optimizer steps in total",
                    STEPS - 1: "6 optimizer steps in total"}


@pytest.mark.whole
def test_whole_tensors_are_described_without_importing_sharded_ones():
    """That import takes half as long as torch's."""
    code = ("import sys, torch\n"
            "from rankcheck.record.tensors import describe_tensors, thin\n"
            "weight = torch.ones(2)\n"
            "assert describe_tensors([('weight', weight)])['plain']\n"
            "assert torch.equal(thin(weight), weight)\n"
            "print('torch.distributed.tensor' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], text=True,
                          capture_output=True, check=True)
    assert done.stdout == "False\n"
