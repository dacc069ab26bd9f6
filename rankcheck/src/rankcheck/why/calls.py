"""The collectives of a process: PyTorch's flight record, and one of MPI's.

Only the standard library: it is loaded into any script, by watcher.py. It uses
torch and mpi4py where the script has imported them.
"""

from __future__ import annotations

import collections
import functools
import heapq
import os
import pickle
import sys
import threading
import time

from ..system import sources
from ..system.launchers import find_torch

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it takes longer than all else here
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType
    from typing import Any

    from .process_record import Call, CallPlace

    ReadDump = Callable[..., Any]  # a function of PyTorch's

KEPT_CALLS = 2000  # collectives
# What is recorded of MPI's communicators. In these, one rank has what all
# others get, or the reverse: the place of `root` among the arguments
ROOTS = {"Bcast": 1, "bcast": 1, "Gather": 2, "Gatherv": 2, "gather": 1,
         "Reduce": 3, "reduce": 2, "Scatter": 2, "Scatterv": 2, "scatter": 1}
COLLECTIVES = (
    *ROOTS, "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv",
    "Barrier", "Exscan", "Neighbor_allgather", "Neighbor_alltoall",
    "Reduce_scatter", "Reduce_scatter_block", "Scan", "allgather",
    "allreduce", "alltoall", "barrier", "exscan", "neighbor_allgather",
    "neighbor_alltoall", "scan")
MAKERS = (  # of further communicators
    "Clone", "Create", "Create_cart", "Create_dist_graph",
    "Create_dist_graph_adjacent", "Create_graph", "Create_intercomm", "Dup",
    "Dup_with_info", "Split", "Split_type", "Sub")
# Of these only the last is kept. The place of the other rank; None: of both
MESSAGES = {"Create_group": None, "Probe": 0, "Recv": 1, "Send": 1,
            "Sendrecv": None, "Ssend": 1, "probe": 0, "recv": 1, "send": 1,
            "sendrecv": None, "ssend": 1}

# As `read_calls` returns them
mpi_calls: collections.deque[Call] = collections.deque(maxlen=KEPT_CALLS)
mpi_messages: collections.deque[Call] = collections.deque(maxlen=1)


def find_sources() -> sources.Sources:
    """Return whose the files of this process are, as of now."""
    return sources.Sources(sources.find_folders(),
                           os.environ.get("RANKCHECK_LIBRARY", ""))


def find_dumps(suffix: str = "") -> list[ReadDump]:
    """Return PyTorch's functions for its flight record, and NCCL's if it is
    there.

    Args:
        suffix: "" for those that pickle it, "_json" for those that write JSON.
    """
    if not find_torch():
        return []
    names = (f"_dump_{kind}_trace{suffix}" for kind in ("fr", "nccl"))
    c10d = sys.modules["torch._C._distributed_c10d"]
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]


def read_flight_record(dump: ReadDump, lines: bool) -> Any:
    """Return what PyTorch's flight record holds.

    For its lines PyTorch asks torch for _inductor, which imports it: that
    takes seconds, and if the script does the same at that moment, it may get a
    module that is only half there. This thread, the only one that wants lines,
    gets none.
    """
    if not lines:
        return pickle.loads(dump(True, False, False))
    torch: Any = sys.modules["torch"]
    this_thread = threading.get_ident()
    load = torch.__getattr__

    def find(name: str) -> Any:
        if threading.get_ident() == this_thread:
            raise AttributeError(name)
        return load(name)

    torch.__getattr__ = find
    try:
        return pickle.loads(dump(True, True, False))
    finally:
        torch.__getattr__ = load


def read_calls(lines: bool) -> list[Call]:
    """Return the last collectives, oldest first, of PyTorch's record and of
    ours.

    Args:
        lines: also the lines that have begun those of PyTorch.
    """
    dumps, torch, owners = find_dumps(), find_torch(), find_sources()
    groups = find_groups() if dumps else {}
    records = []
    for dump in dumps:
        entries = read_flight_record(dump, lines).get("entries", [])
        records.append([describe_entry(entry, groups, torch, owners)
                        for entry in entries])
    # each is in order, also where the clock was set back meanwhile
    return [*heapq.merge([call.copy() for call in list(mpi_calls)], *records,
                         key=lambda call: call["time"])][-KEPT_CALLS:]


