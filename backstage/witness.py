"""Leaves evidence of what a process of several does, and of how it ended.

    HOST-PID.json     where it is, its last collectives, how it ended
    HOST-PID.stack    its stack, if a signal or a crash ended it
    ask               is touched by whoever wants all of them to write

A thread writes the first: at the start, when asked, when the main thread has
not moved for 20 s (then it asks all the others), and at the end. `python -m
workshop why` reads them, also when nothing runs any more.

It serves any script: see hook/sitecustomize.py. Only the standard library; it
uses torch and mpi4py where the script has imported them.
"""

import atexit
import collections
import contextlib
import faulthandler
import importlib.util
import json
import os
import pickle
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

FOLDER = "WORKSHOP_WHY"  # the variable that names the folder
TIMEOUT = "WORKSHOP_TIMEOUT"  # seconds without a move that end the process
POLL = 2  # seconds between two looks
STILL = 20  # seconds without a move, after which it is written down
KEPT = 2000  # collectives
LOOKS = 40  # at where the time goes
# Whichever is there: torchrun's name, Open MPI's, srun's, PMI's
RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
         ("PMI_RANK", "PMI_SIZE"))
# The agent of torchrun is no rank, whatever srun has told it
LAUNCHER = re.compile(r"(^|/)torchrun$|^(-m)?torch\.distributed\."
                      r"(run|launch)$")
# Files whose lines are not the script's
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|/backstage/"
                     r"|/workshop/(as_torchrun|processes)\.py|\.pyx$"
                     r"|/c[a-z2-7]{51}\.py$")  # torch.compile's

# What is recorded of MPI's communicators, and what makes new ones
COLLECTIVES = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv",
    "Barrier", "Bcast", "Gather", "Gatherv", "Reduce", "Reduce_scatter",
    "Reduce_scatter_block", "Scan", "Scatter", "Scatterv", "allgather",
    "allreduce", "alltoall", "barrier", "bcast", "gather", "reduce", "scan",
    "scatter")
MAKERS = ("Create", "Create_group", "Dup", "Split", "Split_type")

the_witness = None
mpi_calls = collections.deque(maxlen=KEPT)  # as `read_record` returns them


def start(folder=None, limit=0):
    """Begin to write, in `folder` or the one that the environment names.

    limit: seconds without a move that end the process; 0: the environment's.

    Called again, it only sets the limit. Without any folder, or in a process
    that is no rank, such as a launcher, it does nothing. What a rank starts is
    not watched.
    """
    global the_witness
    if the_witness and limit:
        the_witness.limit = limit
    folder = os.environ.get(FOLDER) or folder
    if folder and the_witness is None and find_rank()[0] is not None:
        other = os.environ.pop(TIMEOUT, "")
        os.environ.pop(FOLDER, None)
        try:
            the_witness = Witness(Path(folder).absolute(),
                                  limit or float(other or 0))
            the_witness.start()
        except (OSError, ValueError) as error:  # never the script's problem
            warn(error)
        if "mpi4py.MPI" in sys.modules:
            record_mpi(sys.modules["mpi4py.MPI"])
        else:
            sys.meta_path.insert(0, MPIFinder())


def warn(error):
    print(f"warning: no evidence for `why`: {error}", file=sys.stderr)


def note_end(status, error=None):
    """Write how this process ends. The first call counts."""
    if the_witness:
        the_witness.end(status, error)


