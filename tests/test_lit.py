"""The Lightning stage: the same training, without what Lightning loses."""

import gc
import os
import re
import signal
import sys

import pytest
import torch
from conftest import needs
from stages import (
    GOLDEN,
    DieAfter,
    Result,
    SignalAt,
    agree,
    refused,
    run_command,
    same_state,
    start_stage,
    tiny,
    train,
    wait_for_rows,
)

from workshop.processes import Rank
from workshop.stages import STAGES

FSDP2 = ("--strategy", "fsdp2")


def test_one_process_is_the_single_device_bit_for_bit(data, tmp_path):
    std, lit = (train(stage, tmp_path / stage, "--precision", "bf16",
                      data=data) for stage in ("std", "lit"))
    assert lit.status == 0, lit.err
    for column in ("loss", "val_loss", "lr", "norm"):
        assert lit.column(column) == std.column(column)
    assert same_state(lit.checkpoint()["model"], std.checkpoint()["model"])


@pytest.mark.whole
def test_sharded_it_goes_on_from_others_and_they_from_it(
        data, single, tmp_path):
    """In mid-epoch, with another world size and another accumulation."""
    run, flags = tmp_path / "run", ("--checkpoint-every", 3)
    for stage, world_size, *strategy in (
            ("std", None), ("lit", 2, *FSDP2), ("lit", 4)):
        result = start_stage(  # a resumed run keeps its strategy
            stage, run, *flags, *strategy, data=data, world_size=world_size,
            probes=[DieAfter(3)]).result(run)
        assert result.status == -signal.SIGKILL, result.err
        flags, data = ("--resume",), None
    result = train("std", run, "--resume")
    assert "resuming after step 8" in result.out
    agree(result, single)


@pytest.mark.whole
@pytest.mark.parametrize(("step", "world_size", "flags"), [
    (7, None, ()), (20, None, ()), (10, 2, FSDP2)], ids=str)
def test_stopped_and_resumed_are_the_rows_of_one_run(
        data, single, tmp_path, step, world_size, flags):
    """A stopped run validates at the usual steps, and only there."""
    run = tmp_path / "run"
    result = train("lit", run, *flags, data=data, world_size=world_size,
                   probes=[SignalAt(step, signal.SIGUSR1, 0)])
    assert result.status == 0, result.err
    assert result.column("step") == list(range(step))
    validated = [row["step"] for row in result.rows if row["val_loss"]]
    assert validated == [last for last in (9, 19) if last < step]
    if step < 20:
        result = train("lit", run, "--resume", world_size=world_size)
    agree(result, single)
    if world_size is None:
        whole = train("lit", tmp_path / "whole", data=data)
        for column in ("loss", "val_loss", "lr", "norm"):
            assert result.column(column) == whole.column(column)
        assert same_state(result.checkpoint()["optimizer"],
                          whole.checkpoint()["optimizer"])


@pytest.mark.parametrize(("number", "world_size", "flags", "status"), [
    (signal.SIGINT, None, (), 130), (signal.SIGTERM, 2, FSDP2, 0)])
def test_a_signal_stops_after_the_step(
        data, tmp_path, number, world_size, flags, status):
    run = tmp_path / "run"
    launch = start_stage("lit", run, "--max-steps", 5000, "--eval-every",
                         5000, "--checkpoint-every", 5000, *flags, data=data,
                         world_size=world_size)
    wait_for_rows(run, 5)
    launch.signal(number, rank=world_size and 1)  # the last rank alone
    result = launch.result(run)
    assert result.status == status, result.err
    assert result.checkpoint()["step"] == len(result.rows) < 5000
    assert "--resume" in result.out and "Traceback" not in result.err
    assert not any(result.column("val_loss"))  # no needless work


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
    result = start_stage(
        "lit", tmp_path / "run", "--max-steps", 50, *flags, data=data,
        world_size=2, probes=[SignalAllTheStart()]).result(
            tmp_path / "run", 120)
    assert result.status == 0, result.err
    assert len(result.rows) == 1 == result.checkpoint()["step"]
    assert "signals: " in result.out


class DeepSpeedOnCPU(SignalAt):
    """Lets Lightning run DeepSpeed on a CPU, where the sums are the same.

    It sends a signal, too. (DeepSpeed makes an update in several calls.)
    """

    def __call__(self, log):
        super().__call__(log)
        import deepspeed
        from lightning.pytorch.accelerators import CPUAccelerator
        from lightning.pytorch.strategies import deepspeed as strategy

        from backstage import zero

        zero.DEVICES.add("cpu")
        strategy.CUDAAccelerator = CPUAccelerator
        strategy._validate_device_index_selection = lambda devices: None
        initialize = deepspeed.initialize  # args: a GPU's number
        deepspeed.initialize = lambda args, **more: initialize(**more)


