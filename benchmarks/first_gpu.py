"""Everything that one GPU can prove, in ten minutes, by one command.

    python benchmarks/first_gpu.py                  # on a GPU, or several
    python benchmarks/first_gpu.py --device cpu     # as far as a CPU goes
    python benchmarks/first_gpu.py std nanoGPT      # these items alone

ITEMS says what is tried, in the order of what it costs: each is a command with
a time limit, and what must hold of what it did. The next item follows whatever
happened. Several ranks share the GPU if there is only one. Without a GPU all
ranks use gloo, all models are tiny, and what only a GPU can prove is left out.

It leaves a run's folder, that of the stage std at the size of gpt2. Beside the
metrics and the trace are first_gpu.json, which says how each item ended,
logs.txt, the ends of what they printed, and gpus-0.txt, what the GPUs did.
"""

import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree, which

import torch
import tyro

from backstage import ROOT, dataset
from backstage.device import device_name, find_device, memory_size
from backstage.errors import parse_flags, require, run_main
from backstage.files import new_folder, show_path, write_atomically
from backstage.process import count_cores
from workshop.jobs import interpreter
from workshop.jobs.doctor import name_commit, name_driver, name_libraries
from workshop.jobs.mpirun import OPEN_MPI
from workshop.results import runs
from workshop.stages import STAGES
from workshop.vocabulary import save_bytes

from turns import NEVER, SIDE, random_tokens, read_most, send, watch

# Ranks that share a GPU, see side.py, talk over the loopback interface.
SHARED = {"BENCHMARK_SHARES_GPU": "yes", "NCCL_MAX_CTAS": "4", "NCCL_NET":
          "Socket", "NCCL_SOCKET_IFNAME": "lo",
          "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


class LeftOut(Exception):
    """This machine cannot try an item."""


@dataclass
class Flags:
    """Prove on one GPU what one GPU can prove."""

    items: tyro.conf.Positional[tuple[str, ...]] = ()  # none: all of them
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator, if any)
    seconds: float = 600  # for all items: what does not fit is left out
    output: Path | None = None  # a folder (runs/<date>-<time>-first-gpu)


@dataclass
class Item:
    """What is tried."""

    seconds: float  # at most, on a GPU
    tries: Callable  # with the `Bench`; an error if something does not hold
    gpu: str = ""  # why it is left out without a GPU


