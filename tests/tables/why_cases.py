"""`why` under real launchers: eight faults in many scripts, and sound runs.

    pytest --tables tests/workshop/test_why_course.py -k of_the_table

takes an hour; `-k "of_the_table and sound"` runs the sound ones alone.

Each fault is planted in a copy of a stage's script or of somebody else's
(rankcheck/tests/tables/foreign), which torchrun, mpirun or srun starts as two
processes; srun on the throw-away cluster of cluster.py, by the stage's batch
file. From the first sign of the fault on, `why` is asked again and again: its
first complaint has to be the right one, within a minute. About a sound run it
must not complain. The results are in docs/tables.md.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import cluster
from conftest import CLONE_PATH, MPICH, all_processes, edit
from stages import make_dataset

from backstage import ROOT
from rankcheck.engine.ranks import free_port
from rankcheck.system.hook import HOOK
from rankcheck_testing.isolation import OWNER
from rankcheck_testing.verify_cases import TABLES
from workshop.jobs.mpirun import OPEN_MPI
from workshop.stages import STAGES, batch_files

FOREIGN = TABLES / "foreign"
MINUTE = 60  # within which `why` has to name a fault
START = 150  # seconds to its first sign, at most
ASKED = 5  # times about a sound run, while it runs
SLOW = ("--max-steps", 10**6, "--checkpoint-every", 10**6, "--eval-every",
        10**6, "--generate-every", 10**6, "--learning-rate", 1e-5)
# A group of processes with little memory, for one rank; for root alone
GROUP = Path(f"/sys/fs/cgroup/memory/why-cases-{os.getpid()}")

# The fault: what `why` may call it, and words of its reason; also of what is
# seen, where it is not proven.
MORE = ("rank killed|aborted in (another|the same) line"
        "|rank failed(?=.*[Tt]runcate)")
FAULTS = {
    # gloo aborts a rank that gets more than it expects, MPI raises an error
    "skipped collective": (f"collective mismatch|{MORE}", "rank 1"),
    "another order": (
        f"collective mismatch|deadlock|{MORE}", "rank 1"),
    # MPICH lets it pass: then the script itself fails, one line below
    "another shape": (
        f"collective mismatch|rank failed|{MORE}", "rank 1"),
    # the kernel of its node is asked by another rank there, if there is one
    "killed for memory": (
        "(?=.*(lack of memory|SIGKILL, according to the launcher))"
        "(rank killed|rank disappeared)", "rank 1"),
    "blocked port": ("blocked port", "from rank 1"),
    "wrong MASTER_ADDR": ("wrong MASTER_ADDR", "192.0.2.77"),
    "straggler": ("straggler", "rank 1"),
    "dead node": ("rank killed|rank disappeared", "rank 1"),
}
# Tells each rank the name of another node
NODE = ("export SLURMD_NODENAME=node$((1 + ${RANK-${OMPI_COMM_WORLD_RANK-"
        '$PMI_RANK}})); exec "$@"')
# MPI's processes do not meet at an address of ours, and our stages let the
# ranks of one node meet there, whatever they are told.
MEET = ("blocked port", "wrong MASTER_ADDR")

# ------------------------------------------------------------- the faults

BEGIN = """\
import itertools, os, sys, time
ME = next(int(os.environ[name]) for name in (
    "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    if name in os.environ)
STEPS = itertools.count()
def note():
    open({mark!r}, "a").close()
"""
AT_BEGIN = {
    # CLONE_NEWNET, and CLONE_NEWUSER for anybody but root
    # the whole process, with the hook's thread, which has begun already
    "blocked port": f"""\
note()
if ME == 1 and "ALONE" not in os.environ:
    first = open("/proc/self/environ").read().split("\\0")
    os.execvpe("unshare", ["unshare", "-{'r' * (os.getuid() > 0)}n",
        sys.executable, *sys.argv], dict(
            one.split("=", 1) for one in first if one) | {{"ALONE": "1"}})
""",
    "wrong MASTER_ADDR": 'note()\nos.environ["MASTER_ADDR"] = "192.0.2.77"\n',
}
NOTE = "if at == 25:\n    note()\n"
AT_STEP = {
    "killed for memory": f"""\
if ME == 1 and at == 25:
    note()
    open("{GROUP}/cgroup.procs", "w").write(str(os.getpid()))
    b"x" * 10**9
""",
    "dead node": """\
if ME == 1 and at == 25:
    note()
    os.kill(os.getpid(), 9)
""",
    "straggler": f"time.sleep(0.3 * (ME == 1))\n{NOTE}",
    "slow": "time.sleep(9)\nnote()\n",
}
# {0}: the line that reduces the report, {1}: another collective, {2}: joins
AT_REDUCE = {
    "skipped collective": "if at != 25 or ME != 1:\n    {0}",
    "another order": "if at == 25 and ME == 1:\n    {1}\n{0}"
                     "if at == 25 and ME != 1:\n    {1}\n",
    "another shape": "if at == 25 and ME == 1:\n"
                     "    report = {2}([report] * 9)\n{0}",
}
TORCH = ("dist.all_reduce(report)  # the sum over all ranks\n",
         "dist.all_gather([torch.zeros(99) for _ in range(2)], "
         "torch.ones(99))", "torch.cat")
MPI = ("comm.Allreduce(MPI.IN_PLACE, report)  # the sum over all ranks\n",
       "comm.Allgather(np.ones(99), np.ones((2, 99)))", "np.concatenate")
# Where a step begins, in scripts that reduce no report: they get one.
BEGINS = {
    "lit": "        return self.model(*batch)\n",
    "ddp.py": "        optimizer.zero_grad()\n",
    "nano.py": "    optimizer.step()\n",
    "lightning_trainer.py": "        x, y = batch\n",
}
LOOP = "        lr = get_lr(step, max_steps, hp)\n"  # in all others
REPORT = ("import torch.distributed as dist\n"
          "report = torch.ones(2)\n" + TORCH[0])


def plant(name, fault, mark):
    """A stage's or somebody else's script with a fault.

    It writes the time of the first sign to `mark`.
    """
    text = (STAGES[name].solution if name in STAGES else
            FOREIGN / name).read_text()
    begin, words = BEGINS.get(name, LOOP), MPI if name == "mpi" else TORCH
    first = re.search("^import .*\n", text, re.MULTILINE)[0]
    step = "at = next(STEPS)\n" + AT_STEP.get(fault, NOTE)
    if name in BEGINS:
        step += REPORT
    space = re.match(" *", begin)[0]
    text = edit(text, (first, BEGIN.format(mark=str(mark))
                       + AT_BEGIN.get(fault, "") + first),
                (begin, indent(step, space) + begin))
    if fault in AT_REDUCE:
        text = edit(text, (space + words[0], indent(
            AT_REDUCE[fault].format(*words), space)))
    return text.replace("range(100)", "range(10**6)")  # ddp.py is short


# ---------------------------------------------------------- the launchers


def environment(**more):
    return {**{name: value for name, value in os.environ.items()
               if not name.startswith("WORKSHOP_") and name != OWNER},
            **OPEN_MPI,
            "PYTHONPATH": f"{CLONE_PATH}:{HOOK}", "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as activate.sh
            "PYTHONUNBUFFERED": "1", **more}


class Plain:
    """Two processes of one node, started in a terminal."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        self.mark = folder / "mark"

    def launch(self, launcher, fault, script, *flags, **variables):
        python, env = [sys.executable], environment(**variables)
        if fault == "dead node":
            python[:0] = ["bash", "-c", NODE, "-"]
        if launcher == "mpich":
            (self.folder / "libmpi.so.12").symlink_to(MPICH)
            env["LD_LIBRARY_PATH"] = str(self.folder)
        words = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run",
                         "--nproc-per-node=2", "--master-addr=127.0.0.1",
                         f"--master-port={free_port()}", "--no-python", "--",
                         *python],
            "mpirun": ["mpirun", "-n", 2, *python],
            "mpich": ["mpiexec.mpich", "-n", 2, *python],
            "as_torchrun": ["mpirun", "-n", 2, *python, "-m",
                            "workshop.as_torchrun"]}[launcher]
        self.log = open(self.folder / "log", "w")
        self.process = subprocess.Popen(
            [str(word) for word in (*words, script, *flags)], cwd=ROOT,
            env=env, stdout=self.log, stderr=self.log, start_new_session=True)

    def start(self, name, launcher, fault):
        script = self.folder / "train.py"
        script.write_text(plant(name, fault, self.mark))
        flags = []
        if name in STAGES:
            make_dataset(self.folder / "data")
            flags = [*tiny(name), "--data", self.folder / "data", "--run-dir",
                     self.run]
        self.launch(launcher, fault, script, *flags,
                    RANKCHECK_WHY=f"{self.run}/why")

    def why(self):
        """By the run's folder."""
        return subprocess.run(
            [sys.executable, "-m", "workshop", "why", self.run], cwd=ROOT,
            env=environment(), capture_output=True, text=True)

    def clear(self):
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        for pid, words, _ in all_processes():  # in sessions of their own
            if any(str(self.folder) in word for word in words):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.log.close()


