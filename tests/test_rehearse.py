"""The rehearsal of the hour: its table, its errors, and all of it on SLURM."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from cluster import COUNTS, clone_course, wait_for
from conftest import all_processes, copy_course, git, needs, program

from backstage import ROOT
from rankcheck.launch.ranks import OPEN_MPI
from workshop import __main__ as tools
from workshop import rehearse
from workshop.notebook import shown
from workshop.rehearse import Step

# What `qsub -W block=true -o FILE -v NAME=VALUE,... BATCHFILE` does, on this
# machine. Nothing of the shell that submits reaches a job but what -v names.
QSUB = """#!/bin/bash
echo 7.pbs
IFS=, read -ra named <<<"$6"
nodes=$PWD/nodes log=$PWD/$4 file=$PWD/$7
for _ in 1 2 3 4; do hostname; done >"$nodes"
cd / && exec env -i HOME="$HOME" PATH=/usr/bin:/bin OPEN_MPI \\
    PBS_O_WORKDIR="$OLDPWD" PBS_JOBNAME=stage PBS_JOBID=7.pbs \\
    PBS_NODEFILE="$nodes" "${named[@]}" bash "$file" >"$log" 2>&1
""".replace("OPEN_MPI", " ".join(f"{k}={v}" for k, v in OPEN_MPI.items()))


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "activate.sh").write_text("echo said by activate.sh\n")
    return tmp_path


def test_a_step_is_in_time_or_slow(clone, capsys, monkeypatch):
    monkeypatch.setattr(rehearse, "PATIENCE", 10_000)
    steps = [Step("one", 600, ("true",)), Step("two", 0.01, ("sleep", ".1"))]
    assert rehearse.rehearse(steps, clone) == 0
    _, one, two, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"one +600 s +\d+\.\d s +yes", one)
    assert two.endswith(" slow")
    assert last.endswith("longer than the plan leaves: two")


@pytest.mark.parametrize(("script", "said"), [
    ("echo begins; echo 'error: the disk is full'; echo 'more'; exit 3",
     "error: the disk is full"),
    ("echo one; echo two; exit 1", "two"),
    ("exit 1", "it said nothing")])
def test_a_step_that_fails_is_one_line_and_the_last(
        clone, capsys, script, said):
    steps = [Step("bad", 60, ("bash", "-c", script)),
             Step("next", 60, ("touch", "next"))]
    assert rehearse.rehearse(steps, clone) == 1
    out, err = capsys.readouterr()
    assert out.endswith("NO\n")
    assert err.startswith(f"bad: {said}: try `cd {clone} && source activate")
    assert err.count("\n") == 1 and not (clone / "next").exists()


def test_a_cell_that_complains_is_no_success(clone, capsys):
    """Training failed, say, and the notebook went on to its end."""
    failed = shown.complaint("the training failed: `python -m workshop why`")
    output = {"data": {kind: text.splitlines(True) for kind, text
                       in failed._repr_mimebundle_().items()}}
    (clone / "out.ipynb").write_text(json.dumps({"cells": [
        {"source": []}, {"outputs": [{"text": ["fine"]}, output]}]}))
    steps = [Step("start", 60, ("bash", "-c", "mkdir executed && cp out.ipynb "
                                "executed", "notebooks/out.ipynb"))]
    assert rehearse.rehearse(steps, clone) == 1
    out, err = capsys.readouterr()
    assert out.endswith("NO\n")
    assert err.startswith("start: error: the training failed: `python -m work")


def test_a_job_that_does_not_end_is_cancelled(clone, capfd, monkeypatch):
    monkeypatch.setattr(rehearse, "PATIENCE", 1)
    cancel = program(clone / "cancel", (
        f'#!/bin/sh\necho "$1" > {clone}/cancelled\n'
        'echo qdel: Job has finished "$1" >&2; exit 35\n'))
    waits = ("echo 17; trap 'echo qsub: wait for job 17 interrupted by "
             "signal 15; exit 1' TERM; sleep 1000 & wait")  # as qsub says it
    job = Step("job", 2, ("bash", "-c", waits), str(cancel))
    assert rehearse.rehearse([job], clone) == 1
    assert capfd.readouterr().err.startswith(
        "job: error: it had not ended after 2 s: try")
    assert (clone / "cancelled").read_text() == "17\n"


@pytest.mark.parametrize("number", rehearse.ENDING)
def test_an_ended_rehearsal_leaves_nothing(tmp_path, number):
    """Here while it sources an activate.sh that ends only if it has to."""
    clone = tmp_path / "clone"
    copy_course(clone, "backstage", "workshop", "batchfiles", "code")
    (clone / "activate.sh").write_text(
        "trap '' TERM; touch ../begun; while sleep 0.1; do :; done\n")
    for words in ("init", "-q"), ("add", "-A"), ("commit", "-qm", "all"):
        git(clone, *words)
    here = tmp_path / "here"
    here.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", "from workshop import rehearse, __main__\n"
         "rehearse.GRACE = 1; __main__.run_main(__main__.main)", "rehearse"],
        cwd=here, env=os.environ | {"PYTHONPATH": str(clone)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    wait_for(lambda: [*here.glob("*/begun")])
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not [*here.iterdir()]
    assert not [words for _, words, variables in all_processes()
                if f"PWD={here}" in " ".join(variables)]


@pytest.mark.parametrize(("program", "first"), [
    ("sbatch", "sbatch --parsable --wait"), ("qsub", "qsub -W block=true"),
    (None, "python -m workshop launch ddp")])
def test_the_job_is_for_the_scheduler_that_is_there(
        program, first, monkeypatch):
    """And what the other steps start is there."""
    steps = rehearse.steps(["--seed", "3"], lambda name: name == program)
    job, = (step for step in steps if step.name == "job")
    assert " ".join(job.command).startswith(first)
    assert "--seed 3" in " ".join(job.command)
    for step in steps:
        if step.command[:3] == ("python", "-m", "workshop"):
            monkeypatch.setattr(sys, "argv", [*step.command[2:]])
            assert tools.parse().command == step.command[3]
        elif step.command[0] == "jupyter":
            assert (ROOT / step.command[-1]).exists()


@pytest.mark.whole
def test_the_job_on_pbs(tmp_path, monkeypatch, capsys):
    needs("mpiexec")
    clone = tmp_path / "gpt2-workshop"
    clone_course(clone)
    (clone / "solutions" / "train_gpt2_ddp.py").write_text(COUNTS)
    qsub = program(tmp_path / "qsub", QSUB)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job, = (step for step in rehearse.steps(
        ["--max-steps", "3"], {"qsub": qsub}.get)
        if step.name == "job")
    assert rehearse.rehearse([job], clone) == 0, (
        clone / "job.txt").read_text()
    run = json.loads((clone / "runs/ddp-7/hyperparameters.json")
                     .read_text())
    assert run["world_size"] == 4 and run["max_steps"] == 3
    (clone / "site.sh").write_text("WORKSHOP_DATA=/nowhere\n")
    assert rehearse.rehearse([job], clone) == 1
    assert capsys.readouterr().err.startswith(
        "job: stage: WORKSHOP_DATA is /nowhere, which does not exist")


def test_the_hour_on_slurm(slurm):
    """In a clone without a dataset, which activate.sh makes."""
    git(slurm.repo, "rm", "-rq", "fineweb/demo")
    copy_course(slurm.repo, "example-logs")  # which results draws
    git(slurm.repo, "add", "example-logs")
    git(slurm.repo, "commit", "-qm", "no data")
    done = slurm(sys.executable, "-m", "workshop", "rehearse", "--",
                 "--preset", "tiny", "--device", "cpu", "--max-steps", 2,
                 check=False, PYTHONPATH=str(slurm.repo))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +\d+ s +\d+\.\d s +(yes|slow)$", done.stdout,
                      re.M)
    assert [name for name, _ in rows] == [
        "activate", "doctor", "start", "diff", "reset", "check", "job",
        "results"]
    assert not [*slurm.repo.parent.glob(".rehearsal-*")]
