"""Start a script as several processes of this machine, and wait for them.

This does what `torchrun` does in a tenth of the time: the processes are forked
from a server that has already imported torch. It is for the checks, the tests
and benchmarks that time steps alone; a real run has a real launcher.
"""

from __future__ import annotations  # Python 3.9 has no `int | None`

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rankcheck.engine import fork_server

MOST = 1_000_000  # bytes of output from each of its ends


@dataclass
class Rank:
    """How a process ended: `status` is None if it had to be killed."""

    status: int | None
    out: str
    err: str


class Torchrun:
    """Tells the ranks what torchrun does, but that it is torchrun.

    Another launcher is a subclass. Each rank gets it, pickled before `begin`.
    """

    processes = ()  # that it has started itself

    def begin(self, start, folder):
        """Start what the forked ranks need. folder: for its files."""

    def check(self):
        """Raise a `UserError` if it cannot do that."""

    def end(self):
        """Wait for what it has started. The ranks have ended."""

    def tell(self, start, rank, port, output):
        """In a rank: its environment. output: see fork_server.run_script."""
        if not start.world_size:
            return start.env
        devices = start.world_size // start.nodes
        return start.env | {name: str(value) for name, value in {
            "RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": start.world_size,
            "ROLE_WORLD_SIZE": start.world_size, "ROLE_NAME": "default",
            "LOCAL_RANK": rank % devices, "LOCAL_WORLD_SIZE": devices,
            "GROUP_RANK": rank // devices, "GROUP_WORLD_SIZE": start.nodes,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}

    def join(self, start, log):
        """In a rank, right before its probes and the script."""

    def part(self, status):
        """In a rank, at its end."""


@dataclass(frozen=True)
class Start:
    """A script as several processes, which get this, and how it is watched."""

    script: str
    flags: tuple  # in which {rank} becomes the rank
    world_size: int | None = None  # None is plain python
    nodes: int = 1  # on so many the processes believe they are
    launcher: Torchrun = field(default_factory=Torchrun)
    probes: tuple = ()  # functions that get each process's `Log` first
    log: str | None = None  # the folder in which that is kept
    env: dict | None = None
    threads: int = 1
    preload: tuple = fork_server.PRELOAD  # is imported once for all of them
    place: str | None = None  # what the script imports from; None: its folder
    cwd: str | None = None  # None: this process's
    within: str | None = None  # where the folder of what they print is made
    # the seed of Python's hashes in the first rank, if each is to have its
    # own, as under a real launcher; there are four
    hashes: int | None = None
    module: str = ""  # the script's name, if it is run as by python -m


class Launch:
    """The processes of a `Start`, whose fields are the options."""

    def __init__(self, script, *flags, env=None, **options):
        start = Start(str(script), tuple(map(str, flags)),
                      env=dict(os.environ if env is None else env), **options)
        size = start.world_size or 1
        servers = fork_server.get_servers(start.preload, size, start.hashes)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=start.within))
        fork_server.folders.add(self.folder)
        self.script, self.jobs = start.script, []
        self.launcher = start.launcher
        port = free_port()
        try:
            for rank in range(size):
                self.jobs.append(servers[rank % len(servers)].fork(
                    start, rank, port, f"{self.folder}/{rank}"))
            self.launcher.begin(start, self.folder)
        except BaseException:
            self.clear()
            raise

    def wait(self, timeout=120, gives_up=None):
        """The `Rank`s, once all have ended; after `timeout` s it kills them.

        gives_up: a function that is asked ten times a second whether to kill
        them. One that had to be killed has its stack in `err`.
        """
        try:
            late = self.wait_for_end(time.monotonic() + timeout, gives_up)
            stacks = self.stacks() if late else [""] * len(self.jobs)
            self.signal(signal.SIGKILL)
            self.wait_for_end(time.monotonic() + 10)
            return [Rank(None if job in late else job.status,
                         self.text(rank, "out"),
                         self.text(rank, "err") + stacks[rank])
                    for rank, job in enumerate(self.jobs)]
        finally:
            self.clear()

    def wait_for_end(self, end, gives_up=None):
        """The processes that have not ended by then."""
        while running := [job for job in self.jobs if job.is_alive()]:
            left = end - time.monotonic()
            if left <= 0 or (gives_up and gives_up()):
                return running
            self.launcher.check()
            running[0].server.listen(min(left, 0.1))
        return []

    def text(self, rank, name):
        """What the rank has printed: all, or as much from both its ends."""
        try:
            with open(f"{self.folder}/{rank}.{name}", "rb") as file:
                data = file.read(MOST)
                size = os.fstat(file.fileno()).st_size
                file.seek(max(len(data), size - MOST))
                return (data + file.read(MOST)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def lines(self):
        """The line of the script that each rank is in, None if in no line."""
        line = re.compile(rf'File "{re.escape(self.script)}", line (\d+)')
        found = map(line.search, self.stacks())  # the innermost
        return [innermost and int(innermost[1]) for innermost in found]

    def stacks(self):
        """Where each rank is: what faulthandler writes, "" if it has ended."""
        for file in self.folder.glob("*.stack"):
            os.truncate(file, 0)
        self.signal(fork_server.LOOK)
        end = time.monotonic() + 3  # on a busy machine
        while time.monotonic() < end and not all(
                'File "' in self.text(rank, "stack") or not job.is_alive()
                for rank, job in enumerate(self.jobs)):
            time.sleep(0.01)
        time.sleep(0.1)  # until what has begun is whole
        return [self.text(rank, "stack") for rank in range(len(self.jobs))]

    def printed(self):
        """How many bytes the ranks have printed."""
        return sum(file.stat().st_size for name in ("out", "err")
                   for file in self.folder.glob(f"*.{name}"))

    def clear(self):
        self.signal(signal.SIGKILL)
        self.launcher.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        fork_server.folders.discard(self.folder)

    def activity(self):
        """`activity` of the ranks, and of all that a launcher started."""
        return fork_server.activity(
            {job.server.process.pid for job in self.jobs},
            {process.pid for process in self.launcher.processes})

    def signal(self, number):
        for job in self.jobs:
            job.kill(number)


def launch(script, *flags, timeout=120, **options):
    """Start `script`, wait until it has ended, return its `Rank`s."""
    return Launch(script, *flags, **options).wait(timeout)


def free_port():
    """A TCP port of this machine that is free, and stays so.

    Nobody else takes it before its user listens on it: it is not one that the
    system gives to a program that asks for any port (from 32768 on, `man 7
    ip`), nor one that a batch file may choose, from 20000 on.
    """
    while True:
        port = secrets.choice(range(10_000, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
