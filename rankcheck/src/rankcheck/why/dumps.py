"""Reads the flight-recorder dumps that a job has left without `why run`.

When a collective times out, PyTorch's NCCL watchdog writes one file for each
rank, PREFIX0, PREFIX1 and so on; TORCH_FR_DUMP_TEMP_FILE (before PyTorch 2.11
TORCH_NCCL_DEBUG_INFO_TEMP_FILE) names PREFIX. Such a file lists the last
collectives of the rank and says which have ended. It does not say where the
rank was beside them, nor whether it lives.
"""

from __future__ import annotations

import ast
import io
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rankcheck.engine.findings import Finding, fail
from rankcheck.system.errors import UserError, read_regular
from rankcheck.why.ranks import RankNumbers

DEFAULT_GROUP = "0"  # as PyTorch calls the group of all ranks
PICKLE = b"\x80"  # begins a file of Python's pickle, from protocol 2 on
NUMBERED = re.compile(r"(.*?)(\d+)")  # a prefix and a rank
POINT_TO_POINT = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
COUNTERPARTS = {"send": "recv", "recv": "send"}
# The ranks of a group may give these other sizes: NCCL gathers and scatters
# lists of tensors that differ, and only the root of some has both sides
UNEVEN_INPUTS = re.compile(
    "all_?to_?all|^all_gather$|scatter$|^gather|_v$|_v_|barrier")
UNEVEN_OUTPUTS = re.compile(
    "all_?to_?all|^all_gather$|^reduce_scatter$|^gather|_v$|_v_|barrier")