class Bench:
    """This machine, and how an item starts a stage on it."""

    def __init__(self, flags, work):
        """work: a folder for what nobody keeps."""
        self.device = find_device(flags.device)
        self.gpu = self.device.type != "cpu"
        self.count = torch.accelerator.device_count() if self.gpu else 0
        self.work, self.data = work, work / "data"
        self.found = {}  # of the item that runs now
        output = flags.output or new_folder(ROOT / "runs", "first-gpu")
        self.output = output.resolve()  # items start in the course's folder
        self.output.mkdir(parents=True, exist_ok=True)
        self.data.mkdir()
        size = dataset.GPT2_SIZE if self.gpu else 257
        random_tokens(self.data, vocabulary=size)
        save_bytes(self.data, size)
        self.record = {  # without the machine's name
            "date": time.strftime("%Y-%m-%d"), "commit": name_commit(),
            "device": device_name(self.device), "count": self.count,
            "memory": memory_size(self.device), "cores": count_cores(),
            "python": sys.version.split()[0], "torch": torch.__version__}
        if self.device.type == "cuda":
            self.record |= {"driver": name_driver(), "libraries":
                            name_libraries(Path(torch.__file__).parents[1])}
        self.record["items"] = {}

    @cached_property
    def single(self):
        """What the stage std computes on the CPU, in fp32."""
        return self.train("std", device="cpu", name="std on the CPU")

    def sized(self, preset="gpt2"):
        """The flags of a model that fills a GPU; a CPU has a tiny one."""
        return ["--preset", preset, "--max-steps", 8, "--eval-every", NEVER,
                "--eval-minibatches", 1, "--checkpoint-every", NEVER
                ] if self.gpu else []

    def train(self, stage, *flags, mesh=(1, 1, 1), name=None, run=None,
              device=None, stop=None):
        """Train a stage, tiny unless the flags say otherwise.

        mesh: (pipeline, data, tensor) parallel. stop, what it returns and
        raises: see `start`.
        """
        needs(stage)
        run = run or Path(tempfile.mkdtemp(dir=self.work), "run")
        given = [] if "--resume" in flags else [
            "--preset", "tiny", "--max-steps", 10, "--data", self.data,
            "--checkpoint-every", 5, "--device", device or self.device.type]
        given += ["--pipeline-parallel", mesh[0]] * (mesh[0] > 1)
        given += ["--tensor-parallel", mesh[2]] * (mesh[2] > 1)
        seen = self.start(
            name or stage, STAGES[stage].solution, "--run-dir", run, *given,
            *flags, ranks=math.prod(mesh), stop=stop,
            mpi=STAGES[stage].launcher == "mpirun")
        result = runs.read(run)  # also of the steps before it was resumed
        seen |= {"tokens_per_second": result.tokens_per_second, "memory":
                 result.memory, "norm": result.rows[0]["norm"],
                 "losses": [row["loss"] for row in result.rows],
                 "microbatch": result.hyperparameters["microbatch_size"]}
        return seen

    def start(self, name, script, *flags, ranks=1, mpi=False, stop=None,
              ends=(0,), lines=()):
        """Run a script as so many ranks: what it needed, a dictionary.

        ends: the statuses with which it may end, unless it is stopped. lines:
        patterns with which lines begin that it has to print. stop: (a signal,
        the ranks that get it, after how many steps). Raises `UserError`;
        `status` is how it ended, and `out` what it printed.
        """
        command = [sys.executable, SIDE, script, *flags]
        if ranks > 1:
            command = ["mpirun", "-n", ranks, *command] if mpi else [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", ranks, *command[1:]]
        env = interpreter.variables() | OPEN_MPI | (
            {"CUDA_VISIBLE_DEVICES": ""} if not self.gpu else
            SHARED if ranks > self.count else {})
        begin, times = time.monotonic(), []

        def on_step(process):
            times.append(time.monotonic())
            if stop and len(times) == stop[2]:
                send(process, *stop[:2])

        self.status, self.out, steps = watch(
            command, on_step, max(0, self.end - begin), env)
        with open(self.output / "logs.txt", "a", encoding="utf-8") as file:
            print(f"--- {name}", *self.out.splitlines()[-40:], sep="\n",
                  file=file)
        require(self.status is not None, f"{name}: not done in time")
        require(len(times) >= stop[2] if stop else self.status in ends,
                f"{name}: {interpreter.last_line(self.out)}")
        for line in lines:
            require(re.search(f"^{line}", self.out, re.M),
                    f"no line like {line!r}: see logs.txt")
        since = times[stop[2] - 1] if stop else begin
        seen = self.found[name] = {
            "seconds": round(time.monotonic() - since, 1),
            "graphs": read_most("graphs", self.out),
            "memory": read_most("memory", self.out)}
        if steps:
            losses, _, _, speeds = zip(*steps, strict=True)
            seen |= {"losses": losses, "tokens_per_second": statistics.median(
                speeds[len(speeds) // 5:])}
        return seen

    def run(self, name, item, end):
        """Try an item, and note how it ended. end: of all items."""
        begin, status, why = time.monotonic(), "ok", ""
        limit = item.seconds * (1 if self.gpu else 4)
        self.end, self.found = min(begin + limit, end), {}
        try:
            if item.gpu and not self.gpu:
                raise LeftOut(item.gpu)
            if begin > end - 5:
                raise LeftOut("no time is left for it")
            item.tries(self)
        except LeftOut as reason:
            status, why = "left out", str(reason)
        except Exception as error:  # whatever it is, the next item follows
            status, why = "FAILED", str(error) or type(error).__name__
        seconds = time.monotonic() - begin
        print(f"{status:8}  {name}: {seconds:.0f} s" + (
            f", {why}" if why else ""), flush=True)
        self.record["items"][name] = {
            "status": status, "why": why, "seconds": round(seconds, 1),
            "found": self.found}
        text = json.dumps(self.record, indent=1) + "\n"
        write_atomically(self.output / "first_gpu.json", text.encode())


def needs(stage):
    """Leave an item out if a stage cannot run here."""
    package = {"lit": "lightning", "kernels": "triton", "mpi": "mpi4py"}.get(
        stage, "torch")
    if not find_spec(package) or (stage == "mpi" and not which("mpirun")):
        raise LeftOut(f"{package}, or what it needs, is not installed")


def require_same(losses, others, tolerance=1e-4):
    """Raise a `UserError` unless two runs have the same losses."""
    require(len(losses) == len(others), f"{len(losses)} steps, not "
            f"{len(others)}")
    for step, (a, b) in enumerate(zip(losses, others, strict=True)):
        require(abs(a / b - 1) < tolerance, f"step {step} of these: the loss "
                f"is {a}, and should be {b}")


# ----------------------------------------------------------------- the items


def require_as_std(bench, seen):
    """Its losses, and its first norm, are those of std on the CPU."""
    require_same(seen["losses"], bench.single["losses"])
    first, norm = seen["norm"], bench.single["norm"]
    require(abs(first / norm - 1) < 1e-3, f"the first norm is {first}, and "
            f"should be {norm}")


def tiny(stage, *flags, mesh=(1, 1, 1), seconds=90, gpu=""):
    """A stage on several ranks trains as std does on the CPU."""
    return Item(seconds, lambda bench: require_as_std(
        bench, bench.train(stage, *flags, mesh=mesh)), gpu)


def full(stage, *flags, size="gpt2", seconds=120, gpu="", **options):
    """A stage at the size of gpt2, on all GPUs of this machine, or on one."""
    return Item(seconds, lambda bench: bench.train(
        stage, *bench.sized(size), *flags, mesh=(
            1, 1 if stage == "std" else bench.count or 1, 1), **options), gpu)


def resumed_by_std(bench):
    """3d trains, and std goes on from its checkpoint in the middle."""
    run = bench.work / "pipeline"
    bench.train("3d", mesh=(2, 1, 2), run=run)
    (run / "checkpoints" / "step_00000010.pt").unlink()
    require_as_std(bench, bench.train("std", "--resume", run=run))


def end_by(number, ends):
    """A signal to rank 1 of two ends both, and torchrun."""
    def tries(bench):
        bench.train("ddp", "--max-steps", NEVER, "--eval-every", NEVER, mesh=(
            1, 2, 1), name=number.name, stop=(number, {"1"}, 2))
        require(ends(bench), f"status {bench.status}, or no checkpoint was "
                "saved")

    return Item(150, tries)


def std(bench):
    """std leaves a trace and a text, and goes on from its checkpoint."""
    run = bench.output
    seen = bench.train("std", *bench.sized(), "--max-steps", 12,
                       "--checkpoint-every", 8, "--profile", 2, run=run)
    require([*run.glob("profile/*-trace/rank0.json.gz")], "there is no trace")
    require("\n> Hello, I'm" in bench.out, "no text was written")
    (run / "checkpoints" / "step_00000012.pt").unlink()
    try:
        again = bench.train("std", "--resume", run=run, name="std resumed")
        # not bit for bit: a GPU adds up in any order
        require_same(again["losses"], seen["losses"], 1e-3)
    finally:
        rmtree(run / "checkpoints")


def nano_gpt(bench):
    """nanoGPT's loop has the first loss of std, in bf16 and another GELU."""
    seen = bench.start(
        "nanoGPT", "nanogpt", "--run-dir", "none", "--preset", "tiny",
        "--data", bench.data, "--device", bench.device.type,
        *bench.sized() or ["--max-steps", 10])
    if ours := measured(bench.record).get("std"):
        require_same(seen["losses"][:1], ours["losses"][:1], 1e-2)


def compare_speeds(bench):
    """What was expected of the speeds, relative to one another."""
    rows, wrong = measured(bench.record), []
    for name, other, least in ("fsdp", "ddp", 0.95), ("std", "nanoGPT", 1.0):
        if not rows.keys() >= {name, other}:
            raise LeftOut(f"{name} or {other} was not measured")
        ratio = (rows[name]["tokens_per_second"]
                 / rows[other]["tokens_per_second"])
        bench.found[f"{name} over {other}"] = round(ratio, 3)
        if ratio < least:
            wrong.append(f"{name} is {ratio:.3f} times as fast as {other}, "
                         f"expected {least}")
    require(not wrong, "; ".join(wrong))


def all_rows(bench):
    """The rows of notebooks/one_gpu.ipynb, in runs/one_gpu.json."""
    if bench.end - time.monotonic() < ONE_GPU:
        raise LeftOut(f"name it alone, with --seconds {ONE_GPU + 100}")
    bench.start("one_gpu", ROOT / "notebooks/experiments/one_gpu.py", "all")


ONE_GPU = 900  # seconds that all of these rows may take
GPU = "it needs a GPU"
SLOW = "it needs a GPU: a CPU would take minutes"
WORKSHOP = ROOT / "workshop" / "__main__.py"
ITEMS = {
    "doctor": Item(90, lambda bench: bench.start(
        "doctor", WORKSHOP, "doctor", ends=(0, 1),  # 1: something is to do
        lines=("ok +device: ", "ok +processes: "))),
    "doctor --ranks": Item(60, lambda bench: bench.start(
        "doctor --ranks", WORKSHOP, "doctor", "--ranks", ranks=2,
        lines=[".*all-reduce"])),
    "both devices": tiny("std", gpu=GPU),
    "kernels": tiny("kernels", seconds=150, gpu=SLOW),
    "each kernel": Item(100, lambda bench: needs("kernels") or bench.start(
        "each kernel", ROOT / "benchmarks" / "kernels.py", "--output",
        bench.output / "kernels.json"), SLOW),
    "mpi x 2": tiny("mpi", mesh=(1, 2, 1)),
    "ddp x 2": tiny("ddp", mesh=(1, 2, 1)),
    "lit x 2": tiny("lit", mesh=(1, 2, 1)),
    "lit fsdp2 x 2": tiny("lit", "--strategy", "fsdp2", mesh=(1, 2, 1)),
    "fsdp x 2": tiny("fsdp", mesh=(1, 2, 1)),
    "tp x 4": tiny("tp", mesh=(1, 2, 2)),
    "3d x 4": tiny("3d", mesh=(2, 1, 2)),
    "3d, resumed by std": Item(120, resumed_by_std),
    "SIGTERM": end_by(signal.SIGTERM, lambda bench: not bench.status
                      and "checkpoint saved" in bench.out),
    "SIGKILL": end_by(signal.SIGKILL, lambda bench: bench.status),
    "std": Item(240, std),
    "nanoGPT": Item(120, nano_gpt),
    "ddp": full("ddp"),
    "fsdp": full("fsdp"),
    "std, eager": full("std", "--no-compile", name="std, eager",
                       gpu="it needs a GPU: a CPU compiles nothing here"),
    # it recomputes; its checkpoint of 19 GB is not made
    "gpt2-xl, fsdp": full(
        "fsdp", "--minibatch-size", 32, size="gpt2-xl", name="gpt2-xl, fsdp",
        seconds=150, stop=(signal.SIGKILL, None, 5)),
    "tp": full("tp"),
    "3d": full("3d"),
    "lit": full("lit"),
    "speeds": Item(10, compare_speeds, GPU),
    "one_gpu": Item(ONE_GPU + 100, all_rows, GPU),
}
MEASURED = [*ITEMS][[*ITEMS].index("std"):]


def measured(record):
    """{name: figures} of the models that fill a GPU."""
    found = {name: record["items"].get(name, {}).get("found", {}).get(name, {})
             for name in MEASURED}
    return {name: figures for name, figures in found.items()
            if "tokens_per_second" in figures}


def table(record):
    """The speeds as Markdown, for README.md."""
    rows = measured(record)
    base = rows.get("nanoGPT", {}).get("tokens_per_second")
    lines = ["| preset gpt2 | tokens/s | over nanoGPT | GiB | graphs |",
             "|---|---:|---:|---:|---:|"]
    for name, row in rows.items():
        speed = row["tokens_per_second"]
        cells = (name, f"{speed:,.0f}", base and f"{speed / base:.2f}",
                 f"{row['memory'] / 2**30:.1f}", row["graphs"])
        lines.append("| " + " | ".join(
            "-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main():
    flags = parse_flags(Flags)
    names = flags.items or [*ITEMS]
    require(set(names) <= set(ITEMS), "there is no such item: choose from "
            f"{shlex.join(ITEMS)}")
    end = time.monotonic() + flags.seconds
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(flags, Path(work))
        print(", ".join(f"{key} {value}" for key, value
                        in bench.record.items() if key != "items"))
        watcher = which("nvidia-smi") and subprocess.Popen([
            "nvidia-smi", "dmon", "-s", "pucm", "-o", "DT", "-d", "1", "-f",
            bench.output / "gpus-0.txt"])
        try:
            for name in ITEMS:
                if name in names:
                    bench.run(name, ITEMS[name], end)
        finally:
            if watcher:
                watcher.kill()
    if bench.gpu:
        print(f"\n{table(bench.record)}\n")
    print(f"written: {show_path(bench.output, Path.cwd())}/")
    failed = [name for name, item in bench.record["items"].items()
              if item["status"] == "FAILED"]
    require(not failed, f"failed: {', '.join(failed)}: see logs.txt there")


if __name__ == "__main__":
    run_main(main)
