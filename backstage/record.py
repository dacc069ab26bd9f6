"""What a run's folder says about it: hyperparameters.json and metrics.csv.

This needs only the standard library, from Python 3.9 on: the tools of the
course read runs, too.
"""

import csv
import json
import math
from pathlib import Path
from typing import Literal, get_args, get_origin

from backstage.errors import require
from backstage.files import is_count, reading

RECORD = "hyperparameters.json"
CONFIG = "block_size", "vocab_size", "n_layer", "n_head", "n_embd"
COUNTS = "minibatch_size", "microbatch_size", "sequence_length"
DIVISORS = "pipeline_parallel", "tensor_parallel"  # which some stages have

COLUMNS = ("step", "loss", "val_loss", "lr", "norm", "seconds",
           "tokens_per_second", "mfu", "samples_per_second",
           "tokens_per_second_per_device", "memory", "memory_reserved")
ALWAYS = "loss", "lr", "norm", "seconds", "tokens_per_second"


def read_record(folder, types=None):
    """The run's `hyperparameters.json`, a dictionary.

    types: of more of the hyperparameters, which an older run may not have.
    Raises `FileNotFoundError`, or a `UserError` if it is damaged.
    """
    file = Path(folder) / RECORD
    with reading(file, "to go on with the run, delete it, and give --resume "
                 "and all of its flags again"):
        record = json.loads(file.read_bytes())
        hp, config = record["hyperparameters"], record["config"]
        counts = {name: record[name] for name in ("max_steps", "world_size")}
        counts |= {name: config[name] for name in CONFIG}
        counts |= {name: hp[name] for name in COUNTS}
        counts |= {name: hp.get(name, 1) for name in DIVISORS}
        counts["nodes"] = record.get("nodes", 1)
        for name, value in counts.items():
            require(is_count(value), f"{name} is no number from 1 on")
        texts = {name: record[name] for name in ("stage", "device")}
        texts |= {name: hp[name] for name in ("preset", "data")}
        texts["strategy"] = hp.get("strategy", "")
        for name, value in texts.items():  # no path has a zero byte
            require(type(value) is str and "\0" not in value,
                    f"{name} is no text")
        for name, kind in (types or {}).items():
            require(name not in hp or is_a(hp[name], kind),
                    f"{name} has another type")
    return record


def is_a(value, kind):
    """Whether a value of a JSON file has the type of a flag."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is kind or (kind is float and type(value) is int)


def read_metrics(file):
    """A dictionary for each row of metrics.csv: {column: number, or None}.

    Raises `FileNotFoundError`, or a `UserError` at the first damaged row.
    """
    with reading(file), open(file, newline="", encoding="utf-8") as lines:
        for cells in csv.DictReader(lines):
            row = {name: float(cell) for name, cell in cells.items() if cell}
            row["step"] = int(row["step"])
            require(0 <= row["step"] < 2**31 and all(
                math.isfinite(row[name]) for name in ALWAYS), "no metrics")
            yield dict.fromkeys(COLUMNS) | row
