"""python -m workshop cluster: a SLURM of namespaces, and what is left of it.

The batch files run on it in test_slurm.py and test_slurm_ends.py.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import needs_namespaces, wait_for
from conftest import CLONE_PATH, copy_course, needs, program

from backstage.errors import UserError
from workshop.cluster.config import (
    Programs,
    make_cgroup_conf,
    write_commands,
)
from workshop.cluster.control import make_locked_folder
from workshop.cluster.machine import find_programs, unshare_command
from workshop.cluster.processes import (
    CLUSTER_START_VARIABLE,
    PART_VARIABLE,
    find_processes,
)
from workshop.cluster.settings import ClusterFolder, ClusterSettings

pytestmark = pytest.mark.whole
NOBODY = 65534


@dataclass
class Shell:
    """A user's shell, in which `cluster` can be typed."""

    temporary: Path  # its TMPDIR
    start: tuple[str, ...] = ()  # what begins each command, such as setpriv
    python: str = sys.executable
    path: str = CLONE_PATH
    user: int = os.getuid()

    def folder(self, name="main"):
        return self.temporary / f"workshop-cluster-{self.user}" / name

    def __call__(self, *words, **variables):
        """Run a command; its result."""
        env = {name: value for name, value in os.environ.items()
               if not name.startswith(("SLURM_", "SBATCH_"))}
        env |= {"TMPDIR": str(self.temporary), "PYTHONPATH": self.path,
                "PYTHONDONTWRITEBYTECODE": "1", **variables}
        return subprocess.run(
            [*self.start, *map(str, words)], cwd=self.temporary, env=env,
            text=True, capture_output=True, timeout=300)

    def cluster(self, *words, status=0):
        """Run `python -m workshop cluster words...`; what it prints.

        Where it fails, that is one line.
        """
        end = self(self.python, "-m", "workshop", "cluster", *words)
        said = end.stdout + end.stderr
        assert end.returncode == status, said
        if status and words[0] != "status":
            assert end.stderr.count("\n") == 1 and not end.stdout, said
        return said

    def run(self, command, name="main"):
        """Run a line of bash in a shell that uses the cluster."""
        return self("bash", "-c", f". '{self.folder(name)}/env.sh'; "
                    + command).stdout

    def processes(self, name="main"):
        return find_processes(ClusterFolder(self.folder(name)))


