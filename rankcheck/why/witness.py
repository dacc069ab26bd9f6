"""Leaves evidence of what a process of several does, and of how it ended.

    HOST-PID.json     where it is, its last collectives, how it ended
    HOST-PID.stack    its stack, if SIGTERM or a crash ended it
    HOST-PID.exits    of a launcher: how its processes have ended
    ask               is touched by whoever wants all of them to write

The first is written at the start and at the end; in between by a thread: when
asked, and when the main thread has not moved for 20 s (then it asks all the
others). `rankcheck why` reads them, also when nothing runs any more.

It serves any script: see hook/sitecustomize.py. Only the standard library; it
uses torch and mpi4py where the script has imported them. It changes nothing of
what it watches: it replaces no function of Python's, `threading` does not know
its thread, and of the main thread it reads lines and instructions. Already to
look at a function's variables would keep what `del` is to free.
"""

import _thread
import atexit
import collections
import contextlib
import faulthandler
import fcntl
import functools
import gc
import heapq
import importlib.util
import json
import opcode
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

FOLDER = "RANKCHECK_WHY"  # the variable that names the folder
WATCHED = "RANKCHECK_WATCHED"  # the id of the rank that has started this
FORMAT = "rankcheck 1"  # of a record
MARK = ".rankcheck-start"  # in a start's folder that is ours to remove
POLL = 2  # seconds between two looks
STILL = 20  # seconds without a move, after which it is written down
WORKS = 0.02  # of a core, which the main thread uses only if it computes
KEPT = 2000  # collectives
LOOKS = 40  # at where the time goes
# Whichever is there: torchrun's name, Open MPI's, srun's, PMI's
RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
         ("PMI_RANK", "PMI_SIZE"))
# A launcher's agent is no rank, whatever srun has told it
LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate-launch", "accelerate.commands.launch",
             "deepspeed", "deepspeed.launcher.launch",
             "deepspeed.launcher.runner"}
# What is the same for all ranks at a start, and another at the next
STARTS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
          "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
# Files whose lines are not the script's
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|/backstage/"
                     r"|/workshop/as_torchrun\.py|\.pyx$"
                     r"|/rankcheck/(launch/fork_server|why/witness)\.py"
                     r"|/c[a-z2-7]{51}\.py$")  # torch.compile's

# What is recorded of MPI's communicators, and what makes new ones
COLLECTIVES = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv",
    "Barrier", "Bcast", "Gather", "Gatherv", "Reduce", "Reduce_scatter",
    "Reduce_scatter_block", "Scan", "Scatter", "Scatterv", "allgather",
    "allreduce", "alltoall", "barrier", "bcast", "gather", "reduce", "scan",
    "scatter")
MAKERS = ("Create", "Create_group", "Dup", "Split", "Split_type")
MESSAGES = ("Probe", "Recv", "Send", "Sendrecv", "Ssend", "probe", "recv",
            "send", "sendrecv", "ssend")  # of these only the last is kept

the_witness = None
mpi_calls = collections.deque(maxlen=KEPT)  # as `read_record` returns them
mpi_messages = collections.deque(maxlen=1)


def start(folder):
    """Write in this folder, from now on or as soon as this is a rank.

    The thread begins when torch or MPI is imported: Python 3.12 warns of a
    fork beside any other thread, and then there are some anyway.
    """
    folder = Path(os.path.expanduser(folder)).absolute()
    rank, by = find_rank()[0], os.environ.get(WATCHED, str(os.getpid()))
    atexit.register(at_end, folder, by)
    if is_launcher(read_command()):
        return
    # by: after os.execv it is still the same rank; what a rank has started
    # has its number, and may be a monitor
    if by == str(os.getpid()) and (
            # what `why run` has become is a rank, if it is alone
            rank is not None or folder.name.endswith(f"-{by}")):
        begin(folder)
    imports = Imports(folder, by)
    sys.meta_path.insert(0, imports)
    for name in {"torch", "mpi4py.MPI"} & {*sys.modules}:
        imports.find_spec(name)


def at_end(folder, by):
    """Write what is left to say: of a rank that nobody has seen so far, and
    of the processes of a launcher.
    """
    if the_witness is None and is_named(by) and begin(folder):
        the_witness.on_end()
    keep_exits(folder)


