"""Everything that one GPU can prove, in ten minutes, by one command.

    python benchmarks/first_gpu.py                  # on a GPU, or several
    python benchmarks/first_gpu.py --device cpu     # as far as a CPU goes
    python benchmarks/first_gpu.py std nanoGPT      # these items alone

The items come in the order of what they cost. Each has a time limit, and the
next one follows whatever happened. Several ranks share the GPU if there is
only one. Without a GPU all ranks use gloo, all models are tiny, and what only
a GPU can prove is left out.

It leaves a run's folder, that of the stage std at the size of gpt2, with its
metrics and its trace. Beside them are first_gpu.json, which says how each
item ended, logs.txt, the ends of what they printed, and gpus-0.txt, what the
GPUs did.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

import tiktoken
import torch
import tyro

from backstage import ROOT, dataset
from backstage.device import device_name, find_device, memory_size
from backstage.errors import UserError, parse_flags, require, run_main
from backstage.files import new_folder, show_path, write_atomically
from backstage.process import count_cores
from rankcheck.launch.ranks import Launch
from workshop.jobs import interpreter
from workshop.jobs.doctor import name_commit, name_driver, name_libraries
from workshop.results import runs
from workshop.stages import STAGES, modules_of
from workshop.vocabulary import save_vocabulary

import side
from turns import NEVER, SIDE, STEP, random_tokens

# NCCL takes each rank for one on a host of its own (see side.py), so that
# several may share a GPU; they talk over the loopback interface.
SHARED = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
          "NCCL_MAX_CTAS": "4", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
# Under torchrun a shell for each rank first does this, in the item's folder.
SHARE_GPU = "export NCCL_HOSTID=$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1\n"
SAY_PID = 'echo $$ >"$(dirname "$0")/$RANK"\nexec "$@"\n'
ONE_GPU = 900  # seconds that all rows of notebooks/one_gpu.ipynb may take
TO_END = 60  # seconds that the ranks have after a signal to one of them
GPU = "it needs a GPU"


class LeftOut(Exception):
    """This machine cannot try an item."""


@dataclass
class Flags:
    """Prove on one GPU what one GPU can prove."""

    items: tyro.conf.Positional[tuple[str, ...]] = ()
    """Their names (none: all of them)."""
    device: str = "auto"
    """cpu, cuda, xpu, mps (auto: an accelerator, if any)."""
    seconds: float = 600
    """For all items together: what does not fit is left out."""
    output: Path | None = None
    """A new folder (default: runs/<date>-<time>-first-gpu)."""


class Bench:
    """This machine, and how an item starts a stage on it."""

    def __init__(self, flags, work):
        self.device = find_device(flags.device)
        self.gpu = self.device.type != "cpu"
        self.count = torch.accelerator.device_count() if self.gpu else 0
        self.work = work  # a folder for what nobody keeps
        self.output = flags.output or new_folder(ROOT / "runs", "first-gpu")
        self.output.mkdir(parents=True, exist_ok=True)
        self.data = work / "data"
        self.data.mkdir()
        size = dataset.GPT2_SIZE if self.gpu else 257
        random_tokens(self.data, vocabulary=size)
        save_vocabulary(tiktoken.Encoding(
            "random", pat_str=r"[\s\S]", mergeable_ranks={
                i.to_bytes(1 + (i > 255), "big"): i for i in range(size - 1)},
            special_tokens={dataset.END_OF_TEXT: size - 1}), self.data)
        self.record = {
            "date": time.strftime("%Y-%m-%d"), "commit": name_commit(),
            **describe(self.device, self.count), "items": {}}
        self.found = {}  # of the item that runs now

    @property
    def left(self):
        """Seconds that the item still has."""
        return max(0, self.end - time.monotonic())

    @cached_property
    def single(self):
        """What the stage std computes on the CPU, in fp32."""
        return self.train("std", device="cpu", name="std on the CPU")

    def shares(self, ranks):
        """Whether so many ranks have to share a GPU."""
        return self.gpu and ranks > self.count

    def sized(self, preset="gpt2"):
        """The flags of a model that fills a GPU; a CPU has a tiny one."""
        if not self.gpu:
            return ["--recompute"] if preset == "gpt2-xl" else []
        return ["--preset", preset, "--max-steps", 8, "--eval-every", NEVER,
                "--eval-minibatches", 1, "--checkpoint-every", NEVER]

    def train(self, stage, *flags, mesh=(1, 1, 1), name=None, run=None,
              device=None, enough=None):
        """Train a stage, tiny unless the flags say otherwise: its `Result`.

        mesh: (pipeline, data, tensor) parallel. enough: kill it after so many
        steps, so that it saves nothing. The item's `found` gets what it
        needed. Raises `UserError` if it fails or takes too long.
        """
        name = name or stage
        run = run or Path(tempfile.mkdtemp(dir=self.work), "run")
        given = ["--run-dir", run]
        if "--resume" not in flags:
            given += ["--preset", "tiny", "--max-steps", 10, "--data",
                      self.data, "--checkpoint-every", 5,
                      "--device", device or self.device.type]
        pipeline, _, tensor = mesh
        given += ["--pipeline-parallel", pipeline] * (pipeline > 1)
        given += ["--tensor-parallel", tensor] * (tensor > 1)
        self.launch(
            name, STAGES[stage].solution, *given, *flags,
            world_size=math.prod(mesh), mpirun=STAGES[stage].launcher ==
            "mpirun", preload=modules_of(stage), until=lambda: (
                enough and count_steps(run) >= enough))
        result = runs.read(run)
        self.found[name].update(
            tokens_per_second=result.tokens_per_second, memory=result.memory,
            microbatch=result.hyperparameters["microbatch_size"],
            losses=[row["loss"] for row in result.rows])
        return result

    def launch(self, name, script, *flags, world_size=1, until=None,
               **options):
        """Start a script's ranks, and wait; `out` is what rank 0 printed."""
        shares = self.shares(world_size)
        begin = time.monotonic()
        ranks = Launch(
            script, *flags, world_size=world_size if world_size > 1 else None,
            nodes=world_size if shares else 1,
            threads=count_cores(world_size), within=self.work,
            env=os.environ | (SHARED if shares else {}),
            probes=[side.share_gpu if shares else side.count_graphs],
            **options).wait(self.left, until)
        for number, rank in enumerate(ranks):
            self.log(f"{name}, rank {number}", rank.out + rank.err)
        if not (until and until()):
            bad = [rank for rank in ranks if rank.status]
            lines = [line for rank in bad for line in rank.err.splitlines()]
            require(not bad, f"{name}: {(lines or ['no message'])[-1]}")
            require(all(rank.status == 0 for rank in ranks),
                    f"{name}: not done in time")
        self.out = ranks[0].out
        graphs = re.findall(r"^graphs (\d+)$", self.out, re.M)
        self.found[name] = {"seconds": round(time.monotonic() - begin, 1),
                            "graphs": int(graphs[-1]) if graphs else None}

    def ask(self, *words):
        """How `python words...` ended; logs.txt has what it printed."""
        end = subprocess.run(
            [sys.executable, *words], cwd=ROOT, text=True, timeout=self.left,
            capture_output=True, env=interpreter.variables())
        self.log(" ".join(words), end.stdout + end.stderr)
        return end

    def log(self, title, text):
        """Add the end of a text to logs.txt."""
        with open(self.output / "logs.txt", "a", encoding="utf-8") as file:
            print(f"--- {title}", *text.splitlines()[-40:], sep="\n",
                  file=file)

    def run(self, name, limit, function, end):
        """Try an item, and note how it ended. end: of all items."""
        begin = time.monotonic()
        self.end, self.found, why = min(begin + limit, end), {}, ""
        try:
            if begin > end - 5:
                raise LeftOut("no time is left for it")
            function(self)
            status = "ok"
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
        self.write()

    def write(self):
        text = json.dumps(self.record, indent=1) + "\n"
        write_atomically(self.output / "first_gpu.json", text.encode())


