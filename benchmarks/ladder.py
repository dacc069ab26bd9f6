"""A university project's table of training times, and ours beside it.

    python benchmarks/ladder.py                # a minute on each rung
    python benchmarks/ladder.py --seconds 10   # less exact

The project trained a small GPT-2 for 50 epochs: serially, with MPI, in CUDA,
and with both. Here the stages std, mpi and ddp train a model of the same size
on as many tokens, on all rungs of the ladder that this machine has: threads,
processes, GPUs. Each rung trains for a while, and the median of its steps is
extrapolated to 50 epochs. Then it writes texts, with and without the key-value
cache. All rungs do the same arithmetic, in fp32: their losses agree, and their
texts. The table is printed, and the figures are written as JSON, from which
notebooks/results.ipynb draws its picture.
"""

import datetime
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from turns import processor

from backstage import ROOT, vocabulary
from backstage.command_line import parse_flags
from backstage.cores import count_cores
from backstage.device import device_name
from backstage.errors import require, run_main
from backstage.files import show_path, write_atomically
from workshop.processes import OPEN_MPI, free_port
from workshop.results import runs as results

# The model, in the place of preset nano; what is trained, and how long.
MODEL = {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}
TOKENS, VOCABULARY, EPOCHS = 52_600, 172, 50
SIZES = {"ladder": ("nano", 256, 16), "tiny": ("tiny", 32, 8)}  # preset, T, S
TEXTS = 4  # which each rung writes


@dataclass
class Flags:
    """Measure the ladder: threads, processes, GPUs."""

    seconds: float = 60.0  # of training on each rung, at least one step
    tokens: int = 224  # in each of the four texts (0: write none)
    processes: tuple[int, ...] = (2, 4)  # of the stages mpi and ddp
    model: Literal["ladder", "tiny"] = "ladder"  # tiny: to see that it runs
    output: Path = results.RUNS / "ladder.json"  # the figures


@dataclass
class Rung:
    """A way of training, and what was measured."""

    stage: str
    processes: int
    threads: int  # of each process
    device: str
    losses: list = ()  # of the steps that it has trained
    step: float | None = None  # seconds: the median
    training: float | None = None  # seconds of all epochs
    plain: float | None = None  # seconds for the texts, without a cache
    cached: float | None = None  # and with the key-value cache

    @property
    def name(self):
        number, what = self.processes, "process"
        if self.device != "cpu":
            what = "GPU"
        elif self.stage == "std":
            number, what = self.threads, "thread"
        ending = {"process": "es"}.get(what, "s") if number > 1 else ""
        return f"{self.stage}, {number} {what}{ending}"

    def command(self, script, *flags):
        """`script flags...` as the README starts the stage."""
        python = [sys.executable]
        if self.stage == "ddp":
            python += ["-m", "torch.distributed.run", "--standalone",
                       "--nproc-per-node", str(self.processes), "--"]
        elif self.stage == "mpi":
            python = ["mpirun", "-n", str(self.processes), *python]
            if script != __file__:
                python += ["-m", "workshop.as_torchrun"]
        return [*python, *map(str, (script, *flags, "--device", self.device))]

    def run(self, script, *flags, timeout):
        """What it prints. A `UserError` if it fails."""
        done = subprocess.run(
            self.command(script, *flags), text=True, capture_output=True,
            timeout=timeout, cwd=ROOT, env={
                **os.environ, **OPEN_MPI, "PYTHONPATH": str(ROOT),
                "MASTER_PORT": str(free_port()),
                "OMP_NUM_THREADS": str(self.threads)})
        require(done.returncode == 0, f"{self.name} failed:\n{done.stderr}")
        return done.stdout