def is_named(by):
    """Whether this has become a rank: some scripts start theirs themselves."""
    return bool(find_torch()) or (
        by == str(os.getpid()) and find_spawned() is not None)


def run(folder, by):
    try:
        wait = POLL / 50
        while the_witness is None and not is_named(by):
            time.sleep(wait)
            wait = min(1.1 * wait, POLL)
        if the_witness or (the_witness is None and begin(folder)):
            the_witness.watch_moves()
    except Exception as error:  # never the script's problem
        warn(error)


def begin(folder):
    """The `Witness`, or False where nobody can write to the folder."""
    global the_witness
    try:
        the_witness = Witness(folder)
    except OSError as error:  # never the script's problem
        the_witness = False
        warn(error)
    if find_rank()[0] is not None:  # else it may start ranks
        os.environ[WATCHED] = str(os.getpid())
    if "mpi4py.MPI" in sys.modules:
        record_mpi(sys.modules["mpi4py.MPI"])
    return the_witness


class Imports:
    """Sees which modules the script imports, and finds none of them."""

    def __init__(self, *place):
        self.place = place  # of what `run` writes

    def find_spec(self, name, path=None, target=None):
        if the_witness:
            the_witness.follow_imports()
        if name not in ("torch", "mpi4py.MPI"):
            return None
        if self.place:
            _thread.start_new_thread(run, self.place)
            self.place = None
        if name == "torch" or name in sys.modules or not the_witness:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (
                execute(module), record_mpi(module))
        return spec


def warn(error):
    print(f"warning: no evidence for `why`: {error}", file=sys.stderr)


