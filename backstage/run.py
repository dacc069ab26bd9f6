"""The run around a stage's training loop. It is the same in every stage.

A run is a folder:

    metrics.csv             a row for each step
    hyperparameters.json    what the run was started with
    checkpoints/step_00000050.pt    after 50 steps; the newest two are kept

Docstrings say who calls a method: all ranks, or rank 0 alone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote  # for what may be typed
from socket import gethostname
from typing import Any

import tiktoken
import torch

from backstage import ROOT, checkpoint, dataset, files, process, track, world
from backstage import device as devices
from backstage.errors import UserError, require, visible
from backstage.flops import flops_per_token, peak_flops
from backstage.interfaces import ModelConfig, StageFlags
from backstage.record import (
    COLUMNS,
    RECORD,
    Metrics,
    describe_start,
    is_claimed,
    now,
)
from backstage.signals import Signals

ALONE = ", which only rank 0 calls; fix: put it under `if rank == 0:`"


class Run:
    """A run's folder, signals, metrics and checkpoints, from `restore` on.

    Attributes:
        lock: the open folder; rank 0 has it, as those that follow.
        metrics: metrics.csv.
        tracker: what writes for the tool that --track names, if any.
    """

    lock: int
    metrics: Metrics
    tracker: track.TensorBoard | track.Wandb | None

    def __init__(self, stage: str, hp: StageFlags, config: ModelConfig,
                 max_steps: int, device: torch.device) -> None:
        self.stage, self.hp, self.config = stage, hp, config
        self.max_steps, self.device = max_steps, device
        self.rank, self.world_size = world.get_rank_and_size()
        self.tracker = None

    def _open(self) -> None:
        """Make or find the folder, read the tokenizer, handle signals."""
        hp, config, device = self.hp, self.config, self.device
        world.keep_group()
        if (device.type == "cpu" and hp.precision == "bf16"
                and hp.sequence_length <= 128):
            # a step of nano is faster without the fused kernel, by a sixth
            torch.backends.cuda.enable_flash_sdp(False)  # the CPU's, too
        on_node, size = process.count_processes(hp.devices or 1)
        if self.world_size == 1 < size and (
                "TORCHELASTIC_RUN_ID" in os.environ
                or process.find_launcher(os.environ)[1] > 1):
            process.stop_all(
                f"{size} processes were started, but this script does not "
                "connect them, and each would train independently; fix: "
                "start a single process, or the script of another stage")
        sizes = sorted(set(world.on_every_rank(hp.microbatch_size)))
        require(len(sizes) == 1, "the ranks have microbatches of "
                f"{sizes[0]} to {sizes[-1]} samples, because some devices "
                f"have less memory; fix: add --microbatch-size {sizes[0]}")
        self.record: dict[str, Any] = {
            "stage": self.stage, "started": now(),
            "hyperparameters": asdict(hp), "config": asdict(config),
            "max_steps": self.max_steps, "world_size": self.world_size,
            "nodes": math.ceil(self.world_size / on_node),
            "hosts": [*dict.fromkeys(world.on_every_rank(gethostname()))],
            "device": devices.device_name(device), "torch": torch.__version__,
            "backend": world.get_backend(), **process.find_start()}
        folder, self.saved = world.call_on_rank_0(self._make_folder)
        self.folder = Path(folder)
        self.place = quote(files.show_path(self.folder, Path.cwd()))
        self.recorder: track.Recorder | None = None
        if hp.profile:
            self.recorder = track.Recorder(hp.profile, self.folder, device)
        self.tokenizer = self._load_tokenizer()
        if self.tokenizer:  # an empty prompt is the beginning of a document
            self.prompt = self.tokenizer.encode(
                hp.prompt, allowed_special="all") or [self.tokenizer.eot_token]
        self.bytes_per_token = dataset.bytes_per_token(hp.data)
        devices.CHECKS[:] = [partial(
            dataset.check_batch, hp.data, config.vocab_size)]
        self.signals = Signals(self.rank)

    @property
    def stop_requested(self) -> bool:
        """Whether this process was told to stop."""
        return self.signals.last is not None

    def _make_folder(self) -> tuple[str, list[str]]:
        """Make and lock the folder; it and its checkpoints. Rank 0 alone."""
        folder = Path(self.hp.run_dir
                      or files.new_folder(ROOT / "runs", self.stage))
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = files.lock_folder(
            folder, f"{folder}: another process is training in this run; fix: "
            "wait for it, or choose another --run-dir")
        found = [name for name in (RECORD, "metrics.csv", "checkpoints")
                 if os.path.lexists(folder / name)]
        require(self.hp.resume or not found, f"{folder} already holds a run "
                f"({''.join(found[:1])}); fix: continue it with --resume, or "
                "choose another --run-dir")
        place = folder / "checkpoints"
        saved = checkpoint.list_checkpoints(place)
        is_run = RECORD in found or any(map(checkpoint.is_ours, saved))
        require(is_run or not found, f"{folder} holds {''.join(found[:1])}, "
                "but no run that --resume can continue; fix: choose another "
                "--run-dir")
        if not self.hp.resume:
            self._write_record(folder, partial(  # of two, one wins
                (folder / RECORD).touch, exist_ok=False))
        elif RECORD in found and not is_claimed(folder):
            # what somebody has added to it stays
            self.record = files.read_json(folder / RECORD, {}) | self.record
        self.begun = bool(found)
        require(place.is_dir() or not os.path.lexists(place), f"{place} is "
                "a file or a broken link; fix: restore the checkpoints, or "
                "remove it to start at step 0")
        place.mkdir(exist_ok=True)
        for written in folder, place:
            files.remove_parts(written)  # of a save that was killed
        print(f"{visible(describe_start(self.record))}\n"
              f"run {files.show_path(folder, Path.cwd())}", flush=True)
        return str(folder), [*map(str, saved)]

    def _write_record(self, folder: Path,
                      last_look: Callable[[], object] = bool) -> None:
        text = json.dumps(self.record, indent=1) + "\n"
        files.write_atomically(folder / RECORD, text.encode(), "", last_look)

    def _load_tokenizer(self) -> PrintableTokenizer | None:
        """The dataset's tokenizer; None on all ranks if one has none."""
        tokenizer: tiktoken.Encoding | None = None
        problem: str | None = None
        try:
            # a pipeline only computes batches of one size
            require(self.hp.pipeline_parallel <= 1, "a pipeline cannot "
                    "generate; fix: generate from the checkpoint: python "
                    f"code/generate.py --run-dir {self.place}")
            tokenizer = dataset.load_vocabulary(self.hp.data)
        except UserError as error:
            problem = str(error)
        problem = next(filter(None, world.on_every_rank(problem)), None)
        if problem and self.rank == 0:  # training works without it
            print(f"no generated text: {visible(problem)}", flush=True)
        if problem or tokenizer is None:
            return None
        return PrintableTokenizer(tokenizer)

    def restore(self, model: torch.nn.Module,
                optimizer: torch.optim.Optimizer) -> int:
        """Resume from the newest checkpoint; return its step. All ranks.

        That is 0 without one, with the weights of --init if it is given. If
        the run is already finished, this exits with status 0.
        """
        self._open()
        hp, step = self.hp, 0
        if self.saved:
            file, state = checkpoint.load_first(
                self.saved, "--run-dir", self.config, model, optimizer)
            step = state["step"]
            if step >= self.max_steps:
                if self.rank == 0:
                    print(f"already finished: {step} of {self.max_steps} "
                          "steps")
                sys.exit(0)
            checkpoint.spread_state(state, model, optimizer)
        elif hp.init:
            _, state = checkpoint.load_first(
                [hp.init], "--init", self.config, model)
            checkpoint.spread_state(state, model)
        if self.rank == 0:
            if hp.resume:
                self._write_record(self.folder)
            problem = ""
            if self.begun and not self.saved:
                problem = ("no checkpoint step_*.pt in "
                           f"{self.folder}/checkpoints, starting at step 0")
            self.metrics = Metrics(self.folder / "metrics.csv", step, problem)
            line = describe_parameters(optimizer)
            if hp.pipeline_parallel > 1:
                line += ", in the first pipeline stage"
            if step:
                line += f"; resuming after step {step - 1} from {file}"
                line += self.metrics.kept
            print(line, flush=True)
            if hp.track in track.TRACKERS:
                self.tracker = track.TRACKERS[hp.track](
                    self.folder, step, self.record)
        return step

    def begin(self) -> None:
        """Print how long the start took, before the first step. All ranks."""
        if self.rank == 0:
            seconds = self.record["startup"] = process.seconds_since_start()
            self._write_record(self.folder)
            if seconds:
                print(f"startup {seconds:.1f} s", flush=True)

    def check_finite(self, step: int, loss: float, norm: float) -> None:
        """Stop the run if its loss or gradient is not finite. All ranks."""
        if self.recorder:
            self.recorder.step_ended(step)
        require(math.isfinite(loss) and math.isfinite(norm), f"step {step}: "
                f"the loss is {loss} and the gradient norm {norm}; fix: "
                "resume from the last checkpoint, which is older, with a "
                "lower --learning-rate or --precision fp32")

    def log(self, step: int, loss: float, val_loss: float | None, lr: float,
            norm: float, seconds: float) -> None:
        """Print a line and add a row to metrics.csv. Rank 0 alone.

        loss, val_loss: nats per token, val_loss None if it was not evaluated;
        norm: of the gradient, before clipping.
        """
        require(self.rank == 0, f"rank {self.rank} called run.log(){ALONE}")
        hp = self.hp
        speed = hp.minibatch_size * hp.sequence_length / seconds
        each = speed / self.world_size
        peak = peak_flops(self.device, hp.precision)
        mfu: float | None = None
        if peak:
            mfu = each * flops_per_token(
                self.config, hp.sequence_length) / peak
        memory, reserved = devices.peak_memory(self.device)
        row = dict(zip(COLUMNS, (
            step, loss, val_loss, lr, norm, seconds, speed, mfu,
            hp.minibatch_size / seconds, each, memory, reserved), strict=True))
        self.metrics.add(row)
        seen = self.metrics.losses[-hp.eval_minibatches:]
        print(format_line(
            row, self.max_steps, self.bytes_per_token,
            devices.describe_memory(memory, self.device),
            sum(seen) / len(seen)), flush=True)
        if self.tracker:
            self.tracker.log(step, {
                name: value for name, value in row.items()
                if value is not None and name != "step"})

    def save(self, step: int, model: torch.nn.Module,
             optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint after `step` steps, or leave all unchanged.

        All ranks if each holds a part of the model; else rank 0 alone.
        """
        require(self.rank == 0 or checkpoint.is_sharded(model),
                f"rank {self.rank} called run.save(){ALONE}")
        weights, optim_state = checkpoint.gather_state(model, optimizer)
        if self.rank == 0:
            self.metrics.sync()
            checkpoint.write_checkpoint(self.folder / "checkpoints", {
                "stage": self.stage, "step": step, "model": weights,
                "optimizer": optim_state, "config": asdict(self.config),
                "hyperparameters": asdict(self.hp)})
            if not sys.stdout.isatty():
                print(f"saved {self.place}/checkpoints/step_{step:08d}.pt",
                      flush=True)

    def finish(self) -> None:
        """Print how the run ended, after its last step. All ranks."""
        if self.recorder:
            self.recorder.finish()
        memory = world.on_every_rank(devices.peak_memory(self.device)[0])
        world.on_every_rank(None)  # who leaves early can make another abort
        if self.rank == 0:
            most = max(memory)
            line = f"memory: {devices.describe_memory(most, self.device)}"
            line += " at most"
            if self.world_size > 1:
                line += f", on rank {memory.index(most)}"
            print(line)
            self.metrics.file.close()
            if self.tracker:
                self.tracker.close()
            os.close(self.lock)
            by = (signal.Signals(self.signals.last).name if
                  self.signals.last else "a signal to another rank")
            print(f"finished: {self.place}" if self.metrics.last ==
                  self.max_steps - 1 else f"stopped by {by}, checkpoint "
                  f"saved; resume with: --run-dir {self.place} --resume")
        if self.signals.last == signal.SIGINT:
            sys.exit(130)


class PrintableTokenizer:
    """A tokenizer whose decoded text is safe for a terminal: see `visible`."""

    def __init__(self, tokenizer: tiktoken.Encoding) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, tokens: Sequence[int]) -> str:
        return visible(self._tokenizer.decode(tokens))


def describe_parameters(optimizer: torch.optim.Optimizer) -> str:
    """Return how many parameters decay; a sharded one counts whole."""
    parts, total = [], 0
    for group in optimizer.param_groups:
        if weights := group["params"]:
            count = sum(weight.numel() for weight in weights)
            total += count
            parts.append(f"{count:,} in {len(weights)} tensors with weight "
                         f"decay {group['weight_decay']:g}")
    return f"{total:,} parameters: {', '.join(parts)}"


def format_line(
        row: Mapping[str, Any], max_steps: int,
        bytes_per_token: float | None = None, memory: str = "",
        train: float = 0.0) -> str:
    """A line of the log, 165 characters at most; None is left out.

    With a validation loss, each device's speed and the memory are left out.
    row: the metrics; memory: in words; train: the loss of the last samples.
    """
    speed, val_loss = row["tokens_per_second"], row["val_loss"]
    each, mfu = row["tokens_per_second_per_device"], row["mfu"]
    line = (f"| step {row['step']:4d}/{max_steps} | loss {row['loss']:.6f} "
            f"| lr: {row['lr']:.4e} | norm: {row['norm']:.4f} "
            f"| dt: {1000 * row['seconds']:6.1f} ms | tok/s: {speed:,.0f}")
    if val_loss is not None:
        line += f" | val: {val_loss:.4f} (train: {train:.4f}) |"
        if bytes_per_token:
            bits = val_loss / math.log(2) / bytes_per_token
            line += f" bits/byte: {bits:.3f} |"
        return line
    line += " |" if each == speed else f" ({each:,.0f} each) |"
    if mfu is not None:
        line += f" mfu: {100 * mfu:.1f}% |"
    return line + (f" mem: {memory} |" if memory else "")
