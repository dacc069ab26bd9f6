"""Leaves evidence of what a process of several does, and of how it ended.

    HOST-PID.json     where it is, its last collectives, how it ended
    HOST-PID.stack    its stack, if a signal or a crash ended it
    ask               is touched by whoever wants all of them to write

A thread writes the first: at the start, when asked, when the main thread has
not moved for 20 s (then it asks all the others), and at the end. `python -m
workshop why` reads them, also when nothing runs any more.

It serves any script: see hook/sitecustomize.py. Only the standard library; it
uses torch where the script has imported it.
"""

import atexit
import collections
import contextlib
import faulthandler
import json
import os
import pickle
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
KEPT = 300  # collectives
LOOKS = 40  # at where the time goes
# Whichever is there: torchrun's name, Open MPI's, srun's, PMI's
RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
         ("PMI_RANK", "PMI_SIZE"))

the_witness = None


def start(folder=None, env=os.environ):
    """Begin to write, in `folder` or the one that the environment names.

    Called again, or without any folder, it does nothing.
    """
    global the_witness
    folder = env.get(FOLDER) or folder
    if folder and the_witness is None:
        the_witness = Witness(Path(folder))
        the_witness.start()


def watch_signals():
    """Write the stack on SIGTERM as well; its handler is in place now."""
    if the_witness:
        faulthandler.register(signal.SIGTERM, the_witness.stack_file,
                              all_threads=False, chain=True)


def note_end(status, error=None):
    """Write how this process ends. The first call counts."""
    if the_witness:
        the_witness.end(status, error)


class Witness(threading.Thread):
    """The thread that writes, as a daemon: it never keeps a process alive."""

    def __init__(self, folder):
        super().__init__(daemon=True, name="witness")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.owner = folder, os.getpid()
        # SLURM's name of a node is the one in its lists
        self.host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.file = folder / f"{self.host}-{self.owner}.json"
        self.ask = folder / "ask"
        self.began, self.moved, self.place = time.time(), time.monotonic(), ()
        self.ended = None
        self.oom_kills = count_oom_kills()
        self.stack_file = open(self.file.with_suffix(".stack"), "w")
        faulthandler.enable(self.stack_file)
        faulthandler.register(signal.SIGTERM, self.stack_file,
                              all_threads=False, chain=True)
        os.register_at_fork(after_in_child=self.leave_child)
        self.show_error, sys.excepthook = sys.excepthook, self.on_error
        atexit.register(self.end, 0)
        self.write()

    def leave_child(self):
        """A worker of a data loader is not to write in its parent's name."""
        faulthandler.disable()
        faulthandler.unregister(signal.SIGTERM)
        self.ended = {}

    def on_error(self, kind, error, trace):
        self.show_error(kind, error, trace)
        self.end(1, error)

    def end(self, status, error=None):
        if self.ended is not None:
            return
        self.ended = {"status": status, "time": time.time()}
        if error is not None:
            self.ended |= {
                "error": type(error).__name__, "message": str(error)[:2000],
                "stack": [[frame.filename, frame.lineno, frame.name] for frame
                          in traceback.extract_tb(error.__traceback__)]}
        self.write()

    def run(self):
        answered, asked_at = self.last_ask(), time.monotonic()
        limit = float(os.environ.get(TIMEOUT) or 0) or float("inf")
        while self.ended is None:
            time.sleep(POLL)
            place = self.look(), self.progress()
            now = time.monotonic()
            if place != self.place:
                self.place, self.moved, wait = place, now, STILL
            still = now - self.moved
            if still > wait and now - asked_at > STILL / 2:
                self.touch()
                wait *= 2
            if self.last_ask() != answered or still > limit:
                answered, asked_at = self.last_ask(), now
                self.write(lines=True)
            if still > limit and self.ended is None:
                self.give_up(limit)

    def last_ask(self):
        try:
            return self.ask.stat().st_mtime_ns
        except OSError:
            return 0

    def touch(self):
        with contextlib.suppress(OSError):  # for example a full disk
            self.ask.touch()

    def give_up(self, limit):
        """End this process; the launcher then ends the others."""
        self.touch()
        time.sleep(3 * POLL)  # the others are to write before that
        self.end("timeout")
        print(f"error: rank {find_rank()[0]} has not moved for {limit:.0f} s: "
              f"see python -m workshop why {self.folder}", file=sys.stderr,
              flush=True)
        os._exit(1)

    def look(self):
        """The main thread's stack, outermost first: [file, line, function].
        """
        frame = sys._current_frames().get(threading.main_thread().ident)
        return [[code.f_code.co_filename, line, code.f_code.co_name]
                for code, line in traceback.walk_stack(frame)][::-1]

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
        return [dump(False) for dump in find_dumps("_json")]

    def write(self, lines=False):
        """lines: also where the time goes, and in which line each collective
        was called. The first time, that takes PyTorch some four seconds.
        """
        if os.getpid() != self.owner:
            return
        rank, size = find_rank()
        record = {
            "rank": rank, "world_size": size, "host": self.host,
            "pid": self.owner, "parent": os.getppid(), "argv": sys.argv,
            "master": [os.environ.get("MASTER_ADDR"),
                       os.environ.get("MASTER_PORT")],
            "began": self.began, "written": time.time(),
            "still": time.monotonic() - self.moved, "ended": self.ended,
            "stack": self.look(), "state": read_state(self.owner),
            "calls": None, "joined": False,
            "oom_kills": count_oom_kills() - self.oom_kills,
            "connecting": connecting(self.owner),
            "looks": self.watch() if lines else []}
        try:
            record |= read_record(lines)
            if not record["joined"] and self.ended is None and lines:
                record["answer"] = try_meeting(*record["master"])
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(record))
            os.replace(part, self.file)
        except Exception as error:  # never the script's problem
            print(f"warning: no evidence for `why`: {error}", file=sys.stderr)


