"""Forks the ranks of `ranks.Launch` from a server that has torch.

The server and all that it forks are in a session of their own: Ctrl-C in the
terminal does not reach them, and `end_all` ends them at once.
"""

from __future__ import annotations  # Python 3.9 has no `int | None`

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
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from rankcheck.system import proc
from rankcheck.system.errors import KILLED, UserError, describe_error

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel",
           "torch.distributed.elastic.multiprocessing", "torch._dynamo",
           "torch.distributed.pipelining", "torch.distributed.tensor.parallel")


@dataclass(eq=False)
class Job:
    """A forked process; status is None while it lives."""

    server: Server
    pid: int
    status: int | None = None

    def is_alive(self):
        self.server.listen(0)
        return self.status is None

    def kill(self, number):
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """The process that forks the ranks, as the program sees it.

    It counts the jobs: the system gives the number of a process that has
    ended to a new one. hashes: the seed of Python's hashes in all of them.
    """

    def __init__(self, preload, hashes=None):
        self.owner = os.getpid()
        self.jobs = []
        self.link, its = Pipe()
        code = (f"import sys; sys.path[:] = {sys.path!r}\n"
                "from rankcheck.engine.fork_server import serve\n"
                f"serve({its.fileno()}, {preload!r})")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()], start_new_session=True,
            # OpenMP threads sleep, not spin: read when torch is loaded
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | (
                {} if hashes is None else {"PYTHONHASHSEED": str(hashes)}))
        its.close()

    def fork(self, start, *about):
        """A `Job`; for the arguments see `run_script`."""
        number = len(self.jobs)
        # the pickle is opened where sys.path is right for it
        self.link.send((number, start.preload, start.cwd or os.getcwd(),
                        list(sys.path), pickle.dumps((start, *about))))
        while number == len(self.jobs):
            self.listen(60)
        return self.jobs[number]

    def listen(self, seconds):
        """Wait at most that long for news of starts and ends."""
        while self.link.poll(seconds):
            try:
                event, number, value = self.link.recv()
            except (EOFError, OSError):
                raise UserError(KILLED) from None
            if event == "started":
                self.jobs.append(Job(self, value))
                return
            self.jobs[number].status = value
            seconds = 0

    def end(self):
        """End the server and all that it has forked, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def activity(servers, others):
    """The CPU seconds of each thread, and how many threads want a CPU.

    So does one that was stopped (SIGSTOP), also a server, which has to say
    who has ended. Of all that these servers have forked, and of other
    sessions. None where the system does not say (it has no /proc).
    """
    tasks, eager, tick = {}, 0, os.sysconf("SC_CLK_TCK")
    if not proc.read_stat(os.getpid()):
        return None
    for pid in proc.list_processes():
        with contextlib.suppress(OSError):
            if os.getsid(pid) in servers | others:
                for task in proc.list_folder(f"/proc/{pid}/task"):
                    state, *rest = proc.read_stat(f"{pid}/task/{task}") or "Z"
                    eager += state in ("Tt" if pid in servers else "TtRD")
                    if rest and pid not in servers:
                        tasks[task] = sum(map(int, rest[10:12])) / tick
    return tasks, eager


the_servers = {}  # by the seed of their hashes
folders = set()  # of launches that have not been waited for
# which no script takes for its own: a rank says where it is
LOOK = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
SEEDS = 4  # of hashes, at most: each takes a server
PAUSE = 0.02  # seconds between two looks at which ranks have ended


def get_servers(preload=PRELOAD, size=1, hashes=None):
    """The servers of so many ranks, which are started when first asked for.

    preload: what they then import first. hashes: see `Start`; a seed that
    the user has set holds for all.
    """
    seeds = [None]
    if hashes is not None and os.environ.get(
            "PYTHONHASHSEED", "random") == "random":
        seeds = [(hashes + rank) % SEEDS for rank in range(min(size, SEEDS))]
    for seed in seeds:
        server = the_servers.get(seed)
        if server is None or server.owner != os.getpid() or (
                server.process.poll() is not None):
            the_servers[seed] = Server(preload, seed)
    return [the_servers[seed] for seed in seeds]


@atexit.register
def end_all():
    """End every process that this program has started, at once."""
    while the_servers:
        _, server = the_servers.popitem()
        if server.owner == os.getpid():
            server.end()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)


def serve(link, preload):
    """In the server: fork a process for each job, and tell when it ends."""
    # Lightning loads it, and it warns where HOME cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    preload_all(preload)
    link = Connection(link)
    jobs = {}  # process -> its job
    while True:
        try:
            if link.poll(PAUSE if jobs else None):
                job, preload, folder, path, arguments = link.recv()
                preload_all(preload)
                pid = os.fork()
                if pid == 0:
                    link.close()
                    become_rank(folder, path, arguments)
                jobs[pid] = job
                link.send(("started", job, pid))
            for pid in [*jobs]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    link.send(("ended", jobs.pop(pid),
                               os.waitstatus_to_exitcode(status)))
        except (EOFError, OSError):  # the program is gone
            os.killpg(0, signal.SIGKILL)


def preload_all(names):
    """Import what has not been tried before.

    Garbage collection would take a quarter of the time and find nothing; the
    forked ranks do not look through what is imported here, either.
    """
    gc.disable()
    for name in names:
        preload_one(name)
    gc.freeze()
    gc.enable()


@functools.cache
def preload_one(name):
    """Import it, without a warning that each process of ours would print."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    with contextlib.suppress(Exception):  # the rank will say it
        importlib.import_module(name)


def become_rank(folder, path, arguments):
    """In a forked process. Never returns."""
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


def run_script(start, rank, port, output):
    """Run `script flags...` as python does. output: how its files begin."""
    variables = start.launcher.tell(start, rank, port, output)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be another than the server's
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{output}.{name}",
                       os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    faulthandler.register(LOOK, file=open(f"{output}.stack", "a"),
                          all_threads=False)
    import torch

    from rankcheck.record.recorder import Log, is_own

    torch.set_num_threads(start.threads)
    sys.argv = [start.script, *(flag.replace("{rank}", str(rank))
                                for flag in start.flags)]
    # in place of the caller's folder, which PYTHONSAFEPATH leaves out
    sys.path[:not getattr(sys.flags, "safe_path", False)] = [
        str(start.place or Path(start.script).resolve().parent)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = Log(start.log, rank)
    start.launcher.join(start, log)
    for probe in start.probes:
        probe(log)
    finish_once(log.finish, start.launcher)
    status = 0
    try:
        if start.module:
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(start.script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        if is_own(error):
            log.asked("internal error", describe_error(error))
        sys.last_value = error  # as Python itself leaves it
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()  # a forked process would skip them
    return status


def finish_once(finish, launcher):
    """Let `finish` be called where this process ends, also by os._exit."""
    leave, owner = os._exit, os.getpid()

    def visible_exit(status):
        os._exit = leave
        try:
            if os.getpid() == owner:  # not a worker of its own
                finish()
                launcher.part(status)
        finally:  # also on a full disk
            leave(status)

    os._exit = visible_exit
