"""The Lightning stage: the same training, without what Lightning loses."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from stages import (
    CollectivesSeen,
    DieAfter,
    Result,
    agree,
    run_command,
    same_state,
    start_stage,
    tiny,
    train,
    wait_for_rows,
)

from backstage import ROOT
from backstage.errors import UserError
from backstage.launchers import name_ranks
from workshop.processes import Rank
from workshop.stages import STAGES

LIT = STAGES["lit"].solution
FSDP2 = ("--strategy", "fsdp2")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The stage as one process that nothing disturbs."""
    return train("lit", tmp_path_factory.mktemp("whole") / "run", data=data)


# ------------------------------------------- what it says is what happens


class FlagsKept:
    """Says at the end which of the Trainer's flags have changed."""

    def __call__(self, rank):
        import lightning

        told = {}
        make, fit = lightning.Trainer.__init__, lightning.Trainer.fit

        def noting(trainer, **flags):
            told.update(flags)
            return make(trainer, **flags)

        def checking(trainer, *args):
            fit(trainer, *args)
            kept = {name for name, value in told.items()
                    if getattr(trainer, name, None) == value}
            print(len(told), "flags, kept:", *sorted(kept))

        lightning.Trainer.__init__ = noting
        lightning.Trainer.fit = checking


def test_the_flags_hold_to_the_end(data, tmp_path):
    result = train("lit", tmp_path / "run", data=data, observe=FlagsKept())
    line, = re.findall(r"flags, kept: (.*)", result.out)
    assert set(line.split()) >= {
        "accumulate_grad_batches", "check_val_every_n_epoch",
        "gradient_clip_val", "limit_val_batches", "max_steps", "num_nodes",
        "num_sanity_val_steps", "val_check_interval"}


# ------------------------------------------------------- the same training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_process_is_the_single_device_bit_for_bit(
        data, tmp_path, precision):
    std, lit = (train(stage, tmp_path / stage, "--precision", precision,
                      data=data) for stage in ("std", "lit"))
    assert lit.status == 0, lit.err
    for column in ("loss", "val_loss", "lr", "norm"):
        assert lit.column(column) == std.column(column)
    assert same_state(lit.checkpoint()["model"], std.checkpoint()["model"])


