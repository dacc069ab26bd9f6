"""What is known of a rank, and of all of them together: evidence for judge.py.

Nothing here looks at the machine, so that the tests can hand in any evidence.
"""

import linecache
import re
import signal
import sys
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rankcheck.why.calls import find_line, library

SOON = 10  # seconds without a move that are worth a word
PATIENCE = 30  # seconds without a move that are no longer normal
# An error of PyTorch's or MPI's own that another rank was the first to end
LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Rr]emote "
    r"(peer|process)|failed to (recv|connect)|[Ww]atchdog|RemoteError"
    r"|lost the other|[Tt]imed out|Collective .* aborted")
OWN = re.compile("in use|DataLoader|^Caught ")  # a port, or of its own worker
TIMED_OUT = re.compile("[Tt]imed out|[Ww]atchdog")
THEIRS = re.compile(r"/torch/|/mpi4py/|\.pyx$")


class Place(NamedTuple):
    """A line, which reads `line 41 of train.py: loss.backward()`."""

    file: str
    line: int
    function: str

    def __str__(self):
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
        verb = {"is": "are", "has": "have", "was": "were"}.get(
            verb, verb.removesuffix("s")) if many else verb
        return f"rank{'s' * many} {', '.join(numbers)} {verb}".rstrip()

    @property
    def hosts(self):
        return ", ".join(dict.fromkeys(rank.host for rank in self))

    def without(self, some):
        return Who(rank for rank in self if rank not in some)