def describe(device, count):
    """What this machine computes with, without its name."""
    found = {"device": device_name(device), "count": count,
             "memory": memory_size(device), "cores": count_cores(),
             "python": sys.version.split()[0], "torch": torch.__version__}
    if device.type == "cuda":
        packages = Path(torch.__file__).parents[1]
        found |= {"driver": name_driver(),
                  "libraries": name_libraries(packages)}
    return found


def count_steps(run):
    """How many steps metrics.csv has by now."""
    with contextlib.suppress(FileNotFoundError):
        return (run / "metrics.csv").read_text().count("\n") - 1
    return 0


def require_same(losses, others, tolerance=1e-4):
    """Raise a `UserError` unless two runs have the same losses."""
    require(len(losses) == len(others), f"{len(losses)} steps, not "
            f"{len(others)}")
    for step, (a, b) in enumerate(zip(losses, others, strict=True)):
        require(abs(a / b - 1) < tolerance, f"step {step} of these: the loss "
                f"is {a}, and should be {b}")


def need(stage):
    """Leave an item out if a stage cannot run here."""
    if STAGES[stage].trainer and not find_spec("lightning"):
        raise LeftOut("Lightning is not installed")
    if STAGES[stage].kernels and not find_spec("triton"):
        raise LeftOut("Triton is not installed")
    if STAGES[stage].launcher == "mpirun" and (
            not shutil.which("mpirun") or subprocess.run(
                [sys.executable, "-c", "from mpi4py import MPI"],
                capture_output=True).returncode):
        raise LeftOut("mpirun, mpi4py or its MPI library is not installed")


