"""`why` about the course's own scripts, launcher and lesson."""

import functools
import json
import os
import re
import signal
import subprocess
import time
from argparse import Namespace

import pytest
import why_cases
from conftest import CLONE_PATH, edit, needs

from backstage import ROOT
from notebooks.experiments import hangs
from rankcheck.engine.ranks import Launch
from rankcheck.system import launchers
from rankcheck.why import evidence
from rankcheck.why.evidence import collect
from rankcheck_testing.evidence import (
    answer,
    check_end,
    join_alone,
    read_said,
    run_watched,
)
from rankcheck_testing.support import wait_for
from workshop import why as speed

NAMED = {int(job[-1]): said for job, said in read_said().items()
         if "fault-" in job}


@pytest.mark.whole
@pytest.mark.parametrize("number", NAMED)
def test_the_faults_of_the_lesson(number, tmp_path):
    """Each is named within a minute of the first sign, and not otherwise."""
    if number == hangs.MPI:
        needs("mpirun", "mpi4py")
    folder = tmp_path / "why"
    job = hangs.start(number, tmp_path, folder)
    try:
        if number in (4, 8):  # those that end
            job.wait(240)
        wait_for(lambda: folder.exists() and collect(folder) and answer(
            folder).kind, 240)
        found = answer(folder)
    finally:
        job.clear()
    NAMED[number].check(found)
    if number in (1, 2, 3, 7, 9):
        assert " of their_" in found.text


@pytest.mark.table
@pytest.mark.parametrize(("stage", "launcher", "fault", "others"), [
    pytest.param(*how, id=name) for name, how in why_cases.cases()])
def test_a_job_of_the_table(
        stage, launcher, fault, others, tmp_path, request):
    job = (why_cases.Plain(tmp_path) if launcher != "srun" else
           why_cases.Job(tmp_path, request.getfixturevalue("slurm")))
    seen = why_cases.try_out(job, stage, launcher, fault, others)
    if seen:
        pytest.xfail(f"not proven, but reported as it is seen: {seen}")


@pytest.mark.whole
def test_what_every_site_has_prints_what_the_lesson_shows(tmp_path):
    cells = json.loads((ROOT / "notebooks" / "hangs.ipynb").read_text())
    text, = ("".join(cell["source"]) for cell in cells["cells"]
             if cell["id"] == "hangs-every-site")
    script, = re.findall("```python\n(.*?)```", text, re.S)
    (tmp_path / "lost.py").write_text(edit(script, (
        # which reads this variable when it is loaded: here, long before
        "as dist\n", "as dist; dist.set_debug_level_from_env()\n")))
    blocks = re.findall("```text\n(.*?)```", text, re.S)
    env = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for line, shown in re.findall(
            r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks).replace(
                "\\\n    ", ""), re.M):
        fault = line.split()[-1]
        if fault in ("other", "late"):  # torchrun adds nothing to them
            job = Launch(tmp_path / "lost.py", fault, world_size=2, env=env)
            said = (look_at_ranks(job) if fault == "late" else
                    "".join(rank.err for rank in job.wait()))
        elif "py-spy" not in line:  # that has looked at both already
            said = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
        for words in shown.splitlines():
            assert re.search(".*".join(map(
                re.escape, words.split("..."))), said), (words, said)


def look_at_ranks(job):
    """What py-spy says of them, once one waits for the one that is late."""
    try:
        for _ in range(240):
            said = "".join(subprocess.run(
                ["py-spy", "dump", "--pid", str(rank.pid)], text=True,
                capture_output=True).stdout for rank in job.jobs)
            if "main (lost.py:18)" in said and "main (lost.py:19)" in said:
                return said
            time.sleep(0.5)
        raise AssertionError(said)
    finally:
        job.clear()


@pytest.mark.whole
def test_a_sound_run_is_no_alarm(tmp_path, capsys, monkeypatch):
    """Unless somebody stops its processes, as Ctrl-Z does."""
    folder = tmp_path / "why"
    job = Launch(hangs.SCRIPT, "--pause", 1, world_size=3, probes=[
        functools.partial(hangs.prepare, folder, {})])
    try:
        wait_for(lambda: folder.exists() and [
            len(rank.calls or ()) > 8 for rank in collect(folder)
            ] == [True] * 3, 240)
        assert answer(folder).kind == ""
        (tmp_path / "hyperparameters.json").write_bytes((
            ROOT / "example-logs/ddp-2/hyperparameters.json").read_bytes())
        assert speed.main(Namespace(job=str(folder))) == 0
        said = capsys.readouterr().out
        assert "\n  world size 2: 1 node x 2 " in said  # the run's own line
        assert said.startswith("no fault is proven: every rank made progress")
        assert re.search(r"rank 0, 40 stack samples.*\d%  "
                         r"line \d+ of their_train.py: time.sleep\(args.pause",
                         said, re.DOTALL)
        for rank in job.jobs:
            os.kill(rank.pid, signal.SIGSTOP)
        monkeypatch.setattr(evidence, "ANSWER_SECONDS", 1)
        assert speed.main(Namespace(job=str(folder))) == 1
        assert capsys.readouterr().out.startswith(
            "stopped process: ranks 0, 1, 2 are stopped: ")
    finally:
        job.clear()


@pytest.mark.whole
@pytest.mark.parametrize(("joins", "main", "status", "error"), [
    (False, "lambda: 1 / 0", 1, "ZeroDivisionError"),
    # in a group, the course's stages leave without exit handlers
    (True, "lambda: 1 / 0", 1, "ZeroDivisionError"),
    (True, "lambda: None", 0, None)])
def test_how_a_script_of_others_ends(joins, main, status, error, tmp_path):
    """That calls the backstage's `run_main`."""
    join = join_alone() if joins else ""  # the port is free now
    check_end(tmp_path, "from backstage.errors import run_main\n"
              f"{join}run_main({main})", status, error, CLONE_PATH)


@pytest.mark.whole
def test_a_rank_that_the_launcher_ends_has_told_its_error(tmp_path):
    """It waits with its message, so that only rank 0 prints it, and is ended
    meanwhile, as by torchrun after another rank's error.
    """
    end = run_watched(tmp_path, """\
import os, signal, threading
from backstage.errors import require, run_main
threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
run_main(lambda: require(False, "a tensor has 9 elements, not 1"))
""", path=CLONE_PATH, RANK="1", WORLD_SIZE="2")
    record, = end.records
    assert end.status == -signal.SIGTERM
    assert record["ended"]["error"] == "UserError"
    assert record["ended"]["message"] == "a tensor has 9 elements, not 1"


def test_the_courses_launcher_is_a_rank():
    """Unlike the agent of torchrun: it becomes the script."""
    command = "python -m workshop.as_torchrun train.py".split()
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert launchers.read_rank(slurm, command) == (1, 2)
    own = {"RANK": "5", "WORLD_SIZE": "8"}
    assert launchers.read_rank(slurm | own, command) == (5, 8)
