"""Records what a process of a job does, and how it ended.

    PROCESS.json     where it is, its last collectives, how it ended
    PROCESS.end      how it ended, written once, in a room that is reserved
    PROCESS.stack    its stack, if SIGTERM or a crash ended it
    PROCESS.exits    of a launcher: how its processes and it have ended
    PROCESS.start    of what `why run` has become: what that was, see start.py
    ask              numbers: who wants all of them to write adds one

PROCESS is HOST-PID@SPACE, as proc.py's `name_process` makes it.
The first is written at the start and at the end; in between by a thread: when
asked, and when the main thread has not moved for 20 s (then it asks all the
others). `rankcheck why` reads them, also when nothing runs any more. Types of
what is in it are in process_record.py.

It serves any script: see hook/sitecustomize.py. Only the standard library, and
the modules beside it. It changes nothing of what it watches: it replaces no
function of Python's, `threading` does not know its thread, and of the main
thread it reads lines and instructions. Even reading a frame's locals would
keep objects alive after `del`.
"""

from __future__ import annotations

import _thread
import atexit
import collections
import contextlib
import faulthandler
import fcntl
import importlib.util
import json
import opcode
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from ..system import launchers, proc, sources
from ..system.launchers import find_error, find_rank
from ..system.open_file import OpenFile, open_high
from . import calls

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it takes longer than all else here
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any, Literal

    from ..system.sources import Stack
    from .process_record import Ended, ProcessRecord, RecordedRow

FOLDER_VARIABLE = "RANKCHECK_WHY"  # names the folder
# The id of the rank that has started this
WATCHED_VARIABLE = "RANKCHECK_WATCHED"
# The one that names what `why run` has started
START_VARIABLE = "RANKCHECK_START"
RECORD_FORMAT = "rankcheck 5"  # of a record
START_SUFFIX = ".start"  # ends the name of the file that says what was started
START_MARK = ".rankcheck-start"  # in a start's folder that is ours to remove
SAMPLE_SECONDS = 2  # seconds between two samples
IDLE_SECONDS = 20  # seconds without a move, after which it is written down
STACK_SAMPLES = 40  # of where the time goes
PLACES = 10000  # of a loop, at most
END_BYTES = 1 << 16  # bytes, for how a process ends
# What is the same for all ranks at a start, and another at the next
JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
    "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT",
    "WORLD_SIZE")  # not of a group, which no rank knows at first

# Modules in which a script that leaves without exit handlers finds `leave`;
# the second one has the name that older scripts know
PACKAGE_ALIASES = "rankcheck_watcher", "rankcheck_witness"

# False: nobody can write to the folder
the_watcher: Watcher | Literal[False] | None = None


def start_watching(name: str | os.PathLike[str]) -> None:
    """Write in this folder, from now on or as soon as this is a rank.

    The thread begins when torch or MPI is imported: Python 3.12 warns of a
    fork beside any other thread, and then there are some anyway.
    """
    folder = Path(os.path.expanduser(name)).absolute()
    rank = find_rank()[0]
    by = os.environ.get(WATCHED_VARIABLE, str(os.getpid()))
    atexit.register(at_end, folder, by)
    for known in PACKAGE_ALIASES:
        package: Any = sys.modules.setdefault(known, type(sys)(known))
        package.leave = record_exit
    if launchers.is_launcher(launchers.read_own_command()):
        return
    # by: after os.execv it is still the same rank; what a rank has started
    # has its number, and may be a monitor
    if by == str(os.getpid()) and (
            # what `why run` has become is a rank, if it is alone
            rank is not None or folder.name.endswith(f"-{by}")
            or is_start(folder)):
        make_watcher(folder)
    imports = Imports(folder, by)
    sys.meta_path.insert(0, imports)
    for module in {"torch", "mpi4py.MPI"} & {*sys.modules}:
        imports.find_spec(module)


def is_start(folder: Path) -> bool:
    """Whether `why run` has become this process."""
    file = folder / f"{proc.name_process(os.environ)}{START_SUFFIX}"
    token = os.environ.get(START_VARIABLE)
    if not token:
        return False
    # else a process of an earlier start had the same PID
    return token in proc.read_text(file)


