"""python -m workshop why, with what a step's time goes to in a run of ours,
and whether more nodes pay.

By what the run's folder has: metrics.csv, the record of --profile, and the
runs beside it that train the same on fewer nodes. What the network can do is
known from the last `doctor --ranks`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from backstage.errors import UserError
from backstage.files import read_json, show_path
from rankcheck.why import command
from workshop.results.arithmetic import ring
from workshop.results.profile import Seconds, recorded_parts
from workshop.results.runs import (
    RUNS,
    RecordedRun,
    describe_run_start,
    list_folders,
    read_run,
    read_runs,
)
from workshop.stages import STAGES

# Gigabytes/s inside and between nodes, as doctor --ranks has measured them
NETWORK_FILE = RUNS / "network.json"
SLOW_SHARE = 0.1  # of a step that a part may take which is not training
# What to try first, by the part that takes more than that.
FIRST_STEPS = {
    "data": "input: put the dataset on the node's own disk or in memory "
            "(/dev/shm), use fewer, larger shards, and do less between the "
            "passes, such as callbacks",
    "all-reduce": "exposed communication: use a larger --minibatch-size, "
                  "which sends as much for more samples, fewer nodes, or a "
                  "faster network (python -m workshop doctor --ranks)",
    "waiting": "load imbalance: check what else runs on the node of the "
               "slowest rank",
}


add_arguments = command.add_arguments


def main(args: argparse.Namespace) -> int:
    """`why`, of a run of ours as well; returns the exit status."""
    return command.main(args, runs=RUNS, describe_run=describe_run_start,
                        explain_speed=explain_speed)


def explain_speed(folder: Path) -> list[str]:
    """Lines about the speed of the run in a folder; [] if it is not ours."""
    try:
        run = read_run(folder)
        ranks = recorded_parts(folder)
        return [*explain_step(run, ranks), *explain_nodes(run, ranks)]
    except UserError:
        return []


def explain_step(run: RecordedRun, ranks: list[Seconds]) -> Iterator[str]:
    """By part, and what to try first."""
    yield (f"a step takes {1000 * run.seconds:.0f} ms, "
           f"{run.tokens_per_second:,.0f} tokens/s"
           + (f", MFU {100 * run.mfu:.0f}%" if run.mfu else ""))
    if not ranks:
        yield "to see where the time goes, start it again with --profile 10"
        return
    mean = average(ranks)
    whole = sum(mean.values())
    yield "of that: " + ", ".join(
        f"{100 * seconds / whole:.0f}% {part}" for part, seconds in sorted(
            mean.items(), key=lambda item: -item[1]))
    part = max(FIRST_STEPS, key=lambda part: mean[part])
    if mean[part] < SLOW_SHARE * whole:
        yield ("nearly all of it is computation: a larger microbatch, "
               "--compile or a faster device shortens it")
        return
    who = ""
    if part == "waiting":  # the others wait for the one that waits least
        times = [rank[part] for rank in ranks]
        who = f" (rank {times.index(min(times))})"
    yield f"fix: {FIRST_STEPS[part]}{who}"


def average(ranks: list[Seconds]) -> Seconds:
    """Seconds of a step by part, the mean of all ranks."""
    return {part: statistics.mean(rank[part] for rank in ranks)
            for part in ranks[0]}


def explain_nodes(run: RecordedRun, ranks: list[Seconds]) -> Iterator[str]:
    """Whether it is faster than on fewer nodes, and why not."""
    if run.nodes == 1:
        return
    others, _ = read_runs(list_folders(run.folder.parent))
    fewer = [other for other in others if other.stage == run.stage
             and other.nodes < run.nodes and other.alike(run)]
    if not fewer:
        yield ("no run beside it trains the same on fewer nodes; start one to "
               "see what more nodes gain")
    else:
        yield from compare_runs(run, ranks, fewer[-1])
    if run.sent and STAGES[run.stage].split == "samples":
        yield explain_network(ring(run.world_size, run.sent))


def compare_runs(run: RecordedRun, ranks: list[Seconds],
                 other: RecordedRun) -> Iterator[str]:
    """A run and a newer one on fewer nodes, in what they have in common."""
    ratio = run.tokens_per_second / other.tokens_per_second
    devices = run.world_size / other.world_size
    yield (f"with {devices:.3g} times the processes of "
           f"{show_path(other.folder)}, on {run.nodes} nodes instead of "
           f"{other.nodes}, it reaches {ratio:.2f} times its tokens/s"
           + (": more nodes are slower" if ratio < 1 else ""))
    before = recorded_parts(other.folder)
    if not (ranks and before) or ratio > 0.9 * devices:
        return
    # what does not get shorter although there are more processes
    now, then = average(ranks), average(before)
    lost = {part: now[part] - then[part] / (
        1 if part == "all-reduce" else devices) for part in now}
    part = max(lost, key=lambda part: lost[part])
    yield (f"most of that is lost to {part}: {1000 * now[part]:.1f} ms of a "
           f"step, {1000 * then[part]:.1f} ms before"
           + (f"; fix: {FIRST_STEPS[part]}" if part in FIRST_STEPS else ""))


def measured_speeds() -> dict[str, float]:
    """Return what the doctor has measured: {where: gigabytes/s}."""
    speeds = {}
    with suppress(FileNotFoundError, UserError):
        speeds = read_json(NETWORK_FILE, {})
    return {where: speed for where, speed in speeds.items()
            if type(speed) in (int, float) and speed > 0}


def explain_network(sent: float) -> str:
    """How long a step's messages take at least, by the doctor's figures."""
    doctor = "`python -m workshop doctor --ranks`"
    times = " or ".join(
        f"{1000 * sent / (1e9 * speed):.1f} ms {where} ({speed:.2f} GB/s)"
        for where, speed in measured_speeds().items())
    return f"a rank sends {sent / 1e6:,.1f} MB in a step: " + (
        f"at the doctor's measured speeds that takes {times}" if times else
        f"run {doctor} on these nodes to see how long that takes")