@pytest.fixture
def temporary():
    """A folder with a short name, which any user may write in."""
    needs("slurmctld", "munged")
    needs_namespaces()
    folder = Path(tempfile.mkdtemp(prefix="cl", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shell(temporary):
    shell = Shell(temporary)
    yield shell
    shell.cluster("down")
    has_left_nothing(shell)


@pytest.fixture
def ordinary(temporary):
    """The shell of a user with no rights, in a clone that it may read."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    python = "/usr/bin/python3"
    needs(python, "setpriv")
    copy_course(temporary / "clone", "backstage", "workshop")
    clone = temporary / "clone"
    shell = Shell(
        temporary, ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}",
                    "--clear-groups"),
        python, f"{clone}:{clone}/rankcheck/src", NOBODY)
    if shell("unshare", "--user", "--net", "true").returncode:
        pytest.skip("this kernel has no user namespaces for everybody")
    yield shell
    shell.cluster("down")
    has_left_nothing(shell)


def has_left_nothing(shell):
    """No process, no file; mounts and interfaces end with the namespaces."""
    assert not shell.processes()
    assert not shell.folder().parent.exists()
    assert str(shell.temporary) not in Path("/proc/self/mounts").read_text()


def works(shell, name="main"):
    """All nodes run a task, as this user, each with its own GPUs."""
    said = shell.run(
        "srun --nodes=3 --gpus-per-node=2 --ntasks-per-node=1 sh -c "
        "'echo $(hostname) $CUDA_VISIBLE_DEVICES $WORKSHOP_GPUS $(id -u)'",
        name)
    # an earlier job may still have some of the GPUs
    assert [re.sub("[0-3],[0-3]", "GPUs", line) for line in sorted(
        said.splitlines())] == [f"node{number} GPUs simulated {shell.user}"
                                for number in (1, 2, 3)]
    return True


def test_up_and_down(shell):
    """A shell evaluates what `up` prints; a job's nodes are as it asked."""
    said = shell("bash", "-c", f'eval "$({shell.python} -m workshop cluster '
                 'up --nodes=2 --gpus=1)" && sinfo -h -N -o "%N %G %T" && '
                 "sbatch --wait -o log --wrap 'hostname; ip -o link | wc -l'",
                 SBATCH_PARTITION="site's")
    assert "is up: 2 nodes with 1 simulated GPU each" in said.stderr
    assert "node1 gpu:h100:1" in said.stdout, said
    assert "node2 gpu:h100:1" in said.stdout
    assert (shell.temporary / "log").read_text() == "node1\n2\n"
    status = shell.cluster("status")
    assert status.count("ok ") == 4 and "FAIL" not in status
    assert "with other settings" in shell.cluster("up", "--nodes=3", status=1)
    shell.cluster("up")  # it is up already, and stays
    shell.cluster("down")
    has_left_nothing(shell)
    assert "no cluster in" in shell.cluster("status", status=1)
    assert "no cluster main is up" in shell.cluster("down")


def test_an_ordinary_user(ordinary, shell):
    """Beside another user; and a node that crashes comes back."""
    ordinary.cluster("up")
    shell.cluster("up")
    assert works(ordinary) and works(shell)
    assert "CapEff:\t0000000000000000" in ordinary.run(
        "srun grep CapEff /proc/self/status")
    shell.cluster("down")
    ordinary.cluster("kill", "node2")
    assert "FAIL  node2" in ordinary.cluster("status", status=1)
    ordinary.cluster("start", "node2")
    assert works(ordinary)


def test_two_clusters(shell):
    """Each has its jobs, and the end of one is not that of the other."""
    shell.cluster("up")
    shell.cluster("up", "--name=other")
    assert shell.run("sbatch --parsable --wrap 'sleep 600'").strip().isdigit()
    assert shell.run("squeue -h", "other") == ""
    shell.cluster("down", "--name=other")
    wait_for(lambda: shell.run("squeue -h -o %T").strip() == "RUNNING", 60)


def test_a_node_that_runs_and_one_that_is_drained(shell):
    """Neither is started again, nor waited for."""
    shell.cluster("up")
    before = find_part(shell, "slurmd")
    assert shell.cluster("start", "node2") == "node2 is up\n"
    shell.run("scontrol update nodename=node3 state=drain reason=test")
    shell.cluster("up")
    assert find_part(shell, "slurmd") == before
    assert shell.run("sinfo -h -n node3 -o %T") == "drained\n"


def test_another_users_process_stays(shell):
    """Although it says that it is a part: root can read its variables."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    other = subprocess.Popen(
        ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "sleep", "600"],
        env={**os.environ, PART_VARIABLE: str(shell.folder())})
    try:
        shell.cluster("up")
        shell.cluster("down")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_with_the_number_of_one_that_has_ended(tmp_path):
    """A command enters the namespaces of this user's cluster alone."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    needs("setpriv", "nsenter")
    place = ClusterFolder(tmp_path / "main")
    place.bin.mkdir(parents=True)
    program(tmp_path / "sbatch", "#!/bin/sh\necho it is called\n")
    words = [sys.executable, "-c", "import time; time.sleep(600)",
             "workshop.cluster.inside", "cluster", str(place.folder)]
    other_user = ["setpriv", f"--reuid={NOBODY}", "--clear-groups"]
    for start, said in (([], "it is called\n"), (other_user, "")):
        process = subprocess.Popen([*start, *words], cwd="/")
        command = Path(f"/proc/{process.pid}/cmdline")
        try:
            wait_for(lambda: command.read_text().startswith(  # noqa: B023
                sys.executable), 30)
            write_commands(place, Programs(str(tmp_path / "sbatch"), (22, 5),
                                           "root", True), process.pid)
            end = subprocess.run([place.bin / "sbatch"], text=True,
                                 capture_output=True)
        finally:
            process.kill()
            process.wait()
        assert end.stdout == said, end.stderr
    assert "is not up; fix: python -m workshop cluster up" in end.stderr


def test_a_folder_that_another_user_makes_meanwhile(tmp_path):
    """After `find_cluster_folder` has looked: it is not used."""
    folder = tmp_path / "above"
    os.close(make_locked_folder(folder))
    folder.chmod(0o777)
    with pytest.raises(UserError, match="another user may write to"):
        make_locked_folder(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UserError, match="cannot be used"):
        make_locked_folder(tmp_path / "link")
    if not os.getuid():
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(UserError, match="another user may write to"):
            make_locked_folder(folder)


# of a process's command -> what `status` names, and what `up` starts
PARTS = {
    "munged": ["munged"], "slurmctld": ["slurmctld"], "slurmd": ["node2"],
    "a node's unshare": ["node2"], "a node's first process": ["node2"],
    "unshare": ["munged", "slurmctld", "node1", "node2", "node3"],
    "the first process": ["munged", "slurmctld", "node1", "node2", "node3"]}


def find_part(shell, part):
    """The process of that name."""
    kind = "node" if "node" in part else "cluster"
    for process in shell.processes():
        command = process.command
        if part in ("munged", "slurmctld"):
            if process.program == part:
                return process.pid
        elif part == "slurmd":
            if process.program == part and "node2" in command:
                return process.pid
        elif kind in command and (kind == "cluster" or "node2" in command):
            if ("unshare" in part) == (process.program == "unshare"):
                return process.pid
    raise AssertionError(f"no {part}: {shell.processes()}")


def test_each_part_is_killed(shell):
    """`status` names what does not run, and `up` starts it again."""
    shell.cluster("up")
    for part, names in PARTS.items():
        os.kill(find_part(shell, part), signal.SIGKILL)
        wait_for(lambda: not {*names} & {  # noqa: B023
            process.program for process in shell.processes()}, 30)

        def broken():
            said = shell("sh", "-c", f"{shell.python} -m workshop cluster "
                         "status").stdout
            return [line.split()[1] for line in said.splitlines()
                    if line.startswith("FAIL")]

        wait_for(lambda: broken() == names, 30, broken)  # noqa: B023
        if part == "the first process":
            said = shell.run("sbatch --wrap true 2>&1")
            assert said.count("\n") == 1
            assert "is not up; fix: python -m" in said
        shell.cluster("up")
        assert works(shell)


def test_ten_random_kills_leave_nothing(shell):
    """Of any process of the cluster, also those of a job."""
    chance = random.Random(10)
    for _ in range(10):
        shell.cluster("up")
        shell.run("sbatch --nodes=3 --output=/dev/null --wrap "
                  "'srun sleep 600 & sleep 600'")
        processes = sorted(shell.processes(), key=lambda found: found.pid)
        os.kill(chance.choice(processes).pid, signal.SIGKILL)
    shell.cluster("down")
    has_left_nothing(shell)


# A site's own SLURM, in namespaces that stand for its machine, with its
# variables, also those of a job in which the shell runs
SITE_CONF = """\
ClusterName=site
SlurmctldHost=site(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=site NodeAddr=127.0.0.1 CPUs=4
PartitionName=batch Nodes=ALL Default=YES
"""
AT_A_SITE = """\
set -e
folder=$1 python=$2 SLURM_CONF=$1/slurm.conf
export SLURM_CONF PATH=$PATH:/usr/sbin:/sbin
hostname site
ip link set lo up
ip link add eth0 type bridge  # SLURM looks for an address that is not lo's
ip addr add 10.9.8.7/24 dev eth0
mkdir "$folder/spool" "$folder/bin"
munged --force --key-file="$folder/key" --socket="$folder/munge.sock" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed"
slurmctld -c
slurmd -N site
sbatch -o /dev/null --job-name=sites --wrap 'sleep 600' >&2
until squeue -h -o %T | grep -q RUNNING; do sleep 0.2; done
for name in sbatch scancel scontrol sinfo squeue srun; do  # another version's
    printf '#!/bin/sh\necho "$0" >>%s/called\n' "$folder" >"$folder/bin/$name"
    chmod +x "$folder/bin/$name"
done
earlier=$PATH PATH=$folder/bin:$PATH
export SLURM_CLUSTERS=site SQUEUE_CLUSTERS=site SLURM_JOB_ID=1 SLURM_JOBID=1
export SLURM_NTASKS=5 SLURM_MEM_PER_CPU=7 SLURM_STEP_ID=0 SLURM_NNODES=1
eval "$("$python" -m workshop cluster up)"
echo "ours $(squeue -h)"
srun --nodes=2 hostname
export SLURM_CONF=$folder/slurm.conf  # as a module of the site does
srun --nodes=1 hostname
sbatch --output=/dev/null --job-name=of-ours --wrap 'sleep 600' >&2
echo "ours $(squeue -h -o %j)"
scancel --me
eval "$("$python" -m workshop cluster up)"
"$python" -m workshop cluster down
[ ! -e "$folder/called" ]
PATH=$earlier
hash -r
! timeout 5 scancel --me || exit 3
export SLURM_CONF=$folder/slurm.conf
unset SLURM_CLUSTERS SQUEUE_CLUSTERS
[ ! -e "$folder/called" ]
echo "site $(squeue -h -o '%j %T')"
"""


def test_beside_a_sites_slurm(shell):
    """Its jobs and its configuration stay as they are, whatever is typed."""
    if os.getuid():
        pytest.skip("needs root, to start the daemons of a site")
    folder = shell.temporary / "site"
    folder.mkdir()
    folder.joinpath("slurm.conf").write_text(SITE_CONF.format(folder=folder))
    folder.joinpath("cgroup.conf").write_text(make_cgroup_conf(
        ClusterSettings(), find_programs()))
    folder.joinpath("key").write_bytes(os.urandom(128))
    folder.joinpath("key").chmod(0o600)
    end = shell(*unshare_command(user=False), "bash", "-c", AT_A_SITE, "bash",
                folder, shell.python)
    assert end.returncode == 0, end.stderr
    first, *hosts, ours, last = end.stdout.splitlines()
    assert first == "ours " and ours == "ours of-ours", end.stdout
    assert sorted(hosts[:2]) == ["node1", "node2"] and len(hosts) == 3
    assert last == "site sites RUNNING", end.stdout + end.stderr
    assert "for another SLURM, open a new shell" in end.stderr


# `cluster up` is killed when it calls this function of control.py
KILLED_UP = """\
import os, sys
from workshop.cluster import control
from workshop.__main__ import main

def end(*args, **kwargs):
    os.kill(os.getpid(), 9)

owner, _, name = sys.argv.pop(1).rpartition(".")
setattr(getattr(control, owner) if owner else control, name, end)
main()
"""


@pytest.mark.parametrize("function", [
    "write_files", "Cluster.make_namespaces", "write_commands",
    "Cluster.ask_states"])
def test_a_start_that_is_killed_where_it_matters(shell, function):
    """The next one starts anew, and waits for nothing that cannot come."""
    end = shell(shell.python, "-c", KILLED_UP, function, "cluster", "up",
                "--nodes=3")
    assert end.returncode == -signal.SIGKILL, end.stderr
    said = shell.cluster("status", status=1)
    assert said.endswith("fix: python -m workshop cluster up\n"), said
    assert "is not up; fix: python -m workshop cluster up" in shell.cluster(
        "kill", "node1", status=1)
    shell.cluster("up")
    assert works(shell)


def test_ten_starts_that_are_killed(shell):
    """At any moment of `up`, in all that it takes on this machine."""
    begin = time.monotonic()
    shell.cluster("up")
    longest = time.monotonic() - begin
    chance = random.Random(11)
    for _ in range(10):
        shell.cluster("down")
        start = subprocess.Popen(
            [shell.python, "-m", "workshop", "cluster", "up"],
            cwd=shell.temporary, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={
                **os.environ, "TMPDIR": str(shell.temporary),
                "PYTHONPATH": shell.path})
        time.sleep(chance.uniform(0, longest))
        start.kill()
        start.wait()
        shell.cluster("up")
        assert works(shell)
        assert len([process for process in shell.processes()
                    if process.program == "slurmctld"]) == 1


def test_a_start_that_is_replaced_while_it_begins(shell):
    """A child of an `up` that was killed: it begins when another is up."""
    shell.cluster("up")
    place = ClusterFolder(shell.folder())
    start = [shell.python, "-m", "workshop.cluster.inside", "cluster",
             place.folder]
    own = unshare_command(user=bool(os.getuid()))
    variables = {PART_VARIABLE: str(place.folder),
                 CLUSTER_START_VARIABLE: "earlier"}
    end = shell("timeout", "60", *own, *start, **variables)
    assert end.returncode == 1
    assert "another start of the cluster has replaced this one" in end.stderr
    end = shell(*start, **variables)  # as if somebody typed it
    assert end.returncode == 1
    assert "is the first process of a cluster's namespaces" in end.stderr
    assert works(shell)


def test_after_a_restart_of_the_machine(shell):
    """The folder is there, and its processes are not."""
    shell.cluster("up")
    mark = ClusterFolder(shell.folder()).mark
    os.kill(find_part(shell, "the first process"), signal.SIGKILL)
    wait_for(lambda: not shell.processes(), 30)
    assert "FAIL  slurmctld" in shell.cluster("status", status=1)
    assert "is not up" in shell.cluster("kill", "node1", status=1)
    mark.write_text('{"format"')  # its last write has not come to its end
    shell.cluster("up")
    assert works(shell)


def test_what_is_not_a_clusters_stays(shell):
    """A folder without its mark, and a link in the place of the folder."""
    shell.folder().mkdir(parents=True)
    shell.folder().parent.chmod(0o700)
    mine = shell.folder() / "mine"
    mine.touch()
    for action in "up", "down", "status":
        end = shell(shell.python, "-m", "workshop", "cluster", action)
        assert end.returncode == 1 and "not a cluster's folder" in end.stderr
        assert end.stderr.count("\n") == 1
    assert mine.exists()
    shutil.rmtree(shell.folder().parent)
    elsewhere = shell.temporary / "elsewhere"
    elsewhere.mkdir()
    shell.folder().parent.symlink_to(elsewhere)
    assert "another user may write" in shell.cluster("up", status=1)
    shell.folder().parent.unlink()
    assert not [*elsewhere.iterdir()]


@pytest.mark.parametrize("room", ["1M", "80M"])
def test_a_full_disk(shell, room):
    """Before it starts; and later, when SLURM says it of a job."""
    if os.getuid():
        pytest.skip("needs root, to make a small disk")
    end = shell("unshare", "--mount", "sh", "-c", f"""
        mount -t tmpfs -o size={room} none {shell.temporary}
        cd {shell.temporary}
        {shell.python} -m workshop cluster up >/dev/null && {{
            head -c 99M /dev/zero >large
            . {shell.folder()}/env.sh
            sbatch --output=/dev/null --wrap true
            {shell.python} -m workshop cluster down; }}
                ls -A""")
    said = end.stderr.splitlines()
    if room == "1M":
        assert len(said) == 1 and said[0].startswith(
            "error: no space left on device: the cluster needs 50 MB in ")
        assert end.stdout == ""
    else:
        assert "I/O error writing script" in end.stderr
        assert said[-2] == "cluster main is down"
        assert end.stdout.split() == ["large"]


def without(program, command):
    """The command, on a machine without this program."""
    return ("unshare", "--mount", "sh", "-c", f"""
        mount --bind /dev/null "$(readlink -f "$(command -v {program})")"
        exec {command}""")


@pytest.mark.parametrize(("program", "package"), [
    ("slurmctld", "slurm-wlm"), ("munged", "munge"), ("ip", "iproute2")])
def test_a_program_that_is_not_installed(shell, program, package):
    if os.getuid():
        pytest.skip("needs root, to hide a program")
    end = shell(*without(program, f"{shell.python} -m workshop cluster up"),
                PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert end.returncode == 1 and end.stderr.count("\n") == 1
    assert end.stderr.startswith(f"error: {program} not installed; fix: sudo ")
    assert f"--no-install-recommends {package} (" in end.stderr


@pytest.mark.parametrize(("limits", "advice"), [
    ("echo 0 >/proc/sys/user/max_user_namespaces",
     "sudo sysctl -w user.max_user_namespaces=15000"),
    ("echo 0 >/proc/sys/user/max_net_namespaces", "see docs/cluster.md")])
def test_namespaces_are_forbidden(ordinary, limits, advice):
    """The line says by what, and what to type."""
    end = ordinary(
        "unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c",
        f"""{limits} && exec setpriv --ambient-caps=-all --inh-caps=-all \
            {ordinary.python} -m workshop cluster up""")
    assert end.returncode == 1 and end.stderr.count("\n") == 1, end.stderr
    assert advice in end.stderr and "sudo -s" in end.stderr
    assert not ordinary.folder().parent.exists()


def test_the_command_line(shell):
    for words, said in {
            ("up", "--nodes=5"): "--nodes must be from 1 to 4",
            ("up", "--gpus=0"): "--gpus must be from 1 to 8",
            ("up", "--name=../x"): "is not a cluster's name; fix: ",
            ("kill",): "cluster kill needs a node; fix: name one",
            ("down", "node2"): "cluster down takes no node",
            ("kill", "node2"): "is not up; fix: python -m workshop cluster up",
            }.items():
        assert said in shell.cluster(*words, status=1)


def test_the_settings_are_kept(shell):
    """A cluster that is started again is as large as it was."""
    shell.cluster("up", "--nodes=1", "--gpus=3")
    os.kill(find_part(shell, "the first process"), signal.SIGKILL)
    wait_for(lambda: not shell.processes(), 30)
    shell.cluster("up")
    kept = json.loads(ClusterFolder(shell.folder()).mark.read_text())
    assert (kept["nodes"], kept["gpus"]) == (1, 3)
    for name in "node9", "munged":  # which runs, and is no node
        assert f"no such part: {name}; fix: " in shell.cluster(
            "kill", name, status=1)
    assert shell.run("sinfo -h -N -o '%N %G'").split("\n")[0].strip(
        ) == "node1 gpu:h100:3"
