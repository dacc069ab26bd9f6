"""The Lightning stage: the same training, and nothing that Lightning loses."""

import difflib
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import needs
from stages import (
    Result,
    make_dataset,
    same_state,
    start_stage,
    train,
)
from test_ddp import DieAfter, agree, code_lines, run_command, tiny

from workshop import ROOT
from workshop.check import Observer
from workshop.errors import UserError
from workshop.launchers import name_ranks
from workshop.ranks import Rank, free_port

LIT = ROOT / "solutions" / "train_gpt2_lit.py"
FSDP2 = ("--strategy", "fsdp2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def single(data, tmp_path_factory):
    """The single-device run that all others are compared with."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "seen").mkdir()
    return train("std", folder / "run", data=data,
                 observe=Observer(folder / "seen", folder / "run"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The stage as one process, undisturbed."""
    return train("lit", tmp_path_factory.mktemp("whole") / "run", data=data)


# ------------------------------------------------------- the same training


def test_a_readable_change_of_the_ddp_stage():
    ddp, lit = (
        code_lines((ROOT / "solutions" / f"train_gpt2_{stage}.py").read_text())
        for stage in ("ddp", "lit"))
    changed = [line for line in difflib.unified_diff(
        ddp, lit, n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 110
    assert len(lit) < len(ddp)


@pytest.mark.parametrize(("world_size", "B"), [
    (None, 2), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_the_same_training(data, single, tmp_path, world_size, B):
    seen = tmp_path / "seen"
    seen.mkdir()
    result = train("lit", tmp_path / "run", "--microbatch-size", B, data=data,
                   world_size=world_size,
                   observe=Observer(seen, tmp_path / "run"))
    agree(result, single)
    ranks = [torch.load(file) for file in sorted(seen.glob("*.pt"))]
    assert len(ranks) == (world_size or 1)
    alone = torch.load(single.folder.parent / "seen" / "0.pt")
    for step in range(20):
        read = [i for rank in ranks for i in rank["samples"][step]]
        assert sorted(read) == sorted(alone["samples"][step])
    for rank in ranks[1:]:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
    lines = [line for line in result.out.splitlines() if "| step" in line]
    assert len(lines) == 20
    texts = result.out.count("> Hello, I'm a language model,")
    assert texts == 4 * (world_size or 1)


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
    names = sorted(p.name for p in (whole.folder / "checkpoints").iterdir())
    assert names == ["step_00000010.pt", "step_00000020.pt"]
    text = subprocess.run(
        [sys.executable, ROOT / "code" / "generate.py", "--run", whole.folder,
         "--max-new-tokens", "8", "--device", "cpu"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert text.returncode == 0 and "Hello" in text.stdout, text.stderr


@pytest.mark.parametrize("stage", ["std", "ddp"])
def test_init_starts_from_the_weights_of_another_stage(
        data, tmp_path, stage):
    first = train(stage, tmp_path / "first", "--max-steps", 5, data=data)
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
    """Says at each step how many broadcasts there were so far."""

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


@pytest.mark.parametrize(("first", "then"), [
    (("lit", None), ("lit", None)),
    (("lit", 2), ("lit", 4)),
    (("lit", 4), ("lit", None)),
    (("lit", 2), ("ddp", 2)),
    (("ddp", 2), ("lit", 2)),
    (("lit", 2, *FSDP2), ("lit", 4)),  # a resumed run keeps its strategy
    (("lit", 4, *FSDP2), ("lit", 2, "--strategy", "ddp")),
    (("lit", 2), ("lit", 2, *FSDP2)),
    (("std", None), ("lit", 2, *FSDP2)),
], ids=str)
def test_resume_after_an_odd_step(data, single, whole, tmp_path, first, then):
    """In mid-epoch, in another world, with another accumulation."""
    run = tmp_path / "run"
    launch = start_stage(first[0], run, "--checkpoint-every", 7, *first[2:],
                         data=data, world_size=first[1], observe=DieAfter(7))
    assert {rank.status for rank in launch.wait()} == {-signal.SIGKILL}
    result = train(then[0], run, "--resume", *then[2:], world_size=then[1])
    assert "resuming after step 6" in result.out
    agree(result, single)
    if first == then:
        assert same_state(result.checkpoint()["model"],
                          whole.checkpoint()["model"])


def test_killed_at_random_moments(data, tmp_path):
    """kill -9, many times: the same rows and weights, bit for bit."""
    flags = ("--max-steps", 150, "--checkpoint-every", 7, "--eval-every", 9,
             "--generate-every", 150)
    whole = train("lit", tmp_path / "whole", *flags, data=data)
    run, rng, kills = tmp_path / "run", random.Random(0), 0
    for _ in range(60):
        launch = start_stage("lit", run, *flags, "--resume", "--preset",
                             "tiny", "--device", "cpu", data=data)
        if kills < 5:
            time.sleep(rng.uniform(0.2, 1.0))
            launch.signal(signal.SIGKILL)
        status = launch.wait()[0].status
        kills += status == -signal.SIGKILL
        if status == 0:
            break
    assert status == 0 and kills > 0
    result = Result(run, [])
    for column in ("step", "loss", "val_loss", "lr", "norm"):
        assert result.column(column) == whole.column(column)
    for part in ("model", "optimizer"):
        assert same_state(result.checkpoint()[part], whole.checkpoint()[part])


def wait_for_rows(run, number):
    metrics = run / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") <= number:
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "world_size", "flags", "status"), [
    (signal.SIGUSR1, None, (), 0), (signal.SIGINT, None, (), 130),
    (signal.SIGUSR1, 2, (), 0), (signal.SIGTERM, 2, FSDP2, 0)])
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
    assert not any(result.column("val_loss"))  # no more work than needed


def test_a_killed_rank_ends_the_others(data, tmp_path):
    run = tmp_path / "run"
    launch = start_stage("lit", run, "--max-steps", 5000, data=data,
                         world_size=2)
    wait_for_rows(run, 5)
    launch.signal(signal.SIGKILL, 1)
    ranks = launch.wait(60)
    assert [rank.status for rank in ranks] == [1, -signal.SIGKILL]
    lines = ranks[0].err.splitlines()
    assert sum(line.startswith("error: lost the") for line in lines) == 1
    assert "Traceback" not in ranks[0].err


def test_a_broken_model_is_not_saved(data, tmp_path):
    result = train("lit", tmp_path / "run", "--learning-rate", 1e30,
                   data=data, world_size=2)
    assert result.status == 1
    assert "error: step 1: the loss is" in result.ranks[0].err
    assert not list((result.folder / "checkpoints").iterdir())


# ------------------------------------------------------------- strategies


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp2_is_the_same_training(data, single, tmp_path, world_size):
    result = train("lit", tmp_path / "run", *FSDP2, data=data,
                   world_size=world_size, observe=ShardsSeen())
    agree(result, single)
    sizes = {line for line in result.out.splitlines() if "elements" in line}
    total = sum(weight.numel() for name, weight in
                single.checkpoint()["model"].items() if "lm_head" not in name)
    assert sizes == {f"{total // world_size} elements of {total}"}


class ShardsSeen:
    """Says how many elements of the model's parameters a rank keeps."""

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self.step)

    def step(self, optimizer, *_):
        weights = [weight for group in optimizer.param_groups
                   for weight in group["params"]]
        print(sum(weight.to_local().numel() for weight in weights),
              "elements of", sum(weight.numel() for weight in weights))


@pytest.mark.parametrize(("flags", "world_size", "message"), [
    (("--strategy", "fsdp"), None, "--strategy fsdp needs a GPU: on a CPU, "
     "--strategy fsdp2"),
    (("--strategy", "deepspeed_stage_2"), 2, "needs a GPU"),
    (("--strategy", "zero"), None, "choose from ddp, fsdp2,"),
    (("--devices", "4"), 2, "--devices 4, but 2 process(es) were started on "
     "a node: make srun's --ntasks-per-node"),
    (("--devices", "-1"), None, "--devices must be 1 or more"),
    (("--microbatch-size", "3"), 2, "does not divide into microbatches"),
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


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_python_in_a_slurm_shell_is_one_process(data, tmp_path, tasks):
    """A portal's JupyterLab runs inside an allocation."""
    env = {**os.environ, **SLURM_SHELL, "SLURM_NTASKS": tasks}
    result = train("lit", tmp_path / "run", "--max-steps", 2, data=data,
                   env=env, timeout=60)
    assert result.status == 0 and len(result.rows) == 2, result.err


def test_srun_starts_one_task_a_device(data, single, tmp_path):
    """Two processes with the variables of a step, and no others."""
    run, port = tmp_path / "run", str(free_port())
    launches = [start_stage("lit", run, data=data, env={
        **os.environ, **SLURM_SHELL, "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank, "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port,
    }) for rank in ("0", "1")]
    ranks = [rank for launch in launches for rank in launch.wait()]
    agree(Result(run, ranks), single)


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


@pytest.mark.parametrize("launcher", [
    (sys.executable, "-m", "torch.distributed.run", "--standalone",
     "--nproc-per-node", 2, "--", LIT),
    ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2,
     sys.executable, "-m", "workshop.mpi", LIT)], ids=["torchrun", "mpirun"])
def test_launchers_of_the_ddp_stage(data, single, tmp_path, launcher):
    needs(launcher[0])
    done = run_command(*launcher, *tiny(tmp_path / "run", data))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| step   19/20") == 1
    agree(Result(tmp_path / "run", [Rank(0, done.stdout, done.stderr)]),
          single)


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
