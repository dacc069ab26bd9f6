"""The starter: one file to begin one's own training with.

test_contract.py resumes it, stops it by a signal and kills one of its ranks.
test_std.py and test_kept.py ask what of a run it leaves as it is.
"""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from conftest import edit, program
from stages import (
    STARTER,
    DieAfter,
    agree,
    attempt,
    edited,
    same_state,
    start_stage,
    train,
    wait_for_rows,
)

from rankcheck.engine.ranks import free_port

STEPS = "--max-steps", 50, "--eval-every", 20


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train("starter", tmp_path_factory.mktemp("alone") / "run", *STEPS)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """The starter with FSDP, as its README says."""
    text = STARTER.read_text()
    lines = []
    for line in text.splitlines(keepends=True):
        if "# FSDP: " in line:
            if "norm" not in line:
                lines.pop()
            line = line.replace("# FSDP: ", "")
        lines.append(line)
    changed = edit("".join(lines), (
        "from torch import nn\n", "from torch import nn\n"
        "from torch.distributed.fsdp import fully_shard\n"))
    assert changed.count("fully_shard") == 2 and "no_sync" in changed
    script = program(tmp_path_factory.mktemp("fsdp") / "train.py", changed)
    return script


def test_it_needs_nothing_but_pytorch():
    assert {*re.findall(r"^ *(?:import|from) (\w+)", STARTER.read_text(),
                        re.M)} <= {"torch", *sys.stdlib_module_names}


def test_the_same_training(alone, tmp_path):
    result = train("starter", tmp_path / "run", *STEPS, mesh=(1, 3, 1))
    agree(result, alone)
    assert result.column("loss")[-1] < 0.8 * result.column("loss")[0]
    assert len(re.findall(r"^\| step", result.out, re.M)) == 50
    assert (tmp_path / "run" / "finished").exists()


@pytest.mark.whole
def test_with_fsdp(fsdp, alone, tmp_path):
    """Also from a checkpoint of DDP, on another number of processes."""
    run = tmp_path / "run"
    start_stage("starter", run, *STEPS, "--checkpoint-every", 15,
                mesh=(1, 3, 1), probes=[DieAfter(30)]).wait()
    result = train("starter", run, *STEPS, "--resume", mesh=(1, 2, 1),
                   script=fsdp)
    agree(result, alone)
    assert "| step   30/" in result.out and "| step   29/" not in result.out


