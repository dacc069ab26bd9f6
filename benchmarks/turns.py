"""How all benchmarks measure: the sides take turns, and medians count.

A busy machine then slows all of them down. What is compared is a ratio: the
median of the ratios of the turns.
"""

import json
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from threading import Timer

import numpy as np
import psutil

from backstage import ROOT
from backstage.errors import require
from backstage.files import keep
from workshop.results.profile import recorded_parts

SIDE = Path(__file__).with_name("side.py")
STEP = re.compile(r"\| step +\d+/\d+ \| loss (\S+) .*\| norm: (\S+) \| "
                  r"dt: +(\S+) ms \| tok/s: ([\d,]+)")
NEVER = 10**6  # steps


def make_way(file):
    """Make the folder of a file of figures, and keep those that are there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        print(f"the figures that were there: {keep(file)}")


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

    Each turn begins with another side: who comes first may have it easier.
    """
    found, names = {name: [] for name in sides}, [*sides]
    for turn in range(rounds):
        for name in names:
            if sys.stdout.isatty():
                print(f"turn {turn + 1} of {rounds}: {name}")
            found[name].append(sides[name]())
        names = names[1:] + names[:1]
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
    begin, times = time.perf_counter(), []

    def on_step(process):
        nonlocal limit
        times.append(time.perf_counter())
        if limit is not None and len(times) > skip + 1 and (
                times[-1] > times[0] + limit):
            process.terminate()  # it stops after the next step
            limit = None

    status, text, steps = watch(command, on_step, env=env)
    require(status == 0 and len(steps) > skip, f"{' '.join(command)} failed:\n"
            + "\n".join(text.splitlines()[-20:]))
    losses, _, milliseconds, speeds = zip(*steps, strict=True)
    first = times[0] - begin
    return {"tokens_per_second": statistics.median(speeds[skip:]),
            "seconds": statistics.median(milliseconds[skip:]) / 1000,
            "steps": [time / 1000 for time in milliseconds],
            "losses": losses, "memory": read_most("memory", text),
            "start": first - milliseconds[0] / 1000, "first": first}


def watch(command, on_step, seconds=None, env=None):
    """Run a command, and read what it prints until its last process ends.

    on_step(process) is called after each step; all of it is killed after so
    many seconds. Returns (its status, or None if it was killed, the text,
    [[loss, norm, milliseconds, tokens/s] of each step]).
    """
    lines, steps = [], []
    process = psutil.Popen(
        [*map(str, command)], cwd=ROOT, env=env, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    timer = Timer(threading.TIMEOUT_MAX if seconds is None else seconds, send,
                  [process, signal.SIGKILL])
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if match := STEP.match(line):
                steps.append([float(word.replace(",", ""))
                              for word in match.groups()])
                on_step(process)
        late = not timer.is_alive()
    finally:
        timer.cancel()
        send(process, signal.SIGKILL)
    status = process.wait()
    return None if late else status, "".join(lines), steps


def send(starter, number, ranks=None):
    """Send a signal to these ranks of what was started, or to all of it."""
    with suppress(psutil.NoSuchProcess):
        for process in [*starter.children(recursive=True), starter]:
            with suppress(psutil.NoSuchProcess):
                if ranks is None or process.environ().get("RANK") in ranks:
                    process.send_signal(number)


def read_most(name, text):
    """The largest number that a process has printed behind this name."""
    return max(map(int, re.findall(rf"^{name} (\d+)$", text, re.M)),
               default=None)


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