class Rank:
    """A process: what its witness wrote, and what the system says now.

    record: as witness.py writes it. alive: None if it is on another
    host. fresh: whether it has answered now. last: its .stack file.
    """

    looks, work = (), ()
    answer = None  # at rank 0's address: "" or the problem, if it has tried
    # what a rank that only its launcher has seen has not written
    calls, stack, connecting, master = (), (), (), (None, None)
    still, oom_kills, state, library, message = 0, 0, "?", "", None
    over, joined, mpi, launched = False, False, False, True

    def __init__(self, record, alive=None, fresh=False, last=""):
        vars(self).update(record)
        self.alive, self.fresh, self.last = alive, fresh, last
        self.address = ":".join(map(str, self.master))
        self.calls = [call for call in self.calls or ()
                      if not call["p2p"] and call["group"]]
        numbers, starts = defaultdict(int), defaultdict(int)
        texts: dict[int, str] = {}  # of groups: that of a thousand is long
        for call in self.calls:  # a group that is made anew counts from 1
            name, number = call["name"], call["number"]
            starts[name] += number < numbers[name]
            numbers[name] = number
            group = call["group"]
            if id(group) not in texts:  # calls share it, and its hash is kept
                texts[id(group)] = sys.intern(str(group))
            call["of"] = name, starts[name], texts[id(group)]
        # its last words, for example "Segmentation fault"; "" without any
        self.crash = "".join(re.findall("Fatal Python error: (.*)", last)[:1])
        self.runs = self.ending == "runs"
        # whether it lives on this machine, or may live, but is silent
        self.mute = self.ending == "silent" or (self.runs and not fresh)
        if self.ended and self.ended.get("stack"):
            self.stack = self.ended["stack"]
        elif last and not self.runs:
            self.stack = find_frames(main_thread(last))[::-1] or self.stack
            # another thread's, or Python's at its end: no line of the script
            file = self.find_place(self.stack).file
            if self.stack and file == self.stack[-1][0] and (
                    THEIRS.search(file) or "/lib/python3" in file):
                self.stack.append(["?", 0, "?"])
        self.place = self.find_place(self.stack)
        self.meets = self.inside("init_process_group|rendezvous|"
                                 "create_c10d_store")
        # of several with this number, the one with the highest claim is it
        self.claim = (self.joined or self.meets, self.answers, self.launched,
                      self.began)

    @cached_property
    def ending(self):
        """runs, done, error, lost, stopped, killed, or without a word: gone,
        or silent, where nobody sees whether it lives.
        """
        if self.crash:
            return "killed"
        lives = self.fresh if self.alive is None else self.alive
        if self.signal and (self.ended or not lives) and not self.alive:
            return "stopped" if self.signal in (
                "SIGTERM", "SIGINT", "SIGHUP") else "killed"
        if self.ended and "error" in self.ended:
            file, words = (self.ended.get("stack") or [[""]])[-1][0], (
                self.ended["message"])
            return "lost" if THEIRS.search(file) and LOST.search(words) and (
                not OWN.search(words)) else "error"
        if self.ended:  # None: a status is not known
            return "done" if self.ended["status"] in (0, None) else "error"
        if lives:
            return "runs"
        return "gone" if self.alive is False else "silent"

    @property
    def signal(self):
        """The signal that has ended it, or "": its launcher, its own handler,
        or its last words say so.
        """
        ended = self.ended or {}
        if self.crash:
            return self.crash
        if ended.get("error") == "KeyboardInterrupt":
            return "SIGINT"
        if self.last and not ended:
            return "SIGTERM"
        status = ended.get("status")
        names = {number: number.name for number in signal.Signals}
        return names.get(-status, f"signal {-status}") if isinstance(
            status, int) and status < 0 else ""

    @property
    def known_as(self):
        """What no other rank is called: mp.spawn counts on each node."""
        return self.rank, "" if self.world_size else self.host

    def find_place(self, stack):
        """The script's innermost line."""
        return Place(*find_line(stack, self.library))

    @property
    def pending(self):
        """The first collective that it has begun and that has not ended,
        unless a later one of the same group has; or None.
        """
        ended, found = set(), None
        for call in reversed(self.calls):
            if not call["waits"]:
                ended.add(call["of"])
            elif call["of"] not in ended:
                found = call
        if found is None and self.ending == "lost" and self.calls and (
                TIMED_OUT.search(self.ended["message"])):
            return self.calls[-1]  # which its error has ended
        return found

    @cached_property
    def last_numbers(self) -> dict[tuple[str, int, str], int]:
        """The largest number of its collectives, by the group they are of."""
        last: dict[tuple[str, int, str], int] = {}
        for call in self.calls:
            last[call["of"]] = max(last.get(call["of"], -1), call["number"])
        return last

    @property
    def computes(self):
        """Whether its main thread computed, read or wrote meanwhile."""
        return any(worked for kind, pid, _, _, worked, _ in self.work
                   if (kind, pid) == ("thread", self.pid))

    @property
    def helpers(self):
        """The other threads of its `work` that are in the script's lines."""
        return [work for work in self.work
                if work[0] == "thread" and work[1] != self.pid and work[5]
                and not library(self.library).search(work[5][0])]

    @property
    def waits(self):
        """Whether it waits, or waited, for others, without computing."""
        return not self.inside("importlib") and (
            bool(self.message or is_waiting(self.stack)) or (
                self.pending is not None and (
                    not self.computes or self.still > PATIENCE)))

    def inside(self, pattern):
        """Whether its stack has a frame of such a file or function."""
        return any(re.search(pattern, f"{file}:{name}")
                   for file, _, name in self.stack)

    @property
    def longest_gap(self):
        """Seconds between two of its collectives, at most."""
        times = [call["time"] for call in self.calls]
        return max((b - a for a, b in zip(times, times[1:])), default=0)

    @property
    def heard(self):
        """When it last wrote, and where it was then."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.written))
        return f"{clock}, then in {self.place}"


class Job:
    """All ranks, sorted, and what follows from seeing them together."""

    def __init__(self, ranks):
        self.ranks = Who(ranks)
        self.awaited = {}  # of a rank, those for whom it waits
        self.by = defaultdict(Who)  # how they ended -> the ranks
        kills = defaultdict(int)  # a node's: not all of its ranks still count
        for rank in self.ranks:
            self.by[rank.ending].append(rank)
            kills[rank.host] = max(kills[rank.host], rank.oom_kills)
        for rank in self.ranks:
            rank.oom_kills = kills[rank.host]
        self.first = self.ranks[0]  # rank 0, if it is there

    def those(self, condition):
        return Who(rank for rank in self.ranks if condition(rank))

    @cached_property
    def calls(self):
        """{rank: call} of each collective, in the order of their begin."""
        found = defaultdict(dict)
        for rank in self.ranks:
            for call in rank.calls:
                found[call["of"], call["number"]][rank.rank] = call
        return sorted(found.values(), key=lambda calls: min(
            call["time"] for call in calls.values()))

    @cached_property
    def meeting(self):
        """Those in init_process_group(), if no error keeps others away."""
        return Who() if self.by["error"] or self.by["killed"] else (
            self.those(lambda rank: rank.runs and not rank.joined
                       and rank.meets))

    @cached_property
    def deaf(self):
        """Those of them that reach nobody at rank 0's address."""
        return Who(rank for rank in self.meeting
                   if rank.still >= SOON and rank.answer)

    def waits_for(self, rank):
        """Those for whom a rank waits, as the records say."""
        if rank not in self.awaited:  # of a thousand, each is asked often
            self.awaited[rank] = self.find_awaited(rank)
        return self.awaited[rank]

    def find_awaited(self, rank):
        """What `waits_for` returns."""
        if rank.message:
            return self.those(lambda other: other.rank == rank.message["peer"]
                              and other is not rank)
        call = rank.pending
        return Who() if call is None else self.those(
            lambda other: other.rank in call["group"] and other is not rank
            # what it wrote before says nothing of this collective
            and (other.written >= call["time"] or bool(other.ended))
            and other.last_numbers.get(call["of"], -1) < call["number"])

    @cached_property
    def left(self):
        """Those that wait for others, did so at their end, or lost them."""
        return self.those(lambda rank: rank.ending == "lost" or (
            rank.waits and rank.ending in (
                "runs", "stopped", "gone", "silent")))

    def keeps_waiting(self, rank):
        """Those that wait for a rank, or have lost one that nobody names."""
        return Who(other for other in self.left if other is not rank and (
            rank in self.waits_for(other) or (
                other.ending == "lost" and not self.waits_for(other))))


def find_frames(text):
    """The frames of a traceback, or of faulthandler's dump, as printed."""
    return [[file, int(line), name] for file, line, name in
            re.findall(r'File "(.*)", line (\d+),? in (.*)', text)]


def main_thread(text):
    """Of faulthandler's dump, the thread that was running."""
    parts = re.split(r"\n(?=Thread |Current thread |Stack )", text)
    # a signal that a library's thread got says nothing of Python's line
    return next((part for part in parts if 'File "' in part and part.lstrip(
        ).startswith(("Current thread", "Stack"))), parts[-1])


def is_waiting(stack):
    """The function of torch.distributed that a stack ends in; or "".

    A module of torch.distributed that is being loaded does not count.
    """
    file, _, name = next((frame for frame in reversed(stack)
                          if not frame[0].endswith("torch/_ops.py")),
                         ("", 0, ""))
    if "torch/distributed/" not in file or name == "<module>":
        return ""
    return next((name for file, _, name in reversed(stack)
                 if "torch/distributed/" in file and name[0] != "_"
                 and name != "wrapper"), name)