class Witness:
    """Writes what this process does, and how it ended."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.owner, self.host = os.getpid(), name_host(os.environ)
        self.file = folder / f"{self.host}-{self.owner}.json"
        self.ask = folder / "ask"
        if find_rank()[0] == 0:
            self.ask.open("a").close()  # its time stays, if it is there
        with contextlib.suppress(OSError):  # else nobody is to remove it
            self.mark = (folder / MARK).open()
            fcntl.flock(self.mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.began, self.still, self.place = time.time(), 0, ()
        self.start_of = [*map(os.environ.get, STARTS), find_rank()[1]]
        self.first = time.monotonic()  # the clock may be set meanwhile
        self.script, self.clock = None, main_thread_clock()
        self.ended, self.bytes, self.seen = None, "", set()
        self.answers = False  # it has a thread
        self.lock = threading.Lock()  # for the file, and for how it ended
        self.oom_before = count_oom_kills()
        self.stack_file = open(self.file.with_suffix(".stack"), "w")
        if not faulthandler.is_enabled():  # else a crash is the script's own
            faulthandler.enable(self.stack_file)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, self.stack_file,
                                  all_threads=False, chain=True)
        os.register_at_fork(after_in_child=self.leave_child)
        atexit.register(self.on_end)
        self.follow_imports()
        self.write()

    def follow_imports(self):
        """See what a new module tells."""
        self.find_script()
        leaving = getattr(sys.modules.get("backstage.errors"), "LEAVING", None)
        if leaving == []:  # the course's own exit, without exit handlers
            leaving.append(self.on_leave)

    def leave_child(self):
        """A worker of a data loader is not to write in its parent's name."""
        self.ended, self.script = {"status": "forked"}, None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stack_file.fileno(), inheritable=False)
        os.close(nowhere)

    def on_end(self):
        """What Python still knows: of SystemExit, not the status."""
        if self.is_complete():
            self.end(0)
        else:
            self.end(1 if find_error() else None, find_error())
        self.script = None  # its variables are to end with the process

    def on_leave(self, status):
        self.end(status, find_error() if status else None)

    def end(self, status, error=None):
        """status: None if it is not known. Who comes second writes as well:
        the process is not to end while the first one does.
        """
        ended = {"status": status, "time": time.time()}
        if error is not None:
            first, *later = chain(error)
            ended |= {
                "error": type(first).__name__, "message": str(first)[:9000],
                "stack": stack_of(first), "then": [
                    [stack_of(one), f"{type(one).__name__}: {one}"[:200]]
                    for one in later]}
        if self.ended is None or self.ended["status"] is None:
            self.ended = ended
        self.write()

    def find_script(self):
        """Keep the script's own frame, the outermost, which has no variables
        of its own: it tells afterwards whether the script came to its end.
        """
        if self.script is None and self.ended is None:
            *_, self.script = None, *(
                frame for frame in self.frames()
                if frame.f_code.co_name == "<module>"
                and frame.f_globals.get("__name__") == "__main__")

    def is_complete(self):
        script = self.script
        return script is not None and opcode.opname[
            script.f_code.co_code[script.f_lasti]].startswith("RETURN")

    def watch_moves(self):
        answered, wait, self.answers = self.last_ask(), STILL, True
        self.write()
        before = asked_at = time.monotonic()
        computed = self.clock()
        while self.ended is None:
            time.sleep(POLL)
            self.find_script()
            place, now, used = self.find_place(), time.monotonic(), (
                self.clock() - computed)
            # not the time in which the process itself was stopped
            self.still += min(now - before, 2 * POLL)
            works = used > WORKS * (now - before) or self.reads_files()
            before, computed = now, computed + used
            if self.has_moved(place, place[1:] != self.place[1:] or (
                    works and not self.waits())):  # which takes longer
                self.place, self.still, wait = place, 0, STILL
            self.note_error()
            if self.still > wait and now - asked_at > STILL / 2:
                with contextlib.suppress(OSError):  # for example a full disk
                    self.ask.touch()
            if self.last_ask() != answered:
                answered, asked_at = self.last_ask(), now
                wait = 2 * max(wait, self.still)
                self.write()  # at once: on a busy node the rest takes long
                self.write(lines=True)

    def has_moved(self, place, works):
        """Whether it was not there yet: a loop that only asks comes back."""
        if works:
            self.seen.clear()
        new = str(place) not in self.seen
        self.seen.add(str(place))
        return new

    def note_error(self):
        """The script has failed, but the process has yet to end."""
        if self.script is not None and not self.is_complete() and (
                find_error() is not None
                and self.script not in self.frames()):
            self.end(1, find_error())

    def last_ask(self):
        try:  # opened, because a network file system keeps what stat() says
            with self.ask.open() as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return 0

    def find_place(self):
        """What changes when the main thread moves on.

        The instructions that it is at, and its collectives. A loop may be
        seen in the same instruction again and again: then it computes.
        """
        return [(frame.f_code.co_filename, frame.f_lasti)
                for frame in self.frames()], self.progress()

    def waits(self):
        """Whether it waits for another rank, which some do at full speed."""
        calls = ()
        with contextlib.suppress(Exception):  # `write` warns of it
            calls = read_record(False).get("calls", ())
        return any("torch/distributed/" in file for file, _, _ in self.look()
                   ) or any(call["waits"] for call in (
                       *mpi_messages, *calls[-1:]))

    def reads_files(self):
        """Whether the main thread has read or written since the last call."""
        before, self.bytes = self.bytes, read_text(
            f"/proc/self/task/{self.owner}/io")
        return before != self.bytes

    def frames(self):
        """The main thread's frames, innermost first.

        Nobody may keep one of a function: it keeps the function's variables.
        """
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame:
            yield frame
            frame = frame.f_back

    def look(self):
        """The main thread's stack, outermost first: [file, line, function].

        Of this file it keeps `begin` alone: then the script has not begun.
        """
        return [[code.co_filename, frame.f_lineno, code.co_name]
                for frame in self.frames() for code in [frame.f_code]
                if code.co_filename != __file__ or code is begin.__code__
                ][::-1]

    def watch(self):
        """Two seconds: where the main thread is, as [times, stack], how many
        threads run, what part goes to the garbage collector, what workers do.
        """
        looks, running, collecting = collections.Counter(), 0, []
        workers, begin = see_workers(self.owner), time.monotonic()

        def note(phase, info):
            collecting.append(time.monotonic())

        gc.callbacks.append(note)
        while sum(looks.values()) < LOOKS and time.monotonic() < begin + 4:
            time.sleep(2 / LOOKS)
            looks[json.dumps(self.look())] += 1
            running += count_running()
        with contextlib.suppress(ValueError):  # the script has emptied it
            gc.callbacks.remove(note)
        spent = sum(b - a for a, b in zip(collecting[::2], collecting[1::2]))
        return {
            "looks": [[times, json.loads(stack)]
                      for stack, times in looks.most_common(20)],
            "running": running / sum(looks.values()), "collecting": spent / (
                time.monotonic() - begin),
            "workers": compare(workers, see_workers(self.owner))}

    def progress(self):
        """How many collectives each group has begun and ended, as text."""
        return [str([*mpi_messages, *list(mpi_calls)[-1:]])] + [
            dump(False) for dump in find_dumps("_json")]

    def write(self, lines=False):
        """lines: also where the time goes, and in which line each collective
        was called.
        """
        if os.getpid() != self.owner:
            return
        rank, size = find_rank()
        record = {
            "format": FORMAT,
            "rank": rank, "world_size": size, "host": self.host,
            "pid": self.owner,
            "master": [os.environ.get("MASTER_ADDR"),
                       os.environ.get("MASTER_PORT")],
            "began": self.began, "written": time.time(),
            "age": time.monotonic() - self.first, "still": self.still,
            "stack": self.look(),
            "state": read_state(self.owner),
            "start": self.start_of, "answers": self.answers,
            "calls": None, "joined": bool(find_torch() or mpi_calls),
            "message": next((dict(call) for call in list(mpi_messages)
                             if call["waits"]), None),
            "oom_before": self.oom_before,
            "oom_kills": count_oom_kills() - self.oom_before,
            "connecting": connecting(self.owner),
            "cores": sorted(os.sched_getaffinity(0)) if hasattr(
                os, "sched_getaffinity") else [],
            **(self.watch() if lines else {})}
        try:
            record |= read_record(lines)
        except Exception as error:  # the rest has to be known all the same
            warn(error)
        try:
            if not record["joined"] and self.ended is None and lines:
                record["answer"] = try_meeting(*record["master"])
            part = self.file.with_suffix(".part")
            with self.lock:
                record["ended"] = self.ended
                part.write_text(json.dumps(record))
                os.replace(part, self.file)
        except Exception as error:  # never the script's problem
            warn(error)