class Job:
    """A job on the throw-away cluster: two nodes, a process on each."""

    def __init__(self, folder, slurm):
        self.slurm, self.mark, self.node = slurm, folder / "mark", None

    def start(self, stage, launcher, fault):
        script = self.slurm.repo / "solutions" / STAGES[stage].solution.name
        self.kept = script, script.read_text()
        script.write_text(plant(  # of a dead node: a real one
            stage, "" if fault == "dead node" else fault, self.mark))
        variables = {"PYTHONUNBUFFERED": "1"}
        if stage == "mpi":  # which srun starts with MPICH
            library = self.slurm.folder / "libmpi.so.12"
            library.unlink(missing_ok=True)
            library.symlink_to(MPICH)
            variables |= {"LD_LIBRARY_PATH": str(library.parent),
                          "SLURM_MPI_TYPE": "pmi2", "UCX_TLS": "self,tcp"}
            site = self.slurm.repo / "site.sh"
            if "pmi2" not in site.read_text():
                with site.open("a") as file:
                    file.write("export SLURM_MPI_TYPE=pmi2\n")
        name = next(name for name in batch_files() if name.startswith(stage))
        self.job = self.slurm.submit(
            name, *tiny(stage), "--data", "data", options=[
                "--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1"],
            **variables)

    def crash(self):
        """The second node; it comes back when the job has gone."""
        self.node = self.slurm.nodes[1]
        self.slurm.cluster.kill_node(self.node)

    def why(self):
        return self.slurm(sys.executable, "-m", "workshop", "why", self.job,
                          check=False, PYTHONPATH=str(self.slurm.repo))

    def clear(self):
        self.slurm("scancel", self.job, check=False)
        with contextlib.suppress(AssertionError):
            cluster.wait_for(lambda: not self.slurm.processes(self.job), 40)
        self.kept[0].write_text(self.kept[1])
        if self.node:
            self.slurm("scontrol", "update", f"nodename={self.node}",
                       "state=down", "reason=x")
            self.slurm.cluster.start_part(self.node)
            cluster.wait_for(lambda: "idle" in self.slurm(
                "sinfo", "-h", "-n", self.node, "-o", "%T").stdout, 60)


