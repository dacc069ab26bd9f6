"""What is known of a rank, and of all of them: the evidence for judge.py.

Nothing here looks at the machine, so that the tests can hand in any evidence.
"""

import linecache
import re
import signal
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rankcheck.why.witness import LIBRARY, find_line

PATIENCE = 30  # seconds without a move that are no longer normal
# What an error says where another rank was the first to end
LOST = re.compile(
    r"[Cc]onnection (closed|reset) by|Broken pipe|[Rr]emote (peer|process)"
    r"|failed to (recv|connect)|[Ww]atchdog|RemoteError|lost the other"
    r"|Timed out|timed out")
TIMED_OUT = re.compile("[Tt]imed out|[Ww]atchdog")
# In these, DDP and FSDP wait for the other ranks; py-spy does not see where
BACKWARD = re.compile("torch/(autograd/|_tensor|nn/parallel/distributed"
                      "|distributed/c10d_logger)")
MEETING = "init_process_group|rendezvous|create_c10d_store"


class Place(NamedTuple):
    """A line, which reads `line 41 of train.py: loss.backward()`."""

    file: str
    line: int
    function: str

    def __str__(self):
        if self.file.endswith("/why/witness.py"):
            return "its start"
        if self.file == "?":
            return "a line that is not known"
        code = linecache.getline(self.file, self.line).strip()
        return f"line {self.line} of {Path(self.file).name}" + (
            f": {code}" if code else "")


class Who(list):
    """Some ranks, or their numbers: `ranks 0, 1`; `:is` adds a verb."""

    def __format__(self, verb):
        numbers = [str(getattr(rank, "rank", rank)) for rank in self]
        many = len(numbers) > 1
        verb = {"is": "are", "has": "have"}[verb] if many and verb else verb
        return f"rank{'s' * many} {', '.join(numbers)} {verb}".rstrip()

    def without(self, some):
        return Who(rank for rank in self if rank not in some)


