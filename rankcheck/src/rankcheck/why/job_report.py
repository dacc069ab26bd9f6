"""What `why` says of each job in a folder, as lines of text or for JSON."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankcheck.engine.findings import Finding
from rankcheck.why.describe import describe_rank
from rankcheck.why.evidence import UNWATCHED
from rankcheck.why.judge import diagnose
from rankcheck.why.process_record import Call, Ended
from rankcheck.why.ranks import Rank, pluralize

if TYPE_CHECKING:
    from rankcheck.system.sources import Stack

HOSTS = 4  # named in a line
# What differs between ranks that do the same: seconds, clocks, PIDs
VARYING = re.compile(r"(?<= for )\d+(?= s\b)|\b\d+(?= s so far\b)"
                     r"|\b\d\d:\d\d:\d\d\b"
                     r"|(?<=process )\d+(?= \()")


@dataclass(frozen=True)
class JobReport:
    """What was found of one job."""

    ranks: list[Rank]
    finding: Finding

    @property
    def is_fault(self) -> bool:
        return self.finding.verdict == "FAIL"

    @property
    def runs(self) -> bool:
        return any(rank.runs for rank in self.ranks)

    @property
    def token(self) -> str | None:
        """Which start it is of; None if it is not known."""
        tokens = {rank.token for rank in self.ranks}
        return next(iter(tokens - {None}), None)

    @property
    def world_size(self) -> int | None:
        """As all of its ranks say; None if they do not agree."""
        sizes = {rank.world_size for rank in self.ranks}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def missing(self) -> list[int]:
        """The ranks that have left no evidence."""
        found = {rank.rank for rank in self.ranks}
        return sorted({*range(self.world_size or 0)} - found)


def report_job(ranks: list[Rank],
               sample_again: Callable[[], list[Rank]] | None = None
               ) -> JobReport:
    """Judge one job; see `diagnose` for the arguments."""
    return JobReport(ranks, diagnose(ranks, sample_again))


def sort_reports(reports: list[JobReport],
                 last_start: str | None) -> list[JobReport]:
    """Return what matters most first: a proven fault, then what is of the
    last start, then what runs, then what began last.

    Args:
        reports: those that began first are first.
        last_start: its token; None if it is not known.
    """
    return sorted(reversed(reports), key=lambda one: (
        not one.is_fault, one.token != last_start, not one.runs))


def join_ranks(numbers: list[int]) -> str:
    """Return for example `rank 3`, or `ranks 0-62, 64`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts: list[str] = []
    for span in spans:
        if len(span) > 2:
            parts.append(f"{span[0]}-{span[-1]}")
        else:
            parts += map(str, span)
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {', '.join(parts)}"


def join_hosts(ranks: list[Rank]) -> str:
    hosts = [*dict.fromkeys(rank.host for rank in ranks)]
    text = ", ".join(hosts[:HOSTS])
    if len(hosts) > HOSTS:
        text += f" and {len(hosts) - HOSTS} more nodes"
    return text


def merge_texts(texts: list[str]) -> str:
    """Return one text for texts that differ only where `VARYING` matches."""
    values: list[tuple[str, ...]] = [
        *zip(*map(VARYING.findall, texts), strict=False)]

    def merge(_: re.Match[str]) -> str:
        found = values.pop(0)
        first, last = min(found, key=sort_key), max(found, key=sort_key)
        return first if first == last else f"{first}-{last}"

    return VARYING.sub(merge, texts[0])


def sort_key(text: str) -> tuple[int, str]:
    return len(text), text


def group_equal(ranks: list[Rank]) -> list[list[Rank]]:
    """Return those together that do the same, in the order of the first of
    each.
    """
    groups: defaultdict[tuple[int | None, str], list[Rank]] = (
        defaultdict(list))
    for rank in ranks:
        number = rank.calls[-1]["number"] if rank.calls else None
        groups[number, VARYING.sub("", describe_rank(rank))].append(rank)
    return [*groups.values()]


def describe_ranks(ranks: list[Rank]) -> str:
    """Return a line of the table, of a rank or of several that do the same.
    """
    first = ranks[0]
    text = merge_texts([describe_rank(rank) for rank in ranks])
    line = (f"{join_ranks([rank.rank for rank in ranks])} on "
            f"{join_hosts(ranks)}")
    if len(ranks) == 1:
        line += f", process {first.pid}"
    else:
        verb, space, rest = text.partition(" ")
        text = pluralize(verb) + space + rest
    if first.calls:
        line += f", collective {first.calls[-1]['number']}"
    return f"{line}: {text}"


