"""A university project's table of training times, and ours beside it.

    python benchmarks/ladder.py                # a minute on each rung
    python benchmarks/ladder.py --seconds 10   # less exact

The project trained a small GPT-2 for 50 epochs: serially, with MPI, in CUDA,
and with both. Here std, mpi, kernels, mpi with kernels, and ddp train a model
of the same size on as many tokens, on all rungs of the ladder that this
machine has: threads, processes, GPUs. Each rung trains for a while, and the
median of its steps is extrapolated to 50 epochs. Then it writes texts, with
and without the key-value cache. All rungs do the same arithmetic, in fp32:
their losses agree, and their texts. The table is printed, and the figures are
written as JSON, from which notebooks/results.ipynb draws its picture.

Without a GPU, Triton's interpreter runs the kernels: they compute the same,
but their time says nothing about a GPU. So those rungs train one step of two
samples, beside std with these two, and write few tokens.
"""

import datetime
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
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
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from backstage import ROOT, dataset
from backstage.device import device_name
from backstage.errors import parse_flags, require
from backstage.files import reading, show_path, write_atomically
from backstage.process import count_cores
from rankcheck.engine.ranks import Launch
from rankcheck.engine.run import Torchrun
from workshop.errors import run_tool
from workshop.jobs import interpreter
from workshop.jobs.mpirun import Mpirun
from workshop.results import runs as results
from workshop.vocabulary import save_vocabulary

from combine import combine
from turns import make_way, processor

# The model, in the place of preset nano; what is trained, and how long.
MODEL = {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}
TOKENS, VOCABULARY, EPOCHS = 52_600, 172, 50
SIZES = {"ladder": ("nano", 256, 16), "tiny": ("tiny", 32, 8)}  # preset, T, S
TEXTS = 4  # which each rung writes
FEW_TOKENS, FEW_SAMPLES = 8, 2  # where the kernels are interpreted
SOLUTIONS, WRITER = ROOT / "solutions", ROOT / "code" / "generate.py"
KERNELS = SOLUTIONS / "train_gpt2_kernels.py"


@dataclass
class Flags:
    """Measure the ladder: threads, processes, GPUs."""

    seconds: float = 60.0  # of training on each rung, at least one step
    tokens: int = 224  # in each of the four texts (0: write none)
    processes: tuple[int, ...] = (2, 4)  # of mpi and ddp
    model: Literal["ladder", "tiny"] = "ladder"  # tiny: to see that it runs
    # only the rungs with kernels; the others stay as the file has them
    only_kernels: bool = False
    output: Path = results.RUNS / "ladder.json"  # the figures


@dataclass
class Rung:
    """A way of training, and what was measured."""

    stage: str
    processes: int
    threads: int  # of each process
    device: str
    samples: int = 0  # in a step
    losses: list = ()  # of the steps that it has trained
    norms: list = ()  # of their gradients
    step: float | None = None  # seconds: the median
    training: float | None = None  # seconds of all epochs
    tokens: int = 0  # in each of the texts
    plain: float | None = None  # seconds for the texts, without a cache
    cached: float | None = None  # and with the key-value cache
    date: str = ""
    load: float | None = None  # of the machine, at the start

    @property
    def has_kernels(self):
        return "kernels" in self.stage

    @property
    def is_interpreted(self):
        return self.has_kernels and self.device == "cpu"

    @property
    def name(self):
        number, what = self.processes, "process"
        if self.device != "cpu":
            what = "GPU"
        elif self.stage == "std":
            number, what = self.threads, "thread"
        ending = {"process": "es"}.get(what, "s") if number > 1 else ""
        where = ", interpreted" * self.is_interpreted
        return (f"{self.stage.replace('-', ' with ')}, {number} {what}"
                f"{ending}{where}")

    def run(self, script, *flags, timeout):
        """What rank 0 prints. A `UserError` if one fails."""
        ranks = Launch(
            script, *flags, "--device", self.device, threads=self.threads,
            world_size=self.processes if self.processes > 1 else None,
            launcher=Mpirun(sleeping=False) if self.stage.startswith("mpi")
            and "train" in flags else Torchrun(),
            env=interpreter.variables()).wait(timeout)
        require(not any(rank.status != 0 for rank in ranks), f"{self.name} "
                "failed:\n" + "".join(rank.err for rank in ranks))
        return ranks[0].out


