"""rankcheck why [RUN|JOBID|PID]: what is wrong, and what to do."""

import sys
import time
from collections import Counter
from pathlib import Path

from rankcheck.errors import require
from rankcheck.why.evidence import ask_about, collect, find
from rankcheck.why.judge import judge
from rankcheck.why.ranks import PATIENCE, Job, Place, is_waiting
from rankcheck.why.start import run
from rankcheck.why.witness import find_line

STILL = 5  # seconds without a move that are worth a word


def add_arguments(parser):
    parser.after = "the job's own words"
    parser.description += (" `why run -- torchrun ...` starts a job so that "
                           "this is known.")
    parser.add_argument("job", nargs="?", metavar="RUN|JOBID|PID", help="its "
                        "folder, SLURM's number of it, or a process's: the "
                        "launcher's or a rank's; without it, the job that "
                        "torchrun started last")


def unknown(folder):
    """Nothing is known of a run in that folder."""
    return ""


def main(args, **options):
    """options: as `why` has them."""
    if args.job == "run" and args.flags:
        run(args.flags)
    return why(args.job, **options)


def why(target, runs=Path("runs"), describe_run=unknown,
        explain_speed=unknown):
    """Print the answer; returns the exit status, 1 if something is wrong.

    runs: where a job's folder is looked for by its number. describe_run: says
    in a line how the run in a folder was started, explain_speed: in several,
    what its steps' time goes to; both nothing if they do not know it.
    """
    folder, processes = find(target, runs)
    if target is None:
        target = str(folder)
        print(f"what was started last: {target}")
    ranks, answer = look(target, folder, processes)
    print(f"{answer.kind or 'nothing is wrong'}: {answer.text}")
    if answer.advice:
        print(f"try: {answer.advice}")
    for line in ask_about(target):
        print(f"  SLURM: {line}")
    # the evidence is in RUN/why, or in RUN/why/<job>-<start>
    about = ""
    for place in [*folder.parents][:2] if folder else ():
        about = describe_run(place)
        if about:
            print(f"  {about}")
            break
    for rank in ranks:
        print(f"  rank {rank.rank} on {rank.host}, process {rank.pid}: "
              f"{describe(rank)}")
    for rank in [rank for rank in ranks if rank.runs and (
            rank is ranks[0] or rank in answer.ranks)]:
        print_times(rank)
    if folder and answer.kind in ("", "straggler"):
        for line in explain_speed(place if about else folder.parent):
            print(line)
    return int(answer.verdict == "FAIL")


def look(target, folder, processes):
    """(the ranks, the `Finding`). While one stands still, it looks again."""
    # what ranks on a busy node count is less than what has passed
    said, end = False, time.monotonic() + 2 * PATIENCE
    while True:
        ranks = collect(folder, processes)
        require(ranks, f"{target}: no process there has said which rank it is")
        alive = any(rank.alive or rank.fresh for rank in ranks)
        answer = judge(ranks, alive)
        still = Job([rank for rank in ranks if rank.runs]).standstill
        if (answer.kind or not STILL < still <= PATIENCE
                or time.monotonic() > end):
            return ranks, answer
        if not said:
            print(f"a rank has stood still for {still:.0f} s: looking again "
                  f"until it moves, or until it is {PATIENCE} s",
                  file=sys.stderr)
            said = True
        time.sleep(1)


def print_times(rank, most=4):
    """The lines of the script that the rank spends its time in.

    On a GPU these are the lines that wait for it, or keep it waiting.
    """
    lines, whole = Counter(), sum(times for times, _ in rank.looks)
    for times, stack in rank.looks:
        lines[f"{Place(*find_line(stack))}" + " (waits for other ranks)"
              * is_waiting(stack)] += times
    if whole:
        print(f"where the time of rank {rank.rank} goes, of {whole} looks in "
              "two seconds:")
    for line, times in lines.most_common(most):
        print(f"  {100 * times / whole:3.0f}%  {line}")


def describe(rank):
    text = rank.doing
    if rank.ending == "done":
        return text
    if rank.calls:
        text += f", collective {rank.calls[-1]['number']}"
    if rank.runs and rank.still > STILL:
        text += f", for {rank.still:.0f} s"
    wrote = "last wrote from " * (rank.ending in ("killed", "gone"))
    return f"{text}, {wrote}{rank.place}"