def find_groups() -> dict[str, list[int]]:
    """Return the ranks of each of PyTorch's groups, by its name."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return {group.group_name: sorted(ranks)
            for group, ranks in c10d._world.pg_group_ranks.items()
            # a number in place of a group: one without this rank
            if hasattr(group, "group_name")}


def describe_entry(entry: Mapping[str, Any], groups: dict[str, list[int]],
                   torch: Any, owners: sources.Sources) -> Call:
    """Return a call as PyTorch's flight record holds it.

    Args:
        torch: torch.distributed.
    """
    name = entry["process_group"][0]
    root = None
    if entry.get("output_sizes") and (
            entry["profiling_name"].endswith(":gather")):
        # which is not recorded: it is the rank that gets something
        root = torch.get_rank()
    place = describe_stack(owners, entry.get("frames"))
    return {
        "group": groups.get(name), "name": name,
        "number": entry["collective_seq_id"],
        "call": entry["profiling_name"].rpartition(":")[2],
        "sizes": entry["input_sizes"], "types": entry["input_dtypes"],
        "root": root, "waits": not entry["retired"], "p2p": entry["is_p2p"],
        "time": entry["time_created_ns"] / 1e9,
        "line": place["line"], "outside": place["outside"]}


def pack_groups(entries: list[Call]) -> dict[str, list[int]]:
    """Let calls name their group, in place of its ranks.

    Args:
        entries: calls as `read_calls` returns them; they are changed.

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
        packed: Any = entry  # a `Call` as it is in the file
        packed["group"] = name
    return table


def unpack_groups(record: dict[str, Any]) -> None:
    """Undo `pack_groups` in a record; those of an older format have none.

    Args:
        record: a `ProcessRecord`, as it is in the file; it is changed.
    """
    table = record.pop("groups", None)
    if table is None:
        return
    for entry in [*(record["calls"] or ()), record.get("message")]:
        if entry and entry["group"] is not None:
            entry["group"] = table[entry["group"]]


def describe_stack(owners: sources.Sources,
                   frames: Sequence[Mapping[str, Any]] | None) -> CallPlace:
    """Return which line of the script has begun a collective, and whether
    that was outside of the script's own run: in a handler at its end, or a
    thread.

    Args:
        frames: innermost first, as PyTorch has them; None if the record has
            none.
    """
    stack = [[frame["filename"], frame["line"], frame["name"]]
             for frame in reversed(frames or ())]
    if not stack:
        return {"line": None, "outside": None}
    return {"line": owners.find_line(stack),
            "outside": all(name != "<module>" for _, _, name in stack)}


def find_switched_off() -> str:
    """Return the variable that has switched PyTorch's flight record off; "" if
    none has.
    """
    for name in "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE":
        value = os.environ.get(name, "").strip()
        if value:  # the first that is set
            return name if value == "0" else ""
    return ""


def describe_progress() -> list[str]:
    """Return how many collectives each group has begun and ended, as text."""
    own = str([*mpi_messages, *list(mpi_calls)[-1:]])
    return [own, *[dump(False) for dump in find_dumps("_json")]]


# ---------------------------------- MPI, which keeps no record of its own


