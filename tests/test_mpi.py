"""What is particular to stage mpi; the rest is in test_contract.py."""

import json
import os
import shlex
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
    tiny,
    train,
    wait_for_rows,
)

from backstage import ROOT
from workshop.processes import OPEN_MPI, Rank, free_port
from workshop.stages import STAGES

MPI = STAGES["mpi"].solution
GOLDEN = FOLDER / "golden"
MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")  # Debian's


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The single-device run that the others are compared with."""
    return train("std", tmp_path_factory.mktemp("single") / "run", data=GOLDEN)


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
    (folder / "libmpi.so.12").symlink_to(MPICH)  # as the README says
    return {"LD_LIBRARY_PATH": str(folder)}


ENTER = """\
#!/bin/sh
# [options] HOST WORD...: a shell runs the words there, as by ssh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in node1) process={};; node2) process={};; *) exit 1;; esac
shift
exec nsenter --target "$process" --net --uts --mount --wdns="$PWD" sh -c "$*"
"""


@pytest.fixture(scope="module")
def enter(tmp_path_factory):
    """The program that starts another on node1 or node2, as ssh would.

    Each has a network, a host name and an /etc/hosts of its own; a cable
    connects them. They end with the test.
    """
    needs("ip", "nsenter", "unshare")
    folder = tmp_path_factory.mktemp("nodes")
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n10.79.0.1 node1\n10.79.0.2 node2\n")
    nodes = [subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-ec",
         f"hostname {name}; mount --bind '{hosts}' /etc/hosts; "
         "ip link set lo up; echo ready; exec sleep 1000"],
        stdout=subprocess.PIPE, text=True) for name in ("node1", "node2")]
    try:
        if any(node.stdout.readline() != "ready\n" for node in nodes):
            pytest.skip("this user may not make network namespaces")
        first, second = (str(node.pid) for node in nodes)
        cable = subprocess.run(
            ["ip", "link", "add", "eth0", "netns", first, "type", "veth",
             "peer", "name", "eth0", "netns", second])
        if cable.returncode:
            pytest.skip("this system cannot connect network namespaces")
        program = folder / "enter"
        program.write_text(ENTER.format(first, second))
        program.chmod(0o755)
        for number in 1, 2:
            subprocess.run(
                [program, f"node{number}", "ip", "address", "add",
                 f"10.79.0.{number}/24", "dev", "eth0;",
                 "ip", "link", "set", "eth0", "up"], check=True)
        end = time.monotonic() + 30
        while not all(cable_end(program, node)["operstate"] == "UP"
                      for node in ("node1", "node2")):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield program
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def cable_end(enter, node):
    """What the system says of the cable's end in a node."""
    said = subprocess.run(
        [enter, node, "ip", "-json", "-stats", "link", "show", "eth0"],
        check=True, capture_output=True, text=True)
    return json.loads(said.stdout)[0]


def received(enter):
    """The bytes that have come to node1 over the cable."""
    return cable_end(enter, "node1")["stats64"]["rx"]["bytes"]


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
def test_one_loss_curve_under_both_mpis(library, single, tmp_path, request):
    needs("mpirun")
    mpirun, more = (("mpirun", {}) if library == "Open MPI" else
                    ("mpiexec.mpich", request.getfixturevalue("mpich")))
    rank = run(mpirun, "-n", 2, sys.executable, MPI,
               *tiny(tmp_path / "run", GOLDEN), **more)
    agree(Result(tmp_path / "run", [rank]), single)
    assert "world size 2" in rank.out


# without it MPICH would find that both nodes are the same machine
ON_TWO_NODES = {"UCX_TLS": "self,tcp"}


def mpich_on(enter):
    """MPICH's launcher, on both nodes."""
    return ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", enter,
            "-hosts", "node1,node2"]


LATE = """\
import time
import numpy as np
from mpi4py import MPI
from backstage.errors import run_main

def main():
    comm = MPI.COMM_WORLD
    comm.Allreduce(MPI.IN_PLACE, np.ones(50_000))
    if comm.rank == 0:
        time.sleep(0.01)
    comm.gather("text")

run_main(main)
"""


@pytest.mark.whole
def test_all_leave_mpi(tmp_path, enter, mpich):
    """Of 20 programs that only finalized MPI, 13 waited for ever."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    words = [*mpich_on(enter), "-n", 2, sys.executable, script]
    for _ in range(5):
        rank = run(enter, "node1", shlex.join(map(str, words)),
                   **mpich, **ON_TWO_NODES)
        assert rank.status == 0, rank.err


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "library"), [
    ("mpi", "Open MPI"), ("mpi", "MPICH"), ("ddp", "Open MPI")])
def test_one_loss_curve_on_two_nodes(
        stage, library, single, tmp_path, request, enter):
    """Each has a network of its own, and they talk over the cable."""
    needs("mpirun")
    more, script = {}, [sys.executable, STAGES[stage].solution]
    if stage == "ddp":
        script[1:1] = ["-m", "workshop.as_torchrun", "-v"]
        more = {"MASTER_ADDR": "node1", "MASTER_PORT": str(free_port())}
    if library == "Open MPI":
        mpirun = ["mpirun", "--mca", "plm_rsh_agent", enter, "--host",
                  "node1,node2", *(["-x", "MASTER_ADDR"] if more else [])]
    else:
        more |= request.getfixturevalue("mpich") | ON_TWO_NODES
        mpirun = mpich_on(enter)
    words = [*mpirun, "-n", 2, *script, *tiny(tmp_path / "run", GOLDEN)]
    before = received(enter)
    rank = run(enter, "node1", shlex.join(map(str, words)), **more)
    agree(Result(tmp_path / "run", [rank]), single)
    assert "world size 2" in rank.out
    if stage == "ddp":
        assert "rank 1 of 2, on node2 local rank 0 of 1" in rank.out
    # at least half of the gradients, 20 times
    weights = Result(tmp_path / "run", []).checkpoint()["model"].values()
    sent = 20 * sum(weight.nbytes for weight in weights) / 2
    assert received(enter) - before > sent


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
        assert (f"ln -s {MPICH}" in line) == (mpirun == "mpiexec.mpich")
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
@pytest.mark.skipif(os.getuid() != 0, reason="only root is refused")
def test_root_is_told_by_open_mpi(tmp_path):
    needs("mpirun")
    rank = run("mpirun", "-n", 2, sys.executable, MPI,
               *tiny(tmp_path / "run", GOLDEN),
               OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="0")
    assert rank.status == 1 and "--allow-run-as-root" in rank.err
