"""The run around a stage's training loop. It is the same in every stage.

A run is a folder:

    metrics.csv             a row for each step
    hyperparameters.json    what the run was started with
    checkpoints/step_00000050.pt    after 50 updates; the newest two are kept

`Run` writes the folder and resumes from it. Its docstrings say who calls a
method: all ranks, or rank 0 alone.
"""

import contextlib
import csv
import datetime
import io
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from backstage import (
    ROOT,
    dataset,
    terminal,
    track,
    witness,
)
from backstage.checkpoint import (
    FORMAT,
    check_fit,
    gather_state,
    get_shapes,
    is_ours,
    is_sharded,
    list_checkpoints,
    load_checkpoint,
    spread_state,
    write_checkpoint,
)
from backstage.device import describe_memory, device_name, peak_memory
from backstage.errors import UserError, explain, require, warn
from backstage.files import (
    Damaged,
    lock_folder,
    remove_parts,
    show_path,
    write_atomically,
)
from backstage.flops import flops_per_token, peak_flops
from backstage.launchers import (
    count_processes,
    is_one_of_several,
    stop_all,
)
from backstage.profile import Recorder
from backstage.record import COLUMNS, RECORD, read_metrics
from backstage.world import (
    call_on_rank_0,
    get_rank_and_size,
    keep_group,
    on_every_rank,
    wait_for_all,
)

KEEP_EVERY = 10  # seconds from one line that stays in a terminal to the next


