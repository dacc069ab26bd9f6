"""The cells of the lesson that has a cluster on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import show_path
from workshop.cluster.command import NAME
from workshop.cluster.control import Cluster
from workshop.cluster.settings import find_cluster_folder
from workshop.diff import page
from workshop.html import paragraph
from workshop.notebook import output, planted_fault
from workshop.results import runs as results

# A variable: the configuration of the site's SLURM, while the cluster is used
SITE_CONF = "WORKSHOP_SITE_SLURM_CONF"
TAIL = 24  # lines of a log: from the end of a start to the next one's steps
CANCEL_SECONDS = 60  # seconds in which cancelled jobs end
STANDS_STILL = 15  # seconds without a new line
ENDED_STATES = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED",
                "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


@dataclass(frozen=True)
class SlurmJob:
    """What SLURM says of a job."""

    number: str
    name: str
    state: str
    reason: str
    nodes: str
    restarts: str
    log: Path

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    def read_log(self) -> str:
        """Return the text of its log; "" if there is none yet."""
        try:
            return self.log.read_text("utf-8", "replace")
        except OSError:
            return ""

    def describe(self) -> str:
        """Say in a line where it is, and how often it was started."""
        place = f"on {self.nodes}" if self.nodes else f"({self.reason})"
        starts = int(self.restarts) + 1
        return (f"job {self.number}, {self.name}: {self.state} {place}, "
                f"start {starts}")


def own_cluster() -> Cluster:
    """Return the cluster of this machine, which may not be up."""
    return Cluster(find_cluster_folder(NAME))


def use_cluster() -> bool:
    """Let this process use the cluster of this machine, if it is up.

    Returns:
        Whether it is.
    """
    try:
        cluster = own_cluster()
    except UserError:  # a site's TMPDIR may be one that cannot hold it
        return False
    config, folder = str(cluster.place.config), str(cluster.place.bin)
    if cluster.is_up():
        if os.environ.get("SLURM_CONF") != config:
            if "SLURM_CONF" in os.environ:
                os.environ[SITE_CONF] = os.environ["SLURM_CONF"]
            os.environ.update(cluster.environment())
        return True
    if os.environ.get("SLURM_CONF") == config:  # it was up before
        del os.environ["SLURM_CONF"]
        if SITE_CONF in os.environ:
            os.environ["SLURM_CONF"] = os.environ.pop(SITE_CONF)
        entries = os.environ.get("PATH", "").split(os.pathsep)
        os.environ["PATH"] = os.pathsep.join(
            entry for entry in entries if entry != folder)
    return False


def require_cluster() -> None:
    require(use_cluster(), "no cluster is up on this machine; fix: "
            "`cluster(\"up\")`")


@output.in_one_line
def cluster(action="status", node=""):
    """Start, inspect or end a SLURM on this machine.

    action: "up", "status", "down"; "kill" and "start", with a node's name.
    """
    own = own_cluster()
    if action == "down":
        own.down()
    elif action == "kill":
        own.kill_node(node)
    elif action == "start":
        own.start_part(node)
    elif action == "up":
        own.up()
    else:
        require(action == "status", f"there is no cluster({action!r}); fix: "
                'choose from "up", "status", "down", "kill" and "start"')
    use_cluster()
    parts = own.parts()
    if not parts:
        return output.show_text("No cluster is up on this machine.")
    states = own.ask_states()
    rows = [("part", "runs", "SLURM says")]
    rows += [(part.name, "yes" if part.runs else "NO",
              states.get(part.name, "")) for part in parts]
    return output.as_table(rows, "words")


def run_slurm(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM's.

    Raises:
        UserError: it fails, with what it prints.
    """
    end = subprocess.run(command, capture_output=True, text=True, check=False)
    require(end.returncode == 0, (end.stderr or end.stdout).strip())
    return end


def query_slurm(*command: str) -> str:
    """Return what a program of SLURM's answers; raises as `run_slurm` does."""
    return run_slurm(*command).stdout


