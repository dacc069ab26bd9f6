"""The manifest of a dataset folder: what it holds and where it came from.

`manifest.json` has an entry for each shard that is complete, with its token,
document and byte counts and its SHA-256, and their sums for the two splits.
"""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

from workshop import vocabulary
from workshop.errors import UserError

FILE = "manifest.json"


def new(name, folder, source, **more):
    """The manifest, a dictionary, of a folder that has only a vocabulary.

    `source` is what decides the tokens, as plain JSON: a folder that was
    begun with another one is another dataset.
    """
    encoding = vocabulary.load(folder)
    return {
        "name": name,
        "complete": False,
        "source": source,
        **more,
        "vocabulary": {"name": encoding.name, "size": encoding.n_vocab,
                       "sha256": checksum(folder / vocabulary.TOKENS)},
        "versions": {"python": platform.python_version(),
                     "tiktoken": version("tiktoken")},
        "train": {}, "val": {},
        "shards": [],
    }


def write(folder, manifest):
    """Write the manifest atomically, the sums of its splits renewed."""
    for split in "train", "val":
        own = [entry for entry in manifest["shards"]
               if f"_{split}_" in entry["file"]]
        manifest[split] = {
            "shards": len(own),
            **{what: sum(entry[what] for entry in own)
               for what in ("tokens", "documents", "bytes")}}
    text = json.dumps(manifest, indent=1) + "\n"
    vocabulary.replace(Path(folder) / FILE, text.encode())


def read(folder):
    """The manifest of a folder, or None where there is none."""
    path = Path(folder) / FILE
    try:
        manifest = json.loads(path.read_bytes())
        manifest["source"], manifest["shards"]
        return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}): delete the folder and "
                        "make the dataset again") from error


def checksum(path):
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def difference(manifest, name, source):
    """How the manifest differs from a dataset that is wanted, or ""."""
    there = {"name": manifest["name"], **manifest["source"]}
    here = {"name": name, **source}
    return ", ".join(f"{key} {there.get(key)} instead of {here.get(key)}"
                     for key in here | there
                     if there.get(key) != here.get(key))


def table(manifest):
    """The sums of the two splits, as lines for people."""
    return "\n".join(
        f"{split:5} {sums['shards']:4,} shards {sums['documents']:12,} "
        f"documents {sums['bytes']:15,} bytes {sums['tokens']:14,} tokens"
        for split in ("train", "val") for sums in [manifest[split]])