def record_exit(status: int | str | None) -> None:
    """Record the end of a script that exits without exit handlers."""
    if the_watcher:
        the_watcher.end(status)


def at_end(folder: Path, by: str) -> None:
    """Write of a rank that nobody has seen so far, and of a launcher."""
    if the_watcher is None and is_named(by):
        watcher = make_watcher(folder)
        if watcher is not None:
            watcher.on_end()
    try:
        launchers.keep_exits(folder)
    except OSError as error:
        warn_of_error(error)


def is_named(by: str) -> bool:
    """Whether this has become a rank: some scripts start theirs themselves."""
    if launchers.find_torch():
        return True
    return by == str(os.getpid()) and launchers.find_spawned() is not None


def run_watcher(folder: Path, by: str) -> None:
    """Run the watcher thread, once this process is a rank."""
    try:
        wait = SAMPLE_SECONDS / 50
        while the_watcher is None and not is_named(by):
            time.sleep(wait)
            wait = min(1.1 * wait, SAMPLE_SECONDS)
        watcher = the_watcher
        if watcher is None:
            watcher = make_watcher(folder)
        if watcher:
            watcher.watch_moves()
    except Exception as error:  # never the script's problem
        warn_of_error(error)


def make_watcher(folder: Path) -> Watcher | None:
    """Make the `Watcher`; None where nobody can write to the folder."""
    global the_watcher
    watcher = None
    try:
        the_watcher = watcher = Watcher(folder)
    except OSError as error:  # never the script's problem
        the_watcher = False
        warn_of_error(error)
    if find_rank()[0] is not None:  # else it may start ranks
        os.environ[WATCHED_VARIABLE] = str(os.getpid())
    if "mpi4py.MPI" in sys.modules:
        calls.record_mpi(sys.modules["mpi4py.MPI"], record_exit)
    return watcher


class Imports:
    """Observes the script's imports without handling any.

    Args:
        folder, by: as `run_watcher` has them, which is started once.
    """

    def __init__(self, folder: Path, by: str) -> None:
        self.task: tuple[Path, str] | None = (folder, by)

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """Start the thread if this is torch or MPI, and record MPI."""
        if the_watcher:
            the_watcher.find_script()
        if name not in ("torch", "mpi4py.MPI"):
            return None
        if self.task is not None:
            _thread.start_new_thread(run_watcher, self.task)
            self.task = None
        if name == "torch" or name in sys.modules or not the_watcher:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_record(module: ModuleType) -> None:
                execute(module)
                calls.record_mpi(module, record_exit)

            loader.exec_module = execute_and_record
        return spec


def warn_of_error(error: Exception) -> None:
    print(f"warning: no record for `why`: {error}", file=sys.stderr)


