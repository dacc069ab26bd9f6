"""Start a script as several processes of this machine, and wait for them.

This does what `torchrun` does in a tenth of the time: the processes are forked
from a server that has already imported torch. It is for the checks, the tests
and benchmarks that time steps alone; a real run has a real launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankcheck.engine import fork_server
from rankcheck.engine.run import RunOptions, ScriptRun

if TYPE_CHECKING:
    from typing import Unpack  # new in Python 3.11

Flag = str | Path | float  # of a script, which gets it as a text
MOST_OUTPUT = 1_000_000  # bytes of output from each of its ends


@dataclass
class RankExit:
    """How a process ended: `status` is None if it had to be killed."""

    status: int | None
    out: str
    err: str


class Launch:
    """The processes of a `ScriptRun`, whose fields are the options."""

    def __init__(self, script: str | Path, *flags: Flag,
                 env: Mapping[str, str] | None = None,
                 **options: Unpack[RunOptions]) -> None:
        variables = dict(os.environ if env is None else env)
        run = ScriptRun(str(script), tuple(map(str, flags)), variables,
                        **options)
        size = run.world_size or 1
        servers = fork_server.get_servers(run.preload, size, run.hashes)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=run.within))
        fork_server.folders.add(self.folder)
        self.script = run.script
        self.jobs: list[fork_server.ForkedRank] = []
        self.launcher = run.launcher
        port = free_port()
        try:
            for rank in range(size):
                self.jobs.append(servers[rank % len(servers)].fork(
                    run, rank, port, f"{self.folder}/{rank}"))
            self.launcher.begin(run, self.folder)
        except BaseException:
            self.clear()
            raise

    def wait(self, timeout: float = 120,
             gives_up: Callable[[], bool | None] | None = None
             ) -> list[RankExit]:
        """Wait until all ranks have ended, and return how.

        Args:
            timeout: seconds after which it kills them.
            gives_up: a function that is asked ten times a second whether to
                kill them. A rank that had to be killed has its stack in `err`.
        """
        try:
            late = self.wait_for_end(time.monotonic() + timeout, gives_up)
            stacks = self.stacks() if late else [""] * len(self.jobs)
            self.signal(signal.SIGKILL)
            self.wait_for_end(time.monotonic() + 10)
            return [RankExit(None if job in late else job.status,
                             self.text(rank, "out"),
                             self.text(rank, "err") + stacks[rank])
                    for rank, job in enumerate(self.jobs)]
        finally:
            self.clear()

    def wait_for_end(self, end: float,
                     gives_up: Callable[[], bool | None] | None = None
                     ) -> list[fork_server.ForkedRank]:
        """Return the processes that have not ended by then.

        end: as time.monotonic() says it.
        """
        while running := [job for job in self.jobs if job.is_alive()]:
            left = end - time.monotonic()
            if left <= 0 or (gives_up and gives_up()):
                return running
            self.launcher.check()
            running[0].server.listen(min(left, 0.1))
        return []

    def text(self, rank: int, name: str) -> str:
        """Return a rank's output: all of it, or its beginning and end.

        name: "out", "err", or "stack".
        """
        try:
            with open(f"{self.folder}/{rank}.{name}", "rb") as file:
                data = file.read(MOST_OUTPUT)
                size = os.fstat(file.fileno()).st_size
                file.seek(max(len(data), size - MOST_OUTPUT))
                return (data + file.read(MOST_OUTPUT)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def lines(self) -> list[int | None]:
        """Return the script's line that each rank is in, or None."""
        line = re.compile(rf'File "{re.escape(self.script)}", line (\d+)')
        lines: list[int | None] = []
        for stack in self.stacks():
            innermost = line.search(stack)
            lines.append(int(innermost[1]) if innermost else None)
        return lines

    def stacks(self) -> list[str]:
        """Ask each rank where it is: what faulthandler writes, "" if it has
        ended.
        """
        for file in self.folder.glob("*.stack"):
            os.truncate(file, 0)
        self.signal(fork_server.STACK_SIGNAL)
        end = time.monotonic() + 3  # on a busy machine
        while time.monotonic() < end and not all(
                'File "' in self.text(rank, "stack") or not job.is_alive()
                for rank, job in enumerate(self.jobs)):
            time.sleep(0.01)
        time.sleep(0.1)  # until what has begun is whole
        return [self.text(rank, "stack") for rank in range(len(self.jobs))]

    def printed(self) -> int:
        """Return how many bytes the ranks have printed."""
        return sum(file.stat().st_size for name in ("out", "err")
                   for file in self.folder.glob(f"*.{name}"))

    def clear(self) -> None:
        """Kill what remains of the ranks, and remove their output."""
        self.signal(signal.SIGKILL)
        self.launcher.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        fork_server.folders.discard(self.folder)

    def activity(self) -> fork_server.CpuActivity | None:
        """Return the activity of the ranks and of a launcher's processes."""
        return fork_server.measure_activity(
            {job.server.process.pid for job in self.jobs},
            {process.pid for process in self.launcher.processes})

    def signal(self, number: int) -> None:
        for job in self.jobs:
            job.kill(number)


def launch(script: str | Path, *flags: Flag, timeout: float = 120,
           env: Mapping[str, str] | None = None,
           **options: Unpack[RunOptions]) -> list[RankExit]:
    """Start a script, wait for its end, and return how its ranks ended.
    """
    return Launch(script, *flags, env=env, **options).wait(timeout)


def free_port() -> int:
    """Return a TCP port of this machine that is free, and stays so.

    Nobody else takes it before its user listens on it: it is not one that the
    system gives to a program that asks for any port (from 32768 on, `man 7
    ip`), nor one that a batch file may choose, from 20000 on.
    """
    while True:
        port = secrets.choice(range(10_000, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
