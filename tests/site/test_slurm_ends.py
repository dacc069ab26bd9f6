"""Jobs that do not come to their end: signals, crashed nodes, killed ranks."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ENDED, FLAGS, site, start, wait_for, world
from conftest import edit, program
from stages import STARTER, Result, agree, train

from backstage import ROOT
from workshop.cluster.processes import find_daemon, find_processes

pytestmark = pytest.mark.whole

BATCHFILES = ROOT / "batchfiles"
ONE_CORE = "--cpus-per-gpu=1"
SLOW = "import time\ntime.sleep(6)\n"  # to import, as torch may be


class Starts:
    """A job that is about to be disturbed, and starts again."""

    def __init__(self, slurm, name, *flags, options=(), **variables):
        self.slurm = slurm
        self.job = slurm.submit(name, *flags, options=[ONE_CORE, *options],
                                **variables)
        self.result, self.starts = slurm.result(name, self.job), 0

    @property
    def log(self):
        return self.slurm.log(self.job)

    def wait(self, condition):
        wait_for(condition, explain=lambda: (
            f"{self.slurm.job(self.job)}\n{self.log}"))

    def get_going(self):
        """Wait until it has started again, and logged steps since then."""
        self.starts += 1
        self.wait(lambda: f"\n{self.log}".count("\njob  ") == self.starts
                  and self.log.rpartition("\njob  ")[2].count("| step") > 2)

    def signal(self):
        """As SLURM does before the time limit."""
        self.slurm("scancel", "--batch", "--signal=USR1", self.job)

    def kill(self, number):
        """Send this signal to the rank on the second node."""
        pid, = (pid for pid, node in self.slurm.ranks(self.job)
                if node == self.slurm.nodes[1])
        os.kill(pid, number)

    def lose_a_node(self):
        """To a job that is urgent, and short."""
        nodes = self.slurm("scontrol", "show", "hostnames",
                           self.slurm.job(self.job)["NodeList"]).stdout.split()
        urgent = self.slurm(
            "sbatch", "--parsable", "--partition=urgent",
            f"--nodelist={nodes[-1]}", "--exclusive", "--wrap",
            "true").stdout.strip()
        assert self.slurm.wait(urgent)["JobState"] == "COMPLETED", self.log

    def cancel(self):
        self.slurm("scancel", self.job)
        assert self.slurm.wait(self.job)["JobState"] == "CANCELLED"

    def has_lost_nothing(self, times):
        """It has gone on that often; no step is missing, and none is twice."""
        assert self.log.count("resuming after step") == times
        steps = self.result.column("step")
        assert steps == list(range(len(steps)))


@pytest.fixture(scope="module")
def overdue():
    """A job whose run never begins, on a cluster of its own: the shortest
    time that there is passes while the other tests run."""
    with (start(nodes=1) as slurm,
          slurm.counting("std", SLOW.replace("6", "600"))):
        yield Starts(slurm, "std", "--max-steps", 1, options=["--time=1"])


def test_preempted(slurm, overdue, data, tmp_path):
    """Lightning, which knows SLURM and its signals by itself, goes on as if
    nothing had happened when an urgent job takes a node.
    """
    flags = ("--max-steps", 40, "--minibatch-size", 32, "--eval-every", 20,
             "--generate-every", 40, "--learning-rate", 2e-4)
    job = Starts(slurm, "lit-2n1g", *FLAGS, *flags)
    job.get_going()
    job.lose_a_node()
    assert slurm.wait(job.job)["JobState"] == "COMPLETED", job.log
    job.has_lost_nothing(1)
    assert world(job.result.folder) == (2, 2)
    assert "stopped by SIGTERM, checkpoint saved" in job.log
    agree(job.result, train("std", tmp_path / "alone", *flags, data=data))


def test_preempted_and_out_of_time(slurm):
    """An urgent job takes a node; later the job's time is nearly over.

    With srun and torchrun, through which a signal has the longest way. The
    node is taken before the first step, too. A job has less time than its
    signal needs only once it trains: at its start bash would be ended by the
    signal.
    """
    with slurm.counting("ddp", SLOW):
        job = Starts(slurm, "ddp-2n1g", "--max-steps", 10**6)
        job.wait(lambda: "\ncommand " in job.log)
        job.lose_a_node()
        job.starts += 1
        job.get_going()
        job.lose_a_node()
        job.get_going()
        assert "stopped by SIGTERM" in job.log
        for minutes in 2, 10:
            slurm("scontrol", "update", f"JobId={job.job}",
                  f"TimeLimit={minutes}")  # it looks twice a minute
            job.wait(lambda: "stopped by SIGUSR1" in job.log)
        job.wait(lambda: slurm.job(job.job)["Restarts"] == "3")
        job.cancel()
    assert "requeueing, to continue after" in job.log.rpartition("SIGUSR1")[2]
    job.has_lost_nothing(1)


@pytest.mark.parametrize("name", ["ddp-1n2g", "std"])
def test_a_signal_during_the_start(slurm, name):
    """It waits for the first step; or, if that comes too late, for the end."""
    stage = name[:3]
    with slurm.counting(stage, SLOW):
        job = Starts(slurm, name, "--max-steps", 10**6)
        job.wait(lambda: "\ncommand " in job.log)
        job.signal()
        job.wait(lambda: "stopped by SIGUSR1" in job.log)
        assert "the time limit is near" in job.log
        job.starts += 1
        job.get_going()
        job.cancel()
        job.has_lost_nothing(1)
    assert job.log.count("requeueing, to continue after") == 1
    *said, command = job.log.splitlines()[-1].split(": ")
    assert said[:2] == [name, "SLURM ends this job (Reason=None); fix"]
    said = slurm("bash", "-c", command, check=False,
                 PYTHONPATH=str(slurm.repo))
    assert "no such folder" not in said.stderr


def test_a_run_ends_while_slurm_delivers_a_signal(slurm):
    """A grace time begins with SIGCONT. While SLURM delivers it, the job has
    another state, here for as long as its node does not answer.
    """
    with slurm.counting("std"):
        job = Starts(slurm, "std", "--max-steps", 10**6)
        job.get_going()
        daemon = find_daemon(find_processes(slurm.cluster.place),
                             slurm.job(job.job)["NodeList"])
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            slurm("scancel", "--signal=CONT", job.job)
            job.wait(lambda: slurm.job(job.job)["JobState"] == "SIGNALING")
            (pid, _), = slurm.ranks(job.job)
            os.kill(pid, signal.SIGUSR1)
            job.wait(lambda: re.search("\nstd: ", job.log))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        job.get_going()
        job.cancel()
    assert job.log.count("requeueing, to continue after") == 1
    job.has_lost_nothing(1)


# Tells that it has requeued a job, and returns when SLURM has ended its step
SLOW_SCONTROL = """\
#!/bin/bash
"$(type -aP scontrol | sed -n 2p)" "$@" || exit
[ "$1" != requeue ] || {{ echo "$*" >>{calls}; sleep 5; }}
"""


def test_a_job_that_is_cancelled_while_it_is_requeued_stays_so(
        slurm, tmp_path):
    """SLURM ends the scontrol that requeues it: it is not asked once more."""
    calls = tmp_path / "calls"
    program(tmp_path / "scontrol", SLOW_SCONTROL.format(calls=calls))
    with slurm.counting("std"), site(slurm, f"PATH={tmp_path}:$PATH"):
        job = Starts(slurm, "std", "--max-steps", 10**6)
        job.get_going()
        job.signal()
        job.wait(calls.exists)
        job.cancel()
        job.wait(lambda: not slurm.processes(job.job))
        assert slurm.job(job.job)["JobState"] == "CANCELLED"
    assert calls.read_text() == f"requeue {job.job}\n"


def test_the_starter_saves_before_its_time_limit_and_goes_on(slurm):
    """Signalled while its ranks import torch; what is cancelled stays so."""
    folder = slurm.repo.parent
    file = program(folder / "batch.sh", edit(
        STARTER.with_name("batch.sh").read_text(), (
            "# Load your", f"PATH={Path(sys.executable).parent}:$PATH\n#")))
    shutil.copy(STARTER, folder)

    def submit(*flags):
        return slurm(
            "sbatch", "--parsable", "--output=%A.log", "--array=2",
            "--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=2",
            "--cpus-per-task=1", file, *flags).stdout.strip()

    job, short = submit("--max-steps", 10**6), submit("--max-steps", 3)
    wait_for(lambda: any("train.py" in command
                         for *_, command in slurm.processes(job)))
    assert "| step" not in slurm.log(job)
    slurm("scancel", "--batch", "--signal=USR1", f"{job}_2")
    wait_for(lambda: "| step" in slurm.log(job).partition(
        "stopped by a signal")[2], explain=lambda: slurm.log(job))
    slurm("scancel", job)
    for number, state, restarts in (job, "CANCELLED", "1"), (
            short, "COMPLETED", "0"):
        assert slurm.wait(number)["JobState"] == state, slurm.log(number)
        assert slurm.job(number)["Restarts"] == restarts
        steps = Result(folder / f"runs/{number}_2", []).column("step")
        assert steps == [*range(len(steps))]


def test_a_starter_that_is_not_requeued_has_failed(slurm):
    """What depends on it does not start; the printed command goes on."""
    folder = slurm.repo.parent
    program(folder / "batch.sh", edit(
        STARTER.with_name("batch.sh").read_text(), (
            "# Load your", f"PATH={Path(sys.executable).parent}:$PATH\n#")))
    shutil.copy(STARTER, folder)
    asked = {"Partition": "urgent", "TimeLimit": "00:07:00",
             "Account": "proj", "Requeue": "0"}
    job = slurm(
        "sbatch", "--parsable", "--output=%j.log", "--no-requeue",
        "--partition=urgent", "--time=7", "--account=proj", "--nodes=1",
        "--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1",
        folder / "batch.sh", "--max-steps", 10**6).stdout.strip()
    helps = slurm(
        "sbatch", "--parsable", "--output=%j.log", "--nodes=1",
        "--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1",
        folder / "batch.sh", "--help").stdout.strip()
    wait_for(lambda: "| step" in slurm.log(job),
             explain=lambda: slurm.log(job))
    slurm("scancel", "--batch", "--signal=USR1", job)
    for number in job, helps:  # which makes no step, and is not tried again
        end = slurm.wait(number)
        assert (end["JobState"], end["ExitCode"], end["Restarts"]) == (
            "FAILED", "1:0", "0"), slurm.log(number)
    *_, said, command = slurm.log(job).splitlines()
    assert "not finished, and the job was not requeued" in said
    again = slurm("bash", "-c", f"{command.strip()} | grep -o '[0-9]*$'",
                  ).stdout.strip()
    about = slurm.job(again)
    assert {name: about[name] for name in asked} == asked
    assert about["NumNodes"] in ("1-1", "1")  # it may have begun
    log = Path(about["StdOut"])
    wait_for(lambda: log.exists() and "| step" in log.read_text())
    slurm("scancel", again)
    slurm.wait(again)
    assert "| step    0/" not in log.read_text()
    log.unlink()


def test_each_element_of_an_array(slurm):
    """One goes on, although its id is the array's; a cancelled one does not.

    Each has a run, and `why` knows it.
    """
    with slurm.counting("std"):
        array = slurm.submit(
            "std", "--max-steps", 10**6,
            options=["--array=1-2", "--output=%A_%a.log", ONE_CORE])
        first, last = f"{array}_1", f"{array}_2"
        wait_for(lambda: "| step" in slurm.log(first)
                 and "| step" in slurm.log(last))
        slurm("scancel", first)
        slurm("scancel", "--batch", "--signal=USR1", last)
        wait_for(lambda: "resuming" in slurm.log(last),
                 explain=lambda: slurm.log(last))
        queue = slurm("squeue", "-h", "-o", "%i", "-j", array).stdout.split()
        slurm("scancel", array)
    assert queue == [last]
    assert "SLURM ends this job" in slurm.log(first)
    for job in first, last:
        assert (slurm.result("std", job).folder / "metrics.csv").exists()
    wait_for(lambda: "SLURM ends this job" in slurm.log(last))
    said = slurm(sys.executable, "-m", "workshop", "why", last, check=False,
                 PYTHONPATH=str(slurm.repo))
    assert not re.search("no run in", said.stderr)


def test_an_array_that_is_suspended_and_requeued_in_part(slurm):
    """Each element comes to its end, and none loses a step."""
    with slurm.counting("std"):
        array = slurm.submit(
            "std", "--max-steps", 60,
            options=["--array=1-3", "--output=%A_%a.log", ONE_CORE])
        elements = [f"{array}_{number}" for number in (1, 2, 3)]
        for job in elements:
            wait_for(lambda: "| step   2" in slurm.log(job))  # noqa: B023
        suspended, requeued, signalled = elements
        slurm("scontrol", "suspend", suspended)
        slurm("scontrol", "requeue", requeued)
        slurm("scancel", "--batch", "--signal=USR1", signalled)
        wait_for(lambda: "resuming" in slurm.log(signalled))
        wait_for(lambda: "resuming" in slurm.log(requeued))
        slurm("scontrol", "resume", suspended)
        for job, restarts in zip(elements, "011", strict=True):
            end = slurm.wait(job)
            assert end["JobState"] == "COMPLETED", slurm.log(job)
            assert end["Restarts"] == restarts
            steps = slurm.result("std", job).column("step")
            assert steps == list(range(60))


SIGNALS = "HUP", "INT", "USR1", "USR2", "TERM", "KILL"
HOW = {"batch": ["--batch"], "steps": [], "all": ["--full"]}


def test_a_signal_is_no_success(slurm):
    """To the batch file's shell, to its steps, or to all: a job that has not
    come to its end is COMPLETED only if SLURM starts it again.
    """
    def settled(job):
        about = slurm.job(job)
        return (about["JobState"] in ENDED or about["Restarts"] == "1"
                or slurm.log(job).count("| step") > steps + 20)

    with slurm.counting("std"):
        jobs = {(name, how): slurm.submit(
            "std", "--max-steps", 10**6, options=[ONE_CORE])
            for name in SIGNALS for how in HOW}
        for (name, how), job in jobs.items():
            wait_for(lambda: "| step   2" in slurm.log(job))  # noqa: B023
            steps = slurm.log(job).count("| step")
            slurm("scancel", *HOW[how], f"--signal={name}", job)
            wait_for(lambda: settled(job))  # noqa: B023
            about, log = slurm.job(job), slurm.log(job)
            assert about["JobState"] != "COMPLETED", (name, how, log)
            if (name, how) in (("USR1", "batch"), ("TERM", "all")):
                assert about["Restarts"] == "1", log
            slurm("scancel", job)


# What a job was asked for, as SLURM tells it.
ASKED = re.compile(
    r"\b(JobName|Account|QOS|Nice|Partition|TimeLimit|Requeue|ArrayTaskId|"
    r"NumNodes|NumCPUs|ExcNodeList|MinMemoryNode|OverSubscribe|WorkDir|"
    r"CpusPerTres|TresPerNode)=(.*?)(?= \S+=|$)", re.M)


@pytest.mark.parametrize("options", [
    ["--no-requeue", "--partition=urgent", "--time=7", "--account=a",
     "--qos=b", "--nice=3", "--exclude={last}", "--mem=1500",
     "--job-name=my job", "--gpus-per-node=h100:2", "--cpus-per-gpu=2"],
    ["--no-requeue", "--array=3", "--exclusive", "--job-name=a/b"],
    ["--no-requeue", "--gpus-per-node=0", "--ntasks-per-node=1"]])
def test_the_printed_command_is_the_same_job(slurm, options):
    """It has what sbatch was told, and goes on in the same run."""
    options = [word.format(last=slurm.nodes[-1]) for word in options]
    flags = "--max-steps", 40, "--prompt", "it's $1\n x"
    with slurm.counting("std"):
        first = slurm.submit("std", *flags, options=options)
        log = f"{first}_3" if "--array=3" in options else first
        log = slurm("scontrol", "show", "job", log).stdout
        log = Path(re.search("StdOut=(.*)", log)[1])
        wait_for(lambda: log.exists() and "| step   2" in log.read_text())
        slurm("scancel", "--batch", "--signal=USR1", first)
        assert slurm.wait(first)["JobState"] == "FAILED"
        command = log.read_text().rpartition(" continue with: ")[2]
        again = slurm("bash", "-c", f"cd /; {command}").stdout.split()[-1]
        assert slurm.wait(again)["JobState"] == "COMPLETED"
    asked = [ASKED.findall(slurm("scontrol", "show", "job", job).stdout)
             for job in (first, again)]
    assert len(asked[0]) > 12 and asked[0] == asked[1]
    runs = [folder for folder in (slurm.repo / "runs").iterdir()
            if folder.name.rpartition("-")[2].partition("_")[0] == first]
    assert len(runs) == 1
    steps = Result(runs[0], []).column("step")
    assert steps == list(range(40))


def test_what_a_job_prints_can_be_typed(slurm):
    """Each command, as it is printed, with spaces in the names."""
    with slurm.counting("std"):
        job = Starts(slurm, "std", "--max-steps", 40, "--prompt", "it's $1",
                     options=["--no-requeue", "--job-name=my job"],
                     WORKSHOP_RUN="my runs/first")
        job.result.folder = slurm.repo.parent / "my runs" / "first"
        job.get_going()
        job.signal()
        assert slurm.wait(job.job)["JobState"] == "FAILED"
        start, advice = re.findall("^(?:command  |.*continue with:) (.*)",
                                   job.log, re.M)
        again = slurm("bash", "-c", advice).stdout.split()[-1]
        assert slurm.wait(again)["JobState"] == "COMPLETED"
        said = slurm("bash", "-c", start, PYTHONPATH=str(slurm.repo))
        assert shlex.split(start)[-2:] == ["--prompt", "it's $1"]
    assert job.result.column("step") == list(range(40))
    assert "resuming after step 39" in said.stdout


def test_nothing_is_lost(slurm):
    """A killed rank, a crashed node, a node's daemon that is killed alone,
    and a job that is cancelled.
    """
    with slurm.counting("lit"):
        job = Starts(slurm, "lit-2n1g", "--max-steps", 10**6)
        job.get_going()
        job.kill(signal.SIGKILL)
        job.get_going()
        cluster = slurm.cluster
        for crash, node in ((cluster.kill_node, slurm.nodes[1]),
                            (cluster.kill_daemon, slurm.nodes[0])):
            crash(node)
            slurm("scontrol", "update", f"nodename={node}", "state=down",
                  "reason=x")
            job.wait(lambda: slurm.job(job.job)["JobState"] != "RUNNING")
            cluster.start_part(node)  # it comes back
            job.get_going()
        job.cancel()
        wait_for(lambda: not slurm.processes(job.job))
        slurm("scontrol", "requeue", job.job)
        job.get_going()
        job.cancel()
    assert job.log.count("requeueing, to continue after") == 1
    job.has_lost_nothing(4)


def test_the_time_limit_is_what_slurm_says(overdue):
    assert overdue.slurm.wait(overdue.job)["JobState"] == "TIMEOUT"
    assert "the time limit is near" in overdue.log
    assert "SLURM ends this job (Reason=TimeLimit); fix: " in (
        overdue.log.splitlines()[-1])


def test_it_uses_more_memory_than_it_asked_for():
    """At a site whose cgroups allow a job no more: it is not requeued."""
    if not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK):
        pytest.skip("needs cgroups of version 1, which this user may write")
    with (start(limits_memory=True, nodes=1) as slurm,
          slurm.counting("std", "taken = b'x' * 2**30\n")):
        job = slurm.submit("std", options=[ONE_CORE, "--mem=400M"])
        state, log = slurm.wait(job)["JobState"], slurm.log(job)
    assert state == "FAILED" and "Out Of Memory" in log, log
    assert "stopped and not requeued" in log.splitlines()[-1]


@pytest.mark.parametrize(("answers", "status"), [(3, 0), (4, 1)])
def test_slurm_is_asked_again_while_it_is_busy(answers, status):
    """Else a job would end that could go on."""
    done = subprocess.run(["bash", "-c", rf"""
        eval "$(sed -n '/^ask_slurm() /,/^}}/p' '{BATCHFILES}/job.sh')"
        sleep() {{ echo "$1"; }}
        asked=0
        squeue() {{ ((++asked == {answers})) && echo RUNNING; }}
        ask_slurm squeue"""], capture_output=True, text=True, check=False)
    assert done.returncode == status and not done.stderr
    assert done.stdout == "10\n30\n" + "RUNNING\n" * (answers == 3)


def test_a_batch_file_of_ones_own_stays(tmp_path):
    """In the run's folder, where that of a job from a pipe is kept."""
    mine = program(tmp_path / "batch.sh", "mine")
    done = subprocess.run(["bash", "-c", rf"""
        eval "$(sed -n '/^[a-z_]*() {{$/,/^}}$/p' '{BATCHFILES}/job.sh')"
        ask_slurm() {{ printf '%s\n' 'JobId=7 JobName=n' \
            '   JobState=RUNNING Reason=None' '   Requeue=0 Restarts=0' \
            '   Command=(null)' '   WorkDir=/'; }}
        run=$1 _job_id=7 _job_before=1 _job_after=2
        end_job""", BATCHFILES / "job.sh", tmp_path], capture_output=True)
    assert mine.read_text() == "mine"
    assert f" {tmp_path}/batch-7.sh".encode() in done.stderr, done.stderr


# A rank of any training, for ever.
TRAINS = """\
import time
import torch
import torch.distributed as dist
from backstage.process import prepare_process

prepare_process()
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    print("| step", flush=True)
    time.sleep(0.1)
"""


def test_a_stuck_job_says_why(slurm):
    """While it hangs, by its number; nothing of ours ends it."""
    def ask():
        said.append(slurm(sys.executable, "-m", "workshop", "why", job.job,
                          check=False, PYTHONPATH=str(slurm.repo)).stdout)
        return re.search("rank 1 has not answered.*\n.*on "
                         f"{slurm.nodes[1]}$", said[-1], re.M)

    said = []
    with slurm.counting("lit", TRAINS):
        job = Starts(slurm, "lit-2n1g")
        job.get_going()
        job.kill(signal.SIGSTOP)
        wait_for(ask, 120, lambda: said[-1])
        job.kill(signal.SIGCONT)
        job.cancel()