@pytest.mark.whole
@pytest.mark.parametrize("number", [1, 2, 3])
def test_deepspeed_goes_on_from_others_and_they_from_it(
        data, single, tmp_path, number):
    needs("deepspeed")
    run = tmp_path / "run"
    flags = ("--strategy", f"deepspeed_stage_{number}")
    start_stage("std", run, "--checkpoint-every", 3, data=data,
                probes=[DieAfter(3)]).result(run)
    for world_size, calls in ((2, 7), (1, 5)):
        result = train("lit", run, "--resume", *flags, world_size=world_size,
                       probes=[DeepSpeedOnCPU(calls, signal.SIGUSR1, 0)])
        assert result.status == 0, result.err
        assert "stopped by SIGUSR1" in result.out
    agree(train("ddp", run, "--resume", world_size=2), single)
    whole = train("lit", tmp_path / "whole", *flags, data=data, world_size=4,
                  probes=[DeepSpeedOnCPU(0, 0)])
    agree(whole, single)
    assert "Warning" not in whole.err


@pytest.mark.whole
def test_three_processes_share_what_three_does_not_divide(data, tmp_path):
    """The last shard of a tensor is filled up."""
    needs("deepspeed")
    flags = ("--max-steps", 6, "--minibatch-size", 12, "--microbatch-size", 1,
             "--eval-minibatches", 1)
    alone = train("std", tmp_path / "alone", *flags, data=data)
    run = tmp_path / "run"
    start_stage("std", run, *flags, "--checkpoint-every", 3, data=data,
                probes=[DieAfter(3)]).result(run)
    agree(train("lit", run, "--resume", "--strategy", "deepspeed_stage_3",
                world_size=3, probes=[DeepSpeedOnCPU(0, 0)]), alone)


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
            zero, size = trainer.strategy, lambda w: w.untyped_storage()
            own = {size(w).data_ptr() for w in zero.whole.parameters()}
            found = [o for o in gc.get_objects() if issubclass(
                type(o), torch.Tensor) and o.layout == torch.strided]
            found += [w.grad for w in found
                      if w.is_leaf and w.grad is not None]
            kept = {size(w).data_ptr(): size(w).nbytes() for w in found}
            print("kept", sum(
                kept[key] for key in kept.keys() - own
                if kept[key] != 800_000_000) / sum(
                    w.numel() for w in zero.whole.parameters()))

        LitRun.on_after_backward = lambda self, *words: measure(self, *words)


@pytest.mark.whole
@pytest.mark.parametrize(("number", "kept"), [(1, 14.0), (2, 12.1), (3, 10.2)])
def test_what_a_stage_of_zero_keeps(tmp_path, number, kept):
    """In fp32, as the lesson says; bytes for each parameter."""
    needs("deepspeed")
    result = train(
        "lit", tmp_path / "run", "--preset", "nano", "--precision", "fp32",
        "--sequence-length", 32, "--minibatch-size", 4, "--microbatch-size", 1,
        "--max-steps", 2, "--strategy", f"deepspeed_stage_{number}",
        data=GOLDEN, world_size=2, probes=[KeptBytes(0, 0)])
    found, = re.findall("kept (.*)", result.out)
    assert round(float(found), 1) == kept


def test_as_many_steps_as_the_warm_up(data, tmp_path):
    """Lightning asks the schedule for a step after the last one."""
    std, lit = (train(stage, tmp_path / stage, "--max-steps", 4,
                      "--warmup-steps", 4, data=data)
                for stage in ("std", "lit"))
    assert lit.status == 0, lit.err
    assert lit.column("lr") == std.column("lr")


@pytest.mark.parametrize(("flags", "world_size", "message"), [
    (("--strategy", "fsdp"), None, "'ddp', 'fsdp2'"),
    (("--strategy", "deepspeed_stage_2"), None,
     "NVIDIA GPUs, not on cpu: use --strategy fsdp2"),
    (("--devices", "4"), 2, "--devices 4, but 2 process(es) were started on "
     "a node: make srun's --ntasks-per-node"),
    (("--devices", "-1"), None, "--devices must be 0 or more"),
])
def test_errors_are_one_line(data, tmp_path, flags, world_size, message):
    result = train("lit", tmp_path / "run", *flags, data=data,
                   world_size=world_size)
    refused(result, message)
    assert not result.folder.exists()


@pytest.mark.whole
@pytest.mark.parametrize("flags", [(), FSDP2], ids=str)
def test_python_starts_several_devices(data, single, tmp_path, flags):
    """Lightning starts the other processes itself."""
    run = tmp_path / "run"
    done = run_command(sys.executable, STAGES["lit"].solution, *tiny(
        run, data, "--devices", 2, *flags))
    assert done.stdout.count("preset tiny, data ") == 1
    assert done.stdout.count("| step   19/20") == 1
    agree(Result(run, [Rank(done.returncode, done.stdout, done.stderr)]),
          single)
