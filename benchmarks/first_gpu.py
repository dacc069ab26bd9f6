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
from backstage.errors import parse_flags, require
from backstage.files import new_folder, show_path, write_atomically
from backstage.process import count_cores
from rankcheck.why.start import FOLDER_VARIABLE, switch_on
from workshop.errors import run_tool
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
WORKSHOP = ROOT / "workshop" / "__main__.py"
KERNELS = ROOT / "benchmarks" / "kernels.py"


class LeftOut(Exception):
    """This machine cannot try an item."""


@dataclass
class Flags:
    """Prove on one GPU what one GPU can prove."""

    items: tyro.conf.Positional[tuple[str, ...]] = ()  # none: all of them
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator, if any)
    seconds: float = 600  # for all items: what does not fit is left out
    output: Path | None = None  # a folder (runs/<date>-<time>-first-gpu)


@dataclass(frozen=True)
class Item:
    """A command, how long it may take, and what must hold of what it did."""

    script: str | Path = ""  # a stage, nanogpt, or a file; or nothing
    flags: tuple = ()
    seconds: float = 90  # at most, on a GPU
    holds: Callable = lambda bench, seen: None  # raises an error if not
    mesh: tuple | None = (1, 1, 1)  # pipeline, data, tensor; None: all GPUs
    size: str = "tiny"  # or the preset of a model that fills a GPU
    gpu: str = ""  # why it is left out without a GPU
    least: float = 5  # it is left out if fewer seconds are left
    stop: tuple | None = None  # a signal, the ranks, after how many steps
    asks: bool = False  # `why` is asked what it sees then, and all are ended
    ends: tuple = (0,)  # the statuses with which it may end without `stop`
    env: tuple = ()  # (variable, value) of its own


