"""Jobs that do not come to their end: signals, crashed nodes, killed ranks."""

import os
import signal
import subprocess
import sys

import pytest
from cluster import FLAGS, wait_for, world
from stages import agree, train

from backstage import ROOT

pytestmark = pytest.mark.whole

BATCHFILES = ROOT / "batchfiles"
ONE_CORE = "--cpus-per-gpu=1"


class Starts:
    """A job that is about to be disturbed, and starts again."""

    def __init__(self, slurm, name, *flags):
        self.slurm = slurm
        self.job = slurm.submit(name, *flags, options=[ONE_CORE])
        self.result, self.starts = slurm.result(name, self.job), 0

    @property
    def log(self):
        return self.slurm.log(self.job)

    def wait(self, condition):
        wait_for(condition, explain=lambda: (
            f"{self.slurm.job(self.job)}\n{self.log}"))

    def get_going(self, steps=3):
        """Wait until it has started again, and logged steps since then."""
        self.starts += 1
        self.wait(lambda: f"\n{self.log}".count("\njob  ") == self.starts
                  and self.log.rpartition("\njob  ")[2].count("| step")
                  >= steps)

    def kill(self, number):
        """Send this signal to the rank on the second node."""
        pid, = (pid for pid, node in self.slurm.ranks(self.job)
                if node == self.slurm.nodes[1])
        os.kill(pid, number)

    def lose_a_node(self):
        """To a job that is urgent, and short."""
        urgent = self.slurm(
            "sbatch", "--parsable", "--partition=urgent",
            f"--nodelist={self.slurm.nodes[1]}", "--exclusive", "--wrap",
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


def test_preempted(slurm, data, tmp_path):
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

    With srun and torchrun, through which a signal has the longest way. A job
    has less time than its signal needs only once it trains: at its start bash
    would be ended by the signal.
    """
    with slurm.counting("ddp"):
        job = Starts(slurm, "ddp-2n1g", "--max-steps", 10**6)
        job.get_going()
        job.lose_a_node()
        job.get_going()
        assert "stopped by SIGTERM" in job.log
        for minutes in 2, 10:
            slurm("scontrol", "update", f"JobId={job.job}",
                  f"TimeLimit={minutes}")  # it looks twice a minute
            job.wait(lambda: "stopped by SIGUSR1" in job.log)
        job.wait(lambda: slurm.job(job.job)["Restarts"] == "2")
        job.cancel()
    assert "requeueing, to go on after" in job.log.rpartition("SIGUSR1")[2]
    job.has_lost_nothing(1)


def test_nothing_is_lost(slurm):
    """A killed rank, a crashed node, and a job that is cancelled."""
    with slurm.counting("lit"):
        job = Starts(slurm, "lit-2n1g", "--max-steps", 10**6)
        job.get_going()
        job.kill(signal.SIGKILL)
        job.get_going()
        node = slurm.nodes[1]
        slurm.lab("kill-node", node)
        slurm("scontrol", "update", f"nodename={node}", "state=down",
              "reason=x")
        slurm.lab("start-node", node)  # it comes back
        job.get_going()
        job.cancel()
        wait_for(lambda: not slurm.processes(job.job))
        slurm("scontrol", "requeue", job.job)
        job.get_going()
        job.cancel()
    assert job.log.count("requeueing, to go on after") == 1
    job.has_lost_nothing(3)


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
    with slurm.counting("lit", TRAINS):
        job = Starts(slurm, "lit-2n1g")
        job.get_going()
        job.kill(signal.SIGSTOP)
        said = []
        wait_for(lambda: said.append(slurm(
            sys.executable, "-m", "workshop", "why", job.job, check=False,
            PYTHONPATH=str(slurm.repo))) or said[-1].returncode)
        job.kill(signal.SIGCONT)
        job.cancel()
    assert f"rank 1 on {slurm.nodes[1]}" in said[-1].stdout.splitlines()[0], (
        said[-1].stdout)
