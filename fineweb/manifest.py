"""The manifest of a dataset folder: what it holds and where it came from.

`manifest.json` has an entry for each complete shard, with its token, document
and byte counts and its SHA-256, and the sums of the counts for the two splits.
"""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

from backstage import dataset
from backstage.dataset import MANIFEST, read_manifest
from backstage.files import write_atomically

COUNTS = {"tokens": int, "documents": int, "bytes": int}
SUMS = {"shards": int, **COUNTS}
LIKE = {  # what all of them have
    "name": str, "complete": bool, "source": dict,
    "vocabulary": {"sha256": str}, "train": SUMS, "val": SUMS,
    "shards": [{"file": str, "sha256": str, **COUNTS}]}


def new(name, folder, source, **more):
    """The manifest, a dictionary, of a folder that has only a vocabulary.

    `source` is everything that decides the tokens, as plain JSON: a folder
    that was started with another source is another dataset.
    """
    encoding = dataset.load_vocabulary(folder)
    return {
        "name": name,
        "complete": False,
        "source": source,
        **more,
        "vocabulary": {"name": encoding.name, "size": encoding.n_vocab,
                       "sha256": checksum(folder / dataset.TOKENS)},
        "versions": {"python": platform.python_version(),
                     "tiktoken": version("tiktoken")},
        "train": {}, "val": {},
        "shards": [],
    }


def write(folder, manifest):
    """Update the sums of the splits, and write the manifest atomically."""
    for split in "train", "val":
        own = [entry for entry in manifest["shards"]
               if f"_{split}_" in entry["file"]]
        manifest[split] = {
            "shards": len(own),
            **{what: sum(entry[what] for entry in own)
               for what in ("tokens", "documents", "bytes")}}
    text = json.dumps(manifest, indent=1) + "\n"
    write_atomically(Path(folder) / MANIFEST, text.encode())


def read(folder):
    """The manifest of a folder, or None if it has none."""
    return read_manifest(folder, LIKE) or None


def checksum(path):
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def difference(manifest, name, source):
    """How the manifest differs from the dataset we want, or ""."""
    there = {"name": manifest["name"], **manifest["source"]}
    here = {"name": name, **source}
    return ", ".join(f"{key} {there.get(key)} instead of {here.get(key)}"
                     for key in here | there
                     if there.get(key) != here.get(key))


def table(manifest):
    """The sums of the two splits, as lines to print."""
    return "\n".join(
        f"{split:5} {sums['shards']:4,} shards {sums['documents']:12,} "
        f"documents {sums['bytes']:15,} bytes {sums['tokens']:14,} tokens"
        for split in ("train", "val") for sums in [manifest[split]])
