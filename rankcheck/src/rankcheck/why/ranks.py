"""What is known of a rank, and of all of them together: evidence for judge.py.

Nothing here looks at the machine, so that the tests can hand in any evidence.
"""

from __future__ import annotations

import linecache
import re
import signal
import sys
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rankcheck.system.sources import (
    GENERATED,
    LOCAL,
    MAY_WAIT,
    MPI4PY,
    NO_COLLECTIVE,
    PYTHON,
    SCRIPT,
    TORCH,
    Sources,
    is_mpi_call,
)

SOON = 10  # seconds without a move that are worth a word
PATIENCE = 30  # seconds without a move that are no longer normal
NOTICED = 6  # seconds until an error of a script is seen, at most
# An error of PyTorch's or MPI's own that another rank was the first to end
LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Rr]emote "
    r"(peer|process)|failed to (recv|connect)|[Ww]atchdog|RemoteError"
    r"|lost the other|[Tt]imed out|Collective .* aborted")
OWN = re.compile("in use|DataLoader|^Caught ")  # a port, or of its own worker
TIMED_OUT = re.compile("[Tt]imed out|[Ww]atchdog")
# As MAY_WAIT, in a line of a script
MAY_WAIT_TEXT = re.compile(
    r"\.(wait|result|synchronize|item|tolist|cpu|cuda|to|numpy)\(")