def test_the_checkpoint_is_one_of_the_course(whole, single):
    lit, std = whole.checkpoint(), single.checkpoint()
    assert lit.keys() == std.keys() and lit["stage"] == "lit"
    assert lit["model"].keys() == std["model"].keys()
    assert lit["optimizer"]["state"].keys() == std["optimizer"]["state"].keys()
    for a, b in zip(lit["optimizer"]["param_groups"],
                    std["optimizer"]["param_groups"], strict=True):
        assert a.keys() == b.keys()
    names = sorted(p.name for p in (whole.folder / "checkpoints").iterdir())
    assert names == ["step_00000010.pt", "step_00000020.pt"]
    text = subprocess.run(
        [sys.executable, ROOT / "code" / "generate.py", "--run", whole.folder,
         "--max-new-tokens", "8", "--device", "cpu"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert text.returncode == 0 and "Hello" in text.stdout, text.stderr


def test_init_starts_from_the_weights_of_another_stage(data, tmp_path):
    first = train("ddp", tmp_path / "first", "--max-steps", 5, data=data)
    file = first.folder / "checkpoints" / "step_00000005.pt"
    again = [train(name, tmp_path / name, "--max-steps", 3, "--init", file,
                   data=data) for name in ("std", "lit")]
    assert again[1].column("loss") == again[0].column("loss")
    assert again[1].column("loss")[0] < first.column("loss")[0] - 0.1


def test_no_collective_but_the_reductions(data, tmp_path):
    """Lightning's own broadcast would wait at every microbatch."""
    result = train("lit", tmp_path / "run", data=data, world_size=2,
                   observe=BroadcastsSeen())
    assert result.status == 0, result.err
    seen = [line for line in result.out.splitlines() if "broadcasts" in line]
    assert len(seen) == 2 * 20 and len(set(seen)) == 1


class BroadcastsSeen:
    """Says at each step how many broadcasts there have been."""

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        broadcast, calls = torch.distributed.broadcast, []

        def counted(*args, **options):
            calls.append(1)
            return broadcast(*args, **options)

        torch.distributed.broadcast = counted
        register_optimizer_step_pre_hook(
            lambda *_: print(len(calls), "broadcasts"))


# ------------------------------------------------------- nothing is lost


@pytest.mark.whole
@pytest.mark.parametrize(("first", "then"), [
    (("lit", 2, *FSDP2), ("lit", 4)),  # a resumed run keeps its strategy
    (("lit", 4, *FSDP2), ("std", None)),
    (("std", None), ("lit", 2, *FSDP2)),
], ids=str)
def test_resume_after_an_odd_step(data, single, tmp_path, first, then):
    """In mid-epoch, with another world size and another accumulation."""
    run = tmp_path / "run"
    launch = start_stage(first[0], run, "--checkpoint-every", 7, *first[2:],
                         data=data, world_size=first[1], observe=DieAfter(7))
    assert {rank.status for rank in launch.wait()} == {-signal.SIGKILL}
    result = train(then[0], run, "--resume", *then[2:], world_size=then[1])
    assert "resuming after step 6" in result.out
    agree(result, single)


class SignalAfter:
    """Sends a signal to the first rank, in the step with this number."""

    def __init__(self, step):
        self.step = step

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.count = 0
        if rank == 0:
            register_optimizer_step_pre_hook(self.on_step)

    def on_step(self, *_):
        self.count += 1
        if self.count == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.whole
@pytest.mark.parametrize(("step", "world_size", "flags"), [
    (7, None, ()), (10, None, ()), (20, None, ()),  # it validates after 10
    (10, 2, FSDP2)], ids=str)
def test_stopped_and_resumed_are_the_rows_of_one_run(
        data, single, whole, tmp_path, step, world_size, flags):
    """A stopped run validates at the usual steps, and only there."""
    run = tmp_path / "run"
    result = train("lit", run, *flags, data=data, world_size=world_size,
                   observe=SignalAfter(step))
    assert result.status == 0, result.err
    assert result.column("step") == list(range(step))
    assert result.column("val_loss")[:-1].count(None) == step - 1 - (step > 10)
    assert (result.column("val_loss")[-1] is None) == (step == 7)
    if step < 20:
        result = train("lit", run, "--resume", world_size=world_size)
    agree(result, single)
    if world_size is None:
        for column in ("loss", "val_loss", "lr", "norm"):
            assert result.column(column) == whole.column(column)
        assert same_state(result.checkpoint()["optimizer"],
                          whole.checkpoint()["optimizer"])


@pytest.mark.parametrize(("number", "world_size", "flags", "status"), [
    (signal.SIGUSR1, None, (), 0), (signal.SIGINT, None, (), 130),
    (signal.SIGTERM, 2, FSDP2, 0)])
def test_a_signal_stops_after_the_step(
        data, tmp_path, number, world_size, flags, status):
    run = tmp_path / "run"
    launch = start_stage("lit", run, "--max-steps", 5000, "--eval-every",
                         5000, "--checkpoint-every", 5000, *flags, data=data,
                         world_size=world_size)
    wait_for_rows(run, 5)
    launch.signal(number, rank=world_size and 1)  # the last rank alone
    result = Result(run, launch.wait())
    assert result.status == status, result.err
    assert result.checkpoint()["step"] == len(result.rows) < 5000
    assert "--resume" in result.out and "Traceback" not in result.err
    assert not any(result.column("val_loss"))  # no needless work


def test_as_many_steps_as_the_warm_up(data, tmp_path):
    """Lightning asks the schedule for a step after the last one."""
    std, lit = (train(stage, tmp_path / stage, "--max-steps", 4,
                      "--warmup-steps", 4, data=data)
                for stage in ("std", "lit"))
    assert lit.status == 0, lit.err
    assert lit.column("lr") == std.column("lr")


def test_a_broken_model_is_not_saved(data, tmp_path):
    result = train("lit", tmp_path / "run", "--learning-rate", 1e30,
                   data=data, world_size=2)
    assert result.status == 1
    assert "error: step 1: the loss is" in result.ranks[0].err
    assert not list((result.folder / "checkpoints").iterdir())


# ------------------------------------------------------------- strategies


@pytest.mark.whole
def test_fsdp2_is_the_same_training(data, single, tmp_path):
    result = train("lit", tmp_path / "run", *FSDP2, data=data, world_size=4,
                   observe=ShardsSeen())
    agree(result, single)
    sizes = {line for line in result.out.splitlines() if "elements" in line}
    total = sum(weight.numel() for name, weight in
                single.checkpoint()["model"].items() if "lm_head" not in name)
    assert sizes == {f"{total // 4} elements of {total}"}


class ShardsSeen:
    """Says how many elements of the parameters each rank keeps."""

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self.step)

    def step(self, optimizer, *_):
        weights = [weight for group in optimizer.param_groups
                   for weight in group["params"]]
        print(sum(weight.to_local().numel() for weight in weights),
              "elements of", sum(weight.numel() for weight in weights))


@pytest.mark.whole
@pytest.mark.parametrize("flags", [(), FSDP2], ids=["ddp", "fsdp2"])
def test_what_a_step_sends(data, single, tmp_path, flags):
    """The lesson says it: DDP once a step, fsdp2 at every microbatch."""
    result = train("lit", tmp_path / "run", "--max-steps", 5, *flags,
                   data=data, world_size=2, observe=CollectivesSeen())
    assert result.status == 0, result.err
    weights = single.checkpoint()["model"]
    P = sum(weight.numel() for name, weight in weights.items()
            if name != "lm_head.weight")  # is tied
    P_b = sum(weight.numel() for name, weight in weights.items()
              if ".h." in name)
    A, L, n = 2, 4, 2  # microbatches of a rank, blocks, ranks
    sends = {"allreduce 2": 4 * P + 8} if not flags else {
        f"allgather_base {A * (2 * L + 1)}": 4 * A * (P_b + P) // n,
        f"reduce_scatter_base {A * (L + 1)}": 4 * A * P,
        "allreduce 1": 8,  # the loss, and whether to stop
        "all_reduce 1": 4 * (12 * L + 4)}  # the norm of each parameter
    expected = "; ".join(
        ["sent:", *sorted(f"{name} {size}" for name, size in sends.items())])
    for rank in result.ranks:
        lines = [line for line in rank.out.splitlines() if "sent:" in line]
        assert lines[2:] == [expected] * 3  # DDP makes new buckets first


@pytest.mark.parametrize(("flags", "world_size", "message"), [
    (("--strategy", "fsdp"), None, "'ddp', 'fsdp2'"),
    (("--devices", "4"), 2, "--devices 4, but 2 process(es) were started on "
     "a node: make srun's --ntasks-per-node"),
    (("--devices", "-1"), None, "--devices must be 0 or more"),
])
def test_errors_are_one_line(data, tmp_path, flags, world_size, message):
    result = train("lit", tmp_path / "run", *flags, data=data,
                   world_size=world_size, timeout=30)
    assert result.status == 1
    lines = result.ranks[0].err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0]
    assert not result.folder.exists()


