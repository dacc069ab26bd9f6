"""hyperparameters.json and metrics.csv: what a run's folder says about it.

This needs only the standard library, from Python 3.9 on: the tools of the
course read runs, too.
"""

import csv
import io
import math
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args, get_origin

from backstage.errors import UserError, require, warn
from backstage.files import keep, read_json, reading, write_atomically

RECORD = "hyperparameters.json"

COLUMNS = ("step", "loss", "val_loss", "lr", "norm", "seconds",
           "tokens_per_second", "mfu", "samples_per_second",
           "tokens_per_second_per_device", "memory", "memory_reserved")
ALWAYS = "loss", "lr", "norm", "seconds", "tokens_per_second"  # in each row


def read_record(folder, types):
    """The run's `hyperparameters.json`, a dictionary.

    types: of its hyperparameters, some of which an older run may not have.
    Raises `FileNotFoundError`, or a `UserError` if it is damaged.
    """
    file = Path(folder) / RECORD
    remedy = ("to go on with the run, delete it, and give --resume and all "
              "of its flags again")
    record = read_json(file, {"hyperparameters": dict}, remedy)
    with reading(file, remedy):
        for name, value in record["hyperparameters"].items():
            require(name not in types or is_a(value, types[name]),
                    f"{name} has another type")
    return record


def describe_start(record):
    """Where a run's processes were and who started them, in one line."""
    size, nodes, hosts = (record[name] for name in (
        "world_size", "nodes", "hosts"))
    more = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    return (f"world size {size}: {nodes} node{'s' * (nodes > 1)} x "
            f"{size // nodes} {record['device']}, {', '.join(hosts[:4])}{more}"
            f"; {record['backend']}, {record['scheduler']}; "
            f"{record['launcher']}: {' '.join(record['command'].split())}")


def is_a(value, kind):
    """Whether a value of a JSON file has the type of a flag."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if type(value) is str and "\0" in value:  # no path has a zero byte
        return False
    return type(value) is kind or (kind is float and type(value) is int)


def read_metrics(file):
    """A dictionary for each row of metrics.csv: {column: number, or None}.

    Raises `FileNotFoundError`, or a `UserError` at the first damaged row.
    """
    with reading(file):
        _, table = read_table(file)
        for cells in table:
            yield to_numbers(cells)


def read_table(file):
    """The text of a table, and a `csv.DictReader` of it.

    Bytes that are not UTF-8 are kept as Python keeps those of file names.
    """
    text = Path(file).read_bytes().decode("utf-8-sig", "surrogateescape")
    return text, csv.DictReader(io.StringIO(text, newline=""))


def to_numbers(cells):
    """The numbers in a row's cells; an error if these are no metrics."""
    row = {name: float(cells[name]) for name in COLUMNS if cells.get(name)}
    row["step"] = int(row["step"])
    require(0 <= row["step"] < 2**31 and all(
        math.isfinite(row[name]) for name in ALWAYS), "no metrics")
    return dict.fromkeys(COLUMNS) | row


class Metrics:
    """metrics.csv while a run writes it. Rank 0 alone."""

    def __init__(self, file, step, problem=""):
        """Keep the rows before `step`, with all of their columns.

        If anything else is in the file, it stays as it is under the name
        `kept`. What is lost, and a problem with the checkpoints, is one line
        of warning.
        """
        self.names, self.losses, self.last, self.kept = COLUMNS, [], -1, ""
        rows, old, problems = {}, [], [problem]
        try:
            with reading(file):
                text, table = read_table(file)
                for cells in table:
                    with suppress(ValueError, LookupError, UserError):
                        rows[to_numbers(cells)["step"]] = cells
                old = [*filter(None, text.splitlines())]
                self.names = [*dict.fromkeys(
                    [*((step and table.fieldnames) or ()), *COLUMNS])]
        except UserError as error:
            old = [str(error)]
            problems += old
        except FileNotFoundError:
            pass
        self.file = io.StringIO()
        table = csv.writer(self.file, lineterminator="\n")
        table.writerow(self.names)
        for self.last in sorted(number for number in rows if number < step):
            cells = rows[self.last]
            table.writerow(cells.get(name) or "" for name in self.names)
            self.losses.append(float(cells["loss"]))
        if lost := [number for number in range(step) if number not in rows]:
            problems.append(f"{file} has lost {len(lost)} of the steps "
                            f"{lost[0]} to {lost[-1]}")
        text = self.file.getvalue()
        for line, new in zip_longest(old, text.splitlines(), fillvalue=""):
            if not new.startswith(line):  # more columns may follow
                self.kept = keep(file).name
                problems.append(f"what {file.name} was is kept as {self.kept}")
                break
        if any(problems[:-1]):
            warn("; ".join(filter(None, problems)))
        write_atomically(file, text.encode(errors="surrogateescape"))
        self.file = open(file, "a", newline="")

    def add(self, row):
        """Write the values of `COLUMNS`, a dictionary."""
        csv.writer(self.file, lineterminator="\n").writerow(
            format_number(row.get(name)) for name in self.names)
        self.file.flush()
        self.losses.append(row["loss"])
        self.last = row["step"]


def format_number(value):
    """A number as in metrics.csv: an integer, or nine digits.

    Empty for None. What is read from there is written the same again.
    """
    if value is None:
        return ""
    whole = float(value).is_integer() and abs(value) < 2**53
    return str(int(value)) if whole else f"{value:.9g}"
