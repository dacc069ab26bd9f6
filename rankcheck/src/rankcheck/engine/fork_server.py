"""Forks the ranks of `ranks.Launch` from a server that has torch.

The server and all that it forks are in a session of their own: Ctrl-C in the
terminal does not reach them, and `end_all` ends them at once.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import logging
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from rankcheck.engine.progress import paused_collection
from rankcheck.engine.run import PRELOAD, ScriptRun, Torchrun
from rankcheck.system import proc
from rankcheck.system.command_line import (
    open_closed_descriptors,
    open_closed_streams,
)
from rankcheck.system.errors import KILLED, UserError, describe_error


@dataclass(eq=False)
class ForkedRank:
    """A forked process; status is None while it lives."""

    server: Server
    pid: int
    status: int | None = None

    def is_alive(self) -> bool:
        self.server.listen(0)
        return self.status is None

    def kill(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """A handle of the process that forks the ranks.

    It counts the jobs: the system gives the number of a process that has
    ended to a new one. hashes: the seed of Python's hashes in all of them.
    """

    def __init__(self, preload: Sequence[str], hashes: int | None = None
                 ) -> None:
        self.owner = os.getpid()
        self.jobs: list[ForkedRank] = []
        open_closed_descriptors()  # else the link may get the number of one
        self.link, its = Pipe()
        code = (f"import sys; sys.path[:] = {sys.path!r}\n"
                "from rankcheck.engine.fork_server import serve\n"
                f"serve({its.fileno()}, {preload!r})")
        # OpenMP threads sleep, not spin: read when torch is loaded
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        if hashes is not None:
            env["PYTHONHASHSEED"] = str(hashes)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()], start_new_session=True, env=env)
        its.close()

    def fork(self, run: ScriptRun, rank: int, port: int,
             output: str) -> ForkedRank:
        """Fork a rank; for the arguments see `run_script`."""
        number = len(self.jobs)
        # the pickle is opened where sys.path is right for it
        self.link.send((number, run.preload, run.cwd or os.getcwd(),
                        list(sys.path),
                        pickle.dumps((run, rank, port, output))))
        while number == len(self.jobs):
            self.listen(60)
        return self.jobs[number]

    def listen(self, seconds: float) -> None:
        """Wait at most that long for messages about starts and ends."""
        while self.link.poll(seconds):
            try:
                event, number, value = self.link.recv()
            except (EOFError, OSError):
                raise UserError(KILLED) from None
            if event == "started":
                self.jobs.append(ForkedRank(self, value))
                return
            self.jobs[number].status = value
            seconds = 0

    def end(self) -> None:
        """Kill the server and all processes that it forked, and theirs."""
        if self.process.poll() is None:  # else its number may be another's
            kill_descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class CpuActivity:
    """What processes are doing.

    Attributes:
        seconds: how long each thread has used a CPU, by the thread's number.
        eager: how many threads want a CPU. So does one that was stopped
            (SIGSTOP), also a server, which has to say who has ended.
    """

    seconds: dict[str, float]
    eager: int


def measure_activity(servers: set[int],
                     others: set[int]) -> CpuActivity | None:
    """Return what the processes of some sessions are doing.

    Args:
        servers: the numbers of servers, of which all that they have forked
            is measured.
        others: the numbers of processes that lead other sessions.

    Returns:
        None where the system does not say (it has no /proc).
    """
    seconds, eager, tick = {}, 0, os.sysconf("SC_CLK_TCK")
    if not proc.read_stat(os.getpid()):
        return None
    for pid in proc.list_processes():
        with contextlib.suppress(OSError):
            if os.getsid(pid) not in servers | others:
                continue
            states = STOPPED if pid in servers else STOPPED + BUSY
            for task in proc.list_folder(f"/proc/{pid}/task"):
                state, *rest = proc.read_stat(f"{pid}/task/{task}") or ["Z"]
                if state in states:
                    eager += 1
                if rest and pid not in servers:
                    ticks = sum(map(int, rest[10:12]))
                    seconds[task] = ticks / tick
    return CpuActivity(seconds, eager)


STOPPED, BUSY = "Tt", "RD"  # a thread's states, as Linux names them
# servers by the seed of their hashes
the_servers: dict[int | None, Server] = {}
folders: set[Path] = set()  # of launches that have not been waited for
# which no script takes for its own: a rank says where it is
STACK_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
SEED_COUNT = 4  # of hashes, at most: each takes a server
POLL_SECONDS = 0.02  # seconds between two looks at which ranks have ended


def get_servers(preload: Sequence[str] = PRELOAD, size: int = 1,
                hashes: int | None = None) -> list[Server]:
    """Return the servers for N ranks, and start those that are missing.

    Args:
        preload: modules that a server imports when it is started.
        size: the number of ranks.
        hashes: see `ScriptRun`; a seed that the user has set holds for all.
    """
    seeds: list[int | None] = [None]
    if hashes is not None and os.environ.get(
            "PYTHONHASHSEED", "random") == "random":
        seeds = [(hashes + rank) % SEED_COUNT for rank
                 in range(min(size, SEED_COUNT))]
    for seed in seeds:
        server = the_servers.get(seed)
        if server is None or server.owner != os.getpid() or (
                server.process.poll() is not None):
            the_servers[seed] = Server(preload, seed)
    return [the_servers[seed] for seed in seeds]


@atexit.register
def end_all() -> None:
    """End every process that this program has started, at once."""
    while the_servers:
        _, server = the_servers.popitem()
        if server.owner == os.getpid():
            server.end()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)


def serve(descriptor: int, preload: Sequence[str]) -> None:
    """In the server: fork a process for each job, and report its end."""
    open_closed_streams()  # the caller may be a daemon, which closes its own
    # Lightning loads it, and it warns where HOME cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # a daemon of a script loses its parent: it has to end with the others
    proc.adopt_orphans()
    preload_all(preload)
    link = Connection(descriptor)
    jobs: dict[int, int] = {}  # process -> the number of its job
    while True:
        try:
            if link.poll(POLL_SECONDS if jobs else None):
                job, preload, folder, path, arguments = link.recv()
                preload_all(preload)
                pid = os.fork()
                if pid == 0:
                    link.close()
                    become_rank(folder, path, arguments)
                jobs[pid] = job
                link.send(("started", job, pid))
            for pid, status in reap_children():
                if pid in jobs:
                    link.send(("ended", jobs.pop(pid), status))
        except (EOFError, OSError):  # the program is gone
            kill_descendants(os.getpid())
            os.killpg(0, signal.SIGKILL)


def reap_children() -> Iterator[tuple[int, int]]:
    """Yield the number and the exit status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def kill_descendants(root: int) -> None:
    """Kill what a process has started, in its session or not.

    Twice: a process may start another one until it is killed itself.
    """
    for _ in range(2):
        for pid in proc.descendants(root)[1:]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def preload_all(names: Iterable[str]) -> None:
    """Import the modules that were not tried before.

    The forked ranks do not look through it for garbage, either.
    """
    with paused_collection():
        for name in names:
            preload_one(name)
        gc.freeze()