class _NoClasses(pickle.Unpickler):
    """Reads numbers, texts and containers: a file may be anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class DumpedGroup(NamedTuple):
    """A process group; other ranks may have another one of the same name.

    Attributes:
        ranks: None where they are not recorded, as of gloo's groups.
    """

    name: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class DumpedCall:
    """A collective, or a message, as its rank has begun it.

    Attributes:
        number: counts the collectives of its group, from 1 on.
        peer: the other rank of a message, by its number in the group.
        line: FILE, line N; "" if the dump has no stacks.
    """

    group: DumpedGroup
    number: int
    operation: str
    inputs: str
    outputs: str
    types: str
    is_over: bool
    line: str
    is_message: bool = False
    peer: int = -1

    @property
    def name(self) -> str:
        """The operation with what tells it from another of the same name."""
        return f"{self.operation} of {self.inputs} {self.types}"

    @property
    def place(self) -> str:
        return f" ({self.line})" if self.line else ""


@dataclass(frozen=True)
class Dump:
    """What one rank has left."""

    rank: int
    file: Path
    calls: list[DumpedCall]


# ------------------------------------------------------------------- reading


def find_files(target: str) -> dict[int, Path]:
    """Find the dumps in a folder, or that begin with a prefix, by rank.

    Raises:
        UserError: a folder holds several sets of dumps.
    """
    path = Path(target)
    if path.is_dir():
        folder, wanted = path, ""
    else:
        folder, wanted = path.parent, path.name
    sets: dict[str, dict[int, Path]] = defaultdict(dict)
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            match = NUMBERED.fullmatch(file.name)
            if match and wanted in ("", match[1]) and _is_pickle(file):
                sets[match[1]][int(match[2])] = file
    if len(sets) > 1:
        names = ", ".join(str(folder / prefix) for prefix in sorted(sets))
        raise UserError(f"{target} holds several sets of dumps; fix: name one "
                        f"of {names}")
    return next(iter(sets.values()), {})


def _is_pickle(file: Path) -> bool:
    try:
        return read_regular(file, 1) == PICKLE
    except OSError:
        return False


def load_dump(rank: int, file: Path) -> Dump:
    """Read one file.

    Raises:
        UserError: it is damaged, or something else.
    """
    try:
        value = _NoClasses(io.BytesIO(read_regular(file))).load()
        members = {
            name: tuple(sorted(ast.literal_eval(config["ranks"])))
            for name, config in value["pg_config"].items()
            if name}  # gloo's groups have none, and overwrite each other
        calls = [_read_call(entry, members) for entry in value["entries"]]
    except Exception as error:  # whatever another file's content leads to
        raise UserError(f"{file} is not a flight-recorder dump, or corrupt "
                        f"({type(error).__name__}: {error})") from error
    return Dump(rank, file, calls)


def _read_call(entry: dict[str, Any],
               members: dict[str, tuple[int, ...]]) -> DumpedCall:
    """Read an entry of the record.

    Args:
        members: the ranks of each group that the dump names, by its name.
    """
    group = entry["process_group"][0]
    name = entry["profiling_name"].partition(":")[2]
    message = POINT_TO_POINT.fullmatch(name)
    peer = -1
    if message:
        name, peer = message[1], int(message[3])
    return DumpedCall(
        group=DumpedGroup(group, members.get(group)),
        number=entry["collective_seq_id"],
        operation=name, inputs=str(entry["input_sizes"]),
        outputs=str(entry["output_sizes"]),
        types=", ".join(sorted({*entry["input_dtypes"]})),
        is_over=entry["retired"] or entry["state"] == "completed",
        line=_find_line(entry.get("frames") or ()),
        is_message=entry["is_p2p"], peer=peer)


def _find_line(frames: Iterable[dict[str, Any]]) -> str:
    """Return the innermost line that is not in an installed package."""
    for frame in frames:
        file = frame["filename"]
        if "-packages/" not in file and not file.startswith("<"):
            return f"{file}, line {frame['line']}"
    return ""


# ------------------------------------------------------------------- judging


def judge_dumps(dumps: list[Dump]) -> list[Finding]:
    """Say what each group's dumps show; nothing of one where nothing waits.

    Its verdict is "FAIL", with a kind, only for what the dumps prove. They may
    have been written at different moments: a rank that has not called a
    collective yet may be on its way.
    """
    everybody = tuple(range(max(
        (dump.rank for dump in dumps), default=-1) + 1))
    groups = dict.fromkeys(call.group for dump in dumps for call in dump.calls)
    findings = []
    for group in groups:
        ranks = group.ranks
        if ranks is None and group.name == DEFAULT_GROUP:
            ranks = everybody
        calls = {}
        for dump in dumps:
            own = [call for call in dump.calls if call.group == group]
            if own or dump.rank in (ranks or ()):
                calls[dump.rank] = own
        found = judge_collectives(group.name, ranks, calls)
        if found is None and ranks is not None:
            found = judge_messages(group.name, ranks, calls)
        if found is not None:
            findings.append(found)
    return findings


def judge_collectives(group: str, members: tuple[int, ...] | None,
                      calls: dict[int, list[DumpedCall]]) -> Finding | None:
    """Compare the collectives that have the same number in their group.

    Args:
        members: None if the dumps do not say which ranks are in the group.
        calls: of each rank that has a dump, those in this group.
    """
    numbered = {rank: number_calls(own) for rank, own in calls.items()}
    begins = [min(own) for own in numbered.values() if own]
    ends = [max(own) for own in numbered.values() if own]
    if not begins:
        return None
    # a record holds the last calls only: earlier ones cannot be compared
    for number in range(max(begins), max(ends) + 1):
        present = {rank: own[number] for rank, own in numbered.items()
                   if number in own}
        found = find_odd_ranks(group, number, present)
        if found is not None:
            return found
        if all(call.is_over for call in present.values()):
            continue
        everybody = numbered if members is None else members
        if len(present) < len(everybody):
            return describe_absent(group, number, sorted(everybody), present,
                                   numbered)
    last = max(ends)
    waiting = {rank: own[last] for rank, own in numbered.items()
               if last in own and not own[last].is_over}
    if not waiting:
        return None
    call = next(iter(waiting.values()))
    text = (f"{RankNumbers(sorted(waiting)):waits} in collective {last} of "
            f"group {group}, {call.name}{call.place}; ")
    if members is None:
        text += ("which other ranks are in that group is not recorded, and "
                 "none of these has called another collective")
    else:
        text += (f"all of {RankNumbers(members)} have called it, and their "
                 "calls do not differ")
    return observe(text, "a rank that came to it late, or has ended since "
                   "(its log); the network: NCCL_DEBUG=INFO")


def number_calls(calls: list[DumpedCall]) -> dict[int, DumpedCall]:
    """Return a rank's collectives in one group by their number.

    Those that NCCL starts together share a number, and an entry "coalesced"
    follows them: the first of these stands for all, and is over if any is.
    """
    numbered: dict[int, DumpedCall] = {}
    for call in calls:
        if call.is_message:
            continue
        first = numbered.setdefault(call.number, call)
        if call.is_over and not first.is_over:
            numbered[call.number] = replace(first, is_over=True)
    return numbered


def find_odd_ranks(group: str, number: int,
                   present: dict[int, DumpedCall]) -> Finding | None:
    """Name the ranks whose call with this number differs from most ranks'.

    Of two halves, the one with the lowest rank counts as most.
    """
    properties: tuple[tuple[str, Callable[[DumpedCall], str | None]], ...] = (
        ("operation differs", lambda call: call.operation),
        ("sizes differ", lambda call: None if UNEVEN_INPUTS.search(
            call.operation) else call.inputs),
        ("sizes differ", lambda call: None if UNEVEN_OUTPUTS.search(
            call.operation) else call.outputs),
        ("types differ", lambda call: call.types or None))
    for difference, property_of in properties:
        values = {}
        for rank, call in present.items():
            value = property_of(call)
            if value is not None:
                values[rank] = value
        counted = [*values.values()]
        if len({*counted}) < 2:
            continue
        usual = max(counted, key=counted.count)
        odd = sorted(rank for rank in values if values[rank] != usual)
        even = sorted(rank for rank in values if values[rank] == usual)
        first, second = present[odd[0]], present[even[0]]
        return fail(
            f"collective {number} of group {group}: the {difference}: "
            f"{first.name} on {RankNumbers(odd)}{first.place}, {second.name} "
            f"on {RankNumbers(even)}{second.place}",
            "call the same collectives in the same order on all ranks of a "
            "group, with the same shape and dtype: look for a branch that not "
            "all ranks take", kind="collective mismatch", ranks=odd)
    return None


def describe_absent(group: str, number: int, members: list[int],
                    present: dict[int, DumpedCall],
                    numbered: dict[int, dict[int, DumpedCall]]) -> Finding:
    """Say which ranks have not called what the others wait in."""
    call = next(iter(present.values()))
    absent = [rank for rank in members if rank not in present]
    silent = RankNumbers(rank for rank in absent if rank not in numbered)
    behind = RankNumbers(rank for rank in absent if rank in numbered)
    texts = [f"{RankNumbers(sorted(present)):waits} in collective {number} of "
             f"group {group}, {call.name}{call.place}"]
    if behind:
        texts.append(f"{behind:has} not called it")
    for rank in behind:
        if numbered[rank]:
            last = numbered[rank][max(numbered[rank])]
            texts.append(f"the last one of rank {rank} is {last.number}, "
                         f"{last.operation}{last.place}")
        else:
            texts.append(f"rank {rank} has called none of this group")
    if silent:
        texts.append(f"{silent:has} left no dump")
    return observe("; ".join(texts), "where these ranks are or how they "
                   "ended: their log, a branch that they do not take, or "
                   "py-spy if they still run", absent)


def judge_messages(group: str, members: tuple[int, ...],
                   calls: dict[int, list[DumpedCall]]) -> Finding | None:
    """Pair the messages that have not ended: each needs its counterpart.

    Messages that are sent together leave a further entry, "coalesced", which
    is none.
    """
    pending = [(rank, call) for rank, own in sorted(calls.items())
               for call in own
               if call.is_message and not call.is_over
               and call.operation in COUNTERPARTS]
    for rank, call in pending:
        peer = name_peer(call, members)
        counterpart = COUNTERPARTS[call.operation]
        of_peer = [other for one, other in pending if one == peer]
        if any(other.operation == counterpart
               and name_peer(other, members) == rank for other in of_peer):
            continue
        direction = "to" if call.operation == "send" else "from"
        text = (f"rank {rank} waits in {call.operation} of group {group}, "
                f"{direction} rank {peer}{call.place}")
        if peer not in calls:
            text += f"; rank {peer} has left no dump"
        else:
            text += f"; no {counterpart} of rank {peer} waits for it"
        if of_peer:
            text += (f", which waits in {of_peer[0].operation}"
                     f"{of_peer[0].place}")
        return observe(text, "match each send with one recv on the other "
                       "rank, in the same order", [peer])
    return None


def name_peer(call: DumpedCall, members: tuple[int, ...]) -> int:
    """Return the number of a message's other rank among all ranks.

    It may be beyond those that are known, where some have left no dump.
    """
    if call.peer < len(members):
        return members[call.peer]
    return call.peer


def observe(text: str, fix: str, ranks: list[int] | None = None) -> Finding:
    """Return what is seen, and proves no fault."""
    return Finding("ok", [text], [fix], ranks=ranks or [])
