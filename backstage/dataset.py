"""What the program that built a dataset folder wrote about it."""

from pathlib import Path

from backstage.errors import UserError, require
from backstage.schema import read_json, reason, require_file

MANIFEST = "manifest.json"
SUM = range(2**63)  # a text may have no validation split
SCHEMA = {"complete?": bool, "val?": {"bytes?": SUM, "tokens?": SUM}}
LOOK = 100_000  # tokens of each shard that are looked at before a run


def read_manifest(folder):
    """The folder's `manifest.json`, a dictionary; {} if there is none.

    Raises `UserError` if it is damaged.
    """
    try:
        return read_json(Path(folder) / MANIFEST, SCHEMA,
                         "make the dataset again")
    except FileNotFoundError:
        return {}


def check_shards(folder, sequence_length):
    """Raise a `UserError` unless a stage can train on the folder's shards.

    Each is whole, a list of uint16, and its tokens, as far as a look at its
    beginning tells, are in the vocabulary.
    """
    import numpy as np

    from backstage import vocabulary

    require(Path(folder).is_dir(), f"{folder}: there is no such folder: "
            "check --data")
    vocab_size = vocabulary.size(folder)
    for split in ("train", "val"):
        name, count = f"*_{split}_*.npy", 0
        for shard in sorted(Path(folder).glob(name)):
            try:
                require_file(shard)
                tokens = np.lib.format.open_memmap(shard, mode="r")
                if shard.stat().st_size != tokens.offset + tokens.nbytes:
                    raise ValueError("not as long as its first line says")
            except Exception as error:  # NumPy parses that line as Python
                raise UserError(f"{shard}: not a whole shard, make it again "
                                f"({reason(error)})") from error
            require(tokens.dtype == np.uint16 and tokens.ndim == 1, f"{shard}:"
                    f" {tokens.dtype} {tokens.shape}, not a list of uint16")
            highest = tokens[:LOOK].max(initial=0)
            require(highest < vocab_size, f"{shard}: token {highest} is not "
                    f"in the vocabulary of {vocab_size}")
            count += len(tokens)
        require(count, f"{folder}: no shard {name} is there: see --data")
        require(count > sequence_length, f"{folder}: {count} tokens of "
                f"{split} are too few for one sample of {sequence_length} and "
                "its targets")


def is_unfinished(folder):
    """Whether the folder's manifest says that it is not complete yet."""
    try:
        return read_manifest(folder).get("complete") is False
    except UserError:  # training needs no manifest
        return False


def bytes_per_token(folder):
    """For the validation split; None if the folder does not say."""
    try:
        val = read_manifest(folder)["val"]
        return val["bytes"] / val["tokens"] or None
    except (UserError, KeyError, ZeroDivisionError):
        return None