def find_rungs(processes):
    """The rungs that this machine has, and what it lacks for others."""
    cores, lacks = count_cores(), []
    rungs = [Rung("std", 1, threads, "cpu") for threads in sorted({1, cores})]
    gpus = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    found = [("mpi", number, "cpu") for number in processes]
    if not gpus:  # where the kernels are interpreted
        found += [("kernels", 1, "cpu"), ("mpi-kernels", 2, "cpu")]
    found += [("ddp", number, "cpu") for number in processes]
    found += [(stage, number, kind.type) for stage, number in (
        ("std", 1), ("kernels", 1), ("mpi-kernels", 2), ("ddp", 2))
        if number <= gpus]
    rungs += [Rung(stage, number, max(1, cores // number), device)
              for stage, number, device in found]
    for stage, what, is_here in (
            ("mpi", "mpirun", shutil.which("mpirun")),
            ("kernels", "Triton", importlib.util.find_spec("triton"))):
        if not is_here:
            lacks.append(what)
            rungs = [rung for rung in rungs if stage not in rung.stage]
    if gpus < 2:
        lacks.append("a second GPU" if gpus else "a GPU")
    return rungs, lacks


def load(path):
    """A stage's script as a module."""
    spec = importlib.util.spec_from_file_location("script", str(path))
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def train(path, seconds, model):
    """In each process: a script's main(), which stops after so many seconds.

    They count from its first step, and each process stops all. Without any,
    it is the only step.
    """
    script = load(path)
    if model == "ladder":
        script.MODELS["nano"] = script.GPTConfig(**MODEL)

    def start_clock(*_):
        hook.remove()
        if not seconds:
            return os.kill(os.getpid(), signal.SIGTERM)
        clock = threading.Timer(
            seconds, os.kill, (os.getpid(), signal.SIGTERM))
        clock.daemon = True
        clock.start()

    hook = register_optimizer_step_post_hook(start_clock)
    script.main()


def write_with_kernels():
    """In each process: generate.py, with the kernels' operations."""
    sys.path.insert(0, str(WRITER.parent))
    import trained

    script = trained.std = load(KERNELS)
    standard = F.scaled_dot_product_attention
    # with a cache the one new token looks at all: that is not their case
    F.scaled_dot_product_attention = lambda q, k, v, mask, is_causal: (
        script.attention(q, k, v) if is_causal else standard(q, k, v, mask))
    runpy.run_path(str(WRITER), run_name="__main__")


def make_dataset(folder):
    """A toy dataset from the demo's text: 52,600 tokens, vocabulary of 172."""
    demo = ROOT / "fineweb" / "demo"
    require(demo.is_dir(), f"{demo} is not there: run `source activate.sh`")
    encoding = dataset.load_vocabulary(demo)
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
            dataset.END_OF_TEXT: len(parts)},
        mergeable_ranks={part: rank for rank, part in enumerate(parts)})
    ids = np.array(encoding.encode_ordinary(text.decode()), np.uint16)
    end = TOKENS + TOKENS // 10
    require(len(ids) >= end, f"{demo} has too little text: build it again, "
            "without sources of your own")
    np.save(folder / "toy_train_000001.npy", ids[:TOKENS])
    np.save(folder / "toy_val_000000.npy", ids[TOKENS:end])
    save_vocabulary(encoding, folder)


