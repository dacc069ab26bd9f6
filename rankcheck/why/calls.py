"""The collectives of a process: PyTorch's flight record, and one of MPI's.

Only the standard library: it is loaded into any script, by witness.py. It uses
torch and mpi4py where the script has imported them.
"""

from __future__ import annotations

import collections
import functools
import heapq
import os
import pickle
import re
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it takes longer than all else here
    from typing import Any

KEPT = 2000  # collectives
# Files whose lines are not the script's; RANKCHECK_LIBRARY names more
LIBRARY = (r"site-packages|dist-packages|/lib/python3|^<(?!stdin>)|\.pyx$"
           r"|/(rankcheck/(launch|why)|workshop/jobs)/\w+\.py"
           r"|/c[a-z2-7]{51}\.py$")  # torch.compile's

# What is recorded of MPI's communicators. In these, one rank has what all
# others get, or the reverse: the place of `root` among the arguments
ROOTS = {"Bcast": 1, "bcast": 1, "Gather": 2, "Gatherv": 2, "gather": 1,
         "Reduce": 3, "reduce": 2, "Scatter": 2, "Scatterv": 2, "scatter": 1}
COLLECTIVES = (
    *ROOTS, "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv",
    "Barrier", "Reduce_scatter", "Reduce_scatter_block", "Scan", "allgather",
    "allreduce", "alltoall", "barrier", "scan")
MAKERS = ("Create", "Dup", "Split", "Split_type")  # of further communicators
# Of these only the last is kept. The place of the other rank; None: of both
MESSAGES = {"Create_group": None, "Probe": 0, "Recv": 1, "Send": 1,
            "Sendrecv": None, "Ssend": 1, "probe": 0, "recv": 1, "send": 1,
            "sendrecv": None, "ssend": 1}

mpi_calls = collections.deque(maxlen=KEPT)  # as `read_record` returns them
mpi_messages = collections.deque(maxlen=1)


@functools.cache
def library(more):
    return re.compile(f"{LIBRARY}|{more}" if more else LIBRARY)


def find_line(stack, more=None):
    """[file, line, function] of the script's innermost line in a stack.

    more: a pattern of further files that are not the script's.
    """
    foreign = library(os.environ.get("RANKCHECK_LIBRARY", "")
                      if more is None else more)
    mine = [frame for frame in stack if not foreign.search(frame[0])]
    return (mine or stack or [["?", 0, "?"]])[-1]


def find_torch():
    """torch.distributed, once this process has joined a group; else None."""
    torch = sys.modules.get("torch.distributed")
    # while it is imported, and in a build without it, names are missing
    return torch if getattr(torch, "is_initialized", bool)() else None


def find_dumps(suffix=""):
    """PyTorch's functions for its flight record, and NCCL's if it is there."""
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
    """The last collectives, oldest first, of PyTorch's record and of ours."""
    dumps, torch = find_dumps(), find_torch()
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups = {group.group_name: sorted(ranks) for group, ranks
              in c10d._world.pg_group_ranks.items()
              if hasattr(group, "group_name")} if dumps else {}
    # a number in place of a group: one without this rank
    records = [[{
        "group": groups.get(entry["process_group"][0]),
        "name": entry["process_group"][0],
        "number": entry["collective_seq_id"],
        "call": entry["profiling_name"].rpartition(":")[2],
        "sizes": entry["input_sizes"], "types": entry["input_dtypes"],
        # which is not recorded: it is the rank that gets something
        "root": torch.get_rank() if entry.get("output_sizes") and entry[
            "profiling_name"].endswith(":gather") else None,
        "waits": not entry["retired"], "p2p": entry["is_p2p"],
        "time": entry["time_created_ns"] / 1e9,
        "line": find_line([
            [frame["filename"], frame["line"], frame["name"]]
            for frame in reversed(entry["frames"])
        ]) if entry.get("frames") else None}
        for entry in read_dump(dump, lines).get("entries", [])]
        for dump in dumps]
    # each is in order, also where the clock was set back meanwhile
    return [*heapq.merge([dict(call) for call in list(mpi_calls)], *records,
                         key=lambda call: call["time"])][-KEPT:]


