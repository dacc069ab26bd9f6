"""A stage taken home: its script and backstage/, and nothing else of ours.

Every launcher once, and Lightning; test_structure.py asks what backstage/
imports.
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


def start(stage, home, *flags, launcher=()):
    """Train there."""
    script = shutil.copy(STAGES[stage].solution, home / "my_train.py")
    return run_command(*launcher, sys.executable, script, *TINY, *flags,
                       folder=home)


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "launcher", "flags"), [
    ("mpi", ("mpirun", "-n", 2), ()),
    ("ddp", ("torchrun", "--standalone", "--nproc-per-node", 2,
             "--no-python"), ()),
    ("lit", (), ("--devices", 2))])
def test_it_trains_as_in_the_course(stage, launcher, flags, data, home):
    """Also on the processes that Lightning starts itself."""
    needs(*launcher[:1])
    done = start(stage, home, "--data", data, *flags, launcher=launcher)
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
