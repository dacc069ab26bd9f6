"""A stage taken home: its script and backstage/, and nothing else of ours.

Every launcher once, and Lightning; test_structure.py asks what backstage/
imports.
"""

import math
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


def start(stage, home, *flags, mesh=(1, 1, 1)):
    """Train there."""
    script = shutil.copy(STAGES[stage].solution, home / "my_train.py")
    pipeline, _, tensor = mesh
    launcher = [sys.executable]
    if mesh != (1, 1, 1):
        if STAGES[stage].launcher == "mpirun":
            needs("mpirun")
            launcher = ["mpirun", "-n", math.prod(mesh), sys.executable]
        else:
            launcher += ["-m", "torch.distributed.run", "--standalone",
                         "--nproc-per-node", math.prod(mesh)]
    flags += ("--pipeline-parallel", pipeline) * (pipeline > 1)
    flags += ("--tensor-parallel", tensor) * (tensor > 1)
    return run_command(*launcher, script, *TINY, *flags, folder=home)


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "mesh"), [
    ("mpi", (1, 2, 1)), ("lit", (1, 1, 1)), ("3d", (2, 1, 1))])
def test_it_trains_as_in_the_course(stage, mesh, home):
    done = start(stage, home, "--data", GOLDEN, mesh=mesh)
    assert done.returncode == 0, done.stderr
    run, = (home / "runs").iterdir()
    loss, _ = Result(run, []).column("loss")
    golden = Result(GOLDEN, []).column("loss")
    assert loss == pytest.approx(golden[0], rel=1e-5)
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