class Bench:
    """This machine, and how it tries an item."""

    def __init__(self, flags, work):
        """work: a folder for what nobody keeps."""
        self.device = find_device(flags.device)
        self.gpu = self.device.type != "cpu"
        self.count = torch.accelerator.device_count() if self.gpu else 0
        self.work, self.data = work, work / "data"
        self.folder, self.found = None, {}  # of the item that runs now
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
            self.record |= {
                "driver": name_driver(), "libraries": name_libraries()}
        self.record["items"] = {}

    @cached_property
    def single(self):
        """What the stage std computes on the CPU, in fp32."""
        return self.start("std on the CPU", Item("std", ("--device", "cpu")))

    def resume(self):
        """Let std go on from the item's last checkpoint but one."""
        max(self.folder.glob("checkpoints/*.pt")).unlink()
        return self.start("std resumed", Item("std", ("--resume",)),
                          self.folder)

    def model(self, size):
        """The flags of one that fills a GPU, or of a tiny one."""
        rest = ["--max-steps", 8, "--eval-every", NEVER, "--eval-minibatches",
                1, "--checkpoint-every", NEVER]
        if size == "tiny" or not self.gpu:
            size, rest = "tiny", ["--max-steps", 10, "--checkpoint-every", 5]
        return ["--data", self.data, "--device", self.device.type,
                "--preset", size, *rest]

    def command(self, item, run):
        """(How many ranks, the arguments of an item's command)."""
        pipeline, data, tensor = item.mesh or (1, self.count or 1, 1)
        ranks, stage = pipeline * data * tensor, STAGES.get(item.script)
        arguments = [SIDE, stage.solution if stage else item.script]
        if stage or item.script == "nanogpt":
            arguments += ["--run-dir", run]
            if "--resume" not in item.flags:
                arguments += self.model(item.size)
            arguments += ["--pipeline-parallel", pipeline] * (pipeline > 1)
            arguments += ["--tensor-parallel", tensor] * (tensor > 1)
        arguments += [str(flag).format(output=self.output)
                      for flag in item.flags]
        if ranks == 1:
            return ranks, [sys.executable, *arguments]
        if stage and stage.launcher == "mpirun":
            return ranks, ["mpirun", "-n", ranks, sys.executable, *arguments]
        return ranks, [sys.executable, "-m", "torch.distributed.run",
                       "--standalone", "--nproc-per-node", ranks, *arguments]

    def start(self, name, item, run=None):
        """Run an item's command: what it needed, a dictionary.

        run: its folder. Raises `UserError`; `status` is how it ended, and
        `out` what it printed.
        """
        needs(item)
        run = run or Path(tempfile.mkdtemp(dir=self.work), "run")
        ranks, command = self.command(item, run)
        env = interpreter.variables() | OPEN_MPI | dict(item.env) | (
            {"CUDA_VISIBLE_DEVICES": ""} if not self.gpu else
            SHARED if ranks > self.count else {})
        if item.asks:
            folder = str(self.work / "evidence")
            env = switch_on(env | {FOLDER_VARIABLE: folder})
        begin, times, said, stop = time.monotonic(), [], [""], item.stop

        def on_step(process):
            times.append(time.monotonic())
            if stop and len(times) == stop[2]:
                send(process, *stop[:2])
                if item.asks:
                    time.sleep(5)  # the others come to a collective
                    said.append(subprocess.getoutput(shlex.join(
                        [sys.executable, "-m", "rankcheck", "why",
                         env[FOLDER_VARIABLE]])))
                    send(process, signal.SIGKILL)

        self.status, self.out, steps = watch(
            command, on_step, max(0, self.end - begin), env)
        self.out += "\n".join(said)
        with open(self.output / "logs.txt", "a", encoding="utf-8") as file:
            print(f"--- {name}", *self.out.splitlines()[-40:], sep="\n",
                  file=file)
        require(self.status is not None, f"{name}: not done in time")
        require(len(times) >= stop[2] if stop else self.status in item.ends,
                f"{name}: {interpreter.last_line(self.out)}")
        since = times[stop[2] - 1] if stop else begin
        seen = self.found[name] = {
            "seconds": round(time.monotonic() - since, 1),
            "graphs": read_most("graphs", self.out),
            "memory": read_most("memory", self.out)}
        if steps:
            losses, _, _, speeds = zip(*steps, strict=True)
            seen |= {"losses": losses, "tokens_per_second": statistics.median(
                speeds[len(speeds) // 5:])}
        if item.script in STAGES:
            # also of the steps before it was resumed
            result = runs.read_run(run)
            seen |= {
                "tokens_per_second": result.tokens_per_second,
                "memory": result.memory, "norm": result.rows[0]["norm"],
                "losses": [row["loss"] for row in result.rows],
                "microbatch": result.hyperparameters["microbatch_size"]}
        return seen

    def run(self, name, item, end):
        """Try an item, and note how it ended. end: of all items."""
        begin, status, why = time.monotonic(), "ok", ""
        limit = item.seconds * (1 if self.gpu else 4)
        self.end, self.found = min(begin + limit, end), {}
        self.folder = self.output if name == "std" else self.work / name
        try:
            if item.gpu and not self.gpu:
                raise LeftOut(item.gpu)
            if begin > end - item.least:
                raise LeftOut("no time is left: try it alone, --seconds "
                              f"{item.seconds}")
            item.holds(self, item.script and self.start(
                name, item, self.folder))
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


def needs(item):
    """Leave an item out if it cannot run here."""
    package = "deepspeed" if "deepspeed" in str(item.flags) else {
        "lit": "lightning", "kernels": "triton", KERNELS: "triton",
        "mpi": "mpi4py"}.get(item.script, "torch")
    if not find_spec(package) or (package == "mpi4py" and not which("mpirun")):
        raise LeftOut(f"{package}, or what it needs, is not installed")


def require_same(losses, others, tolerance=1e-4):
    """Raise a `UserError` unless two runs have the same losses."""
    require(len(losses) == len(others), f"{len(losses)} steps, not "
            f"{len(others)}")
    for step, (a, b) in enumerate(zip(losses, others, strict=True)):
        require(abs(a / b - 1) < tolerance, f"step {step} of these: the loss "
                f"is {a}, and should be {b}")


# ------------------------------------------------------------- what must hold


def as_std(bench, seen):
    """Its losses, and its first norm, are those of std on the CPU."""
    require_same(seen["losses"], bench.single["losses"])
    first, norm = seen["norm"], bench.single["norm"]
    require(abs(first / norm - 1) < 1e-3, f"the first norm is {first}, and "
            f"should be {norm}")


def prints(*lines):
    """Patterns with which lines begin that it has to print."""
    def holds(bench, seen):
        for line in lines:
            require(re.search(f"^{line}", bench.out, re.M),
                    f"no line like {line!r}: see logs.txt")
    return holds


def ended(ends):
    """How a signal to one rank ends all of them."""
    return lambda bench, seen: require(ends(bench), f"status {bench.status}, "
                                       "or no checkpoint was saved")


def std(bench, seen):
    """std leaves a trace and a text, and goes on from its checkpoint."""
    require([*bench.folder.glob("profile/*-trace/rank0.json.gz")],
            "there is no trace")
    require("\n> Hello, I'm" in bench.out, "no text was written")
    try:  # not bit for bit: a GPU adds up in any order
        require_same(bench.resume()["losses"], seen["losses"], 1e-3)
    finally:
        rmtree(bench.folder / "checkpoints")


def nano_gpt(bench, seen):
    """It has the first loss of std, in bf16 and another GELU."""
    if ours := measured(bench.record).get("std"):
        require_same(seen["losses"][:1], ours["losses"][:1], 1e-2)


GPU = "it needs a GPU"
SLOW = "it needs a GPU: a CPU would take minutes"
ON_TWO = {"mesh": (1, 2, 1), "holds": as_std}
ON_ALL = {"mesh": None, "size": "gpt2", "seconds": 120}
ENDLESS = "--max-steps", NEVER, "--eval-every", NEVER
ITEMS = {
    "doctor": Item(
        WORKSHOP, ("doctor",), 90, prints("ok +device: ", "ok +processes: "),
        ends=(0, 1)),  # 1: something is to do
    "doctor --ranks": Item(
        WORKSHOP, ("doctor", "--ranks"), 60, prints(".*all-reduce"),
        mesh=(1, 2, 1)),
    "both devices": Item("std", holds=as_std, gpu=GPU),
    "kernels": Item("kernels", (), 150, as_std, gpu=SLOW),
    "each kernel": Item(KERNELS, ("--output", "{output}/kernels.json"), 100,
                        gpu=SLOW),
    "mpi x 2": Item("mpi", **ON_TWO),
    "ddp x 2": Item("ddp", **ON_TWO),
    "lit x 2": Item("lit", **ON_TWO),
    "lit fsdp2 x 2": Item("lit", ("--strategy", "fsdp2"), **ON_TWO),
    **{f"lit deepspeed {k} x 2": Item("lit", (
        "--strategy", f"deepspeed_stage_{k}"), gpu=GPU, **ON_TWO)
       for k in (1, 2, 3)},
    "fsdp x 2": Item("fsdp", **ON_TWO),
    "tp x 4": Item("tp", holds=as_std, mesh=(1, 2, 2)),
    "3d x 4": Item("3d", holds=as_std, mesh=(2, 1, 2)),
    "3d, resumed by std": Item(
        "3d", (), 120, lambda bench, seen: as_std(bench, bench.resume()),
        (2, 1, 2)),
    "SIGTERM": Item("ddp", ENDLESS, 150, ended(
        lambda bench: not bench.status and "checkpoint saved" in bench.out),
        (1, 2, 1), stop=(signal.SIGTERM, {"1"}, 2)),
    "SIGKILL": Item("ddp", ENDLESS, 150, ended(lambda bench: bench.status),
                    (1, 2, 1), stop=(signal.SIGKILL, {"1"}, 2)),
    "why": Item("ddp", ENDLESS, 150, prints(".*: rank 1 is stopped"),
                (1, 2, 1), stop=(signal.SIGSTOP, {"1"}, 2), asks=True),
    "std": Item("std", ("--max-steps", 12, "--checkpoint-every", 8,
                        "--profile", 2), 240, std, size="gpt2"),
    "nanoGPT": Item("nanogpt", (), 120, nano_gpt, size="gpt2"),
    "ddp": Item("ddp", **ON_ALL),
    "fsdp": Item("fsdp", **ON_ALL),
    "std, eager": Item("std", ("--no-compile",), 120, size="gpt2", gpu="it "
                       "needs a GPU: a CPU compiles nothing here"),
    "std, cuDNN": Item("std", (), 120, size="gpt2", gpu=GPU, env=(
        ("BENCHMARK_ATTENTION", "CUDNN_ATTENTION"),)),
    "std, 128 samples": Item("std", ("--microbatch-size", 128), 120,
                             size="gpt2", gpu=GPU),
    # it recomputes; its checkpoint of 19 GB is not made
    "gpt2-xl, fsdp": Item(
        "fsdp", ("--minibatch-size", 32), 150, mesh=None, size="gpt2-xl",
        stop=(signal.SIGKILL, None, 5)),
    "tp": Item("tp", **ON_ALL),
    "3d": Item("3d", **ON_ALL),
    "lit": Item("lit", **ON_ALL),
    # the rows of notebooks/one_gpu.ipynb, in runs/one_gpu.json
    "one_gpu": Item(ROOT / "notebooks/experiments/one_gpu.py", ("all",), 1000,
                    gpu=GPU, least=900),
}


def measured(record):
    """{name: figures} of the models that fill a GPU."""
    found = {name: record["items"].get(name, {}).get("found", {}).get(name, {})
             for name, item in ITEMS.items() if item.size != "tiny"}
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
    run_tool(main)