def find_rank(env=os.environ):
    """(rank, world size), None where the process does not know them yet."""
    torch = sys.modules.get("torch.distributed")
    if torch and torch.is_available() and torch.is_initialized():
        return torch.get_rank(), torch.get_world_size()
    launcher = " ".join(sys.orig_argv[:4])
    for rank, size in RANKS:
        if rank in env and size in env and not (
                rank != "RANK" and "torchrun" in launcher):
            return int(env[rank]), int(env[size])
    return None, None


def find_dumps(suffix=""):
    """PyTorch's functions for its flight record, if the script has it.

    NCCL's collectives are in a record of their own; a build for the CPU has
    none.
    """
    torch = sys.modules.get("torch.distributed")
    if not (torch and torch.is_available() and torch.is_initialized()):
        return []
    names = (f"_dump_{kind}_trace{suffix}" for kind in ("fr", "nccl"))
    c10d = sys.modules["torch._C._distributed_c10d"]
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]


def read_record(lines):
    """From PyTorch's flight record: the last collectives, oldest first."""
    dumps = find_dumps()
    if not dumps:
        return {}
    groups = {
        group.group_name: sorted(ranks) for group, ranks in
        sys.modules["torch.distributed.distributed_c10d"]._world
        .pg_group_ranks.items()}
    entries = [entry for dump in dumps for entry in pickle.loads(
        dump(True, lines, False)).get("entries", [])]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return {"joined": True, "calls": [
        {"group": groups.get(entry["process_group"][0]),
         "name": entry["process_group"][0],
         "number": entry["collective_seq_id"],
         "call": entry["profiling_name"].rpartition(":")[2],
         "sizes": entry["input_sizes"], "types": entry["input_dtypes"],
         "waits": not entry["retired"], "p2p": entry["is_p2p"],
         "time": entry["time_created_ns"] / 1e9,
         "stack": [[frame["filename"], frame["line"], frame["name"]]
                   for frame in reversed(entry.get("frames", ()))]}
        for entry in entries[-KEPT:]]}


# ------------------------------------------- what the system says (Linux)


def read_state(pid):
    """The main thread's state: R runs, S sleeps, D waits for a device."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
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