@pytest.mark.whole
def test_a_signal_to_its_workers_too_saves(tmp_path):
    """SLURM sends it to all processes of a job. The last words are seen."""
    run, script = tmp_path / "run", edited(tmp_path, "starter", (
        "    dist.barrier()  # who", "    print('the last words')\n"
        "    dist.barrier()  # who"))
    process = subprocess.Popen(
        [sys.executable, script, "--run-dir", run, "--fp32", "--workers", "2",
         "--max-steps", "100000"], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items()
             if name != "PYTHONUNBUFFERED"})
    wait_for_rows(run, 3)
    os.killpg(process.pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "stopped by a signal" in out and any(run.glob("checkpoints/*.pt"))
    assert out.endswith("the last words\n")


@pytest.mark.whole
def test_a_mistake_ends_it_despite_its_workers(tmp_path):
    """They ignore the SIGTERM by which Python ends them before it waits."""
    script = edited(tmp_path, "starter", (
        "        return self.points[i],", "        if i == 77:\n"
        "            raise OSError(f'no sample {i}')\n"
        "        return self.points[i],"))
    result = attempt("starter", tmp_path / "run", "--workers", 2,
                     script=script, timeout=60)
    assert result.status == 1 and "OSError: no sample 77" in result.err


@pytest.mark.parametrize("changes", [
    # what is random in a step depends on nothing but the step and rank
    pytest.param([("nn.Dropout(0.0)", "nn.Dropout(0.3)"),
                  ('"workers": 0', '"workers": 2')], marks=pytest.mark.whole),
    [("AdamW(model.parameters(), weight_decay", "SGD(model.parameters(), lr")],
    [("        self.layers =",
      "        self.unused = nn.Linear(2, 2)\n        self.layers ="),
     ("Parallel(model)", "Parallel(\n        model, "
      "find_unused_parameters=True)")],
], ids=["dropout", "plain SGD", "a parameter without a gradient"])
def test_a_changed_script_is_resumed_exactly(changes, tmp_path):
    """Also what has no state in its optimizer."""
    script = edited(tmp_path, "starter", *changes)
    whole = train("starter", tmp_path / "whole", "--max-steps", 6,
                  script=script)
    flags = "--max-steps", 6, "--checkpoint-every", 3
    start_stage("starter", tmp_path / "run", *flags, script=script,
                probes=[DieAfter(3)]).wait()
    again = train("starter", tmp_path / "run", *flags, "--resume",
                  script=script)
    assert "| step    3/" in again.out and "| step    2/" not in again.out
    assert again.column("loss") == whole.column("loss")
    found, expected = again.checkpoint(), whole.checkpoint()
    assert same_state(found["model"], expected["model"])
    # a weight without a gradient has got zeros
    state, moments = (one["optimizer"]["state"] for one in (found, expected))
    assert same_state({name: state[name] for name in moments}, moments)


@pytest.mark.parametrize("way", ["DDP", "FSDP"])
def test_another_model_is_not_resumed(way, begun, tmp_path, request):
    """Nor are the weights that the checkpoint lacks left as they are."""
    text = (STARTER if way == "DDP" else request.getfixturevalue("fsdp")
            ).read_text()
    script = program(tmp_path / "train.py", edit(text, (
        "nn.Linear(64, 3))", "nn.Linear(64, 3), nn.Linear(3, 3))")))
    result = attempt("starter", begun, "--resume", script=script)
    (line,) = result.err.splitlines()
    assert result.status == 1 and "a different model" in line


def test_the_ranks_divide_each_minibatch():
    """Also after a resume; each sample comes once in an epoch."""
    shard = runpy.run_path(str(STARTER))["shard"]
    n, S, B, seed = 100, 24, 2, 7
    alone = [*shard(n, range(10), S, B, 0, 1, seed)]
    steps = [[*chain(*alone[i:i + 12])] for i in range(0, len(alone), 12)]
    for first in range(0, 8, 4):
        epoch = [*chain(*steps[first:first + 4])]
        assert len({*epoch}) == len(epoch) == 96
    assert steps[:4] != steps[4:8]
    for size in (2, 3, 4):
        ranks = [[*shard(n, range(3, 10), S, B, rank, size, seed)]
                 for rank in range(size)]
        each = S // B // size
        for k, step in enumerate(steps[3:]):
            read = [i for rank in ranks
                    for batch in rank[k * each:(k + 1) * each] for i in batch]
            assert sorted(read) == sorted(step)


@pytest.mark.whole
def test_a_damaged_checkpoint_is_skipped(alone, tmp_path):
    run = tmp_path / "run"
    flags = *STEPS, "--checkpoint-every", 10
    start_stage("starter", run, *flags, probes=[DieAfter(30)]).wait()
    newest = max((run / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    result = train("starter", run, *flags, "--resume", mesh=(1, 2, 1))
    agree(result, alone)
    assert result.out.count(f"{newest.name} is corrupt") == 1
    assert "| step   20/" in result.out


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that a wrong one must not change."""
    run = tmp_path_factory.mktemp("begun") / "run"
    train("starter", run, "--max-steps", 2)
    return run


@pytest.mark.whole
@pytest.mark.parametrize(("flags", "words"), [
    (["--microbatch-size", 7], "or --minibatch-size"),
    (["--minibatch-size", 2000, "--microbatch-size", 2], "fewer than"),
    (["--learning-rate", 1e30], "--learning-rate"),
    (["--seed", 1, "--resume"], "was started with"),
    ([], "--resume"),
    (["--eval-every", 0, "--resume"], "--eval-every must be 1 or more"),
    (["--run-dir", STARTER / "run"], "Not a directory"),
    (["--run-dir=~/a file/run"], str(Path.home())),
    (["--seed", 10**20], "--seed must be"), (["--workers", -1], "--workers"),
    (["--seed", "1" * 5000], "--seed"),
    (["--learning-rate", "nan"], "--learning-rate must be"),
])
def test_errors_are_one_line(flags, words, begun, tmp_path):
    (Path.home() / "a file").touch()
    run = tmp_path / "run" if "--learning-rate" in flags else begun
    before = {file: file.read_bytes() for file in run.rglob("*.*")
              if file.is_file()}
    result = attempt("starter", run, "--warmup-steps", 0, *flags,
                     mesh=(1, 2, 1))
    assert result.status == 1
    line, *more = result.err.splitlines()
    assert line.startswith("error: ") and words in line and not more, more
    assert all(file.read_bytes() == text for file, text in before.items())


@pytest.mark.parametrize(("name", "resume", "words"), [
    *((name, ["--resume"], f"{name} belongs to another program") for name in (
        "finished", "metrics.part", "metrics.csv", "checkpoints/unfinished")),
    ("metrics.csv", [], "add --resume"), ("checkpoints", [], "add --resume"),
    ("checkpoints/step_00000020.pt", ["--resume"], "is corrupt"),
    ("checkpoints/best.ckpt", ["--resume"], "")])  # beside what it saves
def test_what_another_program_has_left_is_kept(name, resume, words, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    result = attempt("starter", tmp_path, *resume, "--max-steps", 1)
    assert result.status == bool(words) and words in result.err
    assert file.read_text() == "mine"


def test_a_job_refuses_a_folder_that_it_would_not_look_into():
    done = subprocess.run(
        ["bash", STARTER.with_name("batch.sh"), "--run-dir=mine"],
        capture_output=True, text=True)
    assert done.returncode == 2 and "omit --run-dir" in done.stderr


def test_a_run_keeps_a_copy_beside_its_checkpoints(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    copy = folder / "step_00000002-best.pt"
    shutil.copy(folder / "step_00000002.pt", copy)
    train("starter", tmp_path / "run", "--resume", "--max-steps", 6,
          "--checkpoint-every", 1)
    assert sorted(file.name for file in folder.iterdir()) == [
        copy.name, "step_00000005.pt", "step_00000006.pt"]


@pytest.mark.parametrize("names", [
    {"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "", "WORLD_SIZE": ""},
    {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_STEP_NUM_TASKS": "9" * 5000},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
     "MASTER_PORT": "29500"}], ids=str)
def test_names_that_say_no_rank_are_one_line(names, tmp_path):
    """Such as those of a pod of Kubernetes, or without MASTER_ADDR."""
    result = attempt("starter", tmp_path / "run",
                     env={**os.environ, **names})
    (line,) = result.err.splitlines()
    assert result.status == 1 and "MASTER_ADDR" in line
    assert not (tmp_path / "run").exists()


def test_the_ranks_of_one_node_meet_wherever_its_name_leads(tmp_path):
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "nowhere.invalid",
             "MASTER_PORT": str(free_port())}
    launches = [start_stage(
        "starter", tmp_path / "run", "--max-steps", 2, env={
            **os.environ, **names, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"]
    for launch in launches:
        assert launch.result(tmp_path / "run").status == 0


@pytest.mark.whole
def test_srun_names_the_ranks(alone, tmp_path):
    """Without torchrun; and a shell of SLURM's is one process."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("SLURM_")}
    train("starter", tmp_path / "shell", "--max-steps", 2, env=env | {
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"})
    step = env | {"MASTER_ADDR": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2",
                  "MASTER_PORT": str(free_port())}
    launches = [start_stage(
        "starter", tmp_path / "run", *STEPS, env=step | {
            "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    results = [launch.result(tmp_path / "run") for launch in launches]
    agree(results[0], alone)
    assert results[1].status == 0 and not results[1].out
