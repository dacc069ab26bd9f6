"""rankcheck why [RUN|JOBID]: what is wrong, and what to do."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from rankcheck.errors import UserError
from rankcheck.why import evidence
from rankcheck.why.judge import judge
from rankcheck.why.ranks import Rank
from rankcheck.why.seen import describe
from rankcheck.why.start import run
from rankcheck.why.witness import BEGIN

BETWEEN = 5  # seconds between two looks


def add_arguments(parser):
    parser.after = "the job's own words"
    parser.description += (" `why run -- torchrun ...` starts a job so that "
                           "this is known.")
    parser.add_argument("job", nargs="?", metavar="RUN|JOBID", help="its "
                        "folder, or SLURM's number of it; without it, the job "
                        "that was started last")


def main(args, **options):
    """options: as `why` has them. Returns 2 if there is nothing to see."""
    if args.job == "run" and args.flags:
        run(args.flags)
    try:
        return why(args.job, **options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def why(target, runs=Path("runs"), describe_run=lambda folder: "",
        explain_speed=lambda folder: ()):
    """Print the answer; returns the exit status, 1 if a fault is proven.

    runs: where a job's folder is looked for by its number. describe_run: says
    in a line how the run in a folder was started, explain_speed: in several,
    what its steps' time goes to; both nothing if they do not know it.
    """
    folder = evidence.find(target, runs)
    begin = evidence.read_json(folder / BEGIN)
    if target is None:
        target = str(folder)
        print(f"what was started last: {target}",
              *map(str, begin.get("command", ())))
    ranks = evidence.collect(folder)
    if not ranks:  # then only the start can say something
        raise UserError(f"{target}: {evidence.say_begin(folder)}")
    answer = judge(ranks, lambda: look_again(folder))
    print(f"{answer.kind or 'no fault is proven'}: {answer.text}")
    if answer.advice:
        print(f"{'try' if answer.kind else 'look'}: {answer.advice}")
    for line in evidence.ask_about(target):
        print(f"  SLURM: {line}")
    # the evidence is in RUN/why, or in RUN/why/<job>-<start>
    place = next(filter(describe_run, [*folder.parents][:2]), folder.parent)
    if about := describe_run(place):
        print(f"  {about}")
    for rank in ranks:
        number = f", collective {rank.calls[-1]['number']}" if (
            rank.calls) else ""
        print(f"  rank {rank.rank} on {rank.host}, process {rank.pid}"
              f"{number}: {describe(rank)}")
    for rank in [rank for rank in ranks if rank.runs and (
            rank is ranks[0] or rank in answer.ranks)]:
        print_times(rank)
    if begin.get("output") and not all(rank.runs for rank in ranks):
        print(f"  its output, {begin['output']}, ends:\n"
              f"{evidence.read_end(begin['output'])}")
    if answer.kind in ("", "straggler"):
        for line in explain_speed(place):
            print(line)
    return int(answer.verdict == "FAIL")


def look_again(folder: Path) -> list[Rank]:
    """The ranks, some seconds after the first look."""
    time.sleep(BETWEEN)
    return evidence.collect(folder)


def print_times(rank, most=4):
    """The lines of the script that the rank spends its time in.

    On a GPU these are the lines that wait for it, or keep it waiting.
    """
    lines, whole = Counter(), sum(times for times, _ in rank.looks)
    for times, stack in rank.looks:
        lines[f"{rank.find_place(stack)}" + " (waits for other ranks)"
              * bool(rank.sources.find_wait(stack))] += times
    if whole:
        print(f"where the time of rank {rank.rank} goes, of {whole} looks in "
              "two seconds:")
    for line, times in lines.most_common(most):
        print(f"  {100 * times / whole:3.0f}%  {line}")