class Run:
    """A run's folder, signals and log. All ranks create one."""

    def __init__(self, stage, hp, config, max_steps, device):
        self.stage, self.hp, self.config = stage, hp, config
        self.max_steps, self.device = max_steps, device
        keep_group()
        self.rank, self.world_size = get_rank_and_size()
        if self.world_size == 1 and is_one_of_several():
            stop_all(f"{os.environ['WORLD_SIZE']} processes were started, but "
                     "this script does not join them, and each would train "
                     "alone: start one, or a script of another stage")
        sizes = sorted(set(on_every_rank(hp.microbatch_size)))
        require(len(sizes) == 1, "the ranks have microbatches of "
                f"{sizes[0]} to {sizes[-1]} samples, as some devices have "
                f"less memory: add --microbatch-size {sizes[0]}")
        self.stop_signal = None
        self.lock = None  # on rank 0: the folder, locked
        self.next_step = 0  # on rank 0: the step after the last logged one
        self.kept_time = -math.inf  # when a line last stayed in the terminal
        self.metrics = None  # on rank 0: metrics.csv, open for appending
        self.tracker = None  # on rank 0: the same for another tool
        self.folder = Path(call_on_rank_0(self._make_folder))
        if self.world_size > 1:
            witness.start(self.folder / "why", getattr(hp, "timeout", 0))
        self.recorder = Recorder(hp.profile, self.folder, device)
        self.tokenizer = self._load_tokenizer()
        self.bytes_per_token = dataset.bytes_per_token(hp.data)
        self.catch_signals()
        sys.stdout = terminal.Output(sys.stdout, self._on_lost_output)

    def catch_signals(self):
        """From now on, a signal only asks the run to stop. All ranks."""
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's
            numbers.append(signal.SIGHUP)  # the terminal was closed
        for number in numbers:
            signal.signal(number, self._on_signal)

    @property
    def stop_requested(self):
        """Whether this process was told to stop: 1.0 or 0.0."""
        return float(self.stop_signal is not None)

    def _on_signal(self, number, frame):
        if self.stop_signal == number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C stops at once
        self.stop_signal = number
        if number == signal.SIGINT and self.rank == 0:
            # print() fails where the signal has interrupted another one
            with contextlib.suppress(OSError):
                os.write(1, b"\nCtrl-C: stopping after this step (press it "
                         b"again to stop at once, without a checkpoint)\n")

    def _on_lost_output(self):
        self.stop_signal = self.stop_signal or signal.SIGPIPE

    def _make_folder(self):
        hp = self.hp
        if hp.run:
            folder = Path(hp.run)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = new_folder(ROOT / "runs", self.stage)
        self.lock = lock_folder(
            folder, f"{folder}: another process trains in this run: wait for "
            "it, or name another --run")
        self._require_free(folder)
        on_node, _ = count_processes(getattr(hp, "devices", 0) or 1)
        record = {
            "stage": self.stage, "hyperparameters": asdict(hp),
            "config": asdict(self.config), "max_steps": self.max_steps,
            "world_size": self.world_size,
            "nodes": math.ceil(self.world_size / on_node),
            "device": device_name(self.device), "torch": torch.__version__,
        }
        text = json.dumps(record, indent=1) + "\n"
        file = folder / RECORD
        if hp.resume:
            write_atomically(file, text.encode())
        else:
            try:
                with open(file, "x") as new:  # of two runs at once, one wins
                    new.write(text)
            except FileExistsError:
                raise UserError(
                    f"{folder} holds a run already: continue it with "
                    "--resume, or name another folder") from None
        (folder / "checkpoints").mkdir(exist_ok=True)
        if not witness.the_witness:  # what the start before this one left
            shutil.rmtree(folder / "why", ignore_errors=True)
        print(f"run {show_path(folder, Path.cwd())}", flush=True)
        return str(folder)

    def _require_free(self, folder):
        """Raise a `UserError` if the folder holds what is not this run's."""
        found = [name for name in (RECORD, "metrics.csv", "checkpoints")
                 if (folder / name).exists()]
        if found and not self.hp.resume:
            raise UserError(f"{folder} holds a run already (its {found[0]}): "
                            "continue it with --resume, or name another")
        ours = RECORD in found or any(
            map(is_ours, list_checkpoints(folder / "checkpoints")))
        require(ours or not found, f"{folder} holds {''.join(found[:1])}, but "
                "no run that --resume can continue: name another --run")

    def _load_tokenizer(self):
        """The dataset's tokenizer; None on all ranks if one of them has none.

        None also for a pipeline, which only computes batches of one size.
        """
        if getattr(self.hp, "pipeline_parallel", 1) > 1:
            if self.rank == 0:
                print("a pipeline writes no texts: python code/generate.py "
                      f"--run {show_path(self.folder, Path.cwd())} writes "
                      "them from the checkpoint", flush=True)
            return None
        tokenizer, problem = None, None
        try:
            tokenizer = dataset.load_vocabulary(self.hp.data)
        except UserError as error:
            problem = str(error)
        problems = [problem for problem in on_every_rank(problem) if problem]
        if problems and self.rank == 0:  # training works without it
            warn(f"nothing will be generated: {problems[0]}")
        return None if problems else tokenizer

    # ---------------------------------------------------------- resuming

    def restore(self, model, optimizer):
        """Load the newest checkpoint; returns its step. All ranks.

        Without --resume, or if there is no checkpoint yet, that is 0, with
        the weights from --init if it is given. If the run is already
        finished, this exits with status 0.
        """
        files = call_on_rank_0(self._list_checkpoints)
        if not files:
            if self.hp.init:
                _, state = self._load([self.hp.init], model)
                spread_state(state, model)
            if self.rank == 0:
                self._print_parameters(optimizer)
                self._open_metrics(0)
            return 0
        file, state = self._load(files, model, optimizer)
        step = state["step"]
        if step >= self.max_steps:
            if self.rank == 0:
                print(f"already finished: {step} of {self.max_steps} steps")
            sys.exit(0)
        spread_state(state, model, optimizer)
        if self.rank == 0:
            self._print_parameters(optimizer)
            self._open_metrics(step)
            print(f"resuming after step {step - 1} from {file}", flush=True)
        return step

    def _print_parameters(self, optimizer):
        """How many there are, and which of them decay. Rank 0 alone.

        A split tensor counts as a whole one; of a pipeline, it is one stage.
        """
        groups = [(group["params"], f"{group['weight_decay']:g}")
                  for group in optimizer.param_groups if group["params"]]
        counts = [sum(weight.numel() for weight in weights)
                  for weights, _ in groups]
        pipeline = getattr(self.hp, "pipeline_parallel", 1) > 1
        print(f"{sum(counts):,} parameters"
              + " in the first pipeline stage" * pipeline + ": " + ", ".join(
                  f"{count:,} in {len(weights)} tensors with weight decay "
                  f"{decay}" for count, (weights, decay)
                  in zip(counts, groups, strict=True)), flush=True)

    def _list_checkpoints(self):
        """The files to resume from, the newest first. Rank 0 alone."""
        if not self.hp.resume:
            return []
        folder = self.folder / "checkpoints"
        remove_parts(folder)  # of a save that was killed
        return [*map(str, list_checkpoints(folder))]

    def _load(self, files, model, optimizer=None):
        """The first of the files that this run's model can load. All ranks.

        Returns its name and state. Rank 0 looks for it, and warns of others.
        """
        shapes, now, states = get_shapes(model), asdict(self.config), {}

        def find():
            for file in files:
                try:
                    state = load_checkpoint(file)
                    require(state["config"] == now, f"{file} holds another "
                            f"model ({state['config']}, not {now}): check "
                            "--preset and --data")
                    check_fit(file, state, shapes, optimizer)
                    states[file] = state
                    return file
                except Damaged as error:
                    require(file != files[-1], f"{error}: name another "
                            + ("--run" if self.hp.resume else "--init"))
                    warn(f"{error}: going on from the one before it")

        file = call_on_rank_0(find)
        return file, states.get(file) or load_checkpoint(file, verify=False)

    # ----------------------------------------------- during the training

    def check_finite(self, step, loss, norm):
        """Stop the run before a broken model is saved. All ranks.

        Called at the end of a step, where its time is taken.
        """
        self.recorder.step_ended(step)
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise UserError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}. "
            "The last checkpoint is older: try a lower --learning-rate, or "
            "--precision fp32")

    def log(self, step, loss, val_loss, lr, norm, seconds):
        """Print a line and add a row to metrics.csv. Rank 0 alone.

        In a terminal, a line is shown in the place of the one before; some
        stay, at least every ten seconds. Elsewhere all do.

        loss, val_loss: nats per token, val_loss None if it was not evaluated;
        norm: of the gradient, before clipping.
        """
        self._check_rank("log")
        tokens = self.hp.minibatch_size * self.hp.sequence_length
        speed = tokens / seconds
        each = speed / self.world_size
        mfu = None
        peak = peak_flops(self.device, self.hp.precision)
        if peak:
            flops = flops_per_token(self.config, self.hp.sequence_length)
            mfu = speed * flops / (peak * self.world_size)
        memory, reserved = peak_memory(self.device)
        line = format_line(
            step, self.max_steps, loss, lr, norm, seconds, speed,
            each if self.world_size > 1 else None, mfu, val_loss,
            self.bytes_per_token, describe_memory(memory, self.device))
        self._show(step, line, val_loss is not None)
        row = (step, loss, val_loss, lr, norm, seconds, speed, mfu,
               self.hp.minibatch_size / seconds, each, memory, reserved)
        csv.writer(self.metrics, lineterminator="\n").writerow(
            [format_number(value) for value in row])
        self.metrics.flush()
        self.tracker.log(step, dict(zip(COLUMNS[1:], row[1:], strict=True)))
        self.next_step = step + 1

    def _show(self, step, line, stays):
        if not terminal.is_terminal():
            print(line, flush=True)
            return
        terminal.update(line)
        now = time.monotonic()
        last = step + 1 == self.max_steps
        # a text may follow, or how the run ended
        stays = stays or last or (step + 1) % self.hp.generate_every == 0
        if stays or self.stop_requested or now >= self.kept_time + KEEP_EVERY:
            terminal.keep()
            self.kept_time = now

    def save(self, step, model, optimizer):
        """Write the checkpoint after `step` updates.

        All ranks if each holds a part of the model; rank 0 alone if each
        holds all of it. If the run is killed or the disk is full, the
        previous checkpoint stays unchanged.
        """
        if not is_sharded(model):
            self._check_rank("save")
        weights, optim_state = gather_state(model, optimizer)
        if self.rank > 0:
            return
        os.fsync(self.metrics.fileno())  # its rows are saved before it
        write_checkpoint({
            "format": FORMAT, "stage": self.stage, "step": step,
            "model": weights, "optimizer": optim_state,
            "config": asdict(self.config), "hyperparameters": asdict(self.hp),
        }, self.folder / "checkpoints", step)

    def _check_rank(self, name):
        require(self.rank == 0, f"rank {self.rank} called run.{name}(): "
                "rank 0 alone logs and saves")

    def finish(self):
        """Say how the run ended, after its last step. All ranks."""
        self.recorder.finish()
        memory = on_every_rank(peak_memory(self.device)[0])
        wait_for_all()  # a rank that leaves early can make another abort
        if self.rank == 0:
            terminal.keep()
            self._print_memory(memory)
            self.metrics.close()
            self.tracker.close()
            os.close(self.lock)
            if self.next_step == self.max_steps:
                print(f"finished: {show_path(self.folder, Path.cwd())}")
            else:
                name = ("a signal to another rank" if self.stop_signal is None
                        else signal.Signals(self.stop_signal).name)
                print(f"stopped by {name}, checkpoint saved; go on with: "
                      f"--run {show_path(self.folder, Path.cwd())} --resume")
        if self.stop_signal == signal.SIGINT:
            sys.exit(130)

    def _print_memory(self, memory):
        """The peak of this process, or the ranks' largest and smallest."""
        most, least = (describe_memory(find(memory), self.device)
                       for find in (max, min))
        if self.world_size == 1:
            print(f"memory: {most} at most")
        else:
            print(f"memory: {most} at most, on rank "
                  f"{memory.index(max(memory))}; {least} on rank "
                  f"{memory.index(min(memory))}, which has the least")

    def _open_metrics(self, step):
        """Cut metrics.csv back to the rows before `step`. Rank 0 alone."""
        file = self.folder / "metrics.csv"
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        kept = 0
        if step:
            try:
                for row in read_metrics(file):
                    if row["step"] == kept < step:
                        rows.writerow(
                            [format_number(row[name]) for name in COLUMNS])
                        kept += 1
            except (UserError, FileNotFoundError) as error:
                warn(explain(error))
        if kept < step:
            warn(f"{file} has lost the rows from step {kept} to {step - 1}")
        write_atomically(file, text.getvalue().encode())
        self.metrics = open(file, "a", newline="")
        self.tracker = track.start(self.hp.track, self.folder, step)


