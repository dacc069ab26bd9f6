"""The Lightning stage: the same training, without what Lightning loses."""

import gc
import importlib
import os
import re
import signal
import sys
import time

import pytest
import torch
from conftest import needs
from stages import (
    DeepSpeedOnCPU,
    DieAfter,
    SignalAt,
    agree,
    attempt,
    edited,
    same_state,
    train,
)

from backstage.errors import UserError

FSDP2 = ("--strategy", "fsdp2")


@pytest.mark.whole
def test_one_process_is_the_single_device_bit_for_bit(data, tmp_path):
    """Lightning asks the schedule for a step after the last one, too, which
    is none that follows the warm-up here."""
    std, lit = (train(stage, tmp_path / stage, "--precision", "bf16",
                      "--max-steps", 6, "--warmup-steps", 6, data=data)
                for stage in ("std", "lit"))
    for column in ("loss", "val_loss", "lr", "norm"):
        assert lit.column(column) == std.column(column)
    assert same_state(lit.checkpoint()["model"], std.checkpoint()["model"])


@pytest.mark.whole
@pytest.mark.parametrize("step", [10, 20])
def test_stopped_where_it_validates(data, single, tmp_path, step):
    """It does so once, and is resumed; test_std.py stops it elsewhere."""
    run = tmp_path / "run"
    result = train("lit", run, data=data,
                   probes=[SignalAt(step, signal.SIGUSR1)])
    assert result.column("step") == list(range(step))
    validated = [row["step"] for row in result.rows if row["val_loss"]]
    assert validated == [last for last in (9, 19) if last < step]
    if step < 20:
        result = train("lit", run, "--resume")
    agree(result, single)


class SignalAllTheStart:
    """Sends SIGTERM to rank 1 at every call of Lightning's, until it trains.

    The first is sent when the process has joined the others.
    """

    def __call__(self, log):
        if log.rank == 1:
            sys.setprofile(self.on_call)

    def on_call(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or "/lightning/" not in code.co_filename:
            return
        if code.co_name == "training_step":
            sys.setprofile(None)
            print(f"signals: {self.count}")
        elif signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            self.count += 1
            os.kill(os.getpid(), signal.SIGTERM)

    count = 0


@pytest.mark.whole
@pytest.mark.parametrize("flags", [(), FSDP2], ids=str)
def test_a_signal_at_the_start_stops_after_the_first_step(
        data, tmp_path, flags):
    """Whenever it comes: the other ranks may wait for this one."""
    result = train(
        "lit", tmp_path / "run", "--max-steps", 50, *flags, data=data,
        world_size=2, probes=[SignalAllTheStart()], timeout=120)
    assert len(result.rows) == 1 == result.checkpoint()["step"]
    assert "signals: " in result.out


@pytest.mark.whole
@pytest.mark.parametrize("links", [
    (("fsdp2", 2), ("ddp", 3)),
    (("deepspeed_stage_3", 3), ("deepspeed_stage_1", 2),
     ("deepspeed_stage_2", None))], ids=lambda links: links[0][0])
def test_strategies_go_on_from_others_and_they_from_it(data, tmp_path, links):
    """In mid-epoch, with a validation of each strategy's; of what three does
    not divide, the last shard is filled up."""
    probe, preload = SignalAt, ()
    if "deepspeed" in links[0][0]:
        needs("deepspeed")
        probe, preload = DeepSpeedOnCPU, ["deepspeed"]
    run = tmp_path / "run"
    flags = ("--max-steps", 16, "--minibatch-size", 12, "--microbatch-size", 2,
             "--eval-every", 2, "--eval-minibatches", 1)
    alone = train("std", tmp_path / "alone", *flags, data=data)
    attempt("std", run, *flags, "--checkpoint-every", 3, data=data,
            probes=[DieAfter(3)])
    for strategy, world_size in links:
        result = train(
            "lit", run, "--resume", "--strategy", strategy,
            world_size=world_size, preload=preload,
            probes=[probe(3, signal.SIGUSR1, 0)])
        assert "stopped by SIGUSR1" in result.out
        assert "Warning" not in result.err
    agree(train("ddp", run, "--resume", world_size=2), alone)


class KeptBytes(DeepSpeedOnCPU):
    """Prints what rank 0 keeps between two microbatches: bytes of all tensors
    but DeepSpeed's buffers of one size, for each parameter.
    """

    def __call__(self, log):
        super().__call__(log)
        from backstage.lightning import LitRun

        def measure(run, trainer, module):
            if (run.step, log.rank, run.mean_loss.item()) != (1, 0, 0):
                return
            looks = []
            for _ in range(5):  # gloo's thread may still hold what it sent
                time.sleep(0.1)
                looks.append(self.look(trainer.strategy.whole))
            print("kept", min(looks))

        LitRun.on_after_backward = lambda self, *words: measure(self, *words)

    def look(self, whole):
        def storage(tensor):
            return tensor.untyped_storage()

        own = {storage(w).data_ptr() for w in whole.parameters()}
        found = [o for o in gc.get_objects() if issubclass(
            type(o), torch.Tensor) and o.layout == torch.strided]
        found += [w.grad for w in found if w.is_leaf and w.grad is not None]
        kept = {storage(w).data_ptr(): storage(w).nbytes() for w in found}
        return sum(kept[key] for key in kept.keys() - own
                   if kept[key] != 800_000_000) / sum(
                       w.numel() for w in whole.parameters())


@pytest.mark.whole
def test_what_a_stage_of_zero_keeps(data, tmp_path):
    """In fp32, as the lesson says; bytes for each parameter."""
    needs("deepspeed")
    flags = ("--preset", "nano", "--n-layer", 4, "--n-embd", 192,
             "--precision", "fp32", "--sequence-length", 32,
             "--minibatch-size", 4, "--microbatch-size", 1,
             "--max-steps", 2, "--eval-minibatches", 1)
    alone = train("std", tmp_path / "alone", *flags, data=data)
    for number, kept in ((1, 14.0), (2, 12.1), (3, 10.2)):
        result = train(
            "lit", tmp_path / f"{number}", *flags, "--strategy",
            f"deepspeed_stage_{number}", data=data, world_size=2,
            script=edited(tmp_path, "lit", ("(idx, 32, ", "(idx, 2, ")),
            preload=["deepspeed"], probes=[KeptBytes(0, 0)], texts=True)
        found, = re.findall("kept (.*)", result.out)
        assert round(float(found), 1) == kept
        agree(result, alone)


@pytest.mark.parametrize(("flag", "value", "world_size", "message"), [
    ("--strategy", "fsdp", 1, "'ddp', 'fsdp2'"),
    ("--strategy", "deepspeed_stage_2", 1,
     "NVIDIA GPUs, not on cpu; fix: use --strategy fsdp2"),
    ("--devices", "4", 2, "--devices 4 differs from the number of processes "
     "started per node, 2; fix: set srun's --ntasks-per-node"),
    ("--devices", "-1", 1, "--devices must be 0 or more")])
def test_what_lightning_does_not_train_on(
        flag, value, world_size, message, parsed, monkeypatch):
    # imported late: Lightning takes two seconds of every process
    script = importlib.import_module("train_gpt2_lit")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(UserError, match=re.escape(message)):
        script.lit.get_world(parsed(
            "--preset", "tiny", "--device", "cpu", flag, value,
            script=script))
