"""Writes the vocabulary of a dataset folder: for what builds one."""

import base64
import json
from pathlib import Path

from backstage.dataset import SETTINGS, TOKENS
from backstage.files import write_atomically


def save_vocabulary(encoding, folder):
    """Write `encoding`, a `tiktoken.Encoding`, into the folder, atomically."""
    ranks = encoding._mergeable_ranks  # tiktoken has no public name for them
    lines = (base64.b64encode(token) + b" %d\n" % rank
             for token, rank in sorted(ranks.items(), key=lambda kv: kv[1]))
    settings = {"name": encoding.name, "pat_str": encoding._pat_str,
                "special_tokens": encoding._special_tokens}
    write_atomically(Path(folder) / TOKENS, b"".join(lines))
    text = json.dumps(settings, indent=1)
    write_atomically(Path(folder) / SETTINGS, text.encode())