def find_rungs(processes):
    """The rungs that this machine has, and what it lacks for others."""
    cores, lacks = count_cores(), []
    rungs = [Rung("std", 1, threads, "cpu") for threads in sorted({1, cores})]
    for stage in "mpi", "ddp":
        if stage == "mpi" and not shutil.which("mpirun"):
            lacks.append("mpirun")
            continue
        rungs += [Rung(stage, number, max(1, cores // number), "cpu")
                  for number in processes]
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    rungs += [Rung(stage, number, max(1, cores // number), kind.type)
              for stage, number in (("std", 1), ("ddp", 2)) if number <= gpus]
    if gpus < 2:
        lacks.append("a second GPU" if gpus else "a GPU")
    return rungs, lacks


def train(stage, seconds, model):
    """In each process: a stage's main(), which stops after so many seconds.

    They count from its first step, and each process stops all.
    """
    sys.path.insert(0, str(ROOT / "solutions"))
    script = importlib.import_module(f"train_gpt2_{stage}")
    if model == "ladder":
        script.MODELS["nano"] = script.GPTConfig(**MODEL)

    def start_clock(*_):
        clock = threading.Timer(
            seconds, os.kill, (os.getpid(), signal.SIGTERM))
        clock.daemon = True
        clock.start()
        hook.remove()

    hook = register_optimizer_step_post_hook(start_clock)
    script.main()


def make_dataset(folder):
    """A toy dataset from the demo's text: 52,600 tokens, vocabulary of 172."""
    demo = ROOT / "fineweb" / "demo"
    require(demo.is_dir(), f"{demo} is not there: run `source activate.sh`")
    encoding = vocabulary.load(demo)
    shard = min(demo.glob("*_train_*.npy"))
    ids = np.load(shard, mmap_mode="r")[:TOKENS].tolist()
    text = encoding.decode([i for i in ids if i != encoding.eot_token])
    text = text.encode("ascii", "ignore")  # three times as many letters

    # its characters, and its most frequent pairs of characters
    parts = [bytes([character]) for character in sorted(set(text))]
    pairs = Counter(pairwise(text)).most_common(VOCABULARY)
    parts += [bytes(pair) for pair, _ in pairs]
    parts = parts[:VOCABULARY - 1]
    encoding = tiktoken.Encoding(
        "toy", pat_str=r"\s*\S+|\s+", special_tokens={
            vocabulary.END_OF_TEXT: len(parts)},
        mergeable_ranks={part: rank for rank, part in enumerate(parts)})
    ids = np.array(encoding.encode_ordinary(text.decode()), np.uint16)
    end = TOKENS + TOKENS // 10
    require(len(ids) >= end, f"{demo} has too little text: build it again, "
            "without sources of your own")
    np.save(folder / "toy_train_000001.npy", ids[:TOKENS])
    np.save(folder / "toy_val_000000.npy", ids[TOKENS:end])
    vocabulary.save(encoding, folder)


def measure(rung, flags, data, run):
    """Let the rung train, and note what its steps took."""
    preset, T, S = SIZES[flags.model]
    steps = EPOCHS * ((TOKENS - 1) // T // S)
    rung.run(__file__, rung.stage, flags.seconds, flags.model, "--preset",
             preset, "--data", data, "--run", run, "--max-steps", steps,
             "--sequence-length", T, "--minibatch-size", S,
             "--learning-rate", 3e-4, "--warmup-steps", 0, "--precision",
             "fp32", "--eval-minibatches", 1, "--eval-every", steps,
             "--generate-every", steps, "--checkpoint-every", steps,
             timeout=flags.seconds + 900)
    result = results.read(run)
    rung.losses = [row["loss"] for row in result.rows]
    rung.step = result.seconds
    rung.training = steps * result.seconds
    return steps


def write(rung, tokens, run):
    """Let the rung write texts, both ways; returns the two outputs."""
    texts = []
    for name, flag in (("plain", "--no-cache"), ("cached", "--cache")):
        out = rung.run(
            ROOT / "code" / "generate.py", "--run", run, "--num-sequences",
            TEXTS, "--max-new-tokens", tokens, flag, timeout=3600)
        setattr(rung, name, float(re.findall(r" in ([\d.]+) s: ", out)[-1]))
        texts.append(out[:out.rindex(f"{TEXTS * tokens} tokens in")])
    return texts


def distance(rung, first):
    """The largest relative difference of two rungs' losses."""
    both = zip(rung.losses, first.losses, strict=False)  # one has more steps
    return max(abs(a / b - 1) for a, b in both)


def hardware():
    """What the machine computes with, without its name."""
    found = [f"{count_cores()} cores of {processor()}, "
             f"{torch.backends.cpu.get_cpu_capability()}"]
    if count := torch.accelerator.device_count():
        kind = torch.accelerator.current_accelerator()
        found.append(f"{count} x {device_name(kind)}")
    return ", ".join([*found, f"torch {torch.__version__}"])


def table(record):
    """The figures as Markdown: theirs, then ours."""
    def row(*cells):
        return "| " + " | ".join(cells) + " |"

    def seconds(value):
        if value is None:
            return "-"
        return f"{value:,.{0 if value >= 20 else 1 if value >= 1 else 2}f}"

    lines = [
        row("seconds", "50 epochs", "extrapolated from", "texts",
            "texts, with cache"), "|---|---:|---:|---:|---:|"]
    lines += [row(f"theirs: {name}", seconds(training), "-", seconds(texts),
                  "-") for name, (training, texts) in
              results.UNIVERSITY.items()]
    for rung in record["rungs"]:
        measured = len(rung["losses"])
        lines.append(row(
            f"ours: {rung['name']}", seconds(rung["training"]),
            "-" if measured == record["steps"] else
            f"{measured} of {record['steps']:,} steps",
            seconds(rung["plain"]), seconds(rung["cached"])))
    lines += ["", f"{record['date']}, {record['hardware']}, load average "
              f"{record['load']:.1f} at the start. The losses of the rungs "
              f"differ by {record['distance']:.0e} at most (relative), "
              + {True: "their texts not at all.", False: "and so do the "
                 "texts.", None: "no texts were written."}[record["same"]]]
    stages = dict.fromkeys(rung["stage"] for rung in record["rungs"])
    lines += ["", "What differs:", ""]
    lines += [textwrap.fill(f"- {stage}: {results.RUNGS[stage]}.", 79,
                            subsequent_indent="  ") for stage in stages]
    if record["lacks"]:
        lines.append(f"\nNot here: {', '.join(record['lacks'])}.")
    return "\n".join(lines)


def main():
    if sys.argv[1:2] and sys.argv[1] in ("std", "mpi", "ddp"):
        _, stage, seconds, model, *sys.argv[1:] = sys.argv
        train(stage, float(seconds), model)
        return
    flags = parse_flags(Flags)
    require(flags.tokens >= 0, "--tokens must be 0 (no texts) or more")
    load = os.getloadavg()[0]
    rungs, lacks = find_rungs(flags.processes)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        make_dataset(data)
        texts = []
        for number, rung in enumerate(rungs):
            steps = measure(rung, flags, data, Path(folder, str(number)))
            if flags.tokens:  # all rungs with the same weights
                texts += write(rung, flags.tokens, Path(folder, "0"))
            print(f"{rung.name}: {len(rung.losses)} steps of "
                  f"{rung.step:.3f} s", flush=True)
    record = {
        "date": str(datetime.date.today()), "hardware": hardware(),
        "load": load, "model": flags.model, "steps": steps,
        "rungs": [{"name": rung.name, **asdict(rung)} for rung in rungs],
        "distance": max(distance(rung, rungs[0]) for rung in rungs),
        "same": len(set(texts)) == 1 if texts else None, "lacks": lacks}
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(flags.output, text.encode())
    print(f"\n{table(record)}\n\nThe figures: "
          f"{show_path(flags.output, Path.cwd())}")


if __name__ == "__main__":
    run_main(main)
