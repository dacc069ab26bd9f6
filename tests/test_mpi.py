"""What is particular to stage mpi; the rest is in test_contract.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import needs
from stages import (
    FOLDER,
    Result,
    agree,
    changed_lines,
    tiny,
    train,
    wait_for_rows,
)

from backstage import ROOT
from workshop.processes import OPEN_MPI, Rank
from workshop.stages import STAGES

MPI = STAGES["mpi"].solution
GOLDEN = FOLDER / "golden"
MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")  # Debian's


def test_few_lines_change():
    std = STAGES["std"].solution.read_text()
    assert 0 < changed_lines(std, MPI.read_text()) <= 40


def environment(**more):
    return {**os.environ, **OPEN_MPI, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def mpich(tmp_path_factory):
    """The variables with which mpi4py takes MPICH."""
    needs("mpiexec.mpich")
    if not MPICH.exists():
        pytest.skip(f"not there: {MPICH}")
    folder = tmp_path_factory.mktemp("mpich")
    (folder / "libmpi.so.12").symlink_to(MPICH)  # its name elsewhere
    return {"LD_LIBRARY_PATH": str(folder), "MPI4PY_MPIABI": "mpich"}


def start(*words, **more):
    """A program and its environment, in a session of its own."""
    return subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env=environment(**more),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True)


def run(*words, **more):
    process = start(*words, **more)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Rank(process.returncode, out, err)


def errors(rank):
    return [line for line in rank.err.splitlines()
            if line.startswith("error")]


@pytest.mark.whole
@pytest.mark.parametrize("library", ["Open MPI", "MPICH"])
def test_one_loss_curve_under_both_mpis(library, tmp_path, request):
    needs("mpirun")
    single = train("std", tmp_path / "std", data=GOLDEN)
    mpirun, more = (("mpirun", {}) if library == "Open MPI" else
                    ("mpiexec.mpich", request.getfixturevalue("mpich")))
    rank = run(mpirun, "-n", 2, sys.executable, MPI,
               *tiny(tmp_path / "run", GOLDEN), **more)
    agree(Result(tmp_path / "run", [rank]), single)
    assert "world size 2" in rank.out


@pytest.mark.whole
def test_an_error_or_a_death_of_one_rank_ends_all(tmp_path):
    """As mpirun itself starts them."""
    needs("mpirun")
    flags = tiny(tmp_path / "run", GOLDEN)
    begin = time.monotonic()
    rank = run("mpirun", "-n", 1, sys.executable, MPI, *flags, ":",
               "-n", 1, sys.executable, MPI, *flags, "--data", "/nowhere")
    assert rank.status == 1 and time.monotonic() - begin < 60
    (line,) = errors(rank)
    assert "/nowhere" in line and "Traceback" not in rank.err

    launch = start("mpirun", "-n", 2, sys.executable, MPI,
                   *tiny(tmp_path / "killed", GOLDEN, "--max-steps", 5000))
    wait_for_rows(tmp_path / "killed", 3)
    victim = subprocess.run(
        ["pgrep", "-P", str(launch.pid)], capture_output=True, text=True,
        check=True).stdout.split()[-1]
    os.kill(int(victim), signal.SIGKILL)
    begin = time.monotonic()
    launch.communicate(timeout=60)
    assert launch.returncode and time.monotonic() - begin < 60


@pytest.mark.whole
def test_two_mpis_mixed_are_one_line(tmp_path, mpich):
    """The launcher's MPI is not the library's: worlds of one."""
    for mpirun, more in (("mpiexec.mpich", {}), ("mpirun", mpich)):
        rank = run(mpirun, "-n", 2, sys.executable, MPI,
                   *tiny(tmp_path / "run", GOLDEN), **more)
        (line,) = errors(rank)
        assert rank.status == 1 and "2 processes were started" in line
        assert "MPI4PY_LIBMPI" in line and "Traceback" not in rank.err
    assert not (tmp_path / "run").exists()


@pytest.mark.whole
def test_another_launcher_is_one_line(tmp_path):
    flags = tiny(tmp_path / "run", GOLDEN)
    rank = run(sys.executable, MPI, *flags, RANK="0", WORLD_SIZE="2")
    (line,) = rank.err.splitlines()
    assert rank.status == 1 and "start it with mpirun -n 2" in line
    rank = run(sys.executable, MPI, *flags, SLURM_PROCID="0",
               SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="2")
    assert rank.status == 1
    if "error: 2 processes" not in rank.err:  # Open MPI says it itself
        assert "srun" in rank.err


def test_without_a_library_or_mpi4py_it_is_one_line(tmp_path):
    flags = tiny(tmp_path / "run", GOLDEN)
    rank = run(sys.executable, MPI, *flags, MPI4PY_LIBMPI="/nowhere.so")
    (line,) = rank.err.splitlines()
    assert rank.status == 1 and "there is no MPI library" in line
    assert "module load" in line and "install" in line
    hidden = ("import sys, runpy; sys.modules['mpi4py'] = None; "
              f"sys.argv = [{str(MPI)!r}]; "
              f"runpy.run_path({str(MPI)!r}, run_name='__main__')")
    rank = run(sys.executable, "-c", hidden)
    (line,) = rank.err.splitlines()
    assert rank.status == 1 and "mpi4py is not installed" in line


@pytest.mark.whole
@pytest.mark.skipif(os.getuid() != 0, reason="who is not root may")
def test_root_is_told_by_open_mpi(tmp_path):
    needs("mpirun")
    rank = run("mpirun", "-n", 2, sys.executable, MPI,
               *tiny(tmp_path / "run", GOLDEN),
               OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="0")
    assert rank.status == 1 and "--allow-run-as-root" in rank.err