# ------------------------------------------------ the items, cheap ones first


def ask_doctor(bench):
    """The doctor finds the device, and two processes reach each other."""
    end = bench.ask("-m", "workshop", "doctor")
    for name in ("device", "processes"):
        require(re.search(f"^ok +{name}: ", end.stdout, re.M),
                f"the doctor has something to say of {name}: see logs.txt")


def ask_ranks(bench):
    """Two ranks train together and reach each other."""
    if not bench.gpu and torch.accelerator.is_available():
        raise LeftOut("the doctor would take the accelerator")
    bench.launch("doctor --ranks", ROOT / "workshop" / "__main__.py",
                 "doctor", "--ranks", world_size=2)
    require("all-reduce" in bench.out, "no all-reduce was timed")


def train_on_both(bench):
    """The device computes what the CPU computes."""
    if not bench.gpu:
        raise LeftOut(GPU)
    compare(bench, "std")


def try_kernels(bench):
    """The stage kernels trains as std does; each kernel beside PyTorch's."""
    if not bench.gpu:
        raise LeftOut(f"{GPU}: the interpreter takes minutes")
    compare(bench, "kernels")
    end = bench.ask("benchmarks/kernels.py", "--output",
                    str(bench.output.resolve() / "kernels.json"))
    require(end.returncode == 0, "no kernel was timed: see logs.txt")


def make_fast(bench):
    """The rows of notebooks/one_gpu.ipynb, in runs/one_gpu.json."""
    if not bench.gpu:
        raise LeftOut(GPU)
    if bench.left < ONE_GPU:
        raise LeftOut(f"name it alone, with --seconds {ONE_GPU + 100}")
    end = bench.ask("-m", "notebooks.experiments.one_gpu", "all")
    require(end.returncode == 0, "not all rows were measured: see logs.txt")


def compare(bench, stage, mesh=(1, 1, 1), flags=()):
    """A stage on several ranks trains as std does on the CPU."""
    need(stage)
    single = bench.single
    found = bench.train(stage, *flags, mesh=mesh)
    require_same([row["loss"] for row in found.rows],
                 [row["loss"] for row in single.rows])
    first, norm = (result.rows[0]["norm"] for result in (found, single))
    require(abs(first / norm - 1) < 1e-3, f"the first norm is {first}, and "
            f"should be {norm}")


def resume_pipeline(bench):
    """The stage std goes on from a checkpoint of 3d."""
    single, run = bench.single, bench.work / "pipeline"
    bench.train("3d", mesh=(2, 1, 2), run=run)
    (run / "checkpoints" / "step_00000010.pt").unlink()
    found = bench.train("std", "--resume", run=run)
    require_same([row["loss"] for row in found.rows],
                 [row["loss"] for row in single.rows])


