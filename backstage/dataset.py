"""What the program that built a dataset folder wrote about it."""

import json
from pathlib import Path

from backstage.errors import UserError

MANIFEST = "manifest.json"


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
