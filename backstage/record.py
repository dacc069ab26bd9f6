"""hyperparameters.json and metrics.csv: what a run's folder says about it."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from backstage import files
from backstage.errors import FULL, UserError, require, warn
from backstage.files import StrPath

Row = dict[str, Any]  # a number for each of COLUMNS, or None
RECORD = "hyperparameters.json"

COLUMNS = ("step", "loss", "val_loss", "lr", "norm", "seconds",
           "tokens_per_second", "mfu", "samples_per_second",
           "tokens_per_second_per_device", "memory", "memory_reserved")
ALWAYS = "loss", "lr", "norm", "seconds", "tokens_per_second"  # in each row


def read_record(folder: StrPath, types: Mapping[str, Any]) -> dict[str, Any]:
    """The run's `hyperparameters.json`, a dictionary.

    types: of its hyperparameters, some of which an older run may not have.
    Raises `FileNotFoundError`, or a `UserError` if it is damaged.
    """
    file = Path(folder) / RECORD
    remedy = "rename it, then resume with --resume and all of the run's flags"
    record = files.read_json(file, {"hyperparameters": dict}, remedy)
    values = record["hyperparameters"]
    with files.reading(file, remedy):
        files.require_like(values, {
            name: types[name] for name in values if name in types})
    return record


def is_claimed(folder: StrPath) -> bool:
    """Return whether a run was killed before its record was written.

    It begins with an empty file of that name, which two runs cannot both make.
    Beside checkpoints an empty record is damaged.
    """
    file = Path(folder) / RECORD
    try:
        found = os.stat(file)
    except OSError:
        return False
    return (stat.S_ISREG(found.st_mode) and found.st_size == 0
            and not any(Path(folder).glob("checkpoints/step_*.pt")))


def now() -> str:
    """Return the time in UTC as a record has it, sortable as text."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def last_start(folder: StrPath) -> float:
    """When a run was started last, in seconds since 1970: for their order.

    Its record says so, or for an older run its folder's name. A file's own
    time is that of its last copy, and decides where nothing else is there.
    """
    folder = Path(folder)
    with suppress(UserError, OSError, KeyError, ValueError):
        record = files.read_json(folder / RECORD, {"started": str})
        return datetime.fromisoformat(record["started"]).timestamp()
    if named := re.match(r"\d{8}-\d{6}(?=-)", folder.name):
        with suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(named[0], "%Y%m%d-%H%M%S"))
    for file in folder / "metrics.csv", folder:
        with suppress(OSError):
            return file.stat().st_mtime
    return 0.0


def describe_start(record: Mapping[str, Any]) -> str:
    """Where a run's processes were and who started them, in one line."""
    size, nodes, hosts = (
        record[name] for name in ("world_size", "nodes", "hosts"))
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    places = "1 node" if nodes == 1 else f"{nodes} nodes"
    return (f"world size {size}: {places} x "
            f"{size // nodes} {record['device']}, {', '.join(hosts[:4])}{more}"
            f"; {record['backend']}, {record['scheduler']}; "
            f"{record['launcher']}: {' '.join(record['command'].split())}")


def read_table(file: StrPath) -> tuple[str, csv.DictReader[str]]:
    """The text of a table, of any bytes, and a `csv.DictReader` of it."""
    text = Path(file).read_bytes().decode("utf-8-sig", "surrogateescape")
    return text, csv.DictReader(io.StringIO(text, newline=""))


def to_numbers(cells: Mapping[str, str]) -> Row:
    """The numbers in a row's cells; an error if these are no metrics."""
    row: Row = {
        name: float(cells[name]) for name in COLUMNS if cells.get(name)}
    row["step"] = int(row["step"])
    require(0 <= row["step"] < 2**31 and all(
        math.isfinite(row[name]) for name in ALWAYS), "no metrics")
    return dict.fromkeys(COLUMNS) | row


class Metrics:
    """metrics.csv while a run writes it. Rank 0 alone."""

    def __init__(self, file: Path, step: int, problem: str = "") -> None:
        """Keep the rows before `step`, with all of their columns.

        If anything else is in the file, it stays under another name, as
        `kept` says. What is lost, and the caller's problem, is one warning.
        """
        rows: dict[int, dict[str, str]] = {}
        fields: Sequence[str] | None = None
        text, self.kept, problems = "", "", [problem]
        try:
            with files.reading(file):
                text, table = read_table(file)
                for cells in table:
                    with suppress(ValueError, LookupError, UserError):
                        rows[to_numbers(cells)["step"]] = cells
                if step and rows:
                    fields = table.fieldnames
        except FileNotFoundError:
            pass
        except UserError as error:
            text = str(error)
            problems.append(text)
        if lost := [number for number in range(step) if number not in rows]:
            problems.append(f"{file} lacks {len(lost)} of the steps "
                            f"{lost[0]} to {lost[-1]}")
        self.names = [*dict.fromkeys((*(fields or ()), *COLUMNS))]
        self.losses: list[float] = []
        self.last = -1
        kept_rows = io.StringIO()
        writer = csv.DictWriter(
            kept_rows, self.names, "", "ignore", lineterminator="\n")
        writer.writeheader()
        for self.last in sorted(number for number in rows if number < step):
            writer.writerow(rows[self.last])
            self.losses.append(float(rows[self.last]["loss"]))
        new = kept_rows.getvalue()
        before, after = ({line.rstrip(",") for line in lines.splitlines()}
                         for lines in (text, new))
        if before - after - {""}:
            kept = files.keep(file).name
            self.kept = f"; the previous {file.name} is kept as {kept}"
        if any(problems):
            warn("; ".join(filter(None, problems)) + self.kept)
        files.write_atomically(file, new.encode(errors="surrogateescape"))
        self.file: IO[str] = open(file, "a", newline="")

    def add(self, row: Row) -> None:
        """Write the values of `COLUMNS`, a dictionary."""
        with self._writing():
            csv.writer(self.file, lineterminator="\n").writerow(
                format_number(row.get(name)) for name in self.names)
            self.file.flush()
        self.losses.append(row["loss"])
        self.last = row["step"]

    def sync(self) -> None:
        """Make sure that the rows survive a power cut."""
        with self._writing():
            os.fsync(self.file)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Report a write error in one line; `explain` reports a full disk."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise
            raise UserError(
                f"{self.file.name} could not be written "
                f"({files.reason(error)}); fix: solve this, then resume with "
                "--resume"
            ) from error


def format_number(value: float | None) -> str:
    """As in metrics.csv: an integer or nine digits; empty for None."""
    if value is None:
        return ""
    whole = float(value).is_integer() and abs(value) < 2**53
    return str(int(value)) if whole else f"{value:.9g}"
