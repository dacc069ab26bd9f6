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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankcheck.system.errors import UserError

DEFAULT_GROUP = "0"  # as PyTorch calls the group of all ranks
PICKLE = b"\x80"  # begins a file of Python's pickle, from protocol 2 on
NUMBERED = re.compile(r"(.*?)(\d+)")  # a prefix and a rank
POINT_TO_POINT = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
# The ranks of a group may give these other sizes
UNEVEN_INPUTS = re.compile("all_?to_?all|scatter(?!_)|^gather|_v$|_v_|barrier")
UNEVEN_OUTPUTS = re.compile("all_?to_?all|^gather|_v$|_v_|barrier")


class _NoClasses(pickle.Unpickler):
    """Reads numbers, texts and containers: a file may be anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@dataclass(frozen=True)
class Call:
    """A collective, or a message, as its rank has begun it.

    Attributes:
        number: counts the collectives of its group, from 1 on.
        peer: the other rank of a message, by its number in the group.
        line: FILE, line N; "" if the dump has no stacks.
    """

    group: str
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
    """What one rank has left.

    Attributes:
        groups: the ranks of each group that it is in, by the group's name;
            those of gloo's groups are not recorded.
    """

    rank: int
    file: Path
    calls: list[Call]
    groups: dict[str, list[int]]


@dataclass(frozen=True)
class DumpFinding:
    """What the dumps of a group show.

    Attributes:
        kind: a fault that they prove, or "" if they only show where it stands.
        ranks: those that differ from most, or that the others wait for.
    """

    group: str
    kind: str
    text: str
    ranks: list[int] = field(default_factory=list)
    advice: str = ""


# ------------------------------------------------------------------- reading


def find_files(target: str) -> dict[int, Path]:
    """The dumps that a folder holds, or that begin with a prefix, by rank.

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
            if match and _is_pickle(file) and wanted in ("", match[1]):
                sets[match[1]][int(match[2])] = file
    if len(sets) > 1:
        names = ", ".join(str(folder / prefix) for prefix in sorted(sets))
        raise UserError(f"{target} holds several sets of dumps: name one of "
                        f"{names}")
    return next(iter(sets.values()), {})


