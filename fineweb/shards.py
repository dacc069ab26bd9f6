"""The shards of a dataset folder, and progress while they are made.

`<name>_val_000000.npy` and `<name>_train_000001.npy`, ... are NumPy arrays of
uint16 token ids, in which `<|endoftext|>` precedes each document.
"""

import hashlib
import os
from itertools import chain, repeat

import numpy as np
from tqdm import tqdm

from workshop.errors import UserError

SHARD_SIZE = 100_000_000  # tokens: 200 MB


def write(path, tokens, encoding):
    """Write `tokens`, uint16 of shape (n,), to `path`, whole or not at all.

    Returns the shard's entry in the manifest: its file name and SHA-256, its
    tokens, the documents that begin in it, and the bytes of text it holds.
    """
    part = path.with_name(f".{path.name}.part")
    header = np.lib.format.header_data_from_array_1_0(tokens)
    try:
        # np.save would not say why a write has failed
        with open(part, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
            file.flush()
            os.fsync(file.fileno())
        entry = {"file": path.name, **count(tokens, encoding),
                 "sha256": checksum(part)}
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return entry


def count(tokens, encoding):
    """How many tokens, documents and bytes of text there are in `tokens`."""
    length = np.zeros(encoding.n_vocab, np.int64)  # bytes of each token
    for token, rank in encoding._mergeable_ranks.items():
        length[rank] = len(token)
    times = np.bincount(tokens, minlength=encoding.n_vocab)
    return {"tokens": len(tokens),
            "documents": int(times[encoding.eot_token]),
            "bytes": int(times @ length)}


def checksum(path):
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class Progress(tqdm):
    """A progress bar; where no terminal shows it, a plain line at times."""

    def __init__(self, *args, **options):
        every = 0.1 if os.isatty(2) else 30  # seconds
        super().__init__(*args, mininterval=every, maxinterval=every,
                         dynamic_ncols=os.isatty(2), **options)

    @staticmethod
    def status_printer(file):
        """The function that shows a line of progress (tqdm calls it)."""
        if os.isatty(2):
            return tqdm.status_printer(file)
        before = chain([""], repeat("\n"))  # tqdm itself ends the last line
        return lambda text: print(next(before) + text, end="", file=file,
                                  flush=True)
