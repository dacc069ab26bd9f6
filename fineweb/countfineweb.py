"""Count the tokens of a dataset folder, and verify it.

    python fineweb/countfineweb.py fineweb/edu_fineweb10B --verify

Without a manifest, as in a folder from another course, it counts and verifies
what the shards alone can tell. The exit status is 1 if something is wrong.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from backstage import dataset
from backstage.errors import (
    UserError,
    parse_flags,
    require,
    run_main,
    visible,
)

import manifest
import shards


@dataclass
class Flags:
    """Count the tokens of a dataset folder, and verify it."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The dataset folder."""
    verify: bool = False
    """Read the shards, and check checksums, ids and where documents begin."""


def main():
    flags = parse_flags(Flags)
    folder = flags.folder
    paths = shards.find(folder)
    made = manifest.read(folder)
    listed = {entry["file"]: entry for entry in made["shards"]} if made else {}
    n_vocab, begin = tokens_of(folder)

    wrong = [f"{name} is missing" for name in listed
             if not (folder / name).exists()]
    if made and flags.verify and made["vocabulary"]["sha256"] != (
            manifest.checksum(folder / dataset.TOKENS)):
        wrong.append("the vocabulary is not the one in the manifest")
    sums = {"val": [0, 0], "train": [0, 0]}  # shards, tokens
    for path in shards.progress(paths, unit=" shards"):
        try:
            tokens = shards.read(path)
        except UserError as error:
            wrong.append(str(error))
            continue
        split = sums["val" if "_val_" in path.name else "train"]
        split[0] += 1
        split[1] += len(tokens)
        found = {"tokens": len(tokens)}
        if flags.verify:
            times = shards.histogram(tokens)
            found |= {"documents": int(times[begin]),
                      "sha256": manifest.checksum(path)}
            if times[n_vocab:].any():
                wrong.append(f"{path.name} holds ids beyond the vocabulary's "
                             f"{n_vocab:,} tokens")
            first = path == paths[0] and "_val_" in path.name
            if first and not (tokens[:1] == begin).all():
                wrong.append(f"{path.name} does not begin with a document")
        if made:
            there = listed.get(path.name, {})
            wrong += [f"{path.name}: {what} {value} instead of the manifest's "
                      f"{there.get(what)}" for what, value in found.items()
                      if there.get(what) != value]

    for split, (count, tokens) in sums.items():
        print(f"{split:5} {count:4,} shards {tokens:14,} tokens")
    if made is None:
        print("there is no manifest to compare with")
    elif not made["complete"]:
        wrong.append("the dataset is not complete: run fineweb.py again")
    for line in wrong:
        print(visible(line))
    require(not wrong, f"{folder}: {len(wrong)} problems, listed above")
    print("verified" if flags.verify else "--verify would read the shards too")


def tokens_of(folder):
    """The size of a folder's vocabulary, and the id of `<|endoftext|>`."""
    if not (folder / dataset.SETTINGS).exists():
        return dataset.GPT2_SIZE, dataset.GPT2_SIZE - 1
    encoding = dataset.load_vocabulary(folder)
    return encoding.n_vocab, encoding.eot_token


if __name__ == "__main__":
    run_main(main)
