"""Runs a command once a job hangs: rankcheck why run --on-hang COMMAND -- X

`why run` becomes the job. Before, it starts a monitor: a process whose parent
is not the job, so that the job does not wait for it, in a session of its own.
It ends with the job, and changes nothing of it. It asks the ranks, as `why`
does, once one of them has said that it makes no progress.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rankcheck.system import proc
from rankcheck.system.errors import UserError, require
from rankcheck.why import evidence
from rankcheck.why.ranks import Rank

HANG_SECONDS = 600.0  # seconds without progress, after which a job hangs
LOOK_SECONDS = 5  # seconds between two looks at what the ranks have written
# what the command prints; it is there once it began
LOG_NAME = "on-hang-{}.log"


@dataclass(frozen=True)
class Task:
    """What a monitor has to do."""

    folder: Path  # where the ranks write
    command: str  # for a shell; {} is the folder
    seconds: float  # for which no rank has made progress then
    env: dict[str, str]  # of the command
    cwd: str  # of the command


def start_monitor(folder: Path, env: Mapping[str, str], command: str,
                  seconds: float) -> None:
    """Start a process that runs a command when the ranks hang.

    Args:
        folder: where the ranks write.
        env: the variables of the command, those of who calls.
        command: for a shell; {} is the folder.
        seconds: how long no rank has made progress then.

    Raises:
        UserError: if this process would be the monitor's parent, if the
            system cannot tell when it ends, or if the command would have no
            working directory.
    """
    require(hasattr(os, "pidfd_open"), "--on-hang needs Linux 5.3 or later")
    try:
        job = os.pidfd_open(os.getpid())
    except OSError as error:
        raise UserError("--on-hang needs Linux 5.3 or later: "
                        f"{error.strerror}") from error
    try:
        cwd = os.getcwd()
    except OSError as error:
        raise UserError("--on-hang: the working directory was removed; fix: "
                        "change to one that exists") from error
    task = Task(folder, command, seconds, dict(env), cwd)
    reader, writer = os.pipe()
    owner = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        middle = os.getpid()
        if os.fork() == 0:
            become_monitor(job, owner, middle, writer, task)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.close(job)
    require(answer == b"ready", "--on-hang: this process is PID 1, or a "
            "subreaper, so the job would wait for the monitor; fix: start it "
            "in a shell, or with `docker run --init`")


def become_monitor(job: int, owner: int, middle: int, writer: int,
                   task: Task) -> NoReturn:
    """Be the monitor, until the job ends.

    Args:
        job: a file by which the system tells that the job has ended.
        owner: the PID of the job.
        middle: the PID of our parent, which ends now.
        writer: a pipe; who waits for us is told there that we are ready.
    """
    with contextlib.suppress(BaseException):
        os.setsid()
        while os.getppid() == middle:
            time.sleep(0.01)
        if os.getppid() == owner:
            os._exit(1)  # the job would get it as a child
        os.chdir("/")
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.write(writer, b"ready")
        for number in range(3):  # also who reads the job's output waits not
            os.dup2(nowhere, number)
        os.closerange(3, job)
        os.closerange(job + 1, 1 << 16)
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
        watch_job(job, task)
    os._exit(0)


def watch_job(job: int, task: Task) -> None:
    """Run the command when the job hangs; return then, or when it ends."""
    ended = select.poll()
    ended.register(job, select.POLLIN)
    requests = ""
    quiet_since: float | None = None
    while not ended.poll(1000 * LOOK_SECONDS):
        before, requests = requests, proc.read_text(task.folder / "ask")
        if requests != before:  # then a rank has stood still, or somebody asks
            quiet_since = find_quiet(task.folder)
        if quiet_since is None or time.time() < quiet_since + task.seconds:
            continue
        ranks = evidence.gather(task.folder).ranks
        if ended.poll(0):
            return
        requests = proc.read_text(task.folder / "ask")
        if is_hanging(ranks, requests, task.seconds):
            run_command(task, ranks)
            return
        quiet_since = find_quiet(task.folder)


def find_quiet(folder: Path) -> float | None:
    """Return since when no rank may have made progress, as far as they have
    written, in seconds since 1970; None if none is there that runs.
    """
    since = [record["written"] - record["idle_seconds"]
             for record in evidence.read_records(folder)
             if not record["ended"] and evidence.lives(record) is not False]
    return max(since, default=None)


def is_hanging(ranks: list[Rank], requests: str, seconds: float) -> bool:
    """Whether no rank that runs has made progress for this time."""
    running = [rank for rank in ranks if rank.ending in ("runs", "silent")]
    return bool(running) and all(
        is_idle(rank, requests, seconds) for rank in running)


def is_idle(rank: Rank, requests: str, seconds: float) -> bool:
    """Whether it waits, or nothing of it works, for so long; of one that does
    not answer, whether it has not done so for this time.
    """
    if rank.is_unresponsive and rank.has_watcher:
        unanswered = requests
        if rank.seen_requests:
            unanswered = requests.rpartition(rank.seen_requests)[2]
        first = unanswered.strip().partition("\n")[0]
        return first.isdigit() and time.time() - int(first) / 1e9 >= seconds
    works = rank.computes or any(work.has_worked for work in rank.work
                                 if work.number != rank.pid)
    # a loop of messages waits now and then: it works, and leaves its line
    waits = rank.waits and rank.seconds_in_line >= seconds
    return rank.idle_seconds >= seconds and (waits or not works)


def run_command(task: Task, ranks: list[Rank]) -> None:
    """Run it, unless the monitor of another node has done so."""
    began = min(rank.began for rank in ranks)  # for all monitors the same
    log = task.folder / LOG_NAME.format(f"{began:.3f}")
    try:
        output = open(log, "xb")
    except OSError:  # it is there, or nobody can write there
        return
    folder = str(task.folder)
    command = task.command.replace("{}", shlex.quote(folder))
    with output:
        subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL,
                       stdout=output, stderr=output, cwd=task.cwd,
                       check=False,
                       env={**task.env, "RANKCHECK_FOLDER": folder})
