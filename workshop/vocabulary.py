"""Writes the vocabulary of a dataset folder, for its builder."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tiktoken

from backstage.dataset import END_OF_TEXT, SETTINGS, TOKENS
from backstage.files import StrPath, write_atomically


def save_vocabulary(encoding: tiktoken.Encoding, folder: StrPath) -> None:
    """Write `encoding`, a `tiktoken.Encoding`, into the folder, atomically."""
    ranks = encoding._mergeable_ranks  # tiktoken has no public name for them
    lines = (base64.b64encode(token) + b" %d\n" % rank
             for token, rank in sorted(ranks.items(), key=lambda kv: kv[1]))
    settings = {"name": encoding.name, "pat_str": encoding._pat_str,
                "special_tokens": encoding._special_tokens}
    write_atomically(Path(folder) / TOKENS, b"".join(lines))
    text = json.dumps(settings, indent=1)
    write_atomically(Path(folder) / SETTINGS, text.encode())


def save_bytes(folder: StrPath, size: int = 257) -> None:
    """Write an untrained vocabulary: the bytes, and pairs up to its size.

    Its last token is the end of a text.
    """
    save_vocabulary(tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={
            i.to_bytes(1 + (i > 255), "big"): i for i in range(size - 1)},
        special_tokens={END_OF_TEXT: size - 1}), folder)