def new_folder(parent, stage):
    """Create parent/<date>-<time>-<stage>, even if others do so right now."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = parent / f"{now}-{stage}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def format_line(step, max_steps, loss, lr, norm, seconds, speed, each, mfu,
                val_loss, bytes_per_token, memory=None):
    """A line of the log, 165 characters at most; None is left out.

    Where there is a validation loss, the speed of each device is left out:
    metrics.csv has it. memory: in words.
    """
    memory = "" if memory is None else f" mem: {memory} |"
    line = (f"| step {step:4d}/{max_steps} | loss {loss:.6f} "
            f"| lr: {lr:.4e} | norm: {norm:.4f} "
            f"| dt: {1000 * seconds:6.1f} ms | tok/s: {speed:,.0f}")
    if val_loss is not None:
        line += f" | val: {val_loss:.4f} |"
        if bytes_per_token:
            bits = val_loss / math.log(2) / bytes_per_token
            line += f" bits/byte: {bits:.3f} |"
        return line + memory
    line += " |" if each is None else f" ({each:,.0f} each) |"
    if mfu is not None:
        line += f" mfu: {100 * mfu:.1f}% |"
    return line + memory


def format_number(value):
    """A number as in metrics.csv: an integer, or nine digits.

    Empty for None. What is read from there is written the same again.
    """
    if value is None:
        return ""
    if isinstance(value, int) or (
            value.is_integer() and 10**9 <= value < 2**53):
        return str(int(value))
    return f"{value:.9g}"
