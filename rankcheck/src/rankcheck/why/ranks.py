"""What is known of a rank, and of all of them together: evidence for judge.py.

Nothing here looks at the machine, so that the tests can hand in any evidence.
"""

from __future__ import annotations

import itertools
import linecache
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from rankcheck.system.sources import (
    GENERATED,
    LOCAL_TORCH,
    MAY_WAIT,
    MPI4PY,
    NOT_COLLECTIVE,
    PYTHON,
    SCRIPT,
    TORCH,
    Sources,
    is_mpi_call,
)
from rankcheck.why.process_record import (
    Call,
    Ended,
    HandledError,
    Identity,
    ProcessRecord,
    StackSample,
    ThreadStack,
    Work,
)

if TYPE_CHECKING:
    from rankcheck.system.sources import Stack

SOON = 10  # seconds without a move that are worth a word
IDLE_LIMIT = 30  # seconds without a move that are no longer normal
NOTICED = 6  # seconds until an error of a script is seen, at most
# An error of PyTorch's or MPI's own that another rank was the first to end
CONNECTION_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Rr]emote "
    r"(peer|process)|failed to (recv|connect)|[Ww]atchdog|RemoteError"
    r"|lost the other|[Tt]imed out|Collective .* aborted")
# a port, or of its own worker
OWN_ERROR = re.compile("in use|DataLoader|^Caught ")
TIMED_OUT = re.compile("[Tt]imed out|[Ww]atchdog")
# As MAY_WAIT, in a line of a script
MAY_WAIT_TEXT = re.compile(
    r"\.(wait|result|synchronize|item|tolist|cpu|cuda|to|numpy)\(")
# A method that returns when the collective does, and not earlier
WORK_WAIT = re.compile(r"\.wait$")


# "lost": by an error that another rank was the first to end. "gone": without a
# word. "silent": the same, where nobody sees whether it lives
Ending = Literal["runs", "done", "error", "lost", "stopped", "killed", "gone",
                 "silent"]


