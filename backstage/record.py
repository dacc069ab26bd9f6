"""hyperparameters.json and metrics.csv: what a run's folder says about it.

This needs only the standard library, from Python 3.9 on: the tools of the
course read runs, too.
"""

import csv
import io
import json
import math
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

from backstage.errors import UserError, explain, require, warn
from backstage.files import reading, write_atomically

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
    with reading(file, "to go on with the run, delete it, and give --resume "
                 "and all of its flags again"):
        record = json.loads(file.read_bytes())
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
    with reading(file), open(file, newline="", encoding="utf-8-sig") as lines:
        for cells in csv.DictReader(lines):
            row = {name: float(cell) for name, cell in cells.items() if cell}
            row["step"] = int(row["step"])
            require(0 <= row["step"] < 2**31 and all(
                math.isfinite(row[name]) for name in ALWAYS), "no metrics")
            yield dict.fromkeys(COLUMNS) | row


class Metrics:
    """metrics.csv while a run writes it. Rank 0 alone."""

    def __init__(self, file, step):
        """Keep the file's rows before `step`, and drop those after them."""
        self.file, self.losses, self.last = io.StringIO(), [], -1
        csv.writer(self.file, lineterminator="\n").writerow(COLUMNS)
        try:
            for row in read_metrics(file) if step else ():
                if self.last < row["step"] < step:
                    self.add(row)
        except (UserError, FileNotFoundError) as error:
            warn(explain(error))
        if self.last < step - 1:
            warn(f"{file} has lost steps {self.last + 1} to {step - 1}")
            if file.exists():  # it may hold them, as a spreadsheet saves them
                kept = file.with_stem(time.strftime("metrics.%Y%m%d-%H%M%S"))
                file.rename(kept)
                warn(f"what it was is kept as {kept.name}")
        write_atomically(file, self.file.getvalue().encode())
        self.file = open(file, "a", newline="")

    def add(self, row):
        """Write the values of `COLUMNS`, a dictionary."""
        csv.writer(self.file, lineterminator="\n").writerow(
            format_number(row[name]) for name in COLUMNS)
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