def describe_missing(found: JobReport) -> str:
    """Return of which ranks nothing is known; "" if something is of all."""
    if not found.missing:
        return ""
    verb = "has" if len(found.missing) == 1 else "have"
    return (f"{join_ranks(found.missing)}, of {found.world_size}, {verb} left "
            f"no record here: {UNWATCHED}")


def name_job(found: JobReport) -> str:
    """Return what tells a job from others: its ranks, and where they meet.
    """
    first = found.ranks[0]
    name = join_ranks([rank.rank for rank in found.ranks])
    if found.world_size:
        name += f" of {found.world_size}"
    if first.master[1]:
        name += f", MASTER_PORT {first.master[1]}"
    run = first.start[0] if first.start else None
    if run and run != "none":
        name += f", run id {run}"
    return f"{name}, on {join_hosts(found.ranks)}"


def describe_stacks(ranks: list[Rank]) -> list[str]:
    """Return whole stacks, innermost line last, in lines: of ranks where
    they are equal those together.
    """
    groups: defaultdict[tuple[str, tuple[Any, ...]], list[Rank]] = (
        defaultdict(list))
    for rank in ranks:
        groups["main thread", freeze_stack(rank.stack)].append(rank)
        for thread in rank.other_threads:
            key = f"thread {thread.name}", freeze_stack(thread.stack)
            groups[key].append(rank)
    lines = []
    for (name, stack), members in groups.items():
        numbers = [rank.rank for rank in members]
        lines.append(f"{name} of {join_ranks(numbers)}:")
        if not stack:
            lines.append("  not known")
        for file, line, function in stack:
            lines.append(f'  File "{file}", line {line}, in {function}')
    return lines


def freeze_stack(stack: Stack) -> tuple[Any, ...]:
    """Return a stack as a key of a dictionary."""
    return tuple(tuple(frame) for frame in stack)


# ------------------------------------------------------------------- JSON


def to_json(found: JobReport, stacks: bool) -> dict[str, Any]:
    """Return a job, as README.md describes it.

    Args:
        stacks: also whole stacks.
    """
    finding = found.finding
    return {
        "kind": finding.kind or None, "verdict": finding.verdict,
        "text": finding.text, "fix": finding.fix_text,
        "blamed": sorted({rank.rank for rank in finding.ranks}),
        "world_size": found.world_size, "missing": found.missing,
        "ranks": [rank_to_json(rank, stacks) for rank in found.ranks]}


def rank_to_json(rank: Rank, stacks: bool) -> dict[str, Any]:
    place = None
    if rank.place.file != "?":
        place = {"file": rank.place.file, "line": rank.place.line,
                 "function": rank.place.function}
    last = call_to_json(rank.calls[-1]) if rank.calls else None
    document = {
        "rank": rank.rank, "host": rank.host, "pid": rank.pid,
        "state": rank.ending, "answers": not rank.is_unresponsive,
        "seconds": round(rank.idle_seconds, 1) if rank.runs else None,
        "place": place, "collective": last, "waits": wait_to_json(rank),
        "error": error_to_json(rank), "text": describe_rank(rank)}
    if stacks:
        document["stack"] = [[*frame] for frame in rank.stack]
        document["threads"] = [
            {"name": thread.name, "id": thread.number, "stack": thread.stack}
            for thread in rank.other_threads]
    return document


def call_to_json(call: Call) -> dict[str, Any]:
    return {"call": call["call"], "number": call["number"],
            "group": call["name"], "sizes": call["sizes"],
            "types": call["types"], "ended": not call["waits"]}


def wait_to_json(rank: Rank) -> dict[str, Any] | None:
    """Return in what it waits, and for whom if it is a message to one rank;
    None if it does not wait.
    """
    if not rank.waits:
        return None
    call: Call | None = rank.message
    if not call and rank.awaited_calls:
        call = rank.awaited_calls[0]
    if not call:
        return {"call": rank.sources.find_wait(rank.stack) or None,
                "number": None, "group": None, "peer": None}
    return {"call": call["call"], "number": call["number"],
            "group": call["name"], "peer": call.get("peer")}


def error_to_json(rank: Rank) -> dict[str, Any] | None:
    """Return with what it has ended; None if that is a success."""
    ended: Ended = rank.ended or {}
    status = ended.get("status")
    if not (status or ended.get("error") or rank.signal):
        return None
    return {"type": ended.get("error"), "message": ended.get("message"),
            "status": status if isinstance(status, int) else None,
            "signal": rank.signal or None}