def tiny(stage):
    flags = ["--preset", "tiny", "--device", "cpu", "--microbatch-size", 2]
    return [*flags, *SLOW, *(["--tensor-parallel", 2] * (stage == "tp")),
            *(["--pipeline-parallel", 2] * (stage == "3d"))]


# ------------------------------------------------------- what is to be shown


def wait_for_sign(job):
    """Until the script has noted its fault; the time of that."""
    cluster.wait_for(job.mark.exists, START, lambda: "no sign of the fault")
    return job.mark.stat().st_ctime


def name_fault(job, fault):
    """Check that the first complaint of `why` is the right one; without one,
    return what it says instead.
    """
    begin = wait_for_sign(job)
    if fault == "dead node" and isinstance(job, Job):
        job.crash()
        begin = time.time()
    while True:
        said = job.why()
        seconds = time.time() - begin
        if said.returncode == 1 or seconds > MINUTE:
            break
        time.sleep(1)
    line = (said.stdout or said.stderr).partition("\n")[0]
    pattern, words = FAULTS[fault]
    if said.returncode != 1:
        assert re.match("no fault is proven: .*", line), line
        return line
    assert re.match(f"(?:{pattern}): .*{words}", line), line
    assert seconds <= MINUTE, (line, seconds)
    return ""


