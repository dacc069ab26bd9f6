"""The run around a stage's training loop; the same in every stage.

A run is a folder:

    metrics.csv             a row for each step
    hyperparameters.json    what it was started with
    checkpoints/step_00000050.pt    after 50 updates; the newest two are kept

`Run` writes it and resumes from it. Its docstrings say who takes part: every
rank, or rank 0 alone.
"""

import csv
import datetime
import io
import itertools
import json
import math
import os
import pickle
import signal
import sys
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from workshop import ROOT, vocabulary
from workshop.errors import UserError, check, explain, parse_flags
from workshop.launchers import name_ranks
from workshop.peaks import flops_per_token, peak_flops

COLUMNS = ("step", "loss", "val_loss", "lr", "norm", "seconds",
           "tokens_per_second", "mfu")
FORMAT = 1  # of a checkpoint
DEMO = ROOT / "fineweb" / "demo"
FINEWEB = ROOT / "fineweb" / "edu_fineweb10B"


# ------------------------------------------------- before the training loop


@dataclass
class Choice:
    """The flags that the other flags' defaults depend on."""

    preset: Literal["tiny", "nano", "gpt2", ""] = ""
    data: str = ""
    run: str = ""
    resume: bool = False
    device: str = "auto"


def parse(Hyperparameters, presets):
    """The hyperparameters that the command line asks for; all ranks.

    presets: name -> (GPTConfig, Hyperparameters). A resumed run has its own
    hyperparameters for defaults. Rank 0 says what was chosen and why.
    """
    name_ranks()
    if {"-h", "--help"} & set(sys.argv):
        parse_flags(Hyperparameters, default=presets["nano"][1])
    choice, _ = parse_flags(
        Choice, return_unknown_args=True, add_help=False)
    saved = read_hyperparameters(choice) if choice.resume else {}
    device = get_device(choice.device or saved.get("device"))

    fineweb = Path(os.environ.get("WORKSHOP_DATA") or FINEWEB)
    accelerated, has_fineweb = device.type != "cpu", fineweb.is_dir()
    why = []
    preset = choice.preset or saved.get("preset")
    data = choice.data or saved.get("data")
    if not preset:
        large = accelerated and (bool(data) or has_fineweb)
        preset = "gpt2" if large else "nano"
        why += ["an accelerator" if accelerated else "no accelerator"]
    if not data:
        real = has_fineweb and preset == "gpt2"
        data = fineweb if real else DEMO
        if not real:
            why += ["no FineWeb folder" if not has_fineweb else
                    "the demo dataset suits the preset"]
    data = Path(data).resolve()
    check(data.is_dir() or data != DEMO, "the demo dataset is not there yet: "
          "run `source activate.sh` or `python fineweb/demo.py`")

    default = replace(
        presets[preset][1], data=str(data),
        compile=preset == "gpt2" and device.type == "cuda")
    if device.type == "cpu" and not cpu_has_bf16():
        default.precision = "fp32"
    if preset == saved.get("preset"):  # in any stage
        default = replace(default, **{
            key: value for key, value in saved.items()
            if hasattr(default, key)})
    hp = parse_flags(Hyperparameters, default=default)
    hp.preset, hp.data = preset, str(data)

    check(Path(hp.data).is_dir(), f"{hp.data}: there is no such folder: "
          "check --data")
    check_hyperparameters(hp, presets[preset][0], saved)
    if os.environ.get("RANK", "0") == "0":
        if read_manifest(hp.data).get("complete") is False:
            warn(f"{hp.data} is not complete: what makes it is at work, or "
                 "was stopped")
        why = f" ({', '.join(why)})" if why else ""
        print(f"preset {preset}, data {shown(data)}{why}, "
              f"device {device.type}, {hp.precision}"
              + (f", world size {os.environ['WORLD_SIZE']}"
                 if "WORLD_SIZE" in os.environ else ""), flush=True)
    return hp


def read_hyperparameters(choice):
    """What the run that is to be resumed was started with, {} for a new one.
    """
    check(choice.run, "--resume needs the run's folder: --run DIR")
    file = Path(choice.run) / "hyperparameters.json"
    if not file.exists():
        return {}
    try:
        saved = json.loads(file.read_text())["hyperparameters"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error}): delete it, and give all "
                        "the run's flags again") from error
    return {key: value for key, value in saved.items()
            if key not in ("run", "resume", "init", "devices", "num_nodes")}