def record_mpi(MPI: Any, on_abort: Callable[[int], None]) -> None:
    """Let MPI.COMM_WORLD, and what is made of it, record its collectives.

    Args:
        MPI: mpi4py.MPI.
        on_abort: called with the status before MPI ends the process.
    """
    if hasattr(type(MPI.COMM_WORLD), "recorded"):
        return
    kinds: dict[type, type] = {}  # each class of mpi4py's -> ours
    merges: collections.Counter[tuple[int, ...]] = collections.Counter()

    def record(kind: type, name: str, calls: collections.deque[Call],
               counts: int) -> Callable[..., Any]:
        """Return the method of that name, which adds each call to `calls`.

        Args:
            counts: 1 if a call gets a number, 0 if it has the last one's.
        """
        # `sources.is_mpi_call` knows it by this name
        def called(self: Any, *args: Any, **options: Any) -> Any:
            if self.label is None:  # made in a way that is not known here
                return getattr(kind, name)(self, *args, **options)
            self.recorded += counts
            number = self.recorded
            entry = describe_mpi_call(self, name, args, options)
            calls.append(entry)
            result = getattr(kind, name)(self, *args, **options)
            entry["waits"] = False
            return adopt(result, f"{self.label}.{number}")
        return called

    def merge(self: Any, *args: Any, **options: Any) -> Any:
        result = MPI.Intercomm.Merge(self, *args, **options)
        # the two sides have labels of their own: this one is the same on both
        ranks = tuple(find_ranks(result))
        merges[ranks] += 1
        return adopt(result, f"merged.{merges[ranks]}")

    def abort(self: Any, errorcode: int = 0) -> None:
        on_abort(errorcode)
        MPI.Comm.Abort(self, errorcode)

    def make_kind(kind: type) -> type:
        """Return a class as this one of mpi4py's, which records."""
        members: dict[str, Any] = {
            "recorded": 0, "ranks": None, "label": None}
        if issubclass(kind, MPI.Intercomm):
            return type(kind.__name__, (kind,), {**members, "Merge": merge})
        members["Abort"] = abort
        for names, calls, counts in ((COLLECTIVES + MAKERS, mpi_calls, 1),
                                     (MESSAGES, mpi_messages, 0)):
            for name in names:
                if hasattr(kind, name):
                    members[name] = record(kind, name, calls, counts)
        return type(kind.__name__, (kind,), members)

    def adopt(value: Any, label: str) -> Any:
        """Return a communicator that records; anything else as it is."""
        # an empty communicator, which `Split` returns, is false
        if not isinstance(value, (MPI.Intracomm, MPI.Intercomm)) or not value:
            return value
        kind, adopted = type(value), value
        if not hasattr(kind, "recorded"):  # what `Dup` makes has our kind
            kinds[kind] = kinds.get(kind) or make_kind(kind)
            adopted = kinds[kind](value)
            vars(adopted).update(getattr(value, "__dict__", {}))
        vars(adopted).update(label=label, recorded=0, ranks=None)
        return adopted

    MPI.COMM_WORLD = adopt(MPI.COMM_WORLD, "MPI")


@functools.cache
def mpi_sources() -> sources.Sources:
    """Call `find_sources` once: at each call of MPI it has to be fast."""
    return find_sources()


def find_ranks(comm: Any) -> list[int]:
    """Return the ranks of a communicator, as COMM_WORLD counts them."""
    world = sys.modules["mpi4py.MPI"].COMM_WORLD.Get_group()
    ranks: list[int] = comm.Get_group().Translate_ranks(None, world)
    return ranks


def find_argument(args: tuple[Any, ...], options: dict[str, Any], place: int,
                  default: int, names: Iterable[str]) -> Any:
    """Return an argument of a call, by its place or one of its names."""
    for name in names:
        if name in options:
            return options[name]
    if len(args) > place:
        return args[place]
    return default


def describe_mpi_call(comm: Any, name: str, args: tuple[Any, ...],
                      options: dict[str, Any]) -> Call:
    """Return what `read_calls` says of a call that is being made; of an
    array its shape and type.

    To be called by the method itself: the frames above that are the stack.
    """
    if comm.ranks is None:
        comm.ranks = find_ranks(comm)

    def find_rank(place: int | None, default: int, *names: str) -> int | None:
        if place is None:
            return None
        number = find_argument(args, options, place, default, names)
        if isinstance(number, int) and 0 <= number < len(comm.ranks):
            rank: int = comm.ranks[number]
            return rank
        return None

    # the methods in lower case take any objects, also arrays of other shapes
    sent = [array for array in args[:2] if hasattr(array, "dtype")
            and name[0].isupper()][:1]
    stack: list[dict[str, Any]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame:
        stack.append({"filename": frame.f_code.co_filename,
                      "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back
    return {"group": comm.ranks, "name": comm.label, "number": comm.recorded,
            "call": name, "sizes": [list(array.shape) for array in sent],
            "types": [str(array.dtype) for array in sent], "waits": True,
            "p2p": name in MESSAGES, "time": time.time(),
            "root": find_rank(ROOTS.get(name), 0, "root"),
            "peer": find_rank(MESSAGES.get(name), -1, "source", "dest"),
            **describe_stack(mpi_sources(), stack)}
