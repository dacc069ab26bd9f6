"""A stage taken home: its script and backstage/, and nothing else of ours.

One stage of MPI's, of Lightning's and of PyTorch's; test_structure.py asks
what backstage/ imports.
"""

import re
import shutil
import sys

import pytest
from conftest import needs
from stages import GOLDEN, Result, run_command

from backstage import ROOT
from workshop.stages import STAGES

TINY = "--preset", "tiny", "--device", "cpu", "--max-steps", "2"


@pytest.fixture
def home(tmp_path):
    """A folder with backstage/, in which no tool of the course is found."""
    shutil.copytree(ROOT / "backstage", tmp_path / "backstage",
                    ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "workshop.py").write_text("raise SystemExit('not at home')")
    return tmp_path


def start(stage, home, *flags):
    """Train there; a stage of MPI's on two processes."""
    script = shutil.copy(STAGES[stage].solution, home / "my_train.py")
    launcher = []
    if STAGES[stage].launcher == "mpirun":
        needs("mpirun")
        launcher = ["mpirun", "-n", 2]
    return run_command(*launcher, sys.executable, script, *TINY, *flags,
                       folder=home)


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "flags"), [
    ("mpi", ()), ("lit", ("--devices", 2)), ("3d", ())])
def test_it_trains_as_in_the_course(stage, flags, home):
    """Also on the processes that Lightning starts itself."""
    done = start(stage, home, "--data", GOLDEN, *flags)
    assert done.returncode == 0, done.stderr
    for line in ("preset tiny, data ", "| step    1/2 "):
        assert done.stdout.count(line) == 1
    run, = (home / "runs").iterdir()
    for column in ("loss", "norm"):
        assert Result(run, []).column(column)[0] == pytest.approx(
            Result(GOLDEN, []).column(column)[0], rel=1e-5)
    assert len([*run.glob("checkpoints/*.pt")]) == 1
    assert {path.name for path in home.iterdir()} == {
        "backstage", "my_train.py", "runs", "workshop.py"}


def test_no_stage_imports_the_tools():
    for stage in STAGES.values():
        assert not re.search(r"\b(from|import) workshop\b",
                             stage.solution.read_text())


@pytest.mark.whole
def test_it_asks_for_a_dataset(home):
    done = start("std", home)
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and "--data" in line, line
