"""The contract that every stage of the course keeps, on each of its meshes.

What is particular to a stage is in test_<stage>.py. A stage needs nothing
here but its entry in workshop/stages.py.
"""

import csv
import json
import math
import os
import re
import signal

import pytest
import torch
from stages import (
    CORE,
    GOLDEN,
    DieAfter,
    agree,
    every_stage,
    same_state,
    sent_by,
    start_stage,
    steps_seen,
    train,
    wait_for_rows,
)

from workshop.arithmetic import of_step
from workshop.stages import STAGES
from workshop.watch.course import probes


def places(all_places):
    """(stage, mesh) to try: `whole`, but the core's stages on one or two."""
    return [place if place[0] in CORE and place[1] != (1, 4, 1) else
            pytest.param(*place, marks=pytest.mark.whole)
            for place in all_places]


def fewer_steps(stage):
    """Flags: a step with DTensors takes long, as in Triton's interpreter.

    Six of twice the minibatch reach the third shard.
    """
    if stage == "starter":
        return ("--max-steps", 20, "--eval-every", 10)
    about = STAGES[stage]
    return ("--max-steps", 6, "--minibatch-size", 16, "--eval-minibatches",
            1, "--microbatch-size", 16 if about.kernels else 4) if (
                about.kernels or about.shards) else ()


PLACES = [(stage, mesh) for stage in STAGES for mesh in STAGES[stage].meshes]
# the mesh of each stage with which most can go wrong on four processes
LARGEST = [(stage, max(
    (mesh for mesh in STAGES[stage].meshes if math.prod(mesh) <= 4),
    key=STAGES[stage].meshes.index)) for stage in STAGES]
SHARED = [place for place in LARGEST if place[1] != (1, 1, 1)]
# two processes tell each other what four would
TOLD = [(stage, mesh if math.prod(mesh) > max(mesh) else (1, 2, 1))
        for stage, mesh in SHARED]


def name(value):
    return value if isinstance(value, str) else "x".join(map(str, value))