@functools.cache
def preload_one(name: str) -> None:
    """Import it, without a warning that each process of ours would print."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    with contextlib.suppress(Exception):  # the rank will say it
        importlib.import_module(name)


def become_rank(folder: str, path: list[str], arguments: bytes) -> NoReturn:
    """Run the script in this forked process, and end it."""
    status = 1
    try:
        os.chdir(folder)
        sys.path[:] = path
        status = run_script(*pickle.loads(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_script(run: ScriptRun, rank: int, port: int, output: str) -> int:
    """Run `script flags...` as python does; return the exit status.

    Args:
        port: of the first rank, if the launcher takes one.
        output: how the paths of the files begin in which is what it prints.
    """
    variables = run.launcher.tell(run, rank, port, output)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be another than the server's
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{output}.{name}",
                       os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    faulthandler.register(STACK_SIGNAL, file=open(f"{output}.stack", "a"),
                          all_threads=False)
    import torch

    from rankcheck.record.recorder import Log, is_own

    torch.set_num_threads(run.threads)
    sys.argv = [run.script, *(flag.replace("{rank}", str(rank))
                              for flag in run.flags)]
    if not getattr(sys.flags, "safe_path", False):  # by PYTHONSAFEPATH
        del sys.path[:1]  # the caller's folder
    sys.path.insert(0, str(run.place or Path(run.script).resolve().parent))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = Log(run.log, rank, run.record() if run.record else None)
    run.launcher.join(run, log)
    for probe in run.probes:
        probe(log)
    finish_once(log.finish, run.launcher)
    status = 0
    try:
        if run.module:
            runpy.run_module(run.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(run.script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        if is_own(error):
            log.note_fact("internal error", describe_error(error))
        sys.last_value = error  # as Python itself leaves it
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        atexit._run_exitfuncs()  # a forked process would skip them
    return status


def finish_once(finish: Callable[[], None], launcher: Torchrun) -> None:
    """Call `finish` when this process ends, also by os._exit."""
    leave, owner = os._exit, os.getpid()

    def visible_exit(status: int) -> NoReturn:
        os._exit = leave
        try:
            if os.getpid() == owner:  # not a worker of its own
                finish()
                launcher.part(status)
        finally:  # also on a full disk
            leave(status)

    os._exit = visible_exit