def chain(error):
    """An error, and those before it that led to it: these first."""
    found = [error]
    while found[0] is not None and found[0] not in found[1:]:
        found.insert(0, found[0].__cause__ or (
            None if found[0].__suppress_context__ else found[0].__context__))
    return found[1:]


def stack_of(error):
    return [[frame.filename, frame.lineno, frame.name]
            for frame in traceback.extract_tb(error.__traceback__)]


def find_line(stack):
    """[file, line, function] of the script's innermost line in a stack.

    Before the script begins, that is `begin` here, whoever has called it.
    """
    mine = [frame for frame in stack if not LIBRARY.search(frame[0])]
    start = [frame for frame in stack if frame[2] == "begin" and frame[
        0].endswith("/why/witness.py")]
    return (start or mine or stack or [["?", 0, "?"]])[-1]


def name_host(env):
    """What SLURM calls this node in its lists, or its own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def main_thread_clock():
    """A function: the seconds for which the main thread has computed."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    return functools.partial(time.clock_gettime, clock)


def find_error():
    """The error that ends the script; Python leaves it there, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def find_rank():
    """(rank, world size), None where the process does not know them yet."""
    torch = find_torch()
    if torch:
        return torch.get_rank(), torch.get_world_size()
    rank, size = read_rank(os.environ, read_command())
    return (find_spawned() if rank is None else rank), size


def find_spawned():
    """The number, on its node, that mp.spawn has given to this process, or
    None.
    """
    module = sys.modules.get("multiprocessing.process")
    process = module.current_process() if module else None
    target = getattr(process, "_target", None)
    return process._args[1] if getattr(target, "__module__", "") == (
        "torch.multiprocessing.spawn") else None


def read_rank(env, command):
    """(rank, world size) as a process's launcher told it, None if none did.

    env: the process's variables; command: its command line, a list. A launcher
    itself may be the only process of srun or mpirun.
    """
    if not is_launcher(command):
        for names in RANKS:
            rank, size = (env.get(name, "") for name in names)
            if rank.isdigit() and size.isdigit() and (
                    names[0] == "RANK" or int(size) > 1):
                return int(rank), int(size)
    return None, None


def read_command():
    """This process's command line; sys.orig_argv is new in Python 3.10."""
    return getattr(sys, "orig_argv", None) or read_text(
        "/proc/self/cmdline").split("\0")