def measure(rung, flags, data, run):
    """Let the rung train, and note what its steps took.

    Where a step has few samples, one is enough.
    """
    preset, T, S = SIZES[flags.model]
    if rung.is_interpreted:
        rung.samples = FEW_SAMPLES
    few, rung.samples = bool(rung.samples), rung.samples or S
    rung.date, rung.load = str(datetime.date.today()), os.getloadavg()[0]
    steps = EPOCHS * ((TOKENS - 1) // T // S)
    script = SOLUTIONS / f"train_gpt2_{rung.stage}.py"
    if "-" in rung.stage:  # two stages in one
        script = data / script.name
        script.write_text(combine(*rung.stage.split("-")), "utf-8")
    seconds = 0 if few else flags.seconds
    rung.run(__file__, "train", script, seconds, flags.model, "--preset",
             preset, "--data", data, "--run-dir", run, "--max-steps", steps,
             "--sequence-length", T, "--minibatch-size", rung.samples,
             "--learning-rate", 3e-4, "--warmup-steps", 0, "--precision",
             "fp32", "--eval-minibatches", 1, "--eval-every", steps,
             "--generate-every", steps, "--checkpoint-every", steps,
             *["--microbatch-size", 1] * few, timeout=seconds + 1800)
    result = results.read_run(run)
    rung.losses, rung.norms = (
        [row[name] for row in result.rows] for name in ("loss", "norm"))
    rung.step = result.seconds
    rung.training = steps * S / rung.samples * result.seconds
    return steps


def write(rung, tokens, run):
    """Let the rung write texts, both ways; returns the two outputs."""
    texts, rung.tokens = [], tokens
    if rung.samples == FEW_SAMPLES:
        rung.tokens = min(tokens, FEW_TOKENS)
    for name, flag in (("plain", "--no-cache"), ("cached", "--cache")):
        out = rung.run(
            *([__file__, "write"] if rung.has_kernels else [WRITER]),
            "--run-dir",
            run, "--num-sequences", TEXTS, "--max-new-tokens", rung.tokens,
            flag, timeout=3600)
        setattr(rung, name, float(re.findall(r" in ([\d.]+) s: ", out)[-1]))
        texts.append(re.findall(r"^> (.*?)\n(?=> |\d+ tokens in)", out,
                                re.MULTILINE | re.DOTALL))
    return texts


def is_same(texts, others):
    """Whether these are the others, or their beginnings."""
    return len(texts) == len(others) == TEXTS and all(
        other.startswith(text) or text.startswith(other)
        for text, other in zip(texts, others, strict=True))


def distance(rung, first):
    """The largest relative difference of two rungs' losses and norms."""
    return max(abs(a / b - 1) for mine, other in (
        (rung.losses, first.losses), (rung.norms, first.norms))
        for a, b in zip(mine, other, strict=False))  # one has more steps


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

    def seconds(value, part=""):
        if value is None:
            return "-"
        digits = 0 if value >= 20 else 1 if value >= 1 else 2
        return f"{value:,.{digits}f}{part}"

    most, whole = (max(rung[name] for rung in record["rungs"])
                   for name in ("tokens", "samples"))

    lines = [
        row("seconds", "50 epochs", "extrapolated from", "texts",
            "texts, with cache"), "|---|---:|---:|---:|---:|"]
    lines += [row(f"theirs: {name}", seconds(training), "-", seconds(texts),
                  "-") for name, (training, texts) in
              results.read_given()["university"].items()]
    for rung in record["rungs"]:
        measured = len(rung["losses"])
        part = (f" ({rung['tokens']} of {most} tokens)"
                if rung["tokens"] < most else "")
        lines.append(row(
            f"ours: {rung['name']}", seconds(rung["training"]),
            "-" if measured == record["steps"] else
            f"{measured} of {record['steps']:,} steps" if (
                rung["samples"] == whole) else
            f"{measured * rung['samples']} of "
            f"{record['steps'] * whole:,} samples",
            seconds(rung["plain"], part), seconds(rung["cached"], part)))
    with_norms = sum(bool(rung["norms"]) for rung in record["rungs"])
    compared = ("Losses and norms of the rungs" if with_norms == len(
        record["rungs"]) else "Losses of the rungs, and the norms of "
        f"{with_norms} of the {len(record['rungs'])},")
    lines += ["", f"{record['date']}, {record['hardware']}, load average "
              f"{record['load']:.1f} at the start. {compared} "
              f"differ by {record['distance']:.0e} at most (relative), "
              + {True: "their texts not at all.", False: "and so do the "
                 "texts.", None: "no texts were written."}[record["same"]]]
    later = [rung for rung in record["rungs"]
             if rung["date"] != record["date"]]
    if later:
        lines += ["", "; ".join(
            f"{rung['name']}: {rung['date']}, load average {rung['load']:.1f}"
            for rung in later) + "."]
    stages = dict.fromkeys(rung["stage"] for rung in record["rungs"])
    lines += ["", "What differs:", ""]
    lines += [textwrap.fill(f"- {stage.replace('-', ' with ')}: "
                            f"{results.read_given()['rungs'][stage]}.", 79,
                            subsequent_indent="  ") for stage in stages]
    if record["lacks"]:
        lines.append(f"\nNot here: {', '.join(record['lacks'])}.")
    return "\n".join(lines)


def main():
    if sys.argv[1:2] == ["train"]:
        _, _, path, seconds, model, *sys.argv[1:] = sys.argv
        return train(path, float(seconds), model)
    if sys.argv[1:2] == ["write"]:
        del sys.argv[1]
        return write_with_kernels()
    flags = parse_flags(Flags)
    require(flags.tokens >= 0, "--tokens must be 0 (no texts) or more")
    rungs, lacks = find_rungs(flags.processes)
    kept = {"rungs": [], "distance": 0, "same": None}
    if flags.only_kernels:
        with reading(flags.output, "measure all rungs"):
            found = json.loads(flags.output.read_bytes())
            kept = {name: found[name] for name in (
                "hardware", "model", "same", "distance", "rungs")}
        require((kept["hardware"], kept["model"]) == (
            hardware(), flags.model), f"{show_path(flags.output)} has rungs "
            f"of model {kept['model']} on {kept['hardware']}, which do not "
            "belong beside others: measure all rungs")
        rungs = [rung for rung in rungs if rung.has_kernels]
    short = Rung("std", 1, 1, "cpu", FEW_SAMPLES)
    if any(rung.is_interpreted for rung in rungs):
        rungs.insert(0, short)
    same, far = [kept["same"]], [kept["distance"]]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        make_dataset(data)
        first = {}  # of the long rungs, and of the short ones: run, texts
        for number, rung in enumerate(rungs):
            run = Path(folder, str(number))
            steps = measure(rung, flags, data, run)
            beside = first.setdefault(rung.samples, (rung, run, []))
            far.append(distance(rung, beside[0]))
            if flags.tokens:  # with the same weights
                texts = write(rung, flags.tokens, beside[1])
                beside[2].extend(texts[:1 - len(beside[2])])
                same += [is_same(each, beside[2][0]) for each in texts]
            print(f"{rung.name}: {len(rung.losses)} steps of "
                  f"{rung.step:.3f} s", flush=True)
    made = [{"name": rung.name, **asdict(rung)}
            for rung in rungs if rung is not short]
    names = {rung["name"] for rung in made}
    made += [rung for rung in kept["rungs"] if rung["name"] not in names]
    order = [rung.name for rung in find_rungs(flags.processes)[0]]
    same = [each for each in same if each is not None]
    record = {
        "date": str(datetime.date.today()), "hardware": hardware(),
        "load": made[0]["load"], **kept, "model": flags.model,
        "steps": steps, "distance": max(far), "lacks": lacks,
        "same": all(same) if same else None,
        "rungs": sorted(made, key=lambda rung: [
            *order, rung["name"]].index(rung["name"]))}
    make_way(flags.output)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(flags.output, text.encode())
    print(f"\n{table(record)}\n\nThe figures: "
          f"{show_path(flags.output, Path.cwd())}")


if __name__ == "__main__":
    run_tool(main)
