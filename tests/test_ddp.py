"""The DDP stage: the same training on any number of processes."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import needs
from stages import (
    Result,
    agree,
    agree_compiled,
    run_command,
    tiny,
    train,
)

from backstage import ROOT
from workshop.processes import free_port
from workshop.stages import STAGES

DDP = STAGES["ddp"].solution


@pytest.mark.parametrize(("world_size", "B"), [(2, 4), (4, 1), (4, 4)])
def test_any_microbatch_is_the_same_training(
        data, single, tmp_path, world_size, B):
    result = train("ddp", tmp_path / "run", "--microbatch-size", B, data=data,
                   world_size=world_size)
    if B * world_size > 8:
        assert result.status == 1
        assert "8 samples is not divisible by 16" in result.err
        assert "every rank has microbatches of 4" in result.err
    else:
        agree(result, single)


@pytest.mark.whole
def test_resumed_on_four_ranks(data, tmp_path):
    """The step is the same bit for bit; later ones differ by rounding.

    DDP arranges its buckets after the first step that it sees, and gloo adds
    up the parts of a bucket in an order that depends on their place in it.
    """
    flags = ("--microbatch-size", 2, "--checkpoint-every", 6)
    runs = [tmp_path / "whole", tmp_path / "resumed"]
    whole = train("ddp", runs[0], *flags, "--max-steps", 12, data=data,
                  world_size=4)
    shutil.copytree(runs[0], runs[1])
    (runs[1] / "checkpoints" / "step_00000012.pt").unlink()
    resumed = train("ddp", runs[1], *flags, "--max-steps", 12, "--resume",
                    data=data, world_size=4)
    assert "resuming after step 5" in resumed.out
    losses, again = whole.column("loss"), resumed.column("loss")
    assert again[:7] == losses[:7]
    assert again == pytest.approx(losses, rel=1e-6)


# ----------------------------------------------------------- real launchers


@pytest.mark.whole
def test_torchrun(data, single, tmp_path):
    """The README's command; a rank is killed, torchrun restarts all ranks."""
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


@pytest.mark.whole
def test_torchrun_says_an_error_once(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = run_command(
        *torchrun, "--nnodes", 1, "--nproc-per-node", 2, "--rdzv-backend",
        "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", DDP,
        *tiny(tmp_path / "run", data, "--microbatch-size", 3))
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines()
            if line.startswith("error")]
    assert len(ours) == 1 and "not divisible by 6" in ours[0]


@pytest.mark.whole
def test_mpirun(data, single, tmp_path):
    needs("mpirun")
    run = tmp_path / "run"
    done = run_command(
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2,
        sys.executable, "-m", "workshop.as_torchrun", DDP, *tiny(run, data))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: ") == 1
    assert Result(run, []).column("loss") == pytest.approx(
        single.column("loss"), rel=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize("stage", ["ddp", "lit"])
def test_compiled(data, tmp_path, stage):
    """torch.compile inside DDP, two processes; the raw model is saved."""
    agree_compiled(stage, 1, tmp_path, data, world_size=2)


@pytest.mark.whole
def test_without_a_compiler_it_goes_on(tmp_path):
    program = ("import torch; from backstage.device import compile_model; "
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