class Witness(threading.Thread):
    """The thread that writes, as a daemon: it never keeps a process alive."""

    def __init__(self, folder, limit):
        """limit: seconds without a move that end the process, 0 for none."""
        super().__init__(daemon=True, name="witness")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.owner = folder, os.getpid()
        self.host = name_host(os.environ)
        self.file = folder / f"{self.host}-{self.owner}.json"
        self.ask = folder / "ask"
        if find_rank()[0] == 0:
            self.ask.open("a").close()  # its time stays, if it is there
        self.limit = limit or float("inf")
        self.began, self.still, self.place = time.time(), 0, ()
        self.ended, self.status, self.left_from = None, 0, None
        self.lock = threading.Lock()  # for the file, and for how it ended
        self.oom_before = count_oom_kills()
        self.stack_file = open(self.file.with_suffix(".stack"), "w")
        faulthandler.enable(self.stack_file)
        self.watch_sigterm()
        self.set_signal, signal.signal = signal.signal, self.on_signal
        os.register_at_fork(after_in_child=self.leave_child)
        self.show_error, sys.excepthook = sys.excepthook, self.on_error
        self.exit, sys.exit = sys.exit, self.on_exit
        self.leave, os._exit = os._exit, self.on_leave
        atexit.register(lambda: self.end(self.status))
        self.write()

    def leave_child(self):
        """A worker of a data loader is not to write in its parent's name."""
        faulthandler.disable()
        signal.signal = self.set_signal
        handler = signal.getsignal(signal.SIGTERM)
        faulthandler.unregister(signal.SIGTERM)  # brings an old one back
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        self.ended = {}

    def watch_sigterm(self):
        """Write the stack on SIGTERM, before its handler is called."""
        faulthandler.register(signal.SIGTERM, self.stack_file,
                              all_threads=False, chain=True)

    def on_signal(self, number, handler):
        """The script sets a handler of its own."""
        if number != signal.SIGTERM:
            return self.set_signal(number, handler)
        faulthandler.unregister(number)
        try:
            return self.set_signal(number, handler)
        finally:
            self.watch_sigterm()

    def on_error(self, kind, error, trace):
        self.show_error(kind, error, trace)
        self.end(1, error)

    def on_exit(self, status=None, /):
        self.status, self.left_from = status, self.look()
        self.exit(status)

    def on_leave(self, status):
        """Nothing else is called on the way out."""
        self.end(status)
        self.leave(status)

    def end(self, status, error=None):
        if self.ended is not None:
            return
        ended = {"status": status, "time": time.time(),
                 "stack": self.left_from}
        if error is not None:
            ended |= {
                "error": type(error).__name__, "message": str(error)[:2000],
                "stack": [[frame.filename, frame.lineno, frame.name] for frame
                          in traceback.extract_tb(error.__traceback__)]}
        self.ended = ended
        self.write()

    def run(self):
        try:
            self.watch_moves()
        except Exception as error:  # never the script's problem
            warn(error)

    def watch_moves(self):
        answered = self.last_ask()
        before = asked_at = time.monotonic()
        while self.ended is None:
            time.sleep(POLL)
            place, now = self.find_place(), time.monotonic()
            # not the time in which the process itself was stopped
            self.still += min(now - before, 2 * POLL)
            before = now
            if place != self.place:
                self.place, self.still, wait = place, 0, STILL
            if self.still > wait and now - asked_at > STILL / 2:
                self.touch()
            if self.last_ask() != answered or self.still > self.limit:
                answered, asked_at = self.last_ask(), now
                wait = 2 * max(wait, self.still)
                self.write(lines=True)
            if self.still > self.limit:
                self.give_up()

    def last_ask(self):
        try:  # opened, because a network file system keeps what stat() says
            with self.ask.open() as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return 0

    def touch(self):
        with contextlib.suppress(OSError):  # for example a full disk
            self.ask.touch()

    def give_up(self):
        """End this process; the launcher then ends the others."""
        self.touch()
        time.sleep(3 * POLL)  # the others are to write before that
        if self.ended is not None or self.place != self.find_place():
            return  # it goes on
        self.end("timeout")
        print(f"error: rank {find_rank()[0]} has not moved for "
              f"{self.limit:.0f} s: see python -m workshop why "
              f"{shlex.quote(str(self.folder))}", file=sys.stderr, flush=True)
        self.leave(1)

    def find_place(self):
        """What changes when the main thread moves on.

        Its stack, its collectives, and the whole numbers among its variables:
        a loop may be seen in the same line again and again, but it counts.
        """
        counts = [[value for value in list(frame.f_locals.values())
                   if type(value) is int] for frame, _ in self.frames()]
        return self.look(), self.progress(), counts

    def frames(self):
        """The main thread's frames and their lines, innermost first."""
        return traceback.walk_stack(sys._current_frames().get(
            threading.main_thread().ident))

    def look(self):
        """The main thread's stack, outermost first: [file, line, function].
        """
        return [[frame.f_code.co_filename, line, frame.f_code.co_name]
                for frame, line in self.frames()
                if frame.f_code.co_filename != __file__][::-1]

    def watch(self):
        """Where the main thread is, over two seconds: [times, stack]."""
        looks = collections.Counter()
        for _ in range(LOOKS):
            time.sleep(2 / LOOKS)
            looks[json.dumps(self.look())] += 1
        return [[times, json.loads(stack)]
                for stack, times in looks.most_common(20)]

    def progress(self):
        """How many collectives each group has begun and ended, as text."""
        return [str(list(mpi_calls)[-1:])] + [
            dump(False) for dump in find_dumps("_json")]

    def write(self, lines=False):
        """lines: also where the time goes, and in which line each collective
        was called. The first time, that takes PyTorch some four seconds.
        """
        if os.getpid() != self.owner:
            return
        rank, size = find_rank()
        record = {
            "rank": rank, "world_size": size, "host": self.host,
            "pid": self.owner,
            "master": [os.environ.get("MASTER_ADDR"),
                       os.environ.get("MASTER_PORT")],
            "began": self.began, "written": time.time(),
            "still": self.still,
            "stack": self.look(),
            "state": read_state(self.owner),
            "calls": None, "joined": False,
            "oom_before": self.oom_before,
            "oom_kills": count_oom_kills() - self.oom_before,
            "connecting": connecting(self.owner),
            "looks": self.watch() if lines else []}
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