def is_launcher(command):
    """Whether Python runs a launcher: as its script or module, not as a word
    among the script's own.
    """
    words = iter(command[1:])
    for word in words:
        module = re.fullmatch("-[a-zA-Z]*m(.*)", word)
        if module or not word.startswith("-"):
            name = (module[1] or next(words, "")) if module else word
            return os.path.basename(name) in LAUNCHERS
        if word in ("-W", "-X"):
            next(words, None)
    return False


def keep_exits(folder):
    """Write how its processes have ended, where this is a launcher.

    As the error says with which torchrun or mp.spawn ends: {pid: status},
    negative for a signal, with what an error of mp.spawn quotes.
    """
    error = find_error()
    exits = {failure.pid: {"rank": rank, "status": failure.exitcode,
                           "time": failure.timestamp}
             for rank, failure in getattr(error, "failures", {}).items()}
    if hasattr(error, "error_pid"):
        status = getattr(error, "exit_code", None)
        exits[error.error_pid] = {
            "rank": error.error_index, "status": status or 1,
            "time": time.time(), **({} if status else {
                "error": type(error).__name__, "message": str(error)[:9000]})}
    if exits:
        name = f"{name_host(os.environ)}-{os.getpid()}.exits"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(exits))
        except OSError as problem:
            warn(problem)


def find_torch():
    """torch.distributed, once this process has joined a group; else None.

    While it is imported, and in a build without it, names are missing.
    """
    torch = sys.modules.get("torch.distributed")
    return torch if getattr(torch, "is_initialized", bool)() else None


def find_dumps(suffix=""):
    """PyTorch's functions for its flight record, if the script has it.

    NCCL's collectives are in a record of their own; a build for the CPU has
    none.
    """
    if not find_torch():
        return []
    names = (f"_dump_{kind}_trace{suffix}" for kind in ("fr", "nccl"))
    c10d = sys.modules["torch._C._distributed_c10d"]
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]


def read_dump(dump, lines):
    """What PyTorch's flight record holds.

    For its lines PyTorch asks torch for _inductor, which imports it: that
    takes seconds, and if the script does the same at that moment, it may get a
    module that is only half there. This thread, the only one that wants lines,
    gets none.
    """
    if not lines:
        return pickle.loads(dump(True, False, False))
    torch, mine = sys.modules["torch"], threading.get_ident()
    load = torch.__getattr__

    def find(name):
        if threading.get_ident() == mine:
            raise AttributeError(name)
        return load(name)

    torch.__getattr__ = find
    try:
        return pickle.loads(dump(True, True, False))
    finally:
        torch.__getattr__ = load


def read_record(lines):
    """The last collectives, oldest first: PyTorch's flight record, and ours.
    """
    dumps, calls = find_dumps(), list(mpi_calls)
    if not dumps and not calls:
        return {}
    groups = {
        group.group_name: sorted(ranks) for group, ranks in
        sys.modules["torch.distributed.distributed_c10d"]._world
        .pg_group_ranks.items()
        if hasattr(group, "group_name")} if dumps else {}
    # a number in place of a group: one without this rank
    records = [[{
        "group": groups.get(entry["process_group"][0]),
        "name": entry["process_group"][0],
        "number": entry["collective_seq_id"],
        "call": entry["profiling_name"].rpartition(":")[2],
        "sizes": entry["input_sizes"], "types": entry["input_dtypes"],
        "waits": not entry["retired"], "p2p": entry["is_p2p"],
        "time": entry["time_created_ns"] / 1e9,
        "line": find_line([
            [frame["filename"], frame["line"], frame["name"]]
            for frame in reversed(entry["frames"])
        ]) if entry.get("frames") else None}
        for entry in read_dump(dump, lines).get("entries", [])]
        for dump in dumps]
    # each is in order, also where the clock was set back meanwhile
    calls = [*heapq.merge(calls, *records, key=lambda call: call["time"])]
    return {"calls": calls[-KEPT:]}


# ---------------------------------- MPI, which keeps no record of its own


