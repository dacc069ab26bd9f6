"""A SLURM of three nodes with four simulated GPUs, and a clone beside it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import (
    ENVIRONMENT,
    all_processes,
    commit_all,
    copy_course,
    needs,
    program,
)
from stages import Result, make_dataset

from backstage.errors import UserError
from rankcheck.engine.ranks import RankExit
from rankcheck_testing.isolation import OWNER
from rankcheck_testing.support import wait_for
from workshop.cluster.control import Cluster
from workshop.cluster.machine import require_namespaces
from workshop.cluster.settings import ClusterFolder, ClusterSettings

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
FLAGS = ("--preset", "tiny", "--data", "data", "--microbatch-size", 1,
         "--device", "cpu")  # the GPUs are not real

# In the place of a stage. Without torch, each rank says where it is, and
# rank 0 counts steps, saves each of them, and stops where it is told to.
COUNTS = """\
import json, os, signal, sys, time
from pathlib import Path

from backstage.errors import require, run_main
from backstage.process import name_ranks
from backstage.record import COLUMNS, RECORD, Metrics
from backstage.signals import Signals
from workshop.results.runs import CONFIG, COUNTS

SAYS = ("SLURM_NODEID", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
        "MASTER_PORT")


def main():
    name_ranks()
    rank, size, on_node = (int(os.environ.get(name, one)) for name, one in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)))
    flags = dict(zip(sys.argv[1:], sys.argv[2:]))
    steps, run = int(flags["--max-steps"]), Path(flags["--run-dir"])
    require(steps, "nothing to do: check --max-steps")
    os.write(1, ("node %s cores %s gpus %s port %s\\n" % tuple(
        os.environ.get(name) for name in SAYS)).encode())
    signals, saved = Signals(rank), run / "checkpoints"
    saved.mkdir(parents=True, exist_ok=True)
    first = max([int(file.stem[5:]) for file in saved.iterdir()], default=0)
    ready = run / "ready" / Path(os.environ.get("RANKCHECK_WHY", "once")).name
    ready.mkdir(parents=True, exist_ok=True)
    (ready / str(rank)).touch()
    if rank == 0:
        while len([*ready.iterdir()]) < size:  # as a group of processes waits
            time.sleep(0.05)
        ones = dict.fromkeys((*CONFIG, *COUNTS), 1)
        (run / RECORD).write_text(json.dumps({
            "stage": "ddp", "device": "cpu", "max_steps": steps, "config":
            ones, "world_size": size, "nodes": size // on_node,
            "startup": time.time(),
            "hyperparameters": ones | {"preset": "nano", "data": "x"}}))
        metrics = Metrics(run / "metrics.csv", first)
        print(f"resuming after step {first - 1}\\n" * bool(first), end="")
    for step in range(first, steps):
        time.sleep(0.1)
        if rank == 0:
            print(f"| step {step:3}", flush=True)
            metrics.add(dict.fromkeys(COLUMNS, 1) | {"step": step})
            (saved / f"step_{step + 1:08}.pt").touch()
        if signals.last:
            print("stopped by", signal.Signals(signals.last).name)
            break


