"""A dataset's folder: its shards, its vocabulary, and what built it.

The vocabulary is two files: `vocabulary.tiktoken`, in tiktoken's file format
(a line for each token: its bytes in base64, its rank), and `vocabulary.json`
with everything else that an `Encoding` needs. A folder without them holds
GPT-2's tokens. `manifest.json` is by the program that built the folder.
"""

from __future__ import annotations

import base64
import hashlib
import os
import string
import tempfile
from contextlib import suppress
from fnmatch import filter as matching
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import regex  # tiktoken needs it, too
import tiktoken

from backstage.errors import UserError, require
from backstage.files import StrPath, map_file, read_json, reading

if TYPE_CHECKING:
    import torch

GPT2_SIZE = 50257
END_OF_TEXT = "<|endoftext|>"
TOKENS, SETTINGS = "vocabulary.tiktoken", "vocabulary.json"
MANIFEST = "manifest.json"
AGAIN = "rebuild the dataset"
SAMPLE = f"a {string.printable} naïve 世界"  # of what is in a text
SHARDS = "*_{}_*.npy"  # the files of a split, "train" or "val"


def load_vocabulary(folder: StrPath) -> tiktoken.Encoding:
    """The `tiktoken.Encoding` of a dataset folder; never uses the network.

    Raises `UserError` if the files are damaged, or if the folder has none and
    GPT-2's vocabulary has not been downloaded.
    """
    file, tokens = Path(folder, SETTINGS), Path(folder, TOKENS)
    if not file.exists():
        require(gpt2_is_cached(), "GPT-2's vocabulary is not on this machine; "
                "fix: run `source activate.sh` with a network connection")
        return tiktoken.get_encoding("gpt2")
    settings = read_json(file, {
        "name": str, "pat_str": str, "special_tokens": {END_OF_TEXT: int}},
        AGAIN)
    special = settings["special_tokens"]
    with reading(file, AGAIN):
        require(tokens.exists(), f"{TOKENS} is missing")
    with reading(file, AGAIN):
        require_pieces(settings["pat_str"])
    with reading(tokens, AGAIN):
        pairs = [line.split() for line in tokens.read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank)
                 for token, rank in pairs}
        size = len(pairs) + len(special)
        # tiktoken would panic
        require(sorted([*ranks.values(), *special.values()]) == [*range(size)],
                "the ranks have gaps or duplicates")
        return tiktoken.Encoding(
            settings["name"], pat_str=settings["pat_str"],
            mergeable_ranks=ranks, special_tokens=special)


def require_pieces(pattern: str) -> None:
    """Raise a `UserError` if it matches "", on which tiktoken panics.

    An error in the pattern is left to tiktoken.
    """
    with suppress(regex.error):
        empty = any(not found[0] for found in regex.finditer(pattern, SAMPLE))
        require(not empty, f"its pat_str, {pattern[:20]!r}, matches the empty "
                "string")


def vocabulary_size(folder: StrPath) -> int:
    """How many tokens the vocabulary has; never uses the network."""
    if not (Path(folder) / SETTINGS).exists():
        return GPT2_SIZE
    return load_vocabulary(folder).n_vocab


def gpt2_is_cached() -> bool:
    """Whether `tiktoken.get_encoding("gpt2")` works without a network."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get(
        "DATA_GYM_CACHE_DIR") or f"{tempfile.gettempdir()}/data-gym-cache"
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    names = (hashlib.sha1((base + file).encode()).hexdigest()
             for file in ("vocab.bpe", "encoder.json"))  # tiktoken's naming
    return all((Path(cache) / name).exists() for name in names)


def list_shards(folder: StrPath, *patterns: str) -> dict[str, list[Path]]:
    """The files of the splits, {"train": [...], "val": [...]}, in order.

    The files ._NAME, which macOS adds, are ignored.
    """
    names = sorted(  # glob would hide what may not be read
        name for name in os.listdir(folder) if not name.startswith("._"))
    found = {split: [
        Path(folder, name) for pattern in patterns
        for name in matching(names, pattern.format(split))]
        for split in ("train", "val")}
    both = {*found["train"]} & {*found["val"]}
    require(not both, f"{min(both, default='')} would be in both splits; "
            "fix: rename it")
    return found


def check_shards(folder: StrPath, sequence_length: int,
                 look: int | None = 100_000) -> dict[str, int]:
    """How many tokens each split has, {"train": ..., "val": ...}.

    Raises a `UserError` unless a stage can train on the shards: each is whole,
    a list of uint16, and its first `look` tokens are in the vocabulary;
    `check_batch` looks at the others.
    """
    import numpy as np  # the demo dataset's program begins without it

    require(Path(folder).is_dir(), f"{folder}: no such folder; fix: check "
            "--data")
    for split in "train", "val":  # which a stage would list as shards
        extra = min(Path(folder).glob(f"._{SHARDS.format(split)}"),
                    default=None)
        require(not extra, f"{extra} is macOS metadata, not a shard; fix: "
                f"find {quote(str(folder))} -name '._*' -delete")
    vocab_size, counts = vocabulary_size(folder), {}
    for split, shards in list_shards(folder, SHARDS).items():
        count = 0
        for shard in shards:
            with reading(shard, "rebuild it"):
                map_file(shard)
                tokens = np.lib.format.open_memmap(shard, mode="r")
                require(tokens.dtype == np.uint16 and tokens.ndim == 1,
                        f"{tokens.dtype} {tokens.shape}, not 1-D uint16")
                require(shard.stat().st_size == tokens.offset + tokens.nbytes,
                        "longer than its header says")  # NumPy sees shorter
                highest = tokens[:look].max(initial=0)
                require(highest < vocab_size, f"token {highest} is not in the "
                        f"vocabulary of {vocab_size} tokens")
            count += len(tokens)
        other = next(Path(folder).glob("*.bin"), None)
        require(count, f"{folder} has no shard {SHARDS.format(split)}" + (
            f", but has {other.name}; fix: if nanoGPT, llm.c or "
            "modded-nanogpt wrote it, convert the folder: python "
            f"fineweb/splitfineweb.py {folder} --parts 1 --out NEW"
            if other else "; fix: check --data"))
        require(count > sequence_length, f"{folder}: {count} tokens of "
                f"{split} are too few for one sample of {sequence_length} "
                "tokens and its targets; fix: use a smaller --sequence-length "
                "or another --data")
        counts[split] = count
    return counts


def check_batch(folder: StrPath, vocab_size: int,
                tokens: torch.Tensor) -> None:
    """Raise a `UserError` for ids that a sharded embedding would accept."""
    if tokens.__array__().max() >= vocab_size:  # no device has them yet
        check_shards(folder, 0, look=None)  # it names the shard
        raise UserError(f"{folder} has changed; fix: {AGAIN}")


def read_manifest(folder: StrPath, like: Any = dict) -> dict[str, Any]:
    """Its `manifest.json`; {} if there is none. A `UserError` if damaged."""
    file = Path(folder, MANIFEST)
    return read_json(file, like, AGAIN) if file.exists() else {}


def bytes_per_token(folder: StrPath) -> float | None:
    """Return it for the validation split; None if it is not recorded."""
    with suppress(UserError, LookupError, ArithmeticError):
        counts = {"bytes": int, "tokens": int}
        val = read_manifest(folder, {"val": counts})["val"]
        return max(0, val["bytes"] / val["tokens"]) or None
    return None