def check_hyperparameters(hp, config, saved):
    """Raise a `UserError` for what no stage can train with."""
    for name in ("minibatch_size", "microbatch_size", "sequence_length",
                 "eval_every", "eval_minibatches", "generate_every",
                 "checkpoint_every"):
        flag = "--" + name.replace("_", "-")
        check(getattr(hp, name) > 0, f"{flag} must be 1 or more")
    check(hp.max_steps >= 0, "--max-steps must be 0 (one epoch) or more")
    check(hp.sequence_length <= config.block_size,
          f"--sequence-length {hp.sequence_length} is longer than the "
          f"{config.block_size} positions of preset {hp.preset}")
    # The position in the data follows from the step, S and T.
    for name in ("preset", "minibatch_size", "sequence_length"):
        flag, now = "--" + name.replace("_", "-"), getattr(hp, name)
        check(now == saved.get(name, now), f"{hp.run}: this run was made with "
              f"{flag} {saved.get(name)}, it cannot go on with {now}")


def get_device(name="auto", local_rank=0):
    """The device of this process, made the current one.

    name: "auto" (an accelerator if there is one), "cpu", "cuda", "xpu",
    "mps". Raises `UserError` where this process has none.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    here = ["cpu", *([accelerator.type] if accelerator else [])]
    check(name in ("auto", *here), f"--device {name} is not on this machine: "
          f"choose from {', '.join(here)}")
    count = torch.accelerator.device_count()
    check(local_rank < count, f"process {local_rank} of this node has no "
          f"{accelerator.type} device: start no more than {count} a node")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def cpu_has_bf16():
    """Whether the CPU multiplies bf16 itself; emulated, it is slow."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def compile_model(model, device):
    """`torch.compile(model)`, or with one line of warning the model itself.

    A machine may lack the compiler that torch.compile needs, which shows at
    the first call only: so it is tried on a small function.
    """
    def trial(x):
        return (x.sin() * x).sum()

    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(trial)(x).backward()
    except Exception as error:  # of many kinds: it is a compiler
        reason = str(error).strip().splitlines()[0]
        warn(f"torch.compile does not work here, going on without: {reason}")
        return model
    return torch.compile(model)


# -------------------------------------------------------------------- a run