run_main(main)
"""

# What is installed on the nodes of a site, in place of a GPU's.
NVIDIA_SMI = """\
#!/bin/sh
while echo "$@" && [ "$1" = dmon ]; do sleep 1; done
"""


class Slurm:
    """A cluster, and a clone of the repository that submits to it."""

    def __init__(self, cluster, repo):
        self.folder, self.repo = repo.parent, repo
        self.cluster, self.nodes = cluster, cluster.settings().names
        self.env = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "WORKSHOP_"))
            and name != OWNER}
        self.env |= {"WORKSHOP": str(repo),  # as after activate.sh
                     **self.cluster.environment()}

    def __call__(self, *command, check=True, **variables):
        """Run a command in the folder of the clone; its result."""
        return subprocess.run(
            [str(word) for word in command], cwd=self.repo.parent,
            env=self.env | variables, text=True, check=check,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE if not check
            else None)

    def counting(self, stage, first=""):
        """With a stage that counts, after these lines."""
        return holding(self.repo / "solutions" / f"train_gpt2_{stage}.py",
                       first + COUNTS)

    def submit(self, name, *flags, options=(), **variables):
        """Submit a batch file with flags; returns the job's number."""
        return self("sbatch", "--parsable", "--output=%j.log", *options,
                    self.repo / "batchfiles" / f"batch-{name}.sh",
                    *flags, **variables).stdout.strip()

    def job(self, job):
        out = self("scontrol", "-o", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in out.split() if "=" in word)

    def wait(self, job):
        """Wait for the job's end; returns what SLURM says about it."""
        wait_for(lambda: self.job(job)["JobState"] in ENDED,
                 explain=lambda: self.explain(job))
        return self.job(job)

    def explain(self, job):
        """What is known of a job that takes too long."""
        about = self.job(job)
        log = Path(about["StdOut"])
        return "\n".join((
            str(about), log.read_text() if log.exists() else "no log",
            *map(str, self.processes(job))))

    def log(self, job):
        file = self.repo.parent / f"{job}.log"
        return file.read_text() if file.exists() else ""

    def result(self, name, job):
        return Result(self.repo / "runs" / f"{name}-{job}",
                      [RankExit(0, "", "")])

    def processes(self, job):
        """The processes of a job, on any node: (pid, node, command)."""
        mine = {f"SLURM_JOB_ID={job}", f"SLURM_CONF={self.env['SLURM_CONF']}"}
        return [(pid, next((one.partition("=")[2] for one in variables
                            if one.startswith("SLURMD_NODENAME=")), None),
                 command)
                for pid, command, variables in all_processes()
                if mine <= {*variables}]

    def ranks(self, job):
        """Those of them that train: (pid, node)."""
        return [(pid, node) for pid, node, command in self.processes(job)
                if "torchrun" not in " ".join(command[:2])
                and any("/train_gpt2_" in word for word in command[:3])]


def world(folder):
    """How many nodes and processes trained, as the run says."""
    record = json.loads((folder / "hyperparameters.json").read_text())
    return record["nodes"], record["world_size"]


@contextmanager
def holding(file, text):
    kept = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(kept)


def site(slurm, line):
    """With one more line in the clone's site.sh."""
    file = slurm.repo / "site.sh"
    return holding(file, f"{file.read_text()}{line}\n")


def clone_course(clone):
    """Make a clone that submits jobs; it takes its dataset to be there."""
    copy_course(clone, *ENVIRONMENT, "backstage", "batchfiles", "code",
                "notebooks", "solutions", "workshop")
    (clone / "fineweb" / "demo").mkdir()
    (clone / "fineweb" / "demo" / "manifest.json").touch()


def needs_namespaces():
    """Skip a test where this machine allows none; in CI it fails."""
    try:
        require_namespaces(os.geteuid() == 0)
    except UserError as error:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(str(error))


@contextmanager
def start_cluster(**settings):
    """The cluster of `python -m workshop cluster`, with these settings."""
    needs("slurmctld", "munged", "git")
    needs_namespaces()
    if settings.get("limits_memory"):  # the cgroups have the nodes' names
        settings["prefix"] = f"lab{os.getpid()}-"
    chosen = ClusterSettings(**settings)
    folder = Path(tempfile.mkdtemp(prefix="sl"))  # short, for unix sockets
    folder.chmod(0o755)
    cluster = Cluster(ClusterFolder(folder / "lab"))
    try:
        cluster.up(chosen)
        yield cluster
    finally:
        cluster.down()
        if folder.exists():  # else it was empty
            shutil.rmtree(folder)


@contextmanager
def clone_beside(cluster):
    """A clone that submits to a cluster; its jobs end with it."""
    folder = Path(tempfile.mkdtemp(prefix="sl"))
    folder.chmod(0o755)
    repo = folder / "my clone"
    clone_course(repo)
    (repo / "bin").mkdir()
    program(repo / "bin" / "nvidia-smi", NVIDIA_SMI)
    (repo / "site.sh").write_text(
        f'WORKSHOP_VENV="{sys.prefix}"\nPATH="{repo}/bin:$PATH"\n')
    commit_all(repo)
    make_dataset(folder / "data")
    slurm = Slurm(cluster, repo)
    try:
        yield slurm
    finally:
        slurm("scancel", "--me")
        wait_for(lambda: not slurm("squeue", "-h").stdout, 120)
        shutil.rmtree(folder)


@contextmanager
def start(**settings):
    """A cluster with these settings, and a clone beside it."""
    with start_cluster(**settings) as cluster, clone_beside(cluster) as slurm:
        yield slurm
