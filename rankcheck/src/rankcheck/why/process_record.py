"""The types of the record that a process writes of itself: PROCESS.json.

watcher.py and calls.py write it, evidence.py reads it, ranks.py and jobs.py
use it. `watcher.RECORD_FORMAT` is the version of the format: change both
together. Older formats lack some keys, and so does what is known of a process
of which only a launcher says something: no key is required.

A watched process never imports this module: watcher.py and calls.py name its
types in annotations alone, and write lists in place of the named tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from rankcheck.system.sources import Frame, Stack

    # The fields of a named tuple, as JSON has them
    RecordedRow = Sequence[Any]


class StackSample(NamedTuple):
    """How often the main thread was seen with a stack."""

    times: int
    stack: Stack


class ThreadStack(NamedTuple):
    """What a thread that runs Python was doing."""

    name: str  # "?" if `threading` does not know it
    number: int  # the system's; 0 if it is not known
    stack: Stack


class Work(NamedTuple):
    """What a thread of a process, or a process that it has started, did in
    the seconds in which it was watched.
    """

    kind: str  # "thread" or "process"
    number: int  # the system's
    name: str
    state: str  # as proc.read_state() has it
    has_worked: bool
    line: Frame | None  # the script's, of a thread that runs Python


class HandledError(NamedTuple):
    """An error that the main thread handles, in `except` or `finally`."""

    name: str  # of its type
    stack: Stack


class Identity(NamedTuple):
    """What identifies a rank within a job."""

    rank: int | None
    host: str  # "" unless each node counts its own, as mp.spawn does


class CallPlace(TypedDict):
    """Where a call was made; None where PyTorch has recorded no frames."""

    line: Frame | None  # the script's innermost one
    outside: bool | None  # whether the script's own run has not made it


class Call(CallPlace, total=False):
    """A collective, or a message of MPI.

    In the file, `group` is a key of the record's `groups`.
    """

    group: list[int] | None  # its ranks; None if this rank is not in it
    name: str  # of the group
    number: int  # in the group, larger than that of the calls before
    call: str
    sizes: list[list[int]]
    types: list[str]
    root: int | None
    peer: int | None  # of a message, the other rank; None if that is any
    waits: bool  # whether it has not returned
    p2p: bool  # whether it is a message
    time: float  # of its begin, in seconds since 1970


class ErrorThatFollowed(NamedTuple):
    """An error that was raised while another was being handled."""

    stack: Stack
    text: str


class Ended(TypedDict, total=False):
    """How a process has ended."""

    status: int | str | None  # None if nobody in the process knows it
    time: float  # in seconds since 1970
    error: str  # the name of the first error's type
    message: str
    stack: Stack
    then: Sequence[RecordedRow]  # `ErrorThatFollowed`s
    told: bool  # whether its launcher says so
    rank: int  # as its launcher has counted it
    signal: int | None  # which a launcher has got, and passes on


class ProcessRecord(TypedDict, total=False):
    """All that a process writes of itself."""

    # what it knows from its begin on
    format: str
    host: str
    pid: int
    starter: str | None  # the PID of the rank that has started it
    began: float  # in seconds since 1970
    start: list[str | None]  # the values of watcher.JOB_VARIABLES
    parent: int
    token: str | None  # of its `why run`
    space: str  # as proc.name_space() names it
    network: str  # its network namespace
    oom_before: int  # how many processes the kernel had ended for memory

    # when it writes
    written: float  # in seconds since 1970
    rank: int | None  # None if it is no rank, or no rank yet
    world_size: int | None
    master: list[str | None]  # MASTER_ADDR, MASTER_PORT
    joined: bool  # whether it has joined a group
    answer: str  # as proc.try_meeting() returns it
    answers: bool  # whether its thread runs
    asked: str  # the last requests that it has seen
    idle_seconds: float  # seconds without a move of the main thread
    line_seconds: float | None  # seconds in the script's line
    script_ended: bool  # whether the script has ended, and the process has not
    ended: Ended | None
    stack: Stack
    callee: str | None  # what its innermost frame calls
    handles: RecordedRow | None  # a `HandledError`
    calls: list[Call] | None  # None if they could not be read
    message: Call | None  # of MPI, that has not returned
    groups: dict[str, list[int]]  # as calls.pack_groups() returns them
    mpi: bool  # whether it uses mpi4py
    switched_off: str  # as calls.find_switched_off() returns it
    folders: dict[str, str]  # as sources.find_folders() returns them
    library: str  # a pattern of files that are not the script's
    launched: bool  # whether its parent is a launcher
    state: str  # as proc.read_state() has it
    oom_kills: int  # by the kernel since its begin, for memory
    connecting: list[str]  # as proc.connecting() returns them

    # when somebody asks: of the two seconds after that
    stack_samples: Sequence[RecordedRow]  # `StackSample`s
    threads: Sequence[RecordedRow]  # `ThreadStack`s
    work: Sequence[RecordedRow]  # `Work`s

    # which evidence.py adds
    process: str  # the name of its files
    alive: bool | None  # None if it cannot be seen from here
