"""Runs somebody else's script with a fault, for notebooks/hangs.ipynb.

    python -m notebooks.experiments.hangs FAULT FOLDER

It starts notebooks/their_train.py as four processes (fault 9: their_mpi.py, by
mpirun), whose evidence goes to FOLDER. Each second it prints what they have
printed, and a line with a point; two points, and it prints no more. They end
with its input.
"""

import ctypes
import functools
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from backstage import ROOT
from rankcheck.engine.ranks import Launch
from rankcheck.engine.run import Torchrun
from rankcheck.why import watcher
from workshop.errors import run_tool
from workshop.jobs.mpirun import Mpirun

SCRIPT = ROOT / "notebooks" / "their_train.py"
MPI = 9  # the fault with mpirun
SECONDS = 12  # of printing, at the most
QUIET = 6  # seconds without anything new that are enough
REDUCE = "        dist.all_reduce(average)\n"
GATHER = "        dist.all_gather(samples, torch.full((1,), 20.0))\n"
KILL = "            os.kill(os.getpid(), 9)\n" + REDUCE
ALONE = "ALONE"  # a variable: this rank's network reaches nobody
NEW_NETWORK = 0x50000000  # of unshare(2), with a new user namespace
# What is changed in the script, and in the variables of each rank.
FAULTS = {
    1: ([(REDUCE, "        if rank != 2 or step != 25:\n    " + REDUCE)], {}),
    2: ([(REDUCE, "        if rank == 1 and step == 25:\n"
          "            parts = [torch.zeros(1) for _ in range(world_size)]\n"
          "            dist.all_gather(parts, torch.ones(1))\n" + REDUCE),
         (GATHER, "        if rank != 1 or step != 25:\n    " + GATHER)], {}),
    3: ([(REDUCE, "        if rank == 1 and step == 25:\n"
          "            average = average.expand(3).clone()\n" + REDUCE)], {}),
    4: ([(REDUCE, "        if rank == 1 and step == 25:\n" + KILL)], {}),
    5: ([], {2: {ALONE: "yes"}}),
    # an address for documentation: no machine has it
    6: ([], {rank: {"MASTER_ADDR": "192.0.2.77"} for rank in range(4)}),
    7: ([("time.sleep(args.pause)",
          "time.sleep(args.pause + 0.3 * (rank == 3))")], {}),
    8: ([(REDUCE, "        if rank >= 2 and step == 25:\n" + KILL)],
        {rank: {"SLURMD_NODENAME": f"node{rank // 2 + 1}"}
         for rank in range(4)}),
    MPI: ([("    comm.Allreduce(MPI.IN_PLACE, loss)\n",
            "    if comm.rank == 2 and step == 25:\n"
            "        comm.Recv(loss, source=0)\n"
            "    comm.Allreduce(MPI.IN_PLACE, loss)\n")], {}),
}


def start(number, place, folder):
    """The script with this fault, written into `place` and launched."""
    edits, variables = FAULTS[number]
    theirs = SCRIPT.with_name("their_mpi.py") if number == MPI else SCRIPT
    script, text = place / theirs.name, theirs.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script.write_text(text)
    return Launch(script, world_size=4, launcher=Mpirun(
        sleeping=False) if number == MPI else Torchrun(),
        probes=[functools.partial(prepare, folder, variables)])


def prepare(folder, variables, log):
    """In each process, before the script."""
    os.environ.update(variables.get(log.rank, {}))
    if ALONE in os.environ and ctypes.CDLL(None).unshare(NEW_NETWORK):
        print("this kernel makes no network for a process: nothing is wrong "
              "with this job", flush=True)
    watcher.start_watching(folder)


def last_lines(text):
    """The last three, without what C++ says of where it was."""
    return [line for line in text.splitlines() if line.strip() and not
            re.match("frame #|Exception raised from|<omitting", line)][-3:]


def report(job):
    """Print each second what the ranks have printed last, until that ends."""
    begin = quiet = time.monotonic()
    before, left = 0, job.jobs
    while left:
        left = job.wait_for_end(time.monotonic() + 1)
        now = time.monotonic()
        for rank in range(4):
            for name in ("out", "err"):
                for line in last_lines(job.text(rank, name)):
                    print(f"rank {rank}: {line}")
        if job.printed() != before:
            before, quiet = job.printed(), now
        print(f"After {now - begin:.0f} s " + (
            f"{len(left)} of 4 processes run, with nothing new for "
            f"{now - quiet:.0f} s." if left else "all have ended."))
        if now - begin > SECONDS or (before and now - quiet > QUIET):
            break
        print(".", flush=True)
    print("..", flush=True)


def main():
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        job = start(number, Path(place), folder)
        try:
            report(job)
            sys.stdin.read()
        finally:
            job.clear()


if __name__ == "__main__":
    from notebooks.experiments import hangs  # by this name its ranks know it

    run_tool(hangs.main)