class Run:
    """A run's folder, signals and log. All ranks make one."""

    def __init__(self, stage, hp, config, max_steps, device):
        self.stage, self.hp, self.config = stage, hp, config
        self.max_steps, self.device = max_steps, device
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stop_signal = None
        self.next_step = 0  # on rank 0: the one after the last that is logged
        self.metrics = None  # metrics.csv, from the first row on
        self.folder = Path(on_rank_0(self._make_folder))
        self.encoding = self._load_vocabulary()
        self.bytes_per_token = read_bytes_per_token(hp.data)
        self.catch_signals()

    def catch_signals(self):
        """From now on a signal only asks the run to stop. All ranks."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @property
    def stop_requested(self):
        """Whether this process was told to stop: 1.0 or 0.0."""
        return float(self.stop_signal is not None)

    def _on_signal(self, number, frame):
        if self.stop_signal == number == signal.SIGINT:
            raise KeyboardInterrupt  # twice: at once
        if number == signal.SIGINT and self.rank == 0:
            print("\nCtrl-C: stopping after this step "
                  "(once more: at once, without a checkpoint)", flush=True)
        self.stop_signal = number

    def _make_folder(self):
        hp = self.hp
        if hp.run:
            folder = Path(hp.run)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = new_folder(ROOT / "runs", self.stage)
        (folder / "checkpoints").mkdir(exist_ok=True)
        record = {
            "stage": self.stage, "hyperparameters": asdict(hp),
            "config": asdict(self.config), "max_steps": self.max_steps,
            "world_size": self.world_size,
            "device": device_name(self.device), "torch": torch.__version__,
        }
        text = json.dumps(record, indent=1) + "\n"
        file = folder / "hyperparameters.json"
        if hp.resume:
            vocabulary.replace(file, text.encode())
        else:
            try:
                with open(file, "x") as new:  # of two at once, one wins
                    new.write(text)
            except FileExistsError:
                raise UserError(
                    f"{folder} holds a run already: go on with it with "
                    "--resume, or name another folder") from None
        print(f"run {shown(folder)}", flush=True)
        return str(folder)

    def _load_vocabulary(self):
        """The vocabulary, or None on all ranks if one of them has none."""
        encoding, problem = None, None
        try:
            encoding = vocabulary.load(self.hp.data)
        except UserError as error:
            problem = str(error)
        problems = [problem for problem in on_every_rank(problem) if problem]
        if problems and self.rank == 0:  # training needs no text
            warn(f"nothing will be generated: {problems[0]}")
        return None if problems else encoding

    # ---------------------------------------------------------- resuming

    def restore(self, model, optimizer):
        """Load the newest checkpoint; returns its step. All ranks.

        Without --resume, or where there is no checkpoint yet, that is 0, with
        the weights of --init if it is given. A run that is finished already
        exits with status 0.
        """
        step, optimizer_state = self.load(model)
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        return step

    def load(self, model):
        """`restore` for a model whose optimizer is made later. All ranks.

        Returns the step and the optimizer's state, which is None at step 0.
        """
        file = on_rank_0(self._find_checkpoint) if self.hp.resume else None
        if file is None:
            if self.hp.init:
                state = load_checkpoint(self.hp.init)
                self._load_weights(model, state, self.hp.init)
            if self.rank == 0:
                self._open_metrics(0)
            return 0, None
        state = load_checkpoint(file)
        check(state["optimizer"], f"{file} holds no state of the optimizer "
              "(DeepSpeed keeps it): start from its weights with --init")
        self._load_weights(model, state, file)
        step = state["step"]
        if step >= self.max_steps:
            if self.rank == 0:
                print(f"finished already: {step} of {self.max_steps} steps")
            sys.exit(0)
        if self.rank == 0:
            self._open_metrics(step)
            print(f"resuming after step {step - 1} from {file}", flush=True)
        return step, state["optimizer"]

    def _find_checkpoint(self):
        """The newest checkpoint that is whole, or None; rank 0."""
        folder = self.folder / "checkpoints"
        for part in folder.glob(".*.part"):  # of a save that was killed
            part.unlink()
        files = sorted(folder.glob("step_*.pt"), reverse=True)
        for file in files:
            if is_whole(file):
                return str(file)
            warn(f"{file} is damaged: going on from the one before it")
        check(not files, f"{folder}: every checkpoint is damaged: name "
              "another --run to start afresh")
        return None

    def _load_weights(self, model, state, file):
        now = asdict(self.config)
        check(state["config"] == now, f"{file} holds another model "
              f"({state['config']}, not {now}): check --preset and --data")
        model.load_state_dict(state["model"])

    # ----------------------------------------------- during the training

    def check_finite(self, step, loss, norm):
        """Stop the run before a broken model is saved. All ranks."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise UserError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}. "
            "The last checkpoint is from before that: try a lower "
            "--learning-rate, or --precision fp32")

    def log(self, step, loss, val_loss, lr, norm, seconds):
        """Print a line and add a row to metrics.csv. Rank 0 alone.

        loss, val_loss: nats a token, val_loss None where it was not
        evaluated; norm: of the gradient, before clipping.
        """
        self._check_rank("log")
        tokens = self.hp.minibatch_size * self.hp.sequence_length
        speed = tokens / seconds
        mfu = None
        peak = peak_flops(self.device, self.hp.precision)
        if peak:
            flops = flops_per_token(self.config, self.hp.sequence_length)
            mfu = speed * flops / (peak * self.world_size)
        line = (f"| step {step:4d}/{self.max_steps} | loss {loss:.6f} "
                f"| lr: {lr:.4e} | norm: {norm:.4f} "
                f"| dt: {1000 * seconds:6.1f} ms | tok/s: {speed:,.0f} |")
        if mfu is not None:
            line += f" mfu: {100 * mfu:.1f}% |"
        if val_loss is not None:
            line += f" val: {val_loss:.4f} |"
            if self.bytes_per_token:
                bits = val_loss / math.log(2) / self.bytes_per_token
                line += f" bits/byte: {bits:.3f} |"
        print(line, flush=True)
        row = (step, loss, val_loss, lr, norm, seconds, speed, mfu)
        csv.writer(self.metrics, lineterminator="\n").writerow(
            [format_number(value) for value in row])
        self.metrics.flush()
        self.next_step = step + 1

    def save(self, step, model, optimizer):
        """Write the checkpoint after `step` updates. Rank 0 alone.

        Whole or not at all: a run that is killed, or a disk that is full,
        leaves the one before it as it was.
        """
        self._check_rank("save")
        os.fsync(self.metrics.fileno())  # no checkpoint without its rows
        state = {
            "format": FORMAT, "stage": self.stage, "step": step,
            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "config": asdict(self.config), "hyperparameters": asdict(self.hp),
        }
        write_checkpoint(state, self.folder / "checkpoints", step)

    def _check_rank(self, name):
        check(self.rank == 0, f"rank {self.rank} called run.{name}(): rank 0 "
              "alone logs and saves")

    def finish(self):
        """Say how the run ended, after its last step. All ranks."""
        if self.world_size > 1:
            dist.barrier()  # who leaves early can make another's end abort
        if self.rank == 0:
            self.metrics.close()
            if self.next_step == self.max_steps:
                print(f"finished: {shown(self.folder)}")
            else:
                name = ("a signal to another rank" if self.stop_signal is None
                        else signal.Signals(self.stop_signal).name)
                print(f"stopped by {name}, checkpoint saved; go on with: "
                      f"--run {shown(self.folder)} --resume")
        if self.stop_signal == signal.SIGINT:
            sys.exit(130)

    def _open_metrics(self, step):
        """Cut metrics.csv back to the rows before `step`; rank 0."""
        file = self.folder / "metrics.csv"
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        kept = 0
        if step:
            try:
                with open(file, newline="") as old:
                    for row in csv.reader(old):
                        if row[:1] == [str(kept)] and kept < step:
                            rows.writerow(row)
                            kept += 1
            except OSError as error:
                warn(f"{file}: {error.strerror}")
        if kept < step:
            warn(f"{file} has lost the rows from step {kept} to {step - 1}")
        vocabulary.replace(file, text.getvalue().encode())
        self.metrics = open(file, "a", newline="")