class Rank:
    """A process: what its witness wrote, and what the system says now.

    record: as witness.py writes it. alive: None if it is on another
    host. fresh: whether it has answered now. last: its .stack file.
    """

    running = collecting = 0  # threads, and a share of the time
    looks, workers, cores = (), (), ()
    answers = True  # or nothing asks it: it has not loaded torch or MPI yet
    answer = None  # at rank 0's address: "" or the problem, if it has tried

    def __init__(self, record, alive=None, fresh=False, last=""):
        self.__dict__.update(record)
        self.alive, self.fresh, self.last = alive, fresh, last
        self.recorded = self.calls is not None
        self.calls = [call for call in self.calls or ()
                      if not call["p2p"] and call["group"]]
        if self.ended and self.ended.get("stack"):
            self.stack = self.ended["stack"]
        elif last and self.ending != "runs":
            self.stack = find_frames(main_thread(last))[::-1] or self.stack
            # another thread's, or Python's at its end: no line of the script
            if all(name != "<module>" and LIBRARY.search(file)
                   for file, _, name in self.stack):
                self.stack.append(["?", 0, "?"])

    @property
    def ending(self):
        """How it ended: runs, done, error, lost, stopped, killed, crashed or
        gone, of which nobody has left a word.
        """
        if "Fatal Python error" in self.last:
            return "crashed"
        if self.ended and "error" in self.ended:
            text = self.ended["error"] + self.ended["message"]
            return ("lost" if LOST.search(text) and "in use" not in text
                    else "error")
        if self.signal:
            return "stopped" if self.signal == "SIGTERM" else "killed"
        if self.ended:  # None: a status is not known
            return "done" if self.ended["status"] in (0, None) else "error"
        if self.fresh if self.alive is None else self.alive:
            return "runs"
        return "stopped" if self.last else "gone"

    @property
    def signal(self):
        """The name of the signal that has ended it, if a launcher says so."""
        status = self.ended["status"] if self.ended else None
        names = {number.value: number.name for number in signal.Signals}
        return names.get(-status, f"signal {-status}") if isinstance(
            status, int) and status < 0 else ""

    @property
    def known_as(self):
        """What no other rank is called: mp.spawn counts on each node."""
        return self.rank, "" if self.world_size else self.host

    def address(self):
        return ":".join(map(str, self.master))

    @property
    def problem(self):
        """Why it does not reach rank 0, if it does not."""
        return self.answer or "no answer"

    @property
    def runs(self):
        return self.ending == "runs"

    @property
    def mute(self):
        """Whether it lives on this machine, but does not answer."""
        return self.alive and not self.fresh

    @property
    def place(self):
        """The script's innermost line."""
        return Place(*find_line(self.stack))

    @property
    def waits(self):
        """Whether it waits for other ranks, as its record or stack says."""
        return bool(self.message) or any(
            call["waits"] for call in self.calls[-1:]) or (
            not self.imports and any(
                "torch/distributed/" in file and name != "wrapper"
                for file, _, name in self.stack))

    @property
    def timed_out(self):
        """Whether it has waited for others until a time-out ended it."""
        return self.waits and self.ending == "lost" and bool(
            TIMED_OUT.search(self.ended["message"]))

    @property
    def may_wait(self):
        """Whether it may wait unseen: no record, and inside PyTorch's own."""
        return not self.recorded and self.inside(BACKWARD)

    @property
    def imports(self):
        """Whether it loads a module, which can take minutes on a cluster."""
        return self.inside("importlib")

    @property
    def loads(self):
        """Whether it waits for a DataLoader, and not in the script's own."""
        loading = [bool(re.search("torch/utils/data/", file))
                   for file, *_ in self.stack]
        return any(loading[self.stack.index([*self.place]):]
                   ) if self.stack else False

    @property
    def fed(self):
        return any(works for *_, works in self.workers)

    @property
    def moves(self):
        """Whether it, or what it has started, works and does not wait."""
        return self.runs and not self.waits and (
            self.still < PATIENCE / 2 or self.fed or self.imports
            or (self.mute and self.state == "R"))

    @property
    def asleep(self):
        pids = ", ".join(str(pid) for pid, *_ in self.workers)
        return (f"its workers do nothing (processes {pids})" if pids
                else "nothing is known of its workers")

    @property
    def longest_gap(self):
        """Seconds between two of its collectives, at most."""
        times = [call["time"] for call in self.calls]
        return max((b - a for a, b in zip(times, times[1:])), default=0)

    @property
    def share_waited(self):
        """The share of the looks in which it waited for other ranks."""
        waits, whole = (sum(times for times, stack in self.looks if every
                            or is_waiting(stack)) for every in (False, True))
        return waits / whole

    @property
    def heard(self):
        """When it last wrote, and where it was then."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.written))
        return f"{clock}, when it was in {self.place}"

    def inside(self, pattern):
        """Whether its stack has a frame of such a file or function."""
        return any(re.search(pattern, f"{file}:{name}")
                   for file, _, name in self.stack)

    @property
    def doing(self):
        """How it ended, or that it runs."""
        if self.runs and not self.fresh:
            return "does not answer"
        if self.ending == "done":
            return f"ended {with_status([self])}"
        return {"stopped": "was told to end", "lost": "lost the others",
                "error": "ended with an error", "crashed": "crashed",
                "killed": f"was ended by {self.signal}",
                "gone": "ended without a record of how",
                "runs": "runs"}[self.ending]


class Job:
    """All ranks, sorted, and what follows from seeing them together.

    waited: seconds since the first began, without end if none is alive.
    """

    def __init__(self, ranks, alive=True):
        self.ranks = Who(ranks)
        self.waited = max((rank.age for rank in self.ranks), default=0
                          ) if alive else float("inf")
        self.by = defaultdict(Who)  # how they ended -> the ranks
        for rank in self.ranks:
            self.by[rank.ending].append(rank)
        self.left = self.those(lambda rank: rank.ending != "done")
        self.waiting = self.those(lambda rank: (
            rank.waits and rank.ending != "done"))

    def those(self, condition):
        return Who(rank for rank in self.ranks if condition(rank))

    @cached_property
    def calls(self):
        """{rank: call} of each collective, in the order of their begin."""
        found = defaultdict(dict)
        for rank in self.ranks:
            for call in rank.calls:
                found[call["name"], tuple(call["group"]), call["number"]][
                    rank.rank] = call
        return sorted(found.values(), key=lambda calls: min(
            call["time"] for call in calls.values()))

    @cached_property
    def first(self):
        return next((rank for rank in self.ranks if rank.rank == 0),
                    self.ranks[0])

    @cached_property
    def unseen(self):
        """The numbers of the ranks that have left no evidence here."""
        return Who(sorted({*range(self.ranks[0].world_size or 0)}
                          - {rank.rank for rank in self.ranks}))

    @cached_property
    def outside(self):
        """Those in init_process_group()."""
        return self.those(lambda rank: not rank.joined and rank.runs
                          and rank.inside(MEETING))

    @cached_property
    def meeting(self):
        """The same, if no error has kept others away."""
        return Who() if self.by["error"] or self.by["crashed"] else (
            self.outside)

    @cached_property
    def stuck_outside(self):
        """Seconds for which all of these have not moved."""
        return min((rank.still for rank in self.meeting), default=0)

    @cached_property
    def deaf(self):
        """Those of them that reach nobody at rank 0's address."""
        return Who(rank for rank in self.meeting if rank.answer
                   or self.first.address() in rank.connecting)

    @cached_property
    def gone(self):
        """Those that have ended without a record, where others did not.

        Those on another machine may only be slow to answer.
        """
        gone, run = self.by["gone"], self.by["runs"]
        slow = gone and run and len(gone) + len(run) == len(self.ranks) and (
            all(rank.alive is None for rank in gone)
            and max(rank.still for rank in run) < PATIENCE)
        return Who() if slow or len(gone) == len(self.ranks) else gone

    @cached_property
    def standstill(self):
        """How long one has waited, or done nothing if none waits."""
        return max((rank.still for rank in self.waiting or self.left),
                   default=0)

    @cached_property
    def stands(self):
        """Whether that is longer than they have waited before."""
        return bool(self.left) and self.standstill >= max(PATIENCE, 3 * max(
            rank.longest_gap for rank in self.left))

    @cached_property
    def awaited(self):
        """Those for whom others wait, and who do not wait in turn."""
        return Who(rank for rank in self.left if not self.absent(rank) and any(
            rank in self.absent(other) for other in self.waiting)) or (
            self.those(lambda rank: not rank.waits and not rank.may_wait
                       and rank.ending in ("runs", "stopped")))

    @cached_property
    def all_wait(self):
        return len(self.waiting) == len(self.left)

    def absent(self, rank):
        """Those who have not come to the collective in which it waits."""
        call = next((call for call in rank.calls[-1:]
                     if call["waits"] or rank.timed_out), None)
        return Who() if call is None else self.those(
            lambda other: other.rank in call["group"] and other is not rank
            # what it wrote before says nothing of this collective
            and (other.written >= call["time"]
                 or (other.ending == "stopped" and not other.waits))
            and not any(its["name"] == call["name"]
                        and its["number"] >= call["number"]
                        for its in other.calls))


def find_frames(text):
    """The frames of a traceback, or of faulthandler's dump, as printed."""
    return [[file, int(line), name] for file, line, name in
            re.findall(r'File "(.*)", line (\d+),? in (.*)', text)]


def main_thread(text):
    """Of faulthandler's dump, the thread that was running."""
    parts = re.split(r"\n(?=Thread |Current thread |Stack )", text)
    found = next((part for part in parts if part.lstrip().startswith(
        ("Current thread", "Stack"))), parts[-1])
    # a signal that a library's thread got says nothing of Python's line
    return found if 'File "' in found else parts[-1]


def with_status(ranks):
    """How these have ended, which is not known after `raise SystemExit`."""
    return "with status 0" if all(
        rank.ended["status"] == 0 for rank in ranks) else (
        "without an error, with a status that is not known")


def is_waiting(stack):
    """Whether the innermost function is one of torch.distributed's.

    A module of torch.distributed that is being loaded does not count.
    """
    file, _, name = next((frame for frame in reversed(stack)
                          if not frame[0].endswith("torch/_ops.py")),
                         ("", 0, ""))
    return "torch/distributed/" in file and name != "<module>"