class Watcher:
    """Records what this process does, and how it ended.

    Attributes:
        script: the frame of the script itself; None before it has begun.
        thread: the system's number of the thread that watches; None before.
        idle_seconds: since the main thread has moved.
        line_seconds: since the script came to its line.
        places: hashes of those where the main thread was since `progress`.
        progress: of its collectives, as calls.describe_progress() returns it.
        script_ended: whether the script has ended, and the process has not.
        seen_requests: the requests that are answered.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.owner, self.host = os.getpid(), proc.name_host(os.environ)
        self.file = folder / f"{proc.name_process(os.environ)}.json"
        self.ask = folder / "ask"
        if find_rank()[0] == 0:
            # a network file system remembers of a file that it is not there
            self.ask.open("a").close()
        with contextlib.suppress(OSError):  # else nobody is to remove it
            mark = open_high(folder / START_MARK, os.O_RDONLY)
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.at_begin: ProcessRecord = {
            "format": RECORD_FORMAT, "host": self.host, "pid": self.owner,
            "starter": os.environ.get(WATCHED_VARIABLE), "began": time.time(),
            "start": [os.environ.get(name) for name in JOB_VARIABLES],
            "parent": os.getppid(),
            "token": os.environ.get(START_VARIABLE),
            "space": proc.name_space(),
            "network": os.path.basename(
                os.path.realpath("/proc/self/ns/net")),
            "oom_before": proc.count_oom_kills()}
        self.idle_seconds: float = 0
        self.line_seconds: float = 0
        self.line: Sequence[Any] | None = None
        self.places: set[int] = set()
        self.progress: list[str] | None = None
        self.script: FrameType | None = None
        self.script_ended = False
        self.thread: int | None = None
        self.ended: Ended | None = None
        self.seen_requests = ""
        self.lock = threading.Lock()  # for the files, and for how it ended
        self.stack_file = OpenFile(self.file.with_suffix(".stack"))
        self.end_file = OpenFile(self.file.with_suffix(".end"))
        with contextlib.suppress(OSError):  # not every file system can
            os.posix_fallocate(self.end_file.number, 0, END_BYTES)
        if not faulthandler.is_enabled():  # else a crash is the script's own
            faulthandler.enable(self.stack_file.number)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, self.stack_file.number,
                                  all_threads=False, chain=True)
        os.register_at_fork(after_in_child=self.leave_child)
        atexit.register(self.on_end)
        self.find_script()
        self.write()

    def leave_child(self) -> None:
        """Write no more: a worker of a data loader is not its parent."""
        self.ended, self.script = {"status": "forked"}, None
        for file in self.stack_file, self.end_file:
            file.disconnect()

    def on_end(self) -> None:
        """Write what Python still knows: of SystemExit, not the status."""
        status = None
        if self.is_complete():
            status = 0
        elif find_error():
            status = 1
        self.end(status)
        self.script = None  # its variables are to end with the process

    def end(self, status: int | str | None) -> None:
        """Write how it ended, once: a second caller waits for the first.

        Args:
            status: None if it is not known.
        """
        if os.getpid() != self.owner:
            return
        with self.lock:
            if self.ended is None:
                ended: Ended = {"status": status, "time": time.time()}
                if status:
                    add_error(ended, find_error())
                self.ended = ended
                # where no file can be opened any more, and no byte is left
                with contextlib.suppress(OSError):
                    self.end_file.fill(json.dumps(ended).encode())
        self.write()

    def find_script(self) -> None:
        """Keep the script's own frame, the outermost, which has no variables
        of its own: it tells afterwards whether the script came to its end.
        """
        if self.script is not None or self.ended is not None:
            return
        outermost = None
        for frame in self.frames():
            if frame.f_code.co_name == "<module>" and (
                    frame.f_globals.get("__name__") == "__main__"):
                outermost = frame
        self.script = outermost

    def is_complete(self) -> bool:
        """Whether the script came to its end."""
        script = self.script
        return script is not None and opcode.opname[
            script.f_code.co_code[script.f_lasti]].startswith("RETURN")

    def watch_moves(self) -> None:
        """Sample the main thread until the process ends."""
        self.thread = threading.get_native_id()
        self.seen_requests = proc.read_text(self.ask)
        wait: float = IDLE_SECONDS
        self.write()
        now, first_at_end = time.monotonic(), False
        while self.ended is None:
            time.sleep(SAMPLE_SECONDS)
            if not first_at_end and (
                    launchers.find_torch() or calls.mpi_calls):
                # before torch's own handlers, and those of the script that
                # were there before: they may wait for other ranks
                atexit.register(self.note_end)
                first_at_end = True
            self.find_script()
            before, now = now, time.monotonic()
            # not the time in which the process itself was stopped
            passed = min(now - before, 2 * SAMPLE_SECONDS)
            if self.has_left_line():
                self.line_seconds = 0
            else:
                self.line_seconds += passed
            if self.has_moved():
                self.idle_seconds, wait = 0, IDLE_SECONDS
            else:
                self.idle_seconds += passed
            self.note_end()
            if self.idle_seconds > wait:
                with contextlib.suppress(OSError):  # for example a full disk
                    add_request(self.ask)
            requests = proc.read_text(self.ask)
            if requests != self.seen_requests:
                self.seen_requests = requests
                wait = 2 * max(wait, self.idle_seconds)
                self.write()  # at once: on a busy node the rest takes long
                self.write(lines=True)

    def has_moved(self) -> bool:
        """Whether the main thread's place is new since the last collective: a
        polling loop visits the same places again.
        """
        place = hash(tuple((frame.f_code.co_filename, frame.f_lasti)
                           for frame in self.frames()))
        progress = calls.describe_progress()
        if progress != self.progress or len(self.places) > PLACES:
            self.places.clear()
        self.progress = progress
        known = place in self.places
        self.places.add(place)
        return not known

    def has_left_line(self) -> bool:
        """Whether the line is not that of the last sample: a loop comes
        back to places that are not new.
        """
        before = self.line
        self.line = calls.find_sources().find_line(self.sample_stack())
        return self.line != before

    def note_end(self) -> None:
        """Write it if the script is over or has failed, but the process has
        yet to end.
        """
        if self.script is not None and self.script not in self.frames():
            self.script_ended = True
            if not self.is_complete() and find_error() is not None:
                self.end(1)

    def frames(self, thread: int | None = None) -> Iterator[FrameType]:
        """Yield a thread's frames, by default the main one's, innermost first.

        Nobody may keep one of a function: it keeps the function's variables.
        """
        ident = thread or threading.main_thread().ident
        frame = sys._current_frames().get(ident or 0)
        while frame:
            if frame.f_globals is not globals():  # not this module's
                yield frame
            frame = frame.f_back

    def sample_stack(self, thread: int | None = None
             ) -> tuple[tuple[str, int, str], ...]:
        """Return a thread's stack, outermost first: (file, line, function)."""
        return tuple((frame.f_code.co_filename, frame.f_lineno,
                      frame.f_code.co_name) for frame in self.frames(thread)
                     )[::-1]

    def watch(self) -> ProcessRecord:
        """Return the main thread's stacks of two seconds, and what the others
        do meanwhile.
        """
        samples: collections.Counter[Stack] = collections.Counter()
        start = time.monotonic()
        before = proc.see_work(self.owner, but=self.thread)
        while (sum(samples.values()) < STACK_SAMPLES
               and time.monotonic() < start + 4):
            time.sleep(2 / STACK_SAMPLES)
            samples[self.sample_stack()] += 1
        owners, threads = calls.find_sources(), self.sample_threads()
        lines = {number: [name, owners.find_line(stack)]
                 for name, number, stack in threads if number}
        after = proc.see_work(self.owner, but=self.thread)
        most = [(times, stack) for stack, times in samples.most_common(20)]
        return {"stack_samples": most, "threads": threads,
                "work": proc.compare_work(
                    before, after, time.monotonic() - start, lines)}

    def sample_threads(self) -> list[RecordedRow]:
        """Return [name, native id, stack] of all threads that run Python, but
        ours; `threading` may not know some: ["?", 0, stack].
        """
        threads: list[RecordedRow] = []
        # as `threading` knows them, without asking it
        known: dict[int | None, RecordedRow] = {
            thread.ident: [thread.name, thread.native_id]
            for thread in list(vars(threading)["_active"].values())}
        # after a fork it has the number of another process there
        known[threading.main_thread().ident] = ["MainThread", self.owner]
        for ident in list(sys._current_frames()):
            if ident != _thread.get_ident():
                threads.append([*known.get(ident, ["?", 0]),
                                self.sample_stack(ident)])
        return threads

    def find_callee(self) -> str | None:
        """Return what the main thread's innermost frame calls, or None."""
        frame = next(self.frames(), None)
        return None if frame is None else sources.find_callee(frame)

    def write(self, lines: bool = False) -> None:
        """Write the record.

        Args:
            lines: also where the time goes, and the collectives' lines.
        """
        if os.getpid() != self.owner:
            return
        watched: ProcessRecord = {}
        if lines:
            watched = self.watch()  # then all else at one moment
        rank, size = find_rank()
        address = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT")
        record: ProcessRecord = {
            **self.at_begin, **watched, "rank": rank, "world_size": size,
            "master": [address, port],
            "written": time.time(), "idle_seconds": self.idle_seconds,
            "line_seconds": self.line_seconds,
            "script_ended": self.script_ended,
            "ended": None,
            # who does not look yet, does not see it move either
            "stack": self.sample_stack() if self.thread else [],
            "callee": self.find_callee() if self.thread else None,
            "handles": find_handled() if self.thread else None,
            "folders": sources.find_folders(),
            "switched_off": calls.find_switched_off(),
            "answers": self.thread is not None,
            "asked": self.seen_requests[-1000:],  # the last requests
            "state": proc.read_state(self.owner),
            "launched": launchers.is_launcher(proc.read_command(os.getppid())),
            "calls": None, "mpi": "mpi4py.MPI" in sys.modules,
            "joined": bool(launchers.find_torch() or calls.mpi_calls),
            "message": next((call.copy() for call in list(calls.mpi_messages)
                             if call["waits"]), None),
            "oom_kills": (proc.count_oom_kills()
                          - self.at_begin["oom_before"]),
            "connecting": proc.connecting(self.owner),
            "library": os.environ.get("RANKCHECK_LIBRARY", "")}
        try:
            entries = calls.read_calls(lines)
            record["calls"] = entries
            if record["message"] is not None:
                entries = [*entries, record["message"]]
            record["groups"] = calls.pack_groups(entries)
        except Exception as error:  # the rest has to be known all the same
            warn_of_error(error)
        try:
            if not record["joined"] and self.ended is None and lines:
                record["answer"] = proc.try_meeting(address, port)
            part = self.file.with_suffix(".part")
            with self.lock:
                record["ended"] = self.ended
                part.write_text(json.dumps(record))
                os.replace(part, self.file)
        except Exception as error:  # never the script's problem
            warn_of_error(error)


