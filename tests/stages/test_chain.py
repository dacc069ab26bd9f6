"""Runs that are killed at random, on one mesh after another.

    pytest --tables tests/stages/test_chain.py -s

Each place is the last one once: two others, chosen at random, are killed at a
random moment, and it goes on to the end. SEED chooses others.
"""

import os
import random
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from conftest import needs
from stages import (
    DeepSpeedOnCPU,
    Result,
    agree,
    count_lines,
    start_stage,
    train,
    wait_for_rows,
)

FLAGS = ("--max-steps", 12, "--checkpoint-every", 1, "--eval-every", 6,
         "--eval-minibatches", 1)
SEED = int(os.environ.get("SEED", "1"))


@dataclass(frozen=True)
class Place:
    """A stage on a mesh."""

    stage: str
    mesh: tuple[int, int, int]
    strategy: str = ""  # Lightning's

    def __str__(self) -> str:
        return " ".join((self.stage, "x".join(map(str, self.mesh)),
                         self.strategy)).strip()


PLACES = (
    Place("std", (1, 1, 1)), Place("mpi", (1, 2, 1)), Place("mpi", (1, 4, 1)),
    Place("ddp", (1, 2, 1)), Place("ddp", (1, 4, 1)),
    Place("lit", (1, 2, 1), "ddp"), Place("lit", (1, 2, 1), "fsdp2"),
    Place("lit", (1, 2, 1), "deepspeed_stage_1"),
    Place("lit", (1, 2, 1), "deepspeed_stage_2"),
    Place("lit", (1, 2, 1), "deepspeed_stage_3"),
    Place("fsdp", (1, 2, 1)), Place("fsdp", (1, 4, 1)),
    Place("tp", (1, 1, 2)), Place("tp", (1, 2, 2)), Place("3d", (2, 1, 1)),
    Place("3d", (2, 1, 2)), Place("starter", (1, 1, 1)),
    Place("starter", (1, 2, 1)))


def start(place: Place, run, first: bool, data):
    """Begin a run there, or let it go on: a `StageLaunch`."""
    flags, options = (), {}
    if place.stage == "starter":
        flags = FLAGS[:6]
    elif first:
        flags, options = FLAGS, {"data": data}
    if place.stage == "lit":
        flags += "--strategy", place.strategy
    if "deepspeed" in place.strategy:
        no_signal = DeepSpeedOnCPU(step=0, number=0)  # the first step is 1
        options |= {"probes": [no_signal], "preload": ["deepspeed"]}
    if not first:
        flags += ("--resume",)
    return start_stage(place.stage, run, *flags, mesh=place.mesh, **options)


def kill_at_random(launch, run, dice: random.Random) -> None:
    """Kill all ranks at once, some steps later and at any moment."""
    wait_for_rows(run, min(9, count_lines(run) + 1 + dice.randrange(3)))
    time.sleep(dice.random() * 0.3)
    launch.signal(signal.SIGKILL)
    launch.wait(100)


def differences(result: Result, whole: Result) -> tuple[float, float]:
    """The largest of a loss, relatively, and of a weight."""
    losses = max(abs(a / b - 1) for a, b in zip(
        result.column("loss"), whole.column("loss"), strict=True))
    found, right = (one.checkpoint()["model"] for one in (result, whole))
    assert found.keys() == right.keys()
    return losses, max(torch.max(torch.abs(
        found[name] - right[name])).item() for name in right)


@pytest.mark.table
@pytest.mark.parametrize("last", PLACES, ids=str)
def test_killed_on_any_mesh_and_ended_here(last, data, tmp_path, capsys):
    if "deepspeed" in last.strategy:
        needs("deepspeed")
    dice = random.Random(f"{SEED} {last}")
    kind = last.stage == "starter"  # it has checkpoints of its own
    others = [place for place in PLACES if (place.stage == "starter") == kind
              and "deepspeed" not in place.strategy]
    whole = train("starter" if kind else "std", tmp_path / "whole", *(
        FLAGS[:6] if kind else FLAGS), data=None if kind else data)
    run, killed = tmp_path / "run", []
    for first in (True, False):
        place = dice.choice(others)
        kill_at_random(start(place, run, first, data), run, dice)
        steps = max(run.glob("checkpoints/step_*.pt"), default=None)
        killed.append(f"{place} with {steps.stem[-2:] if steps else 0}")
    result = start(last, run, False, data).result(run)
    assert result.status == 0, result.err
    if not kind:
        agree(result, whole)
    loss, weight = differences(result, whole)
    assert loss < 1e-5 and weight < 0.02 * 3e-3
    with capsys.disabled():
        print(f"\n| {last} | {', '.join(killed)} | {loss:.1e} | {weight:.1e} |"
              f" seed {SEED}")