def _is_pickle(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return file.is_file() and opened.read(1) == PICKLE
    except OSError:
        return False


def read_dump(rank: int, file: Path) -> Dump:
    """Read one file.

    Raises:
        UserError: it is damaged, or something else.
    """
    try:
        value = _NoClasses(io.BytesIO(file.read_bytes())).load()
        groups = {
            name: sorted(ast.literal_eval(config["ranks"]))
            for name, config in value["pg_config"].items()
            if name}  # gloo's groups have none, and overwrite each other
        calls = [_read_call(entry) for entry in value["entries"]]
    except Exception as error:  # whatever another file's content leads to
        raise UserError(f"{file} is no flight-recorder dump, or damaged "
                        f"({type(error).__name__}: {error})") from error
    return Dump(rank, file, calls, groups)


def _read_call(entry: dict[str, Any]) -> Call:
    name = entry["profiling_name"].partition(":")[2]
    message = POINT_TO_POINT.fullmatch(name)
    peer = -1
    if message:
        name, peer = message[1], int(message[3])
    return Call(
        group=entry["process_group"][0], number=entry["collective_seq_id"],
        operation=name, inputs=str(entry["input_sizes"]),
        outputs=str(entry["output_sizes"]),
        types=", ".join(sorted({*entry["input_dtypes"]})),
        is_over=entry["retired"] or entry["state"] == "completed",
        line=_find_line(entry.get("frames") or ()),
        is_message=entry["is_p2p"], peer=peer)


def _find_line(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost line that is not in an installed package."""
    for frame in frames:
        file = frame["filename"]
        if "-packages/" not in file and not file.startswith("<"):
            return f"{file}, line {frame['line']}"
    return ""


# ------------------------------------------------------------------- judging


def judge(dumps: list[Dump]) -> list[DumpFinding]:
    """What each group's dumps show; groups in which nothing waits: nothing."""
    members = {name: ranks for dump in dumps
               for name, ranks in dump.groups.items()}
    members.setdefault(DEFAULT_GROUP, [*range(max(
        (dump.rank for dump in dumps), default=-1) + 1)])
    groups = dict.fromkeys(call.group for dump in dumps for call in dump.calls)
    findings = []
    for group in groups:
        ranks = members.get(group)
        calls = {}
        for dump in dumps:
            own = [call for call in dump.calls if call.group == group]
            if own or dump.rank in (ranks or ()):
                calls[dump.rank] = own
        found = judge_collectives(group, ranks, calls)
        if found is None and ranks is not None:
            found = judge_messages(group, ranks, calls)
        if found is not None:
            findings.append(found)
    return findings


def judge_collectives(group: str, members: list[int] | None,
                      calls: dict[int, list[Call]]) -> DumpFinding | None:
    """Compare the collectives that have the same number in their group.

    Args:
        members: None if the dumps do not say which ranks are in the group.
        calls: of each rank that has a dump, those in this group.
    """
    numbered = {rank: {call.number: call for call in own
                       if not call.is_message}
                for rank, own in calls.items()}
    begins = [min(own) for own in numbered.values() if own]
    ends = [max(own) for own in numbered.values() if own]
    if not begins:
        return None
    # a record holds the last calls only: earlier ones cannot be compared
    for number in range(max(begins), max(ends) + 1):
        present = {rank: own[number] for rank, own in numbered.items()
                   if number in own}
        found = find_mismatch(group, number, present)
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
    text = (f"{join(sorted(waiting))} {verb(waiting)} in collective {last} of "
            f"group {group}, {call.name}{call.place}; ")
    if members is None:
        text += ("which other ranks are in that group is not recorded, and "
                 "none of these has called another collective")
    else:
        text += (f"all of {join(members)} have called it, and their calls do "
                 "not differ")
    return DumpFinding(group, "", text, advice=(
        "look for a rank that came to it late, or has ended since (its log), "
        "and for the network: NCCL_DEBUG=INFO"))


def find_mismatch(group: str, number: int,
                  present: dict[int, Call]) -> DumpFinding | None:
    """The ranks whose call with this number is another, by most ranks'."""
    properties: tuple[tuple[str, Callable[[Call], str | None]], ...] = (
        ("operation differs", lambda call: call.operation),
        ("sizes differ", lambda call: None if UNEVEN_INPUTS.search(
            call.operation) else call.inputs),
        ("sizes differ", lambda call: None if UNEVEN_OUTPUTS.search(
            call.operation) else call.outputs),
        ("types differ", lambda call: call.types or None))
    for difference, property_of in properties:
        values = {rank: property_of(call) for rank, call in present.items()}
        if len({*values.values()} - {None}) < 2:
            continue
        counted = [*values.values()]
        usual = max(counted, key=counted.count)
        odd = sorted(rank for rank in values if values[rank] != usual)
        even = sorted(rank for rank in values if values[rank] == usual)
        first, second = present[odd[0]], present[even[0]]
        return DumpFinding(group, "collective mismatch", (
            f"collective {number} of group {group}: the {difference}: "
            f"{first.name} on {join(odd)}{first.place}, {second.name} on "
            f"{join(even)}{second.place}"), odd, (
            "all ranks of a group have to call the same collectives in the "
            "same order, with the same shape and type: look for a branch that "
            "not all ranks take"))
    return None


def describe_absent(group: str, number: int, members: list[int],
                    present: dict[int, Call],
                    numbered: dict[int, dict[int, Call]]) -> DumpFinding:
    """Which ranks have not called what the others wait in."""
    call = next(iter(present.values()))
    absent = [rank for rank in members if rank not in present]
    silent = [rank for rank in absent if rank not in numbered]
    behind = [rank for rank in absent if rank in numbered]
    texts = [f"{join(sorted(present))} {verb(present)} in collective {number} "
             f"of group {group}, {call.name}{call.place}"]
    if behind:
        texts.append(f"{join(behind)} {verb(behind, 'has', 'have')} not "
                     "called it")
        for rank in behind:
            last = max(numbered[rank].values(), default=None,
                       key=lambda one: one.number)
            if last is None:
                texts.append(f"rank {rank} has called none of this group")
            else:
                texts.append(f"the last one of rank {rank} is {last.number}, "
                             f"{last.operation}{last.place}")
    if silent:
        texts.append(f"{join(silent)} {verb(silent, 'has', 'have')} left no "
                     "dump")
    return DumpFinding(group, "", "; ".join(texts), absent, (
        "look where these ranks are or how they ended: their log, a branch "
        "that they do not take, or py-spy if they still run"))


def judge_messages(group: str, members: list[int],
                   calls: dict[int, list[Call]]) -> DumpFinding | None:
    """Pair the messages that have not ended: each needs its counterpart."""
    pending = [(rank, call) for rank, own in sorted(calls.items())
               for call in own if call.is_message and not call.is_over]
    for rank, call in pending:
        peer = members[call.peer] if call.peer < len(members) else call.peer
        counterpart = {"send": "recv", "recv": "send"}[call.operation]
        answers = [other for one, other in pending
                   if one == peer and other.operation == counterpart
                   and members[other.peer] == rank]
        if answers:
            continue
        direction = "to" if call.operation == "send" else "from"
        text = (f"rank {rank} waits in {call.operation} of group {group}, "
                f"{direction} rank {peer}{call.place}")
        if peer not in calls:
            text += f"; rank {peer} has left no dump"
        else:
            text += f"; no {counterpart} of rank {peer} waits for it"
            others = [other for one, other in pending if one == peer]
            if others:
                text += (f", which waits in {others[0].operation}"
                         f"{others[0].place}")
        return DumpFinding(group, "", text, [peer], (
            "each send needs one recv on the other rank, in the same order"))
    return None


# --------------------------------------------------------------------- words


def join(ranks: Iterable[int]) -> str:
    numbers = [*ranks]
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, numbers))}"


def verb(ranks: Iterable[int], one: str = "waits",
         several: str = "wait") -> str:
    return one if len([*ranks]) == 1 else several


def describe(dumps: list[Dump], findings: list[DumpFinding]) -> list[str]:
    """The answer, in lines."""
    lines = [f"{len(dumps)} flight-recorder dumps: "
             f"{dumps[0].file.parent}, {join(dump.rank for dump in dumps)}"]
    for found in sorted(findings, key=lambda one: not one.kind):
        lines.append(f"{found.kind or 'no fault is proven'}: {found.text}")
        if found.advice:
            label = "fix" if found.kind else "look"
            lines.append(f"{label}: {found.advice}")
    if not findings:
        lines.append("no fault is proven: no collective waits in any group")
    lines.append("dumps say nothing of what ranks do beside their "
                 "collectives: `rankcheck why run -- COMMAND` watches that")
    return lines
