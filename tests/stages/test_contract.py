"""The contract that every stage of the course keeps, on each of its meshes.

What is particular to a stage is in test_<stage>.py. A stage needs nothing
here but its entry in workshop/stages.py.
"""

import csv
import functools
import json
import math
import os
import re
import signal

import pytest
from stages import (
    CORE,
    GOLDEN,
    DieAfter,
    SignalAt,
    StepsRecord,
    agree,
    attempt,
    edited,
    same_state,
    sent_by,
    start_stage,
    steps_seen,
    train,
    wait_for_rows,
)

from workshop.check.probe import check_probes
from workshop.results.arithmetic import of_step
from workshop.stages import STAGES


def is_quick(stage, mesh=(1, 1, 1)):
    """Whether plain pytest tries it: the core's stages, on two processes."""
    return stage in CORE and math.prod(mesh) <= 2


def places(all_places):
    """(stage, ...) or (stage, mesh) to try: `whole`, but the quick ones."""
    return [place if is_quick(*place) else
            pytest.param(*place, marks=pytest.mark.whole)
            for place in all_places]


def fewer_steps(stage):
    """Flags: a step with DTensors takes long, as in Triton's interpreter.

    Five of twice the minibatch reach the third shard.
    """
    if stage == "starter":
        return ("--max-steps", 20, "--eval-every", 10)
    about = STAGES[stage]
    return ("--max-steps", 5, "--minibatch-size", 16, "--eval-minibatches",
            1, "--microbatch-size", 16 if about.kernels else 4) if (
                about.kernels or about.shards) else ()


# on two processes, or four: they tell each other what more would
SMALLER = {"tp": (1, 2, 2), "3d": (2, 1, 2), "std": (1, 1, 1)}


def name(value):
    return value if isinstance(value, str) else "x".join(map(str, value))


@pytest.fixture(scope="module")
def recorded(data, tmp_path_factory):
    """recorded(stage, mesh, *flags): a whole run, which several tests see.

    What its probes see is in the folder `seen` beside its own.
    """
    @functools.cache
    def record(stage, mesh=(1, 1, 1), *flags):
        folder, script = tmp_path_factory.mktemp(stage), None
        (folder / "seen").mkdir()
        if "--minibatch-size" in flags:  # nor do its texts get long
            script = edited(folder, stage, ("(idx, 32, ", "(idx, 4, "))
        return train(
            stage, folder / "run", *flags, data=data, mesh=mesh,
            script=script, log=folder / "seen", texts=True,
            probes=[*check_probes(folder / "run"), steps_seen]
            * (stage in STAGES),
            record=StepsRecord)

    return record