def stay_silent(job):
    """Check that `why` does not complain."""
    wait_for_sign(job)
    for _ in range(ASKED):
        said = job.why()
        assert said.returncode != 1, said.stdout or said.stderr
        time.sleep(4)


@contextlib.contextmanager
def busy(number):
    """So many other processes that compute."""
    waste = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    others = [subprocess.Popen([sys.executable, "-c", waste])
              for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# script, launcher; what the eight faults are tried on
PLACES = (("ddp", "torchrun"), ("fsdp", "torchrun"), ("tp", "torchrun"),
          ("lit", "torchrun"), ("3d", "torchrun"), ("ddp.py", "torchrun"),
          ("nano.py", "torchrun"), ("lightning_trainer.py", "torchrun"),
          ("ddp", "as_torchrun"), ("mpi", "mpirun"), ("mpi", "mpich"),
          ("ddp", "srun"), ("fsdp", "srun"), ("mpi", "srun"))
# script, launcher, how it is slow, beside how many others
SOUND = (("ddp", "torchrun", "", 0), ("fsdp", "torchrun", "", 6),
         ("ddp", "torchrun", "slow", 0), ("mpi", "mpirun", "slow", 6),
         ("mpi", "mpich", "", 6), ("ddp", "as_torchrun", "", 0),
         ("ddp", "srun", "", 6), ("fsdp", "srun", "slow", 0),
         ("3d", "torchrun", "", 6), ("nano.py", "torchrun", "", 6),
         ("ddp.py", "torchrun", "slow", 6),
         ("lightning_trainer.py", "torchrun", "", 0))


def cases():
    """(name, stage, launcher, fault, others): "" for a sound run."""
    for stage, launcher in PLACES:
        for fault in FAULTS:
            if fault not in MEET or stage not in STAGES or (
                    launcher == "srun" and stage != "mpi"):
                yield f"{fault}: {stage}, {launcher}", (
                    stage, launcher, fault, 0)
    for stage, launcher, slow, others in SOUND:
        how = f"{slow} " * bool(slow) + f"beside {others} others" * (
            others > 0)
        yield f"sound: {stage}, {launcher} {how}".strip(), (
            stage, launcher, slow, others)


@contextlib.contextmanager
def little_memory():
    """A group of processes, of which the kernel ends one that takes more."""
    GROUP.mkdir()
    try:
        (GROUP / "memory.limit_in_bytes").write_text("100M")
        yield
    finally:
        cluster.wait_for(lambda: not (GROUP / "tasks").read_text(), 20)
        GROUP.rmdir()


def try_out(job, stage, launcher, fault, others):
    """Start the job, and ask `why`, which has to be right. Returns what it
    says of a fault that it does not name.
    """
    memory = (little_memory() if fault == "killed for memory" else
              contextlib.nullcontext())
    with memory, busy(others):
        try:
            job.start(stage, launcher, fault)
            if fault in FAULTS:
                return name_fault(job, fault)
            stay_silent(job)
        finally:
            job.clear()