# A method that returns when the collective does, and not earlier
WORK_WAIT = re.compile(r"\.wait$")


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
    nested = ()  # the ranks of a job that it has started itself
    answer = None  # at rank 0's address: "" or the problem, if it has tried
    # what a rank that only its launcher has seen has not written
    calls, stack, connecting, master = (), (), (), (None, None)
    still, oom_kills, state, library, message = 0, 0, "?", "", None
    over, joined, mpi, launched = False, False, False, True
    # None: it was written before these were recorded
    folders, threads, callee, handles, stays = None, None, None, None, None
    switched_off = ""

    def __init__(self, record, alive=None, fresh=False, last=""):
        vars(self).update(record, record=record)
        self.alive, self.fresh, self.last = alive, fresh, last
        self.address = ":".join(map(str, self.master))
        self.sources = Sources(self.folders, self.library)
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
        stack, self.went_on = self.stack, False
        if self.ended and self.ended.get("stack"):
            self.stack = self.ended["stack"]
        elif last and not self.runs:
            self.stack = self.find_last_stack() or self.stack
        if self.find_place(stack)[1:] != self.find_place(self.stack)[1:]:
            # these were of the stack when it last wrote; its collectives
            # may have ended since, unless it has written them at its end
            self.callee = self.handles = None
            self.went_on = bool(stack) and not (
                self.ended and not self.ended.get("told"))
        self.place = self.find_place(self.stack)
        self.meets = self.inside("init_process_group|rendezvous|"
                                 "create_c10d_store")
        # of several with this number, the one with the highest claim is it
        self.claim = (self.joined or self.meets, self.answers, self.launched,
                      self.began)

    def find_last_stack(self) -> list:
        """The stack that SIGTERM or a crash has left, outermost frame first:
        the main thread's, where that waited for others meanwhile.
        """
        main = find_frames(last_thread(self.last))[::-1]
        if self.sources.find_wait(main):
            return main
        stack = find_frames(main_thread(self.last))[::-1]
        # another thread's, or Python's at its end: no line of the script
        file = self.find_place(stack).file
        if stack and file == stack[-1][0] and self.sources.owner(file) in (
                TORCH, MPI4PY, PYTHON):
            stack.append(["?", 0, "?"])
        return stack

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
            theirs = self.sources.owner(file) in (TORCH, MPI4PY)
            return "lost" if theirs and LOST.search(words) and (
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
        return Place(*self.sources.find_line(stack))

    @cached_property
    def begun(self) -> list[dict]:
        """The collectives that it has begun and that have not ended, oldest
        first, unless a later one of the same group has.
        """
        ended, found = set(), []
        for call in () if self.went_on else reversed(self.calls):
            if not call["waits"]:
                ended.add(call["of"])
            elif call["of"] not in ended:
                found.append(call)
        if not found and self.ending == "lost" and self.calls and (
                TIMED_OUT.search(self.ended["message"])):
            return [self.calls[-1]]  # which its error has ended
        return found[::-1]

    @cached_property
    def reached(self) -> dict[tuple, int]:
        """The number of its last collective in each group."""
        found: dict[tuple, int] = {}
        for call in self.calls:
            found[call["of"]] = max(
                call["number"], found.get(call["of"], -1))
        return found

    @cached_property
    def awaited(self) -> list[dict]:
        """Those of `begun` of which the main thread may wait for one: it may
        have begun others asynchronously, or another thread has.
        """
        if not self.begun or not self.may_wait:
            return []
        if is_mpi_call(*self.last_frame):
            return self.begun[-1:]
        if not self.sources.is_in_collective(self.stack):
            return self.begun
        if any(call["line"] is None for call in self.begun):
            return self.begun  # it has not been asked for the lines
        _, line, function = self.place
        here = [call for call in self.begun
                if call["line"][1:] == [line, function]]
        return here[-1:]

    @property
    def pending(self):
        """The collective in which it is, or else the first that it has begun
        and that has not ended; or None.
        """
        if self.awaited and self.sources.is_in_collective(self.stack):
            return self.awaited[-1]
        return next(iter([*self.awaited, *self.begun]), None)

    @property
    def last_frame(self) -> tuple[str, str]:
        """The file and the function of its innermost frame."""
        frame = self.sources.find_innermost(self.stack) or ["?", 0, "?"]
        return frame[0], frame[2]

    @cached_property
    def may_wait(self) -> bool:
        """Whether its main thread is where it can wait for a collective.

        A collective that has begun says nothing of that: the script may do
        something else meanwhile.
        """
        file, name = self.last_frame
        if self.sources.find_wait(self.stack) or is_mpi_call(file, name):
            return True
        owner = self.sources.owner(file)
        if owner == TORCH:
            return not LOCAL.search(self.sources.path_in_torch(file))
        if owner == GENERATED or self.folders is None:
            return True
        if owner == PYTHON:  # it may wait for a thread of its own
            return any(map(self.sources.find_wait, self.other_stacks))
        if self.callee is None:  # an older Python does not tell
            return bool(MAY_WAIT_TEXT.search(str(self.place)))
        return bool(MAY_WAIT.search(self.callee)) and (
            not NO_COLLECTIVE.search(self.callee))

    @property
    def other_stacks(self) -> list:
        """The stacks of its other threads."""
        return [stack for _, number, stack in self.threads or ()
                if number != self.pid]

    @property
    def is_blocked(self) -> bool:
        """Whether it is proven that its main thread waits for others, and
        that no other thread of it could do what they wait for.
        """
        if not self.runs or self.mute or not self.waits:
            return False
        if self.still < SOON or self.helpers or any(
                map(self.sources.uses_collectives, self.other_stacks)):
            return False
        if self.threads is None and not self.work:
            return False  # nobody has looked at its threads
        return bool(self.message or is_mpi_call(*self.last_frame)
                    or self.sources.find_wait(self.stack)
                    or WORK_WAIT.search(self.callee or ""))

    @property
    def aborted(self) -> bool:
        """Whether SIGABRT has ended it in a collective, or while it waited
        for one: a watchdog does so to those that wait too long, and gloo to
        the one that gets a message of another size than it expects.
        """
        return self.got_sigabrt and (
            self.waits or self.sources.calls_others(self.stack))

    @property
    def aborted_in_backward(self) -> bool:
        """The same in a backward pass, which may call collectives."""
        return self.got_sigabrt and self.sources.path_in_torch(
            self.last_frame[0]).startswith("autograd/")

    @property
    def got_sigabrt(self) -> bool:
        return self.ending == "killed" and self.signal in (
            "Aborted", "SIGABRT")

    @cached_property
    def later_calls(self) -> list[dict]:
        """The collectives that it has begun after its own error: a handler at
        its end may do so, or an exception hook.
        """
        if self.ending != "error" or not self.ended.get("stack") or (
                self.sources.owner(self.ended["stack"][-1][0]) in (
                    TORCH, MPI4PY)):
            return []  # the error may be the collective's
        return [call for call in self.calls if call["time"] > (
            self.ended["time"] - NOTICED) and call.get("outside") is not False]

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
                and self.sources.owner(work[5][0]) == SCRIPT]

    @property
    def waits(self):
        """Whether it waits, or waited, for others, without computing."""
        if self.inside("importlib"):
            return False
        if self.message or self.sources.find_wait(self.stack):
            return True
        return bool(self.awaited) and (  # MPI computes while it waits
            not self.computes or self.still > PATIENCE
            or is_mpi_call(*self.last_frame))

    def inside(self, pattern):
        """Whether its stack has a frame of such a file or function."""
        return any(re.search(pattern, f"{file}:{name}")
                   for file, _, name in self.stack)

    @property
    def in_line(self) -> float:
        """Seconds since it came to its line, as far as it was looked at."""
        return self.still if self.stays is None else min(
            self.still, self.stays)

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
        self.known_waits: dict[Rank, Who] = {}
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
    def later_calls(self) -> list[dict]:
        """Those that a rank has begun after its own error."""
        return [call for rank in self.ranks for call in rank.later_calls]

    @cached_property
    def aborted(self) -> Who:
        return self.those(lambda rank: rank.aborted)

    @cached_property
    def meeting(self):
        """Those in init_process_group(), if no error keeps others away."""
        return Who() if self.by["error"] or self.by["killed"] else (
            self.those(lambda rank: rank.runs and not rank.joined
                       and rank.meets))

    @cached_property
    def unmet(self) -> Who:
        """Those in init_process_group(), where none has come out of it; also
        if all of them were told to end there.
        """
        if any(rank.joined for rank in self.ranks) or self.meeting:
            return self.meeting
        told = self.those(lambda rank: rank.ending == "stopped" and rank.meets)
        return told if {*told} == {*self.ranks} else Who()

    @cached_property
    def deaf(self):
        """Those of them that reach nobody at rank 0's address."""
        return Who(rank for rank in self.meeting
                   if rank.still >= SOON and rank.answer)

    def waits_for(self, rank: Rank) -> Who:
        """Those for whom a rank waits, as the records say."""
        if rank not in self.known_waits:
            self.known_waits[rank] = self.find_awaited(rank)
        return self.known_waits[rank]

    def find_awaited(self, rank: Rank) -> Who:
        if rank.message:
            return self.those(lambda other: other.rank == rank.message["peer"]
                              and other is not rank)
        calls = rank.awaited or rank.begun[:1]
        if rank.sources.find_wait(rank.stack):
            calls = rank.awaited  # none: it waits in something else
        return self.those(lambda other: other is not rank and bool(calls)
                          and all(is_missing(other, call) for call in calls))

    @cached_property
    def left(self):
        """Those that wait for others, did so at their end, or lost them."""
        return self.those(
            lambda rank: rank.ending == "lost" or rank.aborted or (
                rank.waits and rank.ending in (
                    "runs", "stopped", "gone", "silent")))

    def keeps_waiting(self, rank):
        """Those that wait for a rank, or have lost one that nobody names."""
        return Who(other for other in self.left if other is not rank and (
            rank in self.waits_for(other) or (
                (other.ending == "lost" or other.aborted)
                and not self.waits_for(other))))


def is_missing(rank: Rank, call: dict) -> bool:
    """Whether a rank has not come to this collective of its group."""
    return rank.rank in call["group"] and (
        # what it wrote before says nothing of this collective
        rank.written >= call["time"] or bool(rank.ended)
        ) and rank.reached.get(call["of"], -1) < call["number"]


def find_frames(text):
    """The frames of a traceback, or of faulthandler's dump, as printed."""
    return [[file, int(line), name] for file, line, name in
            re.findall(r'File "(.*)", line (\d+),? in (.*)', text)]


def last_thread(text: str) -> str:
    """Of faulthandler's dump, the main thread: it names the newest first."""
    parts = [part for part in re.split(
        r"\n(?=Thread |Current thread |Stack )", text) if 'File "' in part]
    return parts[-1] if parts else ""


def main_thread(text):
    """Of faulthandler's dump, the thread that was running."""
    parts = re.split(r"\n(?=Thread |Current thread |Stack )", text)
    # a signal that a library's thread got says nothing of Python's line
    return next((part for part in parts if 'File "' in part and part.lstrip(
        ).startswith(("Current thread", "Stack"))), parts[-1])
