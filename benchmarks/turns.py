"""How all benchmarks measure: the sides take turns, and medians count.

A busy machine then slows all of them down. What is compared is a ratio: the
median of the ratios of the turns.
"""

import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from backstage import ROOT
from backstage.errors import require
from workshop.results.profile import recorded_parts

SIDE = Path(__file__).with_name("side.py")
STEP = re.compile(r"\| step +\d+/\d+ \| loss (\S+) .*\| dt: +(\S+) ms \| "
                  r"tok/s: ([\d,]+)")
NEVER = 10**6  # steps


def processor():
    """The processor's name, or its kind where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines
                    if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def take_turns(sides, rounds):
    """{name: [result of each turn]} of {name: function}; says how far it is.
    """
    found = {name: [] for name in sides}
    for turn in range(rounds):
        for name, side in sides.items():
            if sys.stdout.isatty():
                print(f"turn {turn + 1} of {rounds}: {name}")
            found[name].append(side())
    return found


def summary(values, base=None):
    """Median and spread of a side's turns, and its ratio to another's."""
    row = {"median": statistics.median(values), "least": min(values),
           "most": max(values)}
    if base:
        row["ratio"] = statistics.median(
            value / other for value, other in zip(values, base, strict=True))
    return row


def train(side, *flags, processes=1, skip=1, limit=None, env=None):
    """Train once, in processes of its own.

    side: a script, or a name that side.py knows. The first `skip` steps do
    not count. limit: seconds after the first step until it is to stop.

    Returns a dictionary: tokens_per_second and seconds (medians of the
    steps), steps (seconds of each), losses, memory (bytes, of the process
    that needs most), start and first (seconds from the command to the
    begin and the end of the first step), hyperparameters, as the run has
    written them, and parts, as it has recorded them.
    """
    launcher = [] if processes == 1 else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            sys.executable, *launcher, SIDE, side, *flags, "--run-dir", run,
            "--eval-every", NEVER, "--generate-every", NEVER,
            "--checkpoint-every", NEVER, "--eval-minibatches", 1]
        turn = follow([str(word) for word in command], skip, limit, env)
        file = run / "hyperparameters.json"
        if file.exists():
            turn["hyperparameters"] = json.loads(file.read_text())
        turn["parts"] = recorded_parts(run)
    return turn


def follow(command, skip, limit, env):
    """Read what a command prints while it trains."""
    begin, first, steps, memory, text = time.perf_counter(), None, [], [], []
    with subprocess.Popen(command, text=True, env=env, cwd=ROOT,
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            text.append(line)
            memory += map(int, re.findall(r"memory (\d+)", line))
            if match := STEP.match(line):
                first = first or time.perf_counter() - begin
                steps.append([float(word.replace(",", ""))
                              for word in match.groups()])
                if limit is not None and len(steps) > skip + 1 and (
                        time.perf_counter() - begin > first + limit):
                    process.terminate()  # it stops after the next step
                    limit = None
    require(process.returncode == 0 and len(steps) > skip,
            f"{' '.join(command)} failed:\n{''.join(text[-20:])}")
    losses, milliseconds, speeds = zip(*steps, strict=True)
    start = first - milliseconds[0] / 1000
    return {"tokens_per_second": statistics.median(speeds[skip:]),
            "seconds": statistics.median(milliseconds[skip:]) / 1000,
            "steps": [time / 1000 for time in milliseconds],
            "losses": losses, "memory": max(memory),
            "start": start, "first": first}


def column(turns, name):
    return [turn[name] for turn in turns]


def random_tokens(folder, number=1_000_000, vocabulary=50257):
    """A dataset of tokens of GPT-2's vocabulary, drawn at random."""
    # more of some than of others, so that there is something to learn
    tokens = vocabulary * np.random.default_rng(0).random(number)**8
    for split in ("val_000000", "train_000001"):
        np.save(Path(folder, f"random_{split}.npy"), tokens.astype(np.uint16))


def show(header, *rows):
    """Print a table."""
    for row in (header, *rows):
        first, *others = ("-" if cell is None else cell for cell in row)
        print(f"{first:28}" + "".join(f"{cell:>11}" for cell in others),
              flush=True)