def texts(result):
    """The texts that a run has written, in their order."""
    return re.findall(
        r"^> Hello, I'm a language model,(.*?)(?=^>|^\||^memory:|^fin)",
        result.out, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------- the same training


@pytest.mark.parametrize(("stage", "mesh"), places(
    (name, mesh) for name, stage in STAGES.items() for mesh in stage.meshes),
    ids=name)
def test_the_same_training(stage, mesh, recorded):
    """Several processes recompute, which changes nothing of it."""
    pipeline, data, tensor = mesh
    flags = fewer = fewer_steps(stage)
    single = recorded("std", (1, 1, 1), *(fewer and fewer_steps("fsdp")))
    steps = len(single.rows)
    if tensor > 1 == pipeline:  # and fewer microbatches
        flags = (*flags[:-1], min(4 * tensor, 16 // data))
    if pipeline * data > 1 == tensor:
        flags = (*flags, "--recompute")
    result = recorded(stage, mesh, *flags)
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
    ranks = [StepsRecord.read_from(result.folder.parent / "seen", rank)
             for rank in range(pipeline * data * tensor)]
    alone = StepsRecord.read_from(single.folder.parent / "seen", 0)
    size = data * tensor
    for step in range(steps):
        read = [sorted(rank.samples[step]) for rank in ranks]
        assert not any(read[size:])  # only the first stage gets tokens
        for k in range(size):  # those who share a matrix read the same
            assert read[k] == read[k - k % tensor]
        assert sorted(i for row in read[:size:tensor] for i in row) == sorted(
            alone.samples[step])

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
            assert rank.kept == steps * [4 * [total // size]]

    assert mine.keys() == theirs.keys() and mine["stage"] == stage
    assert mine["model"].keys() == theirs["model"].keys()
    for part in ("state", "param_groups"):
        assert len(mine["optimizer"][part]) == len(theirs["optimizer"][part])
    assert (mine["optimizer"]["state"].keys()
            == theirs["optimizer"]["state"].keys())


# ------------------------------------------------------- nothing is lost


@pytest.mark.whole
@pytest.mark.parametrize(("stage",), places(
    (stage,) for stage in (*STAGES, "starter")
    if stage not in ("kernels", "fsdp", "tp")))
def test_resume_on_one_process_is_exact(stage, recorded, data, tmp_path):
    """Bit for bit, after an odd step, in the middle of an epoch.

    The lines of kernels are those of std, those of fsdp and tp in 3d, too.
    """
    flags, run = fewer_steps(stage), tmp_path / "run"
    whole = recorded(stage, (1, 1, 1), *flags)
    attempt(stage, run, *flags, "--checkpoint-every", 3, data=data,
            probes=[DieAfter(3)])
    again = train(stage, run, "--resume", *(
        flags if stage == "starter" else ()))  # a stage keeps its flags
    assert "| step    3/" in again.out and "| step    2/" not in again.out
    for column in ("step", "loss", "val_loss", "lr", "norm"):
        assert again.column(column) == whole.column(column)
    for part in ("model", "optimizer"):
        assert same_state(again.checkpoint()[part], whole.checkpoint()[part])


@pytest.mark.parametrize("stages", [CORE[:3], pytest.param(
    ("mpi", "fsdp", "tp", "3d"), marks=pytest.mark.whole)], ids=name)
def test_stages_resume_each_other_and_stop(
        stages, recorded, data, tmp_path):
    """With its optimizer, in another world, with another accumulation.

    One run goes through the stages, and std ends it. In each a signal reaches
    the last rank alone, in its first step: after it all of them stop.
    """
    run, flags = tmp_path / "run", ()
    for step, stage in enumerate(stages, 1):
        mesh = SMALLER.get(stage, (1, 2, 1))
        result = train(stage, run, *flags, data=data, mesh=mesh, probes=[
            SignalAt(1, signal.SIGUSR1, math.prod(mesh) - 1)])
        assert result.checkpoint()["step"] == len(result.rows) == step
        assert result.checkpoint()["stage"] == stage
        assert "stopped by " in result.out and not result.err
        assert not flags or f"resuming after step {step - 2}" in result.out
        flags, data = ("--resume",), None
    agree(train("std", run, "--resume"), recorded("std"))


def test_a_signal_to_the_last_rank_stops_the_starter(tmp_path):
    run = tmp_path / "run"
    launch = start_stage("starter", run, "--max-steps", 5000, mesh=(1, 3, 1))
    wait_for_rows(run, 3)
    launch.jobs[-1].kill(signal.SIGUSR1)
    result = launch.result(run)
    assert result.status == 0, result.err
    assert result.checkpoint()["step"] == len(result.rows) < 5000
    assert "stopped" in result.out and "Traceback" not in result.err


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "mesh"), [
    ("ddp", (1, 2, 1)), ("mpi", (1, 2, 1)), ("lit", (1, 2, 1)),
    ("3d", (2, 2, 1)), ("starter", (1, 3, 1))], ids=name)
def test_a_killed_rank_ends_the_others(stage, mesh, data, tmp_path):
    """Also without a launcher that ends them: the connection breaks.

    The loops of fsdp and tp wait for it as that of ddp, and 3d shards, too.
    """
    run = tmp_path / "run"
    launch = start_stage(stage, run, "--max-steps", 5000, data=data,
                         mesh=mesh)
    wait_for_rows(run, 3)
    launch.jobs[-1].kill(signal.SIGKILL)
    ranks = launch.wait(60)
    statuses = [rank.status for rank in ranks]
    if stage == "mpi":  # mpirun ends them
        assert all(statuses) and statuses[-1] == -9
        return
    assert statuses == [1] * (len(ranks) - 1) + [-9]
    if stage == "starter":  # has no words of its own for that
        return
    ours = [line for line in ranks[0].err.splitlines()
            if line.startswith("error: lost the")]
    assert len(ours) == 1 and "Traceback" not in ranks[0].err


# --------------------------------------------------------- errors, launching


@pytest.mark.parametrize(("stage",), places(
    (stage,) for stage in ("std", "mpi", "ddp", "lit", "tp")))
def test_an_error_of_the_script_is_one_line(stage, data, tmp_path):
    """test_std.py has those of the backstage."""
    result = attempt(
        stage, tmp_path / "run", "--microbatch-size", 3, data=data,
        mesh=(1, min(2, STAGES[stage].meshes[-1][1]), 1))
    if STAGES[stage].launcher == "mpirun":  # it kills the others
        first, *others = [rank.status for rank in result.ranks]
        assert first == 1 and set(others) <= {1, -9}
    else:
        assert result.status == 1
    line, = result.ranks[0].err.splitlines()
    assert line.startswith("error: ") and "not divisible" in line


@pytest.mark.parametrize("stage", [
    "ddp", "lit", pytest.param("mpi", marks=pytest.mark.whole)])
def test_python_in_a_slurm_shell_is_one_process(stage, data, tmp_path):
    """A portal's JupyterLab runs inside an allocation."""
    variables = {"PROCID": "0", "NTASKS": "8", "LOCALID": "0", "JOB_ID": "1",
                 "NNODES": "2", "NTASKS_PER_NODE": "4", "NODEID": "0",
                 "JOB_NODELIST": "node[1-2]", "NODELIST": "node[1-2]"}
    result = train(
        stage, tmp_path / "run", "--max-steps", 2, data=data,
        env=os.environ | {f"SLURM_{name}": value
                          for name, value in variables.items()})
    assert len(result.rows) == 2