def find_jobs() -> list[SlurmJob]:
    """Return this user's jobs of the last hour, the newest first."""
    found = []
    for line in query_slurm("scontrol", "-o", "show", "job").splitlines():
        fields = dict(re.findall(r"(\w+)=(.*?)(?= \w+[:/\w]*=|$)", line))
        if fields.get("JobId"):
            nodes = fields.get("NodeList", "")
            found.append(SlurmJob(
                fields["JobId"], fields["JobName"], fields["JobState"],
                fields["Reason"], "" if nodes == "(null)" else nodes,
                fields["Restarts"], Path(fields["StdOut"])))
    return sorted(found, key=lambda job: int(job.number), reverse=True)


def newest_job() -> SlurmJob:
    jobs = find_jobs()
    require(jobs, "there is no job yet; fix: submit one")
    return jobs[0]


@output.in_one_line
def watch(words, times=1, seconds=600):
    """Show my newest job's log until it has these words, or the job ends.

    times: how often they are to be there. seconds: how long to wait at most.
    """
    require_cluster()
    job, end = newest_job(), time.monotonic() + seconds
    show = output.live(lambda: show_log(job))
    show(now=True)
    while time.monotonic() < end:
        job = newest_job()
        show()
        if job.read_log().count(words) >= times or job.has_ended:
            break
        time.sleep(1)
    show(now=True)


def show_log(job: SlurmJob) -> output.Shown:
    """Show the end of a job's log, below its state."""
    lines = job.read_log().rstrip().split("\n")[-TAIL:]
    state = job.describe()
    text = f"{show_path(job.log)}:\n" + "\n".join(lines)
    return output.show_output(text, above=paragraph(page.quote(state)))


@output.in_one_line
def freeze():
    """Stop one rank of my newest job, on its last node, as if it hung.

    Shows the log once nothing new has come for some seconds.
    """
    require_cluster()
    job = newest_job()
    require(job.state == "RUNNING", f"{job.describe()}: only a running job "
            "can hang")
    last = query_slurm("scontrol", "show", "hostnames", job.nodes).split()[-1]
    pattern = rf"train_gpt2.*-{job.number}( |$)"
    query_slurm("srun", f"--jobid={job.number}",
                "--overlap", f"--nodelist={last}",
                "--nodes=1", "--ntasks=1", "pkill", "-STOP", "--newest", "-f",
                pattern)
    show = output.live(lambda: show_log(job))
    size, since = -1, time.monotonic()
    while time.monotonic() - since < STANDS_STILL:
        now = len(job.read_log())
        if now != size:
            size, since = now, time.monotonic()
            show(now=True)
        time.sleep(1)


@output.in_one_line
def why_job():
    """Ask why my newest job hangs or has ended."""
    require_cluster()
    output.run_and_show("-m", "workshop", "why", newest_job().number,
                        view=planted_fault.show_reason)


@output.in_one_line
def cancel():
    """End all my jobs on the cluster of this machine, and wait for that."""
    require_cluster()
    query_slurm("scancel", "--me")
    end = time.monotonic() + CANCEL_SECONDS
    while query_slurm("squeue", "--me", "-h") and time.monotonic() < end:
        time.sleep(0.5)
    return output.show_text("All jobs are cancelled.")


@output.in_one_line
def difference(first, then):
    """How far the losses of my newest runs of two batch files differ."""
    one, other = newest_run(first), newest_run(then)
    steps = min(len(one.rows), len(other.rows))
    require(steps, "one of the runs has no step yet")
    pairs = [(one.rows[step]["loss"], other.rows[step]["loss"])
             for step in range(steps)]
    most = max(abs(a / b - 1) for a, b in pairs)
    rows = [("run", "world size", "steps", "last loss")]
    for run in one, other:
        rows.append((show_path(run.folder), str(run.world_size),
                     str(len(run.rows)), f"{run.rows[-1]['loss']:.6f}"))
    return output.as_table(rows, notes=[
        f"Of {steps} steps, the losses differ by {most:.1e} at most "
        "(relative)."])


def newest_run(name: str) -> results.RecordedRun:
    """Return the newest run of a batch file.

    Raises:
        UserError: there is none.
    """
    def number(folder: Path) -> int:
        return int(folder.name.rpartition("-")[2])

    folders = [folder for folder in results.RUNS.glob(f"{name}-*")
               if re.fullmatch(rf"{re.escape(name)}-\d+", folder.name)]
    if not folders:
        raise UserError(f"no run of {name} is in runs/; fix: submit it first")
    return results.read_run(max(folders, key=number))