def pack_groups(entries: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Let calls name their group, in place of its ranks.

    Args:
        entries: calls as `read_record` returns them; they are changed.

    Returns:
        The ranks of each group, by that name. Thousands of calls share a
        group of thousands of ranks: a record holds these once.
    """
    table: dict[str, list[int]] = {}
    for entry in entries:
        ranks = entry["group"]
        if ranks is None:
            continue
        name, number = str(entry["name"]), 1
        # one that was made anew has the same name, and may have other ranks
        while table.setdefault(name, ranks) != ranks:
            number += 1
            name = f"{entry['name']}#{number}"
        entry["group"] = name
    return table


def unpack_groups(record: dict[str, Any]) -> None:
    """Undo `pack_groups` in a record; those of an older format have none."""
    table = record.pop("groups", None)
    if table is None:
        return
    for entry in [*(record["calls"] or ()), record.get("message")]:
        if entry and entry["group"] is not None:
            entry["group"] = table[entry["group"]]


def progress():
    """How many collectives each group has begun and ended, as text."""
    return [str([*mpi_messages, *list(mpi_calls)[-1:]])] + [
        dump(False) for dump in find_dumps("_json")]


# ---------------------------------- MPI, which keeps no record of its own


def record_mpi(MPI, on_abort):
    """Let MPI.COMM_WORLD, and what is made of it, record its collectives."""
    kind = type(MPI.COMM_WORLD)
    if hasattr(kind, "recorded"):
        return

    def call(name, calls, counts):
        def called(self, *args, **options):
            self.recorded += counts
            number = self.recorded
            entry = describe_call(self, name, args, options)
            calls.append(entry)
            result = getattr(kind, name)(self, *args, **options)
            entry["waits"] = False
            # an empty communicator, which `Split` returns, is false
            return adopt(result, f"{self.label}.{number}") if isinstance(
                result, kind) and result else result
        return called

    def abort(self, errorcode=0):
        on_abort(errorcode)
        kind.Abort(self, errorcode)

    def adopt(comm, label):
        mine = Recorded(comm)
        vars(mine).update(getattr(comm, "__dict__", {}), label=label)
        return mine

    Recorded = type("Intracomm", (kind,), {
        "recorded": 0, "ranks": None, "Abort": abort,
        **{name: call(name, mpi_calls, 1) for name in COLLECTIVES + MAKERS},
        **{name: call(name, mpi_messages, 0) for name in MESSAGES}})
    MPI.COMM_WORLD = adopt(MPI.COMM_WORLD, "MPI")


def describe_call(comm, name, args, options):
    """What `read_record` says of a call; of an array its shape and type."""
    if comm.ranks is None:
        world = sys.modules["mpi4py.MPI"].COMM_WORLD.Get_group()
        comm.ranks = comm.Get_group().Translate_ranks(None, world)

    def find_rank(place, default, *names):
        number = None if place is None else next(
            (options[name] for name in names if name in options),
            args[place] if len(args) > place else default)
        return comm.ranks[number] if isinstance(number, int) and (
            0 <= number < len(comm.ranks)) else None

    # the methods in lower case take any objects, also arrays of other shapes
    sent = [array for array in args[:2] if hasattr(array, "dtype")
            and name[0].isupper()][:1]
    frame = sys._getframe(2)
    while frame.f_back and library("").search(frame.f_code.co_filename):
        frame = frame.f_back
    return {"group": comm.ranks, "name": comm.label, "number": comm.recorded,
            "call": name, "sizes": [list(array.shape) for array in sent],
            "types": [str(array.dtype) for array in sent], "waits": True,
            "p2p": name in MESSAGES, "time": time.time(),
            "root": find_rank(ROOTS.get(name), 0, "root"),
            "peer": find_rank(MESSAGES.get(name), -1, "source", "dest"),
            "line": [frame.f_code.co_filename, frame.f_lineno,
                     frame.f_code.co_name]}