def find_line(stack):
    """[file, line, function] of the script's innermost line in a stack."""
    mine = [frame for frame in stack if not LIBRARY.search(frame[0])]
    return (mine or stack or [["?", 0, "?"]])[-1]


def name_host(env):
    """What SLURM calls this node in its lists, or its own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def find_rank():
    """(rank, world size), None where the process does not know them yet."""
    torch = find_torch()
    if torch:
        return torch.get_rank(), torch.get_world_size()
    return read_rank(os.environ, sys.orig_argv)


def read_rank(env, command):
    """(rank, world size) as a process's launcher told it, None if none did.

    env: the process's variables; command: its command line, a list.
    """
    if not any(map(LAUNCHER.search, command[:4])):
        for rank, size in RANKS:
            if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
                return int(env[rank]), int(env[size])
    return None, None


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
    for entry in (entry for dump in dumps for entry in pickle.loads(
            dump(True, lines, False)).get("entries", [])):
        calls.append({
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
            ]) if entry.get("frames") else None})
    calls.sort(key=lambda call: call["time"])
    return {"joined": True, "calls": calls[-KEPT:]}


# ---------------------------------- MPI, which keeps no record of its own


class MPIFinder:
    """Asks for a record as soon as the script imports mpi4py's MPI."""

    def find_spec(self, name, path=None, target=None):
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (
                execute(module), record_mpi(module))
        return spec


def record_mpi(MPI):
    """Let MPI.COMM_WORLD, and what is made of it, record its collectives."""
    kind = type(MPI.COMM_WORLD)
    if hasattr(kind, "recorded"):
        return

    def call(name):
        def called(self, *args, **options):
            self.recorded += 1
            entry = describe_call(self, name, args)
            mpi_calls.append(entry)
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

    def adopt(comm, label):
        mine = Recorded(comm)
        vars(mine).update(getattr(comm, "__dict__", {}), label=label)
        return mine

    Recorded = type("Intracomm", (kind,), {
        "recorded": 0, "children": 0, "ranks": None,
        **{name: call(name) for name in COLLECTIVES},
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
            "p2p": False, "time": time.time(),
            "line": [frame.f_code.co_filename, frame.f_lineno,
                     frame.f_code.co_name]}


# ------------------------------------------- what the system says (Linux)


def read_state(pid):
    """The main thread's state: R runs, S sleeps, D waits for a device."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def count_oom_kills():
    """How many processes the kernel has ended as the memory was full."""
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0


def connecting(pid):
    """"HOST:PORT" of each TCP connection that nobody has answered yet."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    mine, found = set(), []
    for link in links:
        with contextlib.suppress(OSError):  # closed by now
            mine.add(os.readlink(link))
    for fields in map(str.split, lines):
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