def record_mpi(MPI):
    """Let MPI.COMM_WORLD, and what is made of it, record its collectives."""
    kind = type(MPI.COMM_WORLD)
    if hasattr(kind, "recorded"):
        return

    def call(name, calls, counts):
        def called(self, *args, **options):
            self.recorded += counts
            entry = describe_call(self, name, args)
            calls.append(entry)
            result = getattr(kind, name)(self, *args, **options)
            entry["waits"] = False
            return result
        return called

    def make(name):
        def made(self, *args, **options):
            self.children += 1
            comm = getattr(kind, name)(self, *args, **options)
            return adopt(comm, f"{self.label}.{self.children}") if comm else (
                comm)
        return made

    def abort(self, errorcode=0):
        if the_witness:
            the_witness.end(errorcode, find_error())
        kind.Abort(self, errorcode)

    def adopt(comm, label):
        mine = Recorded(comm)
        vars(mine).update(getattr(comm, "__dict__", {}), label=label)
        return mine

    Recorded = type("Intracomm", (kind,), {
        "recorded": 0, "children": 0, "ranks": None, "Abort": abort,
        **{name: call(name, mpi_calls, 1) for name in COLLECTIVES},
        **{name: call(name, mpi_messages, 0) for name in MESSAGES},
        **{name: make(name) for name in MAKERS}})
    MPI.COMM_WORLD = adopt(MPI.COMM_WORLD, "MPI")


def describe_call(comm, name, args):
    """What `read_record` says of a call; of an array its shape and type.

    The methods in lower case take any objects, also arrays of other shapes.
    """
    if comm.ranks is None:
        world = sys.modules["mpi4py.MPI"].COMM_WORLD.Get_group()
        comm.ranks = comm.Get_group().Translate_ranks(None, world)
    sent = [array for array in args[:2] if hasattr(array, "dtype")
            and name[0].isupper()][:1]
    frame = sys._getframe(2)
    while frame.f_back and LIBRARY.search(frame.f_code.co_filename):
        frame = frame.f_back
    return {"group": comm.ranks, "name": comm.label, "number": comm.recorded,
            "call": name, "sizes": [list(array.shape) for array in sent],
            "types": [str(array.dtype) for array in sent], "waits": True,
            "p2p": name in MESSAGES, "time": time.time(),
            "line": [frame.f_code.co_filename, frame.f_lineno,
                     frame.f_code.co_name]}


# ------------------------------------------- what the system says (Linux)


def read_text(file):
    try:
        return Path(file).read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


def read_stat(pid):
    """What Linux says of a process, from its state on; [] if it is gone."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def open_files(pid):
    """The paths of what a process has open, as far as we may see."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                yield os.readlink(link)


def read_state(pid):
    """The main thread's state: R runs, S sleeps, D waits for a device."""
    return (read_stat(pid) or "?")[0]


def count_running():
    """How many threads of this process run, but for the one that asks."""
    tasks = Path("/proc/self/task")
    return sum(read_state(f"self/task/{task}") == "R" for task in (
        os.listdir(tasks) if tasks.is_dir() else ())) - 1


def see_workers(pid):
    """{process: its state, time and bytes} of what a main thread started."""
    children = read_text(f"/proc/{pid}/task/{pid}/children").split()
    return {int(child): [*read_stat(child)[:1], *read_stat(child)[11:13],
                         read_text(f"/proc/{child}/io")]
            for child in children}


def compare(before, now):
    """[process, its state, whether it has worked since] of its workers."""
    return [[child, seen[0], seen[1:] != before.get(child, seen)[1:]]
            for child, seen in now.items() if seen[0] != "Z"]


def count_oom_kills():
    """How many processes the kernel has ended as the memory was full."""
    found = re.search(r"^oom_kill (\d+)", read_text("/proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def connecting(pid):
    """"HOST:PORT" of each TCP connection that nobody has answered yet."""
    mine, found = {*open_files(pid)}, []
    lines = read_text(f"/proc/{pid}/net/tcp").splitlines()
    for fields in map(str.split, lines[1:]):
        if fields[3] == "02" and f"socket:[{fields[9]}]" in mine:  # SYN_SENT
            host, port = fields[2].split(":")
            host = int(host, 16).to_bytes(4, sys.byteorder)
            found.append(f"{socket.inet_ntoa(host)}:{int(port, 16)}")
    return found


def try_meeting(host, port):
    """Whether somebody answers where rank 0 should be: "" or the problem."""
    if not host or not (port or "").isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), 3).close()
        return ""
    except socket.gaierror:
        return "no such host"
    except ConnectionRefusedError:
        return "nobody listens there"
    except OSError as error:
        return ("no answer" if isinstance(error, TimeoutError)
                else error.strerror or str(error))
