"""Split a shard into smaller ones, without changing a token.

    cd fineweb
    python splitfineweb.py edu_fineweb10B/fineweb_train_000001.npy
    python splitfineweb.py edu_fineweb10B --out small  # each of its shards
    python splitfineweb.py fineweb10B --parts 1 --out mine  # *.bin

The parts have the same size, give or take a token, and are written to a new
folder, with the vocabulary. It reads *.bin of nanoGPT, llm.c and
modded-nanogpt, too.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from backstage import dataset
from backstage.errors import parse_flags, require, run_main
from workshop.vocabulary import save_vocabulary

import shards


@dataclass
class Flags:
    """Split a shard into smaller ones, without changing a token."""

    input: Annotated[Path, tyro.conf.Positional]
    """The shard, or a dataset folder: then each of its shards is split."""
    parts: int = 10
    """How many parts a shard is split into."""
    out: Path | None = None
    """The new folder (default: the shard's path without .npy)."""


def main():
    flags = parse_flags(Flags)
    given = flags.input
    require(given.exists(), f"{given}: no such shard or folder")
    paths = shards.find(given) if given.is_dir() else [given]
    require(flags.out or given.is_file(),
            "the new folder has no name; fix: add --out")
    out = flags.out or given.with_suffix("")
    require(not out.exists(),
            f"{out} already exists; fix: choose another --out")
    with shards.new_folder(out) as folder:
        if (paths[0].parent / dataset.SETTINGS).exists():
            save_vocabulary(
                dataset.load_vocabulary(paths[0].parent), folder)
        number = {"val": 0, "train": 1}  # the next shard's
        for path in shards.progress(paths, unit=" shards"):
            named = re.fullmatch(  # nanoGPT's are train.bin and val.bin
                r"(?:(.+)_)?(train|val)(?:_\d+)?", path.stem)
            require(named, f"{path} is not named as a shard; fix: rename it "
                    "<name>_train_<number>.npy or <name>_val_<number>.npy")
            name, split = named.groups()
            tokens = shards.read(path)
            if path.suffix == ".bin":
                shards.refuse_other_tokens(
                    path, tokens, dataset.vocabulary_size(path.parent))
            require(0 < flags.parts <= len(tokens), f"{path} has "
                    f"{len(tokens):,} tokens; fix: set --parts from 1 to that")
            for part in np.array_split(tokens, flags.parts):
                target = shards.file_name(
                    name or "nanogpt", split, number[split])
                shards.write(folder / target, part)
                number[split] += 1
    print(f"{out}: {len(paths) * flags.parts} shards")


if __name__ == "__main__":
    run_main(main)
