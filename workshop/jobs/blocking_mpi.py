"""MPI for checks and tests: a waiting rank sleeps instead of spinning.

An MPI library looks for messages without pause while it waits. Four ranks on
two cores then take the cores from one another, and nobody sees from outside
whether they compute or wait for ever. Here COMM_WORLD is a communicator whose
ranks sleep until all have come to a collective, and only then call MPI's own.
If they have not come to the same collective, they wait on, where MPI would
hang, fail or mix up messages, as it happens. A `Send` waits until its message
is received, which MPI allows and does with long messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from rankcheck.why import calls

if TYPE_CHECKING:  # it imports torch
    from rankcheck.record.recorder import Log

module: Any = MPI  # in which names are replaced
# Those of a topology are another class's
MPI_COLLECTIVES = tuple(name for name in calls.COLLECTIVES
                        if hasattr(MPI.Intracomm, name))
# as many elements on all ranks
EQUAL_COUNT_CALLS = ("Allreduce", "Bcast", "Reduce")
BEGUN = (  # they return a request
    *{f"I{name.lower()}" for name in MPI_COLLECTIVES},
    "Irecv", "Isend", "Issend", "irecv", "isend", "issend")
SYNCHRONOUS_SENDS = {"Send": "Issend", "Ssend": "Issend", "send": "issend",
                     "ssend": "issend"}  # by what begins it
RECEIVED = ("Recv", "recv")
LONGEST_SLEEP = 0.02  # seconds between two looks


def install(nodes: int, log: Log) -> None:
    """Let MPI.COMM_WORLD sleep while it waits.

    nodes: on how many nodes the ranks are to believe they are. log: the
    `Log` that is told of each call.
    """
    module.COMM_WORLD = SleepingComm.adopt(MPI.COMM_WORLD)
    SleepingComm.nodes, SleepingComm.log = nodes, log


class SleepingComm(MPI.Intracomm):
    """A communicator whose ranks sleep while they wait."""

    nodes: int
    log: Log
    apart: MPI.Intracomm

    @classmethod
    def adopt(cls, comm: MPI.Comm) -> SleepingComm:
        """The same communicator, but it sleeps. All its ranks."""
        asleep = cls(comm)
        # what the ranks say of themselves is apart from their messages
        asleep.apart = MPI.Intracomm.Dup(MPI.Intracomm(comm))
        return asleep

    def Split(self, *args: Any, **kwargs: Any) -> SleepingComm:
        return self.adopt(MPI.Intracomm(self).Split(*args, **kwargs))

    def Split_type(self, split_type: int, key: int = 0,
                   info: MPI.Info = MPI.INFO_NULL) -> SleepingComm:
        if self.nodes > 1 and split_type == MPI.COMM_TYPE_SHARED:
            node = self.rank * self.nodes // self.size
            return self.Split(node, self.rank)
        return self.adopt(
            MPI.Intracomm(self).Split_type(split_type, key, info))

    def Dup(self, info: MPI.Info | None = None) -> SleepingComm:
        return self.adopt(MPI.Intracomm(self).Dup(info))

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End all ranks: mpirun does so when one ends with an error.

        MPI's own Abort waits for mpirun and holds Python's lock meanwhile. It
        might wait for ever if another rank has made mpirun end already.
        """
        os._exit(errorcode or 1)


SleepingComm.__name__ = "mpi4py.MPI.Intracomm"  # so errors call it


class SleepingRequest(MPI.Request):
    def Wait(self, status: MPI.Status | None = None) -> Any:
        sleep_until(self.Get_status)
        return super().Wait(status)

    def wait(self, status: MPI.Status | None = None) -> Any:
        sleep_until(self.Get_status)
        return super().wait(status)

    @classmethod
    def Waitall(cls, requests: Any, statuses: Any = None) -> Any:
        for request in requests:
            sleep_until(request.Test)
        return True

    @classmethod
    def waitall(cls, requests: Any, statuses: Any = None) -> Any:
        return [request.wait() for request in requests]


module.Request = SleepingRequest


def sleep_until(done: Callable[[], object]) -> None:
    """Return once done() is true; the pauses between two looks grow."""
    pause = 2e-5
    while not done():
        time.sleep(pause)
        pause = min(LONGEST_SLEEP, 1.5 * pause)


def count_elements(args: Sequence[Any]) -> int:
    """How many elements the first buffer or object among `args` has."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and arg:
            return count_elements(arg)
        if hasattr(arg, "numel"):
            return arg.numel()
        if isinstance(getattr(arg, "size", None), int):
            return arg.size
        if isinstance(arg, (int, float)):
            return 1
    return 0


# ---------------------------------------------- the methods of a SleepingComm


def add(name: str) -> None:
    """Give `SleepingComm` a method, which stack traces call by that name."""
    plain = getattr(MPI.Intracomm, SYNCHRONOUS_SENDS.get(name, name))

    def method(self: SleepingComm, *args: Any, **kwargs: Any) -> Any:
        elements = count_elements([*args, *kwargs.values()])
        self.log.tell("call", name.lower(), elements)
        if name in MPI_COLLECTIVES:  # until all ranks have come to this one
            compared = elements if name in EQUAL_COUNT_CALLS else 0
            mine = f"{name} {compared}".encode().ljust(40)
            theirs = bytearray(40 * self.size)
            sleep_until(self.apart.Iallgather(mine, theirs).Test)
            sleep_until(lambda: theirs == mine * self.size)
            return plain(self, *args, **kwargs)
        request = plain(self, *args, **kwargs)
        if name in SYNCHRONOUS_SENDS:
            sleep_until(request.Test)
            return None
        return SleepingRequest(request)

    def receive(
            self: SleepingComm, buf: Any = None, source: int = MPI.ANY_SOURCE,
            tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        self.log.tell("call", name.lower(), count_elements([buf]))
        sleep_until(lambda: self.Iprobe(source, tag))
        return plain(self, buf, source, tag, status)

    if name in RECEIVED:
        method = receive
    method.__code__ = method.__code__.replace(co_name=name)
    method.__name__ = name
    setattr(SleepingComm, name, method)


for one in (*MPI_COLLECTIVES, *BEGUN, *SYNCHRONOUS_SENDS, *RECEIVED):
    add(one)
