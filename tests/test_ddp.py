"""The DDP stage: the same training on any number of processes."""

import difflib
import os
import re
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
    start_stage,
    train,
    weight_distance,
)

from workshop import ROOT
from workshop.check import Observer
from workshop.errors import UserError
from workshop.mpi import map_variables
from workshop.ranks import free_port

DDP = ROOT / "solutions" / "train_gpt2_ddp.py"
LEARNING_RATE = 3e-3  # of preset tiny


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


def agree(result, single):
    """Contract 1: losses, norms, learning rates and final weights."""
    assert result.status == 0, result.err
    assert result.column("step") == single.column("step")
    for column, tolerance in (("loss", 1e-5), ("lr", 1e-9), ("norm", 1e-4)):
        assert result.column(column) == pytest.approx(
            single.column(column), rel=tolerance)
    for a, b in zip(result.column("val_loss"), single.column("val_loss"),
                    strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, rel=1e-5)
    distance = weight_distance(result.checkpoint()["model"],
                               single.checkpoint()["model"])
    assert distance <= 0.02 * LEARNING_RATE


def code_lines(text):
    """Lines but for comments and blank ones."""
    return [line for line in text.splitlines()
            if line.strip() and not line.strip().startswith("#")]


def test_a_small_change_of_the_single_device_stage():
    std = (ROOT / "solutions" / "train_gpt2_std.py").read_text()
    changed = [line for line in difflib.unified_diff(
        code_lines(std), code_lines(DDP.read_text()), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 50


@pytest.mark.parametrize("B", [1, 2, 4])
@pytest.mark.parametrize("world_size", [None, 1, 2, 4])
def test_the_same_training(data, single, tmp_path, world_size, B):
    flags = ("--microbatch-size", B)
    if B * (world_size or 1) > 8:
        result = train("ddp", tmp_path / "run", *flags, data=data,
                       world_size=world_size)
        assert all(rank.status not in (0, None) for rank in result.ranks)
        assert "does not divide into microbatches of 4 on 4" in result.err
        return
    seen = tmp_path / "seen"
    seen.mkdir()
    result = train("ddp", tmp_path / "run", *flags, data=data,
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
    texts = result.out.count("> Hello, I'm a language model,")
    assert texts == 4 * (world_size or 1)


@pytest.mark.parametrize(("first", "then"), [
    (("ddp", 2), ("ddp", 4)), (("ddp", 2), ("ddp", 1)),
    (("ddp", 2), ("std", None)), (("std", None), ("ddp", 2))])
def test_resume_in_another_world(data, single, tmp_path, first, then):
    run = tmp_path / "run"
    launch = start_stage(first[0], run, "--checkpoint-every", 7, data=data,
                         world_size=first[1], observe=DieAfter(7))
    launch.wait()
    result = train(then[0], run, "--resume", world_size=then[1])
    assert "resuming after step 6" in result.out
    agree(result, single)


class DieAfter:
    """Kills every process when so many steps are done and saved."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.count = 0
        register_optimizer_step_pre_hook(self.step)

    def step(self, *_):
        self.count += 1
        if self.count == self.steps + 2:  # then the last one is saved
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all(data, single, tmp_path, rank):
    run = tmp_path / "run"
    launch = start_stage("ddp", run, "--max-steps", 5000, "--eval-every",
                         5000, "--checkpoint-every", 5000, data=data,
                         world_size=2)
    metrics = run / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        time.sleep(0.01)
    launch.signal(signal.SIGUSR1, rank)
    result = Result(run, launch.wait())
    assert result.status == 0, result.err
    assert result.checkpoint()["step"] == len(result.rows)
    assert "stopped" in result.out


def test_a_killed_rank_ends_the_others(data, tmp_path):
    """Without a launcher to end them: from the broken connection."""
    run = tmp_path / "run"
    launch = start_stage("ddp", run, "--max-steps", 5000, data=data,
                         world_size=4)
    metrics = run / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        time.sleep(0.01)
    launch.signal(signal.SIGKILL, 2)
    ranks = launch.wait(60)
    assert [rank.status for rank in ranks] == [1, 1, -9, 1]
    lines = ranks[0].err.splitlines()
    ours = [line for line in lines if line.startswith("error: lost the")]
    assert len(ours) == 1 and "Traceback" not in ranks[0].err


def test_python_in_a_slurm_shell_is_one_process(data, tmp_path):
    """A portal's JupyterLab runs inside an allocation."""
    env = {**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "8",
           "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2",
           "SLURM_JOB_NODELIST": "node[1-2]"}
    result = train("ddp", tmp_path / "run", "--max-steps", 2, data=data,
                   env=env, timeout=60)
    assert result.status == 0 and len(result.rows) == 2


# ----------------------------------------------------------- real launchers


def run_command(*command, timeout=180):
    """Run a launcher; whatever it started has ended when this returns."""
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # as activate.sh
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def tiny(run, data, *flags):
    return ("--preset", "tiny", "--device", "cpu", "--data", data, "--run",
            run, *flags)


def test_torchrun(data, single, tmp_path):
    """The README's line; a rank is killed, torchrun starts all again."""
    activate = (ROOT / "activate.sh").read_text()
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in activate
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run = tmp_path / "run"
    script = tmp_path / "train_gpt2.py"
    kill = ("        norm = nn.utils",
            "        if step == 12 and rank == 1 and first_step == 0:\n"
            "            os.kill(os.getpid(), 9)\n        norm = nn.utils")
    text = DDP.read_text()
    assert text.count(kill[0]) == 1
    script.write_text(text.replace(*kill))
    done = run_command(
        *torchrun, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1,
        "--", script, *tiny(run, data, "--resume", "--checkpoint-every", 5))
    result = Result(run, [])
    assert done.returncode == 0, done.stderr
    assert "resuming after step 9" in done.stdout
    assert result.column("loss") == pytest.approx(
        single.column("loss"), rel=1e-5)
    assert result.column("step") == list(range(20))


def test_torchrun_says_an_error_once(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = run_command(
        *torchrun, "--nnodes", 1, "--nproc-per-node", 2, "--rdzv-backend",
        "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", DDP,
        *tiny(tmp_path / "run", data, "--microbatch-size", 3))
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines()
            if line.startswith("error")]
    assert len(ours) == 1 and "2 process(es)" in ours[0]


def test_mpirun(data, single, tmp_path):
    needs("mpirun")
    run = tmp_path / "run"
    done = run_command(
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2,
        sys.executable, "-m", "workshop.mpi", DDP, *tiny(run, data))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step   19/20") == 1
    assert Result(run, []).column("loss") == pytest.approx(
        single.column("loss"), rel=1e-5)


def test_names_of_mpich_and_intel_mpi():
    env = {"PMI_RANK": "5", "PMI_SIZE": "8",
           "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    map_variables(env)
    assert [env[name] for name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR")] == ["5", "8", "1", "4", "127.0.0.1"]
    with pytest.raises(UserError, match="no rank from MPI"):
        map_variables({"PMI_RANK": "0"})


@pytest.mark.parametrize("stage", ["ddp", "lit"])
def test_compiled(data, single, tmp_path, stage):
    """torch.compile around DDP, two processes; the raw model is saved."""
    needs("g++")
    result = train(stage, tmp_path / "run", "--compile", data=data,
                   world_size=2, timeout=290)
    assert result.status == 0, result.err
    assert "does not work here" not in result.err
    assert result.column("loss") == pytest.approx(
        single.column("loss"), rel=1e-4)
    assert result.checkpoint()["model"].keys() == (
        single.checkpoint()["model"].keys())


def test_without_a_compiler_it_goes_on(tmp_path):
    program = ("import torch; from workshop.run import compile_model; "
               "m = torch.nn.Linear(1, 1); "
               "print(compile_model(m, torch.device('cpu')) is m)")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT),
                          "CXX": "/no/such/compiler",
                          "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert done.stdout == "True\n"
    assert len(re.findall("^warning: torch.compile does not work here",
                          done.stderr, re.MULTILINE)) == 1
