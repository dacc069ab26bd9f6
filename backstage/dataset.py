"""What the program that built a dataset folder wrote about it."""

import json
from pathlib import Path

from backstage.errors import UserError, require

MANIFEST = "manifest.json"
LOOK = 100_000  # tokens of each shard that are looked at before a run


def read_manifest(folder):
    """The folder's `manifest.json`, a dictionary; {} if there is none.

    Raises `UserError` if it is damaged.
    """
    file = Path(folder) / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        manifest.keys()
        return manifest
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: damaged ({error}): make the dataset "
                        "again") from error


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
                tokens = np.load(shard, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise UserError(f"{shard}: not a whole shard, make it again "
                                f"({error})") from error
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
        return val["bytes"] / val["tokens"]
    except (UserError, KeyError, TypeError, ZeroDivisionError):
        return None