def train_alone(folder, *flags):
    """A run of the single-device stage, with which others are compared."""
    (folder / "seen").mkdir()
    return train("std", folder / "run", *flags, data=GOLDEN,
                 log=folder / "seen", probes=probes(folder / "run"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train_alone(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def shorter(tmp_path_factory):
    return train_alone(tmp_path_factory.mktemp("shorter"),
                       *fewer_steps("fsdp"))


def texts(result):
    """The texts that a run has written, in their order."""
    return re.findall(
        r"^> Hello, I'm a language model,(.*?)(?=^>|^\||^memory:|^fin)",
        result.out, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------- the same training


@pytest.mark.parametrize(("stage", "mesh"), places(PLACES), ids=name)
def test_the_same_training(stage, mesh, request, tmp_path):
    """Two processes recompute, which changes nothing of it."""
    seen = tmp_path / "seen"
    seen.mkdir()
    pipeline, data, tensor = mesh
    flags = fewer = fewer_steps(stage)
    single = request.getfixturevalue("shorter" if fewer else "single")
    steps = len(single.rows)
    if tensor > 1 == pipeline:  # and fewer microbatches
        flags = (*flags[:-1], min(4 * tensor, 16 // data))
    if pipeline * data == 2 > tensor:
        flags = (*flags, "--recompute")
    result = train(stage, tmp_path / "run", *flags, data=GOLDEN, mesh=mesh,
                   log=seen, probes=[*probes(tmp_path / "run"), steps_seen])
    agree(result, single)
    assert "Warning" not in result.err, result.err
    expected = single.rows
    if not fewer:
        with open(GOLDEN / "metrics.csv", newline="") as file:
            expected = list(csv.DictReader(file))
        assert len(expected) == 20
    for column, tolerance in (("loss", 1e-6), ("val_loss", 1e-5),
                              ("norm", 1e-5), ("lr", 1e-8)):
        assert [value or 0 for value in result.column(column)] == (
            pytest.approx([float(row[column] or 0) for row in expected],
                          rel=tolerance))

    lines = [line for line in result.out.splitlines() if "| step" in line]
    assert len(lines) == steps
    if pipeline == 1:
        written = texts(result)
        assert len(written) == 8 * data  # after step 0, and after the last
        second = written[4 * data:]
        assert written[:4] + second[:4] == texts(single)  # of the first row
    ranks = [torch.load(file) for file in sorted(seen.glob("*.pt"))]
    assert len(ranks) == pipeline * data * tensor
    alone = torch.load(single.folder.parent / "seen" / "0.pt")
    size = data * tensor
    for step in range(steps):
        read = [sorted(rank["samples"][step]) for rank in ranks]
        assert not any(read[size:])  # only the first stage gets tokens
        for k in range(size):  # those who share a matrix read the same
            assert read[k] == read[k - k % tensor]
        assert sorted(i for row in read[:size:tensor] for i in row) == sorted(
            alone["samples"][step])

    # what a step sends is what the lessons' formulas say (of MPI, torch sees
    # nothing), and a rank keeps its part of everything
    about, hp = STAGES[stage], json.loads(
        (result.folder / "hyperparameters.json").read_text()
    )["hyperparameters"]
    mine, theirs = result.checkpoint(), single.checkpoint()
    if size * pipeline > 1 and about.split:
        B = hp["microbatch_size"]
        assert sent_by(ranks, mesh) == of_step(
            about.split, mine["config"], mesh,
            hp["minibatch_size"] // (B * data), B, hp["sequence_length"])
    if about.split == "parameters":
        total = sum(weight.numel() for key, weight in mine["model"].items()
                    if key != "lm_head.weight")
        for rank in ranks:
            assert rank["kept"] == steps * [4 * [total // size]]

    assert mine.keys() == theirs.keys() and mine["stage"] == stage
    assert mine["model"].keys() == theirs["model"].keys()
    for part in ("state", "param_groups"):
        assert len(mine["optimizer"][part]) == len(theirs["optimizer"][part])
    assert (mine["optimizer"]["state"].keys()
            == theirs["optimizer"]["state"].keys())


# ------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("stage", [*every_stage(), "starter"])
def test_resume_on_one_process_is_exact(stage, tmp_path):
    """Bit for bit, after an odd step, in the middle of an epoch."""
    flags = fewer_steps(stage)
    if stage in STAGES and STAGES[stage].kernels:
        flags += ("--minibatch-size", 4, "--microbatch-size", 4)
    whole = train(stage, tmp_path / "whole", *flags, data=GOLDEN)
    run = tmp_path / "run"
    start_stage(stage, run, *flags, "--checkpoint-every", 3, data=GOLDEN,
                probes=[DieAfter(3)]).wait()
    again = train(stage, run, "--resume", *(
        flags if stage == "starter" else ()))  # a stage keeps its flags
    assert again.status == 0, again.err
    assert "| step    3/" in again.out and "| step    2/" not in again.out
    for column in ("step", "loss", "val_loss", "lr", "norm"):
        assert again.column(column) == whole.column(column)
    for part in ("model", "optimizer"):
        assert same_state(again.checkpoint()[part], whole.checkpoint()[part])


@pytest.mark.whole
def test_every_stage_resumes_and_is_resumed(single, tmp_path):
    """With its optimizer, in another world, with another accumulation.

    One run goes through all stages and back to the first one, and is killed
    in each but the last.
    """
    run = tmp_path / "run"
    chain = [*LARGEST, LARGEST[0]]
    (first, mesh), *others = chain
    start_stage(first, run, "--checkpoint-every", 1, data=GOLDEN, mesh=mesh,
                probes=[DieAfter(1)]).wait()
    for step, (stage, mesh) in enumerate(others, 2):
        last = step == len(chain)
        result = start_stage(
            stage, run, "--resume", mesh=mesh,
            probes=[] if last else [DieAfter(1)]).result(run)
        assert f"resuming after step {step - 1}" in result.out, result.err
    agree(result, single)
    assert result.checkpoint()["stage"] == chain[-1][0]


@pytest.mark.parametrize(
    ("stage", "mesh"), places([*TOLD, ("starter", (1, 3, 1))]), ids=name)
def test_a_signal_to_the_last_rank_stops_all(stage, mesh, tmp_path):
    run = tmp_path / "run"
    launch = start_stage(
        stage, run, "--max-steps", 5000, "--eval-every", 5000,
        "--checkpoint-every", 5000, data=GOLDEN, mesh=mesh)
    wait_for_rows(run, 3)
    launch.signal(signal.SIGUSR1, -1)
    result = launch.result(run)
    assert result.status == 0, result.err
    assert result.checkpoint()["step"] == len(result.rows) < 5000
    assert "stopped" in result.out and "Traceback" not in result.err


@pytest.mark.whole
@pytest.mark.parametrize(
    ("stage", "mesh"), places([*SHARED, ("starter", (1, 4, 1))]), ids=name)
def test_a_killed_rank_ends_the_others(stage, mesh, tmp_path):
    """Also without a launcher that ends them: the connection breaks."""
    run = tmp_path / "run"
    launch = start_stage(stage, run, "--max-steps", 5000, data=GOLDEN,
                         mesh=mesh)
    wait_for_rows(run, 3)
    launch.signal(signal.SIGKILL, -1)
    ranks = launch.wait(60)
    statuses = [rank.status for rank in ranks]
    if stage in STAGES and STAGES[stage].launcher == "mpirun":  # ends them
        assert all(statuses) and statuses[-1] == -9
        return
    assert statuses == [1] * (len(ranks) - 1) + [-9]
    if stage == "starter":  # has no words of its own for that
        return
    ours = [line for line in ranks[0].err.splitlines()
            if line.startswith("error: lost the")]
    assert len(ours) == 1 and "Traceback" not in ranks[0].err


# --------------------------------------------------------- errors, launching


ERRORS = [  # flags, and words of the one line
    # these two meet lines of the script itself, the others the backstage's
    (["--microbatch-size", 3], ["not divisible"]),
    (["--learning-rate", 1e30], ["loss is", "--learning-rate"]),
    (["--max-stepz", 3], ["--max-stepz", "--help"]),
    (["--data", "/no/such/folder"], ["/no/such/folder", "--data"]),
    (["--init", "/no/such/file.pt"], ["/no/such/file.pt"]),
]


@pytest.mark.parametrize(("stage", "flags", "words"), places(
    (stage, *error) for stage in STAGES
    for error in (ERRORS if stage in ("std", "ddp") else ERRORS[:2])))
def test_errors_are_one_line(stage, flags, words, tmp_path):
    result = train(stage, tmp_path / "run", *flags, data=GOLDEN,
                   mesh=(1, min(2, STAGES[stage].meshes[-1][1]), 1))
    if STAGES[stage].launcher == "mpirun":  # it kills the others
        first, *others = [rank.status for rank in result.ranks]
        assert first == 1 and set(others) <= {1, -9}
    else:
        assert result.status == 1
    lines = result.ranks[0].err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    for word in words:
        assert word in lines[0]


def test_a_checkpoint_of_an_older_version_is_named(single, tmp_path):
    state = single.checkpoint()
    torch.save({**state, "format": 1}, tmp_path / "old.pt")
    result = train("std", tmp_path / "run", "--init", tmp_path / "old.pt",
                   data=GOLDEN)
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert "old.pt: a checkpoint of format 1" in line and "train again" in line


@pytest.mark.parametrize("stage", [
    "ddp", "lit", pytest.param("mpi", marks=pytest.mark.whole)])
def test_python_in_a_slurm_shell_is_one_process(stage, tmp_path):
    """A portal's JupyterLab runs inside an allocation."""
    variables = {"PROCID": "0", "NTASKS": "8", "LOCALID": "0", "JOB_ID": "1",
                 "NNODES": "2", "NTASKS_PER_NODE": "4", "NODEID": "0",
                 "JOB_NODELIST": "node[1-2]", "NODELIST": "node[1-2]"}
    result = train(
        stage, tmp_path / "run", "--max-steps", 2, data=GOLDEN,
        env=os.environ | {f"SLURM_{name}": value
                          for name, value in variables.items()})
    assert result.status == 0 and len(result.rows) == 2, result.err