# -------------------------------------------------------------- launchers


SLURM_SHELL = {  # what SLURM sets in the shell of a job
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NNODES": "2", "SLURM_NODELIST": "node[1-2]"}


@pytest.mark.parametrize(("tasks", "nodes", "node"), [
    ("4(x2)", "gpu[03-04,07]", "gpu03"), ("4", "gpu3", "gpu3"),
    ("2(x2)", "a1,b[1-2]", "a1"), ("4(x2)", "n-[7,9]-gpu", "n-7-gpu")])
def test_names_of_a_step(tasks, nodes, node):
    env = {**SLURM_SHELL, "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
           "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8",
           "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NODELIST": nodes}
    named = dict(env)
    name_ranks(named)
    assert [named[name] for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR")] == ["5", "1", "8", tasks[0], node]
    with pytest.raises(UserError, match="as many on each"):
        name_ranks({**env, "SLURM_STEP_TASKS_PER_NODE": "4,3"})
    by_torchrun = {**env, "RANK": "2"}
    name_ranks(by_torchrun)
    assert by_torchrun == {**env, "RANK": "2"}


@pytest.mark.whole
def test_torchrun(data, single, tmp_path):
    done = run_command(
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", 2, "--", LIT, *tiny(tmp_path / "run", data))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: ") == 1
    agree(Result(tmp_path / "run", [Rank(0, done.stdout, done.stderr)]),
          single)


@pytest.mark.whole
@pytest.mark.parametrize("flags", [(), FSDP2])
def test_python_starts_several_devices(data, single, tmp_path, flags):
    """Lightning starts the other processes itself."""
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, LIT, "--preset", "tiny", "--device", "cpu", "--data",
         data, "--run", run, "--devices", "2", *flags],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("preset tiny") == 1
    assert done.stdout.count("| step   19/20") == 1
    agree(Result(run, [Rank(0, done.stdout, done.stderr)]), single)
