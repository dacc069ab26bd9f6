"""The results of the bench: a JSON document, and the tables made of it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankcheck.bench.cases import HANG, KINDS, SILENT, TWINS
from rankcheck.bench.scoring import Score, Statement
from rankcheck.system.errors import UserError
from rankcheck.system.version import __version__

# Of the document: another number if a field changes or goes
RESULTS_SCHEMA = 1
TITLES = {SILENT: "silent errors", HANG: "hangs and deaths"}


@dataclass(frozen=True)
class ResultRow:
    """What one tool has said about one case.

    Attributes:
        score: a `Score`, by its value.
        reason: the statement that decided, or why the tool does not apply.
        by_warning: whether the fault was named by a warning only.
        false_warnings: how many warnings there were about the right script.
        seconds: how long the tool took for both scripts.
        wrong: the statements about the wrong script.
        right: the statements about the right script.
    """

    case: str
    group: str
    kind: str
    held_out: bool
    tool: str
    score: str
    reason: str
    by_warning: bool
    false_warnings: int
    seconds: float
    wrong: list[Statement]
    right: list[Statement]


@dataclass(frozen=True)
class Results:
    """A run of the bench.

    Attributes:
        date: when it began, in UTC.
        versions: of what was used, by name.
        cores: of the machine.
        seconds: how long all of it took.
        cpu_seconds: how long its processes computed, together.
    """

    date: str
    versions: dict[str, str]
    cores: int
    seconds: float
    cpu_seconds: float
    rows: list[ResultRow]


def begin(tools: dict[str, str]) -> Results:
    """Return the results of a run that begins now. tools: their versions."""
    return Results(begin_date(), describe_versions(tools),
                   count_usable_cores(), 0.0, 0.0, [])


def describe_versions(tools: dict[str, str]) -> dict[str, str]:
    """Return the versions of the tools, of Python and of PyTorch.

    One without a version is left out: it is known, but not installed.
    """
    import torch

    installed = {name: version for name, version in tools.items() if version}
    return {"rankcheck": __version__, "torch": str(torch.__version__),
            "python": platform.python_version(), **installed}


def begin_date() -> str:
    """Return the time now, as the document has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def count_usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_cpu_seconds() -> float:
    """Return how long this process and all that have ended have computed."""
    return sum(os.times()[:4])


def write(results: Results, file: Path) -> None:
    """Write the document.

    Raises:
        UserError: if the file cannot be written.
    """
    document = {"schema": RESULTS_SCHEMA, **asdict(results)}
    text = json.dumps(document, indent=1) + "\n"
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; fix: "
                        "name another file") from None


def read(file: Path) -> Results:
    """Return the results of a document.

    Raises:
        UserError: if the file is none, or has another schema.
    """
    try:
        document = json.loads(file.read_text("utf-8"))
        if document.pop("schema") != RESULTS_SCHEMA:
            raise ValueError("another schema")
        rows = [read_row(row) for row in document.pop("rows")]
        return Results(rows=rows, **document)
    except (OSError, ValueError, LookupError, TypeError, AttributeError
            ) as error:
        raise UserError(f"{file} has no results of the bench: {error}; fix: "
                        "write them by `python -m rankcheck.bench --json "
                        "FILE`") from None


def read_row(values: dict[str, Any]) -> ResultRow:
    """Return a row of the document."""
    whole = dict(values)
    for twin in TWINS:
        whole[twin] = [read_statement(one) for one in values[twin]]
    return ResultRow(**whole)


def read_statement(values: dict[str, Any]) -> Statement:
    """Return a statement of the document."""
    return Statement(**{**values, "ranks": tuple(values["ranks"]),
                        "lines": tuple(values["lines"])})


@dataclass(frozen=True)
class Counts:
    """How often a tool got which score, in some of the cases."""

    tool: str
    label: str
    numbers: dict[Score, int]

    @property
    def asked(self) -> int:
        """The number of cases that the tool was asked about."""
        return sum(self.numbers.values())

    @property
    def applied(self) -> int:
        """The number of cases to which the tool applies."""
        return self.asked - self.numbers[Score.NOT_APPLICABLE]

    @property
    def named_of_applied(self) -> str:
        """How many of the cases to which the tool applies it has named."""
        return f"{self.numbers[Score.NAMED]} of {self.applied}"


def count(rows: Iterable[ResultRow], tool: str, label: str) -> Counts:
    """Count the scores of a tool."""
    scores = [Score(row.score) for row in rows if row.tool == tool]
    return Counts(tool, label, {one: scores.count(one) for one in Score})


def tools_of(rows: Sequence[ResultRow]) -> list[str]:
    """Return the names of the tools, in the order of the rows."""
    return [*dict.fromkeys(row.tool for row in rows)]


SCORE_COLUMNS = (Score.NOTICED, Score.MISSED, Score.FALSE,
                 Score.NOT_APPLICABLE)


def make_table(results: Results) -> str:
    """Return the tables in Markdown: for each group, the tools by kind."""
    parts = [make_total(results)]
    parts += [make_group(results, group) for group in KINDS]
    return "\n\n".join(part for part in parts if part)


def make_total(results: Results) -> str:
    """Return the table of all cases of both groups."""
    lines = ["| tool | cases | named | of those, only by a warning | noticed "
             "| missed | false | not applicable | named, held out | warnings "
             "about correct scripts |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for group, title in TITLES.items():
        rows = [row for row in results.rows if row.group == group]
        for tool in tools_of(rows):
            counts = count(rows, tool, title)
            held = count([row for row in rows if row.held_out], tool, title)
            mine = [row for row in rows if row.tool == tool]
            warnings = sum(row.false_warnings for row in mine)
            by_warning = sum(row.by_warning for row in mine)
            cells = [f"{tool}, {title}", str(counts.asked),
                     str(counts.numbers[Score.NAMED]), str(by_warning)]
            cells += [str(counts.numbers[one]) for one in SCORE_COLUMNS]
            cells += [held.named_of_applied, str(warnings)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_group(results: Results, group: str) -> str:
    """Return a table of one group: a row for each kind."""
    rows = [row for row in results.rows if row.group == group]
    tools = [tool for tool in tools_of(rows) if count(
        rows, tool, "").applied]
    if not tools:
        return ""
    lines = [f"| kind | cases | {' | '.join(tools)} |",
             f"|---|---:|{'---|' * len(tools)}"]
    for kind in KINDS[group]:
        some = [row for row in rows if row.kind == kind]
        if some:
            number = len({row.case for row in some})
            cells = [summarize_counts(count(some, tool, kind))
                     for tool in tools]
            lines.append(f"| {kind} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summarize_counts(counts: Counts) -> str:
    """Return the scores of a tool in words: "4 named, 1 missed"."""
    if not counts.asked:
        return "not asked"
    if not counts.applied:
        return "not applicable"
    parts = [f"{number} {score.value}"
             for score, number in counts.numbers.items() if number]
    return ", ".join(parts)
