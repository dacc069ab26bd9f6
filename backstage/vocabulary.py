"""The vocabulary that belongs to a dataset folder.

A folder has its own: `vocabulary.tiktoken`, in tiktoken's file format (a line
for each token: its bytes in base64, its rank), and `vocabulary.json` with
everything else that an `Encoding` needs. A folder without these files holds
GPT-2's tokens.
"""

import base64
import hashlib
import json
import os
import tempfile
from pathlib import Path

import tiktoken

from backstage.errors import UserError
from backstage.files import write_atomically
from backstage.schema import read_json, reason, require_file

GPT2_SIZE = 50257
END_OF_TEXT = "<|endoftext|>"
TOKENS, SETTINGS = "vocabulary.tiktoken", "vocabulary.json"
SCHEMA = {"name": str, "pat_str": str,
          "special_tokens": {END_OF_TEXT: int, str: int}}


def save(encoding, folder):
    """Write `encoding`, a `tiktoken.Encoding`, into the folder, atomically."""
    ranks = encoding._mergeable_ranks  # tiktoken has no public name for them
    lines = (base64.b64encode(token) + b" %d\n" % rank
             for token, rank in sorted(ranks.items(), key=lambda kv: kv[1]))
    settings = {"name": encoding.name, "pat_str": encoding._pat_str,
                "special_tokens": encoding._special_tokens}
    write_atomically(Path(folder) / TOKENS, b"".join(lines))
    text = json.dumps(settings, indent=1)
    write_atomically(Path(folder) / SETTINGS, text.encode())


def load(folder):
    """The `tiktoken.Encoding` of a dataset folder; never uses the network.

    Raises `UserError` if the files are damaged, or if the folder has none and
    GPT-2's vocabulary has not been downloaded.
    """
    folder = Path(folder)
    if not (folder / SETTINGS).exists():
        return gpt2()
    settings = read_json(folder / SETTINGS, SCHEMA, "make the dataset again")
    special = settings["special_tokens"]
    try:
        require_file(folder / TOKENS)
        pairs = [line.split()
                 for line in (folder / TOKENS).read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank)
                 for token, rank in pairs}
        # tiktoken would panic
        if sorted([*ranks.values(), *special.values()]) != [
                *range(len(pairs) + len(special))]:
            raise ValueError("the ranks have gaps or come twice")
        return tiktoken.Encoding(
            settings["name"], pat_str=settings["pat_str"],
            mergeable_ranks=ranks, special_tokens=special)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the vocabulary is damaged "
                        f"({reason(error)}): make the dataset again"
                        ) from error


def size(folder):
    """How many tokens the vocabulary has; never uses the network."""
    if not (Path(folder) / SETTINGS).exists():
        return GPT2_SIZE
    return load(folder).n_vocab


def gpt2(download=False):
    """GPT-2's own vocabulary, from tiktoken's cache.

    `activate.sh` downloads it if there is a network (`download=True`). A run
    never tries, because the attempt may hang on a compute node.
    """
    if not (download or gpt2_is_cached()):
        raise UserError("GPT-2's vocabulary is not on this machine: run "
                        "`source activate.sh` where there is a network")
    return tiktoken.get_encoding("gpt2")


def gpt2_is_cached():
    """Whether `tiktoken.get_encoding("gpt2")` works without a network."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get(
        "DATA_GYM_CACHE_DIR") or f"{tempfile.gettempdir()}/data-gym-cache"
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    names = (hashlib.sha1((base + file).encode()).hexdigest()
             for file in ("vocab.bpe", "encoder.json"))  # tiktoken's naming
    return all((Path(cache) / name).exists() for name in names)