def add_request(file: Path) -> str:
    """Ask all ranks, beside what others ask. Returns the request."""
    request = f"{time.time_ns()}\n"
    with file.open("a") as requests:
        requests.write(request)
    return request


def add_error(ended: Ended, error: BaseException | None) -> None:
    """Add the error with which a script ended, and those that led to it."""
    if error is None:
        return
    first, *later = chain_errors(error)
    ended["error"] = type(first).__name__
    ended["message"] = launchers.read_message(first)
    ended["stack"] = stack_of(first)[-50:]
    followed = []
    for one in later[-5:]:
        text = f"{type(one).__name__}: {launchers.read_message(one)}"
        followed.append([stack_of(one)[-20:], text[:200]])
    ended["then"] = followed


def chain_errors(error: BaseException) -> list[BaseException]:
    """Return an error, and those before it that led to it: these first."""
    found: list[BaseException] = []
    earlier: BaseException | None = error
    while earlier is not None and earlier not in found:
        found.insert(0, earlier)
        earlier = find_earlier(earlier)
    return found


def find_earlier(error: BaseException) -> BaseException | None:
    """Return the error that led to this one; of a group, the first one inside.
    """
    inside = getattr(error, "exceptions", None)
    # as a backport for older Pythons calls it, too
    if inside and any(kind.__name__ == "BaseExceptionGroup"
                      for kind in type(error).__mro__):
        first: BaseException = inside[0]
        return first
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def find_handled() -> RecordedRow | None:
    """Return [the name, the stack] of the error that the main thread is
    handling, as in `finally` or `except`; None without one, or before Python
    3.10.
    """
    current: Any = getattr(sys, "_current_exceptions", dict)
    handled = current().get(threading.main_thread().ident)
    if isinstance(handled, tuple):  # before Python 3.12
        handled = handled[1]
    if handled is None:
        return None
    return [type(handled).__name__, stack_of(handled)[-20:]]


def stack_of(error: BaseException) -> list[RecordedRow]:
    """Return its frames, outermost first: (file, line, function)."""
    return [[frame.f_code.co_filename, line, frame.f_code.co_name]
            for frame, line in traceback.walk_tb(error.__traceback__)]