class CodeLine(NamedTuple):
    """A line, which reads `line 41 of train.py: loss.backward()`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if self.file == "?":
            return "a line that is not known"
        text = f"line {self.line} of {Path(self.file).name}"
        code = linecache.getline(self.file, self.line).strip()
        if code:
            text += f": {code}"
        return text


PLURALS = {"is": "are", "has": "have", "was": "were"}


def pluralize(verb: str) -> str:
    """Return as it is of several ranks what is `is` or `waits` of one."""
    return PLURALS.get(verb, verb.removesuffix("s"))


def format_ranks(numbers: Sequence[int], verb: str) -> str:
    """Return for example `ranks 0, 1`, with a verb `ranks 0, 1 are`.

    Args:
        verb: as it is of one rank, as in `is` or `waits`; or "".
    """
    noun = "rank"
    if len(numbers) > 1:
        noun = "ranks"
        verb = pluralize(verb)
    return f"{noun} {', '.join(map(str, numbers))} {verb}".rstrip()


class RankNumbers(list[int]):
    """The numbers of some ranks; see `format_ranks` for an f-string."""

    def __format__(self, verb: str) -> str:
        return format_ranks(self, verb)


class RankList(list["Rank"]):
    """Some ranks; see `format_ranks` for what an f-string makes of them."""

    def __format__(self, verb: str) -> str:
        return format_ranks([rank.rank for rank in self], verb)

    @property
    def hosts(self) -> str:
        return ", ".join(dict.fromkeys(rank.host for rank in self))

    def without(self, others: Iterable[Rank]) -> RankList:
        excluded = {*others}
        return RankList(rank for rank in self if rank not in excluded)


class GroupKey(NamedTuple):
    """What a group has in the records of all its ranks, and no other group."""

    name: str
    generation: int  # how often a group of that name was made before
    ranks: str


class RankCall(Call):
    """A collective, with the group that it is of."""

    of: GroupKey


class Claim(NamedTuple):
    """Of several processes with one number, the rank is the one with the
    largest.
    """

    joins: bool  # or has joined
    has_watcher: bool  # whose thread answers
    has_launcher: bool  # as its parent
    began: float

    def is_like(self, other: Claim) -> bool:
        """Whether they differ only in when the processes have begun."""
        return self[:3] == other[:3]


class Rank:
    """A process: what it has written, and what the system says now.

    Args:
        record: as watcher.py writes it; `of` is added to its calls.
        alive: whether it lives; None if that cannot be seen from here.
        has_answered: whether it has answered now.
        stack_dump: its .stack file, which faulthandler writes.

    Attributes:
        idle_seconds: since its main thread has moved.
        line_seconds: since it came to its line; None in an older record.
        master_problem: why it does not reach rank 0's address, "" if it does;
            None if it has not tried.
        started_ranks: of a job that it has started itself.
        crash: its last words, for example "Segmentation fault"; or "".
        is_unresponsive: whether it lives, or may live, but does not answer.
        calls_are_stale: whether its collectives may have ended since it wrote.
    """

    def __init__(self, record: ProcessRecord, alive: bool | None = None,
                 has_answered: bool = False, stack_dump: str = "") -> None:
        self.record = record
        self.alive, self.has_answered = alive, has_answered
        self.stack_dump = stack_dump
        # evidence.py gives a number to a process that has none
        self.rank = cast(int, record["rank"])
        self.world_size = record.get("world_size")
        self.host = record["host"]
        self.pid = record["pid"]
        self.token = record.get("token")
        self.start = record.get("start")
        self.began = record["began"]
        self.written = record["written"]
        self.ended = record["ended"]
        self.has_watcher = record["answers"]
        self.seen_requests = record.get("asked", "")
        # a rank that only its launcher has seen has not written these, and an
        # older record lacks some
        self.stack: Stack = record.get("stack", ())
        self.callee = record.get("callee")
        self.handles: HandledError | None = None
        handled = record.get("handles")
        if handled is not None:
            self.handles = HandledError(*handled)
        self.idle_seconds = record.get("idle_seconds", 0)
        self.line_seconds = record.get("line_seconds")
        self.script_ended = record.get("script_ended", False)
        self.joined = record.get("joined", False)
        self.has_launcher = record.get("launched", True)
        self.uses_mpi = record.get("mpi", False)
        self.message = record.get("message")
        self.switched_off = record.get("switched_off", "")
        self.master = record.get("master", [None, None])
        self.master_problem = record.get("answer")
        self.connecting = record.get("connecting", [])
        self.state = record.get("state", "?")
        self.oom_kills = record.get("oom_kills", 0)
        self.folders = record.get("folders")
        self.stack_samples = [
            StackSample(*row) for row in record.get("stack_samples", ())]
        self.work = [Work(*row) for row in record.get("work", ())]
        self.threads: list[ThreadStack] | None = None
        rows = record.get("threads")
        if rows is not None:
            self.threads = [ThreadStack(*row) for row in rows]
        self.started_ranks: Sequence[Rank] = ()

        self.address = ":".join(map(str, self.master))
        self.sources = Sources(self.folders, record.get("library", ""))
        self.calls = find_collectives(record.get("calls") or ())
        self.crash = "".join(re.findall("Fatal Python error: (.*)",
                                        stack_dump)[:1])
        self.runs = self.ending == "runs"
        self.is_unresponsive = self.ending == "silent" or (
            self.runs and not has_answered)
        self.calls_are_stale = False
        written_stack = self.stack
        if self.ended and self.ended.get("stack"):
            self.stack = self.ended["stack"]
        elif stack_dump and not self.runs:
            self.stack = self.find_last_stack() or self.stack
        if self.find_place(written_stack)[1:] != (
                self.find_place(self.stack)[1:]):
            # these were of the stack when it last wrote; its collectives
            # may have ended since, unless it has written them at its end
            self.callee = self.handles = None
            self.calls_are_stale = bool(written_stack) and not (
                self.ended and not self.ended.get("told"))
        self.place = self.find_place(self.stack)
        self.is_joining = self.has_frame(
            "init_process_group|rendezvous|create_c10d_store")
        self.claim = Claim(self.joined or self.is_joining, self.has_watcher,
                           self.has_launcher, self.began)

    def find_last_stack(self) -> Stack:
        """Return the stack that SIGTERM or a crash has left, outermost frame
        first: the main thread's, where that waited for others meanwhile.
        """
        main = find_frames(last_thread(self.stack_dump))[::-1]
        if self.sources.find_wait(main):
            return main
        stack = find_frames(main_thread(self.stack_dump))[::-1]
        # another thread's, or Python's at its end: no line of the script
        file = self.find_place(stack).file
        if stack and file == stack[-1][0] and self.sources.owner(file) in (
                TORCH, MPI4PY, PYTHON):
            stack.append(["?", 0, "?"])
        return stack

    @cached_property
    def ending(self) -> Ending:
        """How it has ended, as far as its record and the system say it."""
        if self.crash:
            return "killed"
        lives = self.has_answered if self.alive is None else self.alive
        if self.signal and (self.ended or not lives) and not self.alive:
            if self.signal in ("SIGTERM", "SIGINT", "SIGHUP"):
                return "stopped"
            return "killed"
        if self.ended and "error" in self.ended:
            return "lost" if self.has_lost_others(self.ended) else "error"
        if self.ended:  # None: a status is not known
            return "done" if self.ended["status"] in (0, None) else "error"
        if lives:
            return "runs"
        return "gone" if self.alive is False else "silent"

    def has_lost_others(self, ended: Ended) -> bool:
        """Whether its error says that another rank was the first to end."""
        stack = ended.get("stack")
        file = stack[-1][0] if stack else ""
        if self.sources.owner(file) not in (TORCH, MPI4PY):
            return False
        message = ended["message"]
        if OWN_ERROR.search(message):
            return False
        return bool(CONNECTION_LOST.search(message))

    @property
    def end_time(self) -> float:
        """When it ended, in seconds since 1970; 0 if that is not known."""
        return (self.ended or {}).get("time", 0)

    @property
    def signal(self) -> str:
        """The signal that has ended it, or "": its launcher, its own handler,
        or its last words say so.
        """
        ended: Ended = self.ended or {}
        if self.crash:
            return self.crash
        if ended.get("error") == "KeyboardInterrupt":
            return "SIGINT"
        if self.stack_dump and not ended:
            return "SIGTERM"
        status = ended.get("status")
        if not isinstance(status, int) or status >= 0:
            return ""
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"

    @property
    def identity(self) -> Identity:
        return Identity(self.rank, "" if self.world_size else self.host)

    def find_place(self, stack: Stack) -> CodeLine:
        """Return the script's innermost line."""
        return CodeLine(*self.sources.find_line(stack))

    @cached_property
    def unfinished_calls(self) -> list[RankCall]:
        """The collectives that it has begun and that have not ended, oldest
        first, unless a later one of the same group has.
        """
        ended: set[GroupKey] = set()
        found: list[RankCall] = []
        for call in () if self.calls_are_stale else reversed(self.calls):
            if not call["waits"]:
                ended.add(call["of"])
            elif call["of"] not in ended:
                found.append(call)
        if not found and self.ending == "lost" and self.calls and (
                self.ended and TIMED_OUT.search(self.ended["message"])):
            return [self.calls[-1]]  # which its error has ended
        return found[::-1]

    @cached_property
    def last_numbers(self) -> dict[GroupKey, int]:
        """The number of its last collective in each group."""
        found: dict[GroupKey, int] = {}
        for call in self.calls:
            found[call["of"]] = max(
                call["number"], found.get(call["of"], -1))
        return found

    @cached_property
    def awaited_calls(self) -> list[RankCall]:
        """Those of `unfinished_calls` of which the main thread may wait for
        one: it may have begun others asynchronously, or another thread has.
        """
        if not self.unfinished_calls or not self.may_wait:
            return []
        if is_mpi_call(*self.last_frame):
            return self.unfinished_calls[-1:]
        if not self.sources.is_in_collective(self.stack):
            return self.unfinished_calls
        here = []
        for call in self.unfinished_calls:
            if call["line"] is None:  # it has not been asked for the lines
                return self.unfinished_calls
            if call["line"][1:] == [self.place.line, self.place.function]:
                here.append(call)
        return here[-1:]

    @property
    def current_call(self) -> RankCall | None:
        """The collective in which it is, or else the first that it has begun
        and that has not ended; or None.
        """
        if self.awaited_calls and self.sources.is_in_collective(self.stack):
            return self.awaited_calls[-1]
        return next(iter([*self.awaited_calls, *self.unfinished_calls]), None)

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
            return not LOCAL_TORCH.search(self.sources.path_in_torch(file))
        if owner == GENERATED or self.folders is None:
            return True
        if owner == PYTHON:  # it may wait for a thread of its own
            return any(self.sources.find_wait(thread.stack)
                       for thread in self.other_threads)
        if self.callee is None:  # an older Python does not tell
            return bool(MAY_WAIT_TEXT.search(str(self.place)))
        return bool(MAY_WAIT.search(self.callee)) and (
            not NOT_COLLECTIVE.search(self.callee))

    @property
    def other_threads(self) -> list[ThreadStack]:
        """All threads but the main one."""
        return [thread for thread in self.threads or ()
                if thread.number != self.pid]

    @property
    def is_blocked(self) -> bool:
        """Whether it is proven that its main thread waits for others, and
        that no other thread of it could do what they wait for.
        """
        if not self.runs or self.is_unresponsive or not self.waits:
            return False
        if self.idle_seconds < SOON or self.helpers:
            return False
        if any(self.sources.uses_collectives(thread.stack)
               for thread in self.other_threads):
            return False
        if self.threads is None and not self.work:
            return False  # nobody has looked at its threads
        return bool(self.message or is_mpi_call(*self.last_frame)
                    or self.sources.find_wait(self.stack)
                    or WORK_WAIT.search(self.callee or ""))

    @property
    def was_aborted(self) -> bool:
        """Whether SIGABRT has ended it in a collective, or while it waited
        for one: a watchdog does so to those that wait too long, and gloo to
        the one that gets a message of another size than it expects.
        """
        return self.got_sigabrt and (
            self.waits or self.sources.calls_others(self.stack))

    @property
    def was_aborted_in_backward(self) -> bool:
        """The same in a backward pass, which may call collectives."""
        return self.got_sigabrt and self.sources.path_in_torch(
            self.last_frame[0]).startswith("autograd/")

    @property
    def got_sigabrt(self) -> bool:
        return self.ending == "killed" and self.signal in (
            "Aborted", "SIGABRT")

    @cached_property
    def later_calls(self) -> list[RankCall]:
        """The collectives that it has begun after its own error: a handler at
        its end may do so, or an exception hook.
        """
        if self.ending != "error" or not self.ended:
            return []
        stack = self.ended.get("stack")
        if not stack or self.sources.owner(stack[-1][0]) in (TORCH, MPI4PY):
            return []  # the error may be the collective's
        return [call for call in self.calls
                if call["time"] > self.end_time - NOTICED
                and call.get("outside") is not False]

    @property
    def computes(self) -> bool:
        """Whether its main thread computed, read or wrote meanwhile."""
        return any(work.has_worked for work in self.work
                   if work.kind == "thread" and work.number == self.pid)

    @property
    def helpers(self) -> list[Work]:
        """The other threads of its `work` that are in the script's lines."""
        return [work for work in self.work
                if work.kind == "thread" and work.number != self.pid
                and work.line and self.sources.owner(work.line[0]) == SCRIPT]

    @property
    def waits(self) -> bool:
        """Whether it waits, or waited, for others, without computing."""
        if self.has_frame("importlib"):
            return False
        if self.message or self.sources.find_wait(self.stack):
            return True
        if not self.awaited_calls:
            return False
        # MPI computes while it waits
        return (not self.computes or self.idle_seconds > IDLE_LIMIT
                or is_mpi_call(*self.last_frame))

    def has_frame(self, pattern: str) -> bool:
        """Whether its stack has a frame of such a file or function."""
        return any(re.search(pattern, f"{file}:{name}")
                   for file, _, name in self.stack)

    @property
    def reads_pdb_command(self) -> bool:
        """Whether its main thread reads a command for Python's debugger."""
        frames = [(self.sources.owner(file), Path(file).name, name)
                  for file, _, name in self.stack]
        return (frames[-1:] == [(PYTHON, "cmd.py", "cmdloop")]
                and (PYTHON, "pdb.py", "interaction") in frames)

    @property
    def seconds_in_line(self) -> float:
        """Seconds since it came to its line, as far as it was looked at."""
        if self.line_seconds is None:
            return self.idle_seconds
        return min(self.idle_seconds, self.line_seconds)

    @property
    def longest_gap(self) -> float:
        """Seconds between two of its collectives, at most."""
        times = [call["time"] for call in self.calls]
        return max((b - a for a, b in itertools.pairwise(times)), default=0)

    @property
    def last_report(self) -> str:
        """When it last wrote, and where it was then."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.written))
        return f"{clock}, then in {self.place}"


def find_collectives(calls: Iterable[Call]) -> list[RankCall]:
    """Return those of a rank's calls that are collectives of a group of its
    own, each with that group.
    """
    found = []
    numbers: defaultdict[str, int] = defaultdict(int)
    generations: defaultdict[str, int] = defaultdict(int)
    texts: dict[int, str] = {}  # of groups: that of a thousand is long
    for call in cast("Iterable[RankCall]", calls):
        group = call["group"]
        if call["p2p"] or not group:
            continue
        name, number = call["name"], call["number"]
        if number < numbers[name]:  # a group that is made anew counts from 1
            generations[name] += 1
        numbers[name] = number
        if id(group) not in texts:  # calls share it, and its hash is kept
            texts[id(group)] = sys.intern(str(group))
        call["of"] = GroupKey(name, generations[name], texts[id(group)])
        found.append(call)
    return found


class Job:
    """All ranks, sorted, and what follows from seeing them together.

    Attributes:
        by_ending: the ranks by how they have ended.
        first_rank: rank 0, if it is there.
    """

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self.ranks = RankList(ranks)
        self.known_waits: dict[Rank, RankList] = {}
        self.by_ending: defaultdict[Ending, RankList] = defaultdict(RankList)
        # a node's: not all of its ranks still count
        kills: defaultdict[str, int] = defaultdict(int)
        for rank in self.ranks:
            self.by_ending[rank.ending].append(rank)
            kills[rank.host] = max(kills[rank.host], rank.oom_kills)
        for rank in self.ranks:
            rank.oom_kills = kills[rank.host]
        self.first_rank = self.ranks[0]

    def select(self, condition: Callable[[Rank], object]) -> RankList:
        """Return the ranks of which the condition is true."""
        return RankList(rank for rank in self.ranks if condition(rank))

    @cached_property
    def calls(self) -> list[dict[int, RankCall]]:
        """{rank: call} of each collective, in the order of their begin."""
        found: defaultdict[tuple[GroupKey, int], dict[int, RankCall]] = (
            defaultdict(dict))
        for rank in self.ranks:
            for call in rank.calls:
                found[call["of"], call["number"]][rank.rank] = call
        return sorted(found.values(), key=lambda calls: min(
            call["time"] for call in calls.values()))

    @cached_property
    def later_calls(self) -> list[RankCall]:
        """Those that a rank has begun after its own error."""
        return [call for rank in self.ranks for call in rank.later_calls]

    @cached_property
    def aborted_ranks(self) -> RankList:
        return self.select(lambda rank: rank.was_aborted)

    @cached_property
    def joining(self) -> RankList:
        """Those in init_process_group(), if no error keeps others away."""
        if self.by_ending["error"] or self.by_ending["killed"]:
            return RankList()
        return self.select(lambda rank: rank.runs and not rank.joined
                           and rank.is_joining)

    @cached_property
    def not_joined(self) -> RankList:
        """Those in init_process_group(), where none has come out of it; also
        if all of them were told to end there.
        """
        if any(rank.joined for rank in self.ranks) or self.joining:
            return self.joining
        stopped = self.select(lambda rank: rank.ending == "stopped"
                              and rank.is_joining)
        return stopped if len(stopped) == len(self.ranks) else RankList()

    @cached_property
    def unconnected(self) -> RankList:
        """Those of them that reach nobody at rank 0's address."""
        return RankList(
            rank for rank in self.joining
            if rank.idle_seconds >= SOON and rank.master_problem)

    def waits_for(self, rank: Rank) -> RankList:
        """Return those for whom a rank waits, as the records say."""
        if rank not in self.known_waits:
            self.known_waits[rank] = self.find_awaited(rank)
        return self.known_waits[rank]

    def find_awaited(self, rank: Rank) -> RankList:
        if rank.message:
            peer = rank.message["peer"]
            return self.select(lambda other: other.rank == peer
                               and other is not rank)
        calls = rank.awaited_calls or rank.unfinished_calls[:1]
        if rank.sources.find_wait(rank.stack):
            calls = rank.awaited_calls  # none: it waits in something else
        if not calls:
            return RankList()
        return self.select(lambda other: other is not rank and all(
            is_missing(other, call) for call in calls))

    @cached_property
    def waiting(self) -> RankList:
        """Those that wait for others, did so at their end, or lost them."""
        return self.select(
            lambda rank: rank.ending == "lost" or rank.was_aborted or (
                rank.waits and rank.ending in (
                    "runs", "stopped", "gone", "silent")))

    def waiters_of(self, rank: Rank) -> RankList:
        """Return those that wait for a rank, or have lost one that nobody
        names.
        """
        found = RankList()
        for other in self.waiting:
            if other is rank:
                continue
            awaited = self.waits_for(other)
            has_lost = other.ending == "lost" or other.was_aborted
            if rank in awaited or (has_lost and not awaited):
                found.append(other)
        return found


def is_missing(rank: Rank, call: RankCall) -> bool:
    """Whether a rank has not come to this collective of its group."""
    if rank.rank not in (call["group"] or ()):
        return False
    if rank.written < call["time"] and not rank.ended:
        return False  # what it wrote before says nothing of this collective
    return rank.last_numbers.get(call["of"], -1) < call["number"]


def find_frames(text: str) -> list[list[Any]]:
    """Return the frames of a traceback, or of faulthandler's dump, as they
    are printed.
    """
    return [[file, int(line), name] for file, line, name in
            re.findall(r'File "(.*)", line (\d+),? in (.*)', text)]


def last_thread(text: str) -> str:
    """Return the main thread of faulthandler's dump, which names the newest
    first.
    """
    parts = [part for part in re.split(
        r"\n(?=Thread |Current thread |Stack )", text) if 'File "' in part]
    return parts[-1] if parts else ""


def main_thread(text: str) -> str:
    """Return the thread of faulthandler's dump that was running."""
    parts = re.split(r"\n(?=Thread |Current thread |Stack )", text)
    # a signal that a library's thread got says nothing of Python's line
    return next((part for part in parts if 'File "' in part and part.lstrip(
        ).startswith(("Current thread", "Stack"))), parts[-1])
