"""What a run's folder says about it: hyperparameters.json and metrics.csv.

This needs only the standard library, from Python 3.9 on: the tools of the
course read runs, too.
"""

import csv
from pathlib import Path

from backstage.errors import UserError
from backstage.schema import COUNT, check, read_json, reason, require_file

RECORD = "hyperparameters.json"
CONFIG = dict.fromkeys(
    ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"), COUNT)
SCHEMA = {
    "stage": str, "world_size": COUNT, "nodes?": COUNT, "device": str,
    "max_steps": COUNT, "config": CONFIG,
    "hyperparameters": {
        "preset": str, "data": str, "minibatch_size": COUNT,
        "microbatch_size": COUNT, "sequence_length": COUNT,
        "pipeline_parallel?": COUNT, "tensor_parallel?": COUNT,
        "strategy?": str},
}

COLUMNS = ("step", "loss", "val_loss", "lr", "norm", "seconds",
           "tokens_per_second", "mfu", "samples_per_second",
           "tokens_per_second_per_device", "microbatch_norm", "noise_scale",
           "memory", "memory_reserved")
ROW = {"step": range(2**31), **dict.fromkeys(
    ("loss", "lr", "norm", "seconds", "tokens_per_second"), float)}


def read_record(folder, types=None):
    """The run's `hyperparameters.json`, a dictionary as in `SCHEMA`.

    types: of more of the hyperparameters, which an older run may not have.
    Raises `FileNotFoundError`, or a `UserError` if it is damaged.
    """
    more = {f"{name}?": kind for name, kind in (types or {}).items()}
    schema = SCHEMA | {"hyperparameters": more | SCHEMA["hyperparameters"]}
    return read_json(Path(folder) / RECORD, schema, "to go on with the run, "
                     "delete it, and give --resume and all of its flags again")


def read_metrics(file):
    """A dictionary for each row of metrics.csv: {column: number, or None}.

    Raises `FileNotFoundError`, or a `UserError` at the first damaged row.
    """
    try:
        require_file(file)
        with open(file, newline="", encoding="utf-8") as lines:
            for cells in csv.DictReader(lines):
                row = {name: float(cell) for name, cell in cells.items()
                       if cell}
                row["step"] = int(row.get("step", -1))
                check(row, ROW)
                yield dict.fromkeys(COLUMNS) | row
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{file}: damaged ({reason(error)})") from error
