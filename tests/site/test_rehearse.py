"""The rehearsal of the hour: how it fails and ends, and all of it on SLURM."""

import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from cluster import needs_namespaces, wait_for
from conftest import (
    all_processes,
    commit_all,
    copy_course,
    git,
    needs,
    program,
)

from backstage import ROOT
from workshop.instructor.plan import LENGTHS, read_plan

SCRIPT = "docs/rehearse.sh"


def start(tmp_path, activate, *more, venv="none", flags=(), path=""):
    """Rehearse in a course of which there is little but this activate.sh."""
    course, here = tmp_path / "course", tmp_path / "here"
    copy_course(course, SCRIPT, *more)
    (course / "notebooks").mkdir(exist_ok=True)
    (course / "notebooks" / "one").touch()
    (course / "activate.sh").write_text(activate)
    commit_all(course)
    here.mkdir()
    return here, subprocess.Popen(
        ["bash", course / SCRIPT, *flags], cwd=here, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"VIRTUAL_ENV": venv,
                          "PATH": path + os.environ["PATH"]},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL)
                            for number in (signal.SIGINT, signal.SIGHUP)])


@pytest.mark.parametrize(("activate", "name", "said"), [
    ("python() { echo more; echo error: the disk is full; return 3; }",
     "doctor", "error: the disk is full"),
    ("python() { :; }; jupyter() { echo '\"application/x-workshop-complaint\":"
     " [\"the training failed\"' > notebooks/done.start.ipynb; }",
     "start", "the training failed")])
def test_a_step_that_fails_is_the_last(tmp_path, activate, name, said):
    """Also where a cell complains, and the notebook goes on to its end."""
    here, process = start(tmp_path, activate)
    out, err = process.communicate()
    folder, = here.iterdir()
    assert process.returncode == 1 and said in err
    assert err.endswith(f"{name} failed: {folder}\n") and name not in out
    assert re.match(r"activate +\d+ s of 120\n", out)


def test_a_session_that_there_is_not(tmp_path):
    done = subprocess.run(["bash", ROOT / SCRIPT, "45"], cwd=tmp_path,
                          text=True, capture_output=True,
                          env=os.environ | {"VIRTUAL_ENV": "none"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: a session has 60, 90, 120 or 240 minutes, "
                           "not 45\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.whole
@pytest.mark.parametrize("minutes", LENGTHS)
def test_a_session_has_the_lessons_of_the_plan(tmp_path, minutes):
    """What it executes are the plan's notebooks, in their order."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "qsub", "#!/bin/sh\n")
    _, process = start(
        tmp_path, "python() { echo /code/; }; jupyter() { "
        f'echo "${{@: -1}}" >>{tmp_path}/said; }}', flags=[str(minutes)],
        path=f"{tmp_path}/bin:")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    said = re.findall(r"notebooks/(\w+)\.ipynb", (
        tmp_path / "said").read_text())
    assert said == [name for name, row in read_plan().items()
                    if minutes in row.minutes and row.where.endswith("ipynb")
                    and not name.endswith(" end")
                    and not name.startswith("diff_")]


@pytest.mark.parametrize("number", [
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ended_rehearsal_leaves_nothing(tmp_path, number):
    here, process = start(tmp_path, "touch ../begun; sleep 1000")
    wait_for(lambda: [*here.glob(".*/begun")])
    process.send_signal(number)
    assert process.wait(60) == 1
    assert not [*here.iterdir()]
    assert not [words for _, words, variables in all_processes()
                if f"PWD={here}" in " ".join(variables)]


@pytest.mark.whole
def test_without_slurm_it_starts_one(tmp_path, monkeypatch):
    """The jobs run on this machine's own, of which nothing is left."""
    needs("slurmctld", "munged")
    needs_namespaces()
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("SBATCH_PARTITION", "a-site's")
    files = tmp_path / "course" / "batchfiles"
    files.mkdir(parents=True)
    for stage in "ddp", "lit":
        program(files / f"batch-{stage}-1n2g.sh", "#!/bin/sh\n"
                f"echo {stage} $(hostname) >>{tmp_path}/said\n")
    here, process = start(
        tmp_path, "python() { echo /code/; }; jupyter() { :; }", "backstage",
        "workshop", venv=sys.prefix)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "on a SLURM on this machine" in err
    assert (tmp_path / "said").read_text() == "ddp node1\nlit node1\n"
    # in this suite's folder: another suite of this machine may rehearse, too
    folder = re.compile(f"{re.escape(tempfile.gettempdir())}/.*/rehearsal-")
    assert not [words for _, words, _ in all_processes()
                if any(map(folder.search, words))]
    assert not [*here.iterdir()]


def test_the_hour_on_slurm(slurm):
    """In a clone without a dataset, which activate.sh makes."""
    git(slurm.repo, "rm", "-rq", "fineweb/demo")
    copy_course(slurm.repo, "example-logs", "docs")
    git(slurm.repo, "add", "example-logs", "docs")  # which results draws
    git(slurm.repo, "commit", "-qm", "no data")
    done = slurm("bash", slurm.repo / SCRIPT, "--preset", "tiny", "--device",
                 "cpu", "--max-steps", 2, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^([\w-]+) +\d+ s of +\d+$", done.stdout, re.M) == [
        "activate", "doctor", "start", "ddp", "ddp-job", "lit", "lit-job",
        "results"]
    print(done.stdout)  # `pytest -rP` shows the seconds
    assert not [*slurm.repo.parent.glob(".rehearsal-*")]