def end_by(bench, number):
    """A signal to rank 1 of two ends both, and torchrun."""
    place = Path(tempfile.mkdtemp(dir=bench.work))
    shares = bench.shares(2)
    (place / "rank.sh").write_text(SHARE_GPU * shares + SAY_PID)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", 2, "--no-python", "--", "sh",
        place / "rank.sh", sys.executable,
        STAGES["ddp"].solution, "--preset", "tiny", "--data", bench.data,
        "--run-dir", place / "run", "--max-steps", NEVER,
        "--eval-every", NEVER,
        "--device", bench.device.type]
    with open(place / "log", "w+") as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=log,
            start_new_session=True, cwd=ROOT, env={
                **os.environ, **(SHARED if shares else {}), "PYTHONPATH":
                os.pathsep.join(filter(None, map(str, sys.path)))})
        try:
            while count_steps(place / "run") < 2:
                require(process.poll() is None, "it ended too early")
                require(bench.left, "no step in time")
                time.sleep(0.1)
            pids = [int((place / str(rank)).read_text()) for rank in (0, 1)]
            begin = time.monotonic()
            os.kill(pids[1], number)
            status = process.wait(TO_END)
            bench.found["seconds to the end"] = round(
                time.monotonic() - begin, 1)
            left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
            require(not left, "a rank is still there")
        except subprocess.TimeoutExpired:
            raise UserError(f"not ended after {TO_END} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(0)
            said = log.read()
            bench.log(signal.Signals(number).name, said)
    if number == signal.SIGTERM:
        require(status == 0 and "checkpoint saved" in said, f"status {status}"
                ", or no checkpoint was saved")
    else:
        require(status, "status 0, although a rank was killed")


def train_std(bench):
    """std at the size of gpt2: profile, checkpoint, resume, text."""
    run = bench.output
    flags = (*bench.sized(), "--max-steps", 12, "--checkpoint-every", 8,
             "--profile", 2)
    single = bench.train("std", *flags, run=run)
    losses = [row["loss"] for row in single.rows]
    trace, = run.glob("profile/*-trace/rank0.json.gz")
    require(trace.stat().st_size, "the trace is empty")
    require("\n> Hello, I'm" in bench.out, "no text was written")
    (run / "checkpoints" / "step_00000012.pt").unlink()
    try:
        again = bench.train("std", "--resume", run=run, name="std resumed")
        # not bit for bit: a GPU adds up in any order
        require_same([row["loss"] for row in again.rows], losses, 1e-3)
    finally:
        shutil.rmtree(run / "checkpoints")


def train_sized(bench, stage):
    """A stage at the size of gpt2, on all GPUs of this machine."""
    need(stage)
    bench.train(stage, *bench.sized(), mesh=(1, bench.count or 1, 1))


def train_eager(bench):
    if not bench.gpu:
        raise LeftOut(f"{GPU}: a CPU compiles nothing here")
    bench.train("std", *bench.sized(), "--no-compile", name="std, eager")


def train_nanogpt(bench):
    """nanoGPT's model in nanoGPT's loop, beside std."""
    flags = bench.sized() or ["--max-steps", 10]
    bench.launch(
        "nanoGPT", SIDE, "nanogpt", "--run-dir", "none", "--preset", "tiny",
        "--data", bench.data, "--device", bench.device.type, *flags)
    steps = STEP.findall(bench.out)
    speeds = [float(speed.replace(",", "")) for *_, speed in steps]
    losses = [float(loss) for loss, *_ in steps]
    memory = re.findall(r"^memory (\d+)$", bench.out, re.M)
    bench.found["nanoGPT"].update(
        tokens_per_second=statistics.median(speeds[len(speeds) // 5:]),
        memory=int(memory[-1]) if memory else None, losses=losses)
    ours = bench.record["items"].get("std", {}).get("found", {}).get("std")
    if ours:  # in bf16 and with GPT-2's GELU, the first loss is the same
        require_same(losses[:1], ours["losses"][:1], 1e-2)


def train_xl(bench):
    """gpt2-xl with FSDP: it recomputes. Its checkpoint of 19 GB is not made.
    """
    size = ["--minibatch-size", 32] if bench.gpu else ["--max-steps", 100]
    bench.train("fsdp", *bench.sized("gpt2-xl"), *size, enough=5,
                mesh=(1, bench.count or 1, 1), name="gpt2-xl, fsdp")


def compare_speeds(bench):
    """What was expected of the speeds, relative to one another."""
    if not bench.gpu:
        raise LeftOut(GPU)
    speeds = {name: row["tokens_per_second"]
              for name, row in measured(bench.record).items()}
    wrong = []
    for name, other, least in (
            ("fsdp", "ddp", 0.95), ("std", "nanoGPT", 1.0)):
        if name not in speeds or other not in speeds:
            raise LeftOut(f"{name} or {other} was not measured")
        ratio = speeds[name] / speeds[other]
        bench.found[f"{name} over {other}"] = round(ratio, 3)
        if ratio < least:
            wrong.append(f"{name} is {ratio:.3f} times as fast as {other}, "
                         f"expected {least}")
    require(not wrong, "; ".join(wrong))


FSDP2 = "--strategy", "fsdp2"
ITEMS = {  # name -> (seconds at most, function)
    "doctor": (90, ask_doctor),
    "doctor --ranks": (60, ask_ranks),
    "both devices": (90, train_on_both),
    "kernels": (150, try_kernels),
    "mpi x 2": (90, partial(compare, stage="mpi", mesh=(1, 2, 1))),
    "ddp x 2": (90, partial(compare, stage="ddp", mesh=(1, 2, 1))),
    "lit x 2": (90, partial(compare, stage="lit", mesh=(1, 2, 1))),
    "lit fsdp2 x 2": (90, partial(
        compare, stage="lit", mesh=(1, 2, 1), flags=FSDP2)),
    "fsdp x 2": (90, partial(compare, stage="fsdp", mesh=(1, 2, 1))),
    "tp x 4": (90, partial(compare, stage="tp", mesh=(1, 2, 2))),
    "3d x 4": (90, partial(compare, stage="3d", mesh=(2, 1, 2))),
    "3d, resumed by std": (120, resume_pipeline),
    "SIGTERM": (150, partial(end_by, number=signal.SIGTERM)),
    "SIGKILL": (150, partial(end_by, number=signal.SIGKILL)),
    "std": (240, train_std),
    "nanoGPT": (120, train_nanogpt),
    "ddp": (120, partial(train_sized, stage="ddp")),
    "fsdp": (120, partial(train_sized, stage="fsdp")),
    "std, eager": (120, train_eager),
    "gpt2-xl, fsdp": (150, train_xl),
    "tp": (120, partial(train_sized, stage="tp")),
    "3d": (120, partial(train_sized, stage="3d")),
    "lit": (120, partial(train_sized, stage="lit")),
    "speeds": (10, compare_speeds),
    "one_gpu": (ONE_GPU + 100, make_fast),
}
MEASURED = [*ITEMS][[*ITEMS].index("std"):]


def measured(record):
    """{name: figures} of the models that fill a GPU."""
    return {name: record["items"][name]["found"][name] for name in MEASURED
            if name in record["items"].get(name, {}).get("found", {})}


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


@contextlib.contextmanager
def watch_gpus(file):
    """Each second, write what the GPUs do, where nvidia-smi is there."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    with open(file, "w") as output, subprocess.Popen(
            ["nvidia-smi", "dmon", "-s", "pucm", "-o", "DT", "-d", "1"],
            stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            process.kill()


def main():
    flags = parse_flags(Flags)
    names = flags.items or [*ITEMS]
    require(set(names) <= set(ITEMS), "there is no such item: choose from "
            f"{', '.join(ITEMS)}")
    # else asking for a GPU would keep the forked ranks from using it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    end = time.monotonic() + flags.seconds
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(flags, Path(work))
        print(", ".join(f"{key} {value}" for key, value
                        in bench.record.items() if key != "items"))
        with watch_gpus(bench.output / "gpus-0.txt"):
            for name in ITEMS:
                if name in names:
                    bench.run(name, *ITEMS[name], end)
    if bench.gpu:
        print(f"\n{table(bench.record)}\n")
    print(f"written: {show_path(bench.output, Path.cwd())}/")
    failed = [name for name, item in bench.record["items"].items()
              if item["status"] == "FAILED"]
    require(not failed, f"failed: {', '.join(failed)}: see logs.txt there")


if __name__ == "__main__":
    run_main(main)