# --------------------------------------------------------------- checkpoints


def write_checkpoint(state, folder, step):
    """Write `state` to folder/step_<step>.pt atomically, keep the newest two.

    Raises `UserError` where it cannot be written; what was there stays.
    """
    final = folder / f"step_{step:08d}.pt"
    part = final.with_name(f".{final.name}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # torch hides the cause
            error = error.__context__
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{final} could not be written ({reason}). The checkpoints before "
            "it are whole: make room, and go on with --resume") from error
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def load_checkpoint(file):
    """A checkpoint's dictionary, on the CPU; `UserError` if it is none."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        check(state["format"] == FORMAT, f"{file}: its format is "
              f"{state['format']}, this version reads {FORMAT}")
        return state
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError,
            pickle.UnpicklingError) as error:
        reason = (explain(error) or str(error)).strip().splitlines()[0]
        raise UserError(f"{file}: not a checkpoint ({reason})") from error


def is_whole(file):
    """Whether a checkpoint's archive is complete and its checksums hold."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def sync_folder(folder):
    """Make a renaming in the folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --------------------------------------------------------------------- tools


def new_folder(parent, stage):
    """Make parent/<date>-<time>-<stage>, also when others do so right now."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = parent / f"{now}-{stage}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def shown(path):
    """The path as one would type it in this folder."""
    inside = path.is_relative_to(Path.cwd())
    return path.relative_to(Path.cwd()) if inside else path


def on_rank_0(function):
    """Call `function` on rank 0 alone; all ranks get its result or error."""
    if not (dist.is_available() and dist.is_initialized()):
        return function()
    message = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = function()
        except (UserError, OSError) as error:
            message[1] = explain(error) or str(error)
    dist.broadcast_object_list(message, src=0)
    check(message[1] is None, message[1])
    return message[0]


def on_every_rank(value):
    """The values that all ranks call this with, a list in their order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def read_manifest(data):
    """What the folder's maker wrote about it; {} where there is nothing."""
    try:
        return json.loads((Path(data) / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}


def read_bytes_per_token(data):
    """Of the validation split, or None where the folder does not say."""
    try:
        val = read_manifest(data)["val"]
        return val["bytes"] / val["tokens"]
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def device_name(device):
    """What the vendor calls it."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    return device.type


def format_number(value):
    """A number as it stands in metrics.csv: nine digits, empty for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def warn(message):
    """One line of warning; the run goes on."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
