"""Jobs that do not come to their end: signals, crashed nodes, killed ranks."""

import csv
import os
import signal
import subprocess
import sys
from zipfile import ZipFile

import pytest
from cluster import FLAGS, agree, holding, wait_for

from backstage import ROOT

pytestmark = pytest.mark.whole

BATCHFILES = ROOT / "batchfiles"

LONG = (*FLAGS, "--max-steps", 400, "--checkpoint-every", 20,
        "--eval-every", 200, "--generate-every", 400,
        "--learning-rate", 2e-4)  # so low that rounding errors do not grow


class Disturbed:
    """A job that is about to be disturbed."""

    def __init__(self, slurm, stage):
        self.slurm = slurm
        self.name = f"{stage}-2n1g"
        self.job = slurm.submit(self.name, *LONG,
                                options=["--cpus-per-gpu=1"])
        self.result = slurm.result(self.name, self.job)
        self.starts = 0

    def get_going(self):
        """Wait until it has started again, and saved a step since then."""
        self.starts += 1
        wait_for(lambda: self.log.count("\njob  ") + self.log.startswith("job")
                 == self.starts, explain=lambda: self.log)
        first = self.last_step()
        wait_for(lambda: self.log.rpartition("\njob  ")[2].count("| step")
                 and self.last_step() >= first + 22,
                 explain=lambda: self.log)

    @property
    def log(self):
        return self.slurm.log(self.job)

    def last_step(self):
        try:
            with open(self.result.folder / "metrics.csv", newline="") as file:
                return max([int(row[0]) for row in csv.reader(file)
                            if row and row[0].isdigit()], default=0)
        except FileNotFoundError:
            return 0

    def kill_rank(self):
        """On the second node."""
        pid, = (pid for pid, node in self.slurm.ranks(self.job)
                if node == self.slurm.nodes[1])
        os.kill(pid, signal.SIGKILL)

    def crash(self):
        """The second node, which comes back."""
        node = self.slurm.nodes[1]
        self.slurm.lab("kill-node", node)
        self.slurm("scontrol", "update", f"nodename={node}", "state=down",
                   "reason=x")
        self.slurm.lab("start-node", node)
        self.get_going()

    def cancel(self):
        """And requeue it after that."""
        self.slurm("scancel", self.job)
        assert self.slurm.wait(self.job)["JobState"] == "CANCELLED"
        wait_for(lambda: not self.slurm.processes(self.job))
        newest = sorted((self.result.folder / "checkpoints").iterdir())[-1]
        assert newest.suffix == ".pt" and ZipFile(newest).testzip() is None
        self.slurm("scontrol", "requeue", self.job)


@pytest.mark.parametrize(("stage", "disturb"), [  # torchrun, srun alone
    ("ddp", Disturbed.crash), ("lit", Disturbed.cancel)], ids=["ddp", "lit"])
def test_nothing_is_lost(slurm, stage, disturb):
    """A killed rank, and what happens to the whole job.

    The run ends as if nothing had happened.
    """
    expected = slurm.alone(*LONG)
    job = Disturbed(slurm, stage)
    job.get_going()
    job.kill_rank()
    job.get_going()
    disturb(job)
    assert slurm.wait(job.job)["JobState"] == "COMPLETED", job.log
    assert job.log.count("requeueing, to go on after") == 1
    agree(job.result, expected)


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


def test_a_stuck_job_says_why(slurm):
    """It ends by itself; its log says whom to ask, who names the rank."""
    job = slurm("sbatch", "--parsable", "--output=%j.log",
                slurm.repo / "batchfiles" / "batch-ddp-2n1g.sh", *FLAGS,
                "--max-steps", 100_000, "--checkpoint-every", 100_000,
                WORKSHOP_TIMEOUT="8").stdout.strip()
    wait_for(lambda: "| step   20/" in slurm.log(job), 200,
             lambda: slurm.log(job))
    (pid,) = (pid for pid, node in slurm.ranks(job) if node == slurm.nodes[1])
    os.kill(pid, signal.SIGSTOP)
    assert slurm.wait(job)["JobState"] == "FAILED"
    folder = slurm.repo / "runs" / f"ddp-2n1g-{job}"
    last = slurm.log(job).splitlines()[-1]
    assert last.endswith(f"python -m workshop why '{folder}'")
    said = slurm(sys.executable, "-m", "workshop", "why", job, check=False,
                 PYTHONPATH=str(slurm.repo))
    assert said.returncode == 1
    assert f"rank 1 on {slurm.nodes[1]}" in said.stdout.splitlines()[0], (
        said.stdout)


# Trains nothing: it counts steps, and saves where it is told to stop.
COUNTS = """\
import signal, sys, time
from pathlib import Path

flags, got = dict(zip(sys.argv[1:], sys.argv[2:])), []
for number in signal.SIGTERM, signal.SIGUSR1:
    signal.signal(number, lambda number, _: got.append(number))
run, steps = Path(flags["--run-dir"]), int(flags["--max-steps"])
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
first = 0
if "--resume" in flags:
    first = max([int(file.stem[5:]) for file in (
        run / "checkpoints").iterdir()], default=0)
if first:
    print("resuming after step", first - 1, flush=True)
with open(run / "metrics.csv", "a" if first else "w", 1) as rows:
    if not first:
        print("step", file=rows)
    for step in range(first, steps):
        time.sleep(0.1)
        print(f"| step {step:3}", flush=True)
        print(step, file=rows)
        if got:
            (run / "checkpoints" / f"step_{step + 1:08}.pt").touch()
            name = signal.Signals(got[0]).name
            print(f"stopped by {name}, checkpoint saved", flush=True)
            break
"""


@pytest.fixture
def counts(slurm):
    """The stage ddp counts."""
    with holding(slurm.repo / "solutions" / "train_gpt2_ddp.py", COUNTS):
        yield


def test_preempted_and_out_of_time(slurm, counts):
    """An urgent job takes the node; later the time limit comes near.

    With srun and torchrun, through which a signal has the longest way. That
    a stage stops as told, test_contract.py shows.
    """
    node = f"--nodelist={slurm.nodes[0]}"
    job = slurm.submit(
        "ddp-1n1g", "--max-steps", 10**6,
        options=["--time=30", "--cpus-per-gpu=1", node])

    def wait(count, text):
        wait_for(lambda: slurm.log(job).count(text) >= count,
                 explain=lambda: f"{slurm.job(job)}{slurm.log(job)}")

    wait(1, "| step   1")
    urgent = slurm("sbatch", "--parsable", "--partition=urgent", node,
                   "--exclusive", "--wrap", "true").stdout.strip()
    wait(1, "resuming after step")
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    # SLURM looks twice a minute whose end is near
    ran, _ = slurm.job(job)["RunTime"].rsplit(":", 1)
    hours, minutes = map(int, ran.split(":"))
    slurm("scontrol", "update", f"jobid={job}",
          f"timelimit={60 * hours + minutes + 2}")
    wait(1, "stopped by SIGUSR1")
    slurm("scontrol", "update", f"jobid={job}", "timelimit=30")
    wait(2, "resuming after step")
    log = slurm.log(job)
    assert "stopped by SIGTERM, checkpoint saved" in log
    assert "stopped by SIGUSR1, checkpoint saved" in log
    slurm("scancel", job)
    slurm.wait(job)
    steps = slurm.result("ddp-1n1g", job).column("step")
    assert steps == list(range(len(steps)))
