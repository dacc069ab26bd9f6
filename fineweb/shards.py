"""The shards of a dataset folder, and a progress bar while they are made.

`<name>_val_000000.npy` and `<name>_train_000001.npy`, ... are NumPy arrays of
uint16 token ids, in which `<|endoftext|>` precedes each document.
"""

import fcntl
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from backstage import dataset
from backstage.errors import UserError, require
from backstage.files import (
    PART,
    Damaged,
    WriteFailed,
    map_file,
    open_part,
    reading,
    write_atomically,
)

import manifest

SIZE = 100_000_000  # tokens: 200 MB
BIN_MAGIC = 20240520  # with which the shards of llm.c begin
BEGINNINGS = {  # of files that have been given the name of a shard
    "a NumPy array, as in .npy": b"\x93NUMPY",
    "a text in UTF-16": b"\xff\xfe", "a zip archive": b"PK\3\4",
    "compressed by gzip": b"\x1f\x8b\x08",
    "compressed by zstd": b"\x28\xb5\x2f\xfd", "a Parquet file": b"PAR1",
    "the index of Megatron's data": b"MMIDIDX"}


def file_name(name, split, index):
    """The file name of a shard; `split` is "train" or "val"."""
    return f"{name}_{split}_{index:06d}.npy"


@contextmanager
def new_folder(out):
    """Give a folder to fill, which appears as `out` once it is complete.

    An error leaves no trace. It is an `OSError` if `out` holds files by then.
    What a killed process has left is removed by the next that makes `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    mark, file = open_part(out)  # locked while we live
    folder = marked_folder(mark)
    try:
        folder.mkdir()
        yield folder
        folder.rename(out)
    except WriteFailed as error:  # which names what is removed now
        raise UserError(
            f"{out} could not be made ({error.reason}); fix: free some space, "
            "or check the disk, and run the same command again") from error
    finally:
        with suppress(OSError):  # the next one does it
            remove_marked(mark)
        file.close()


def remove_abandoned(out):
    """Remove the folders with our mark on which nobody has a lock any more.

    Where the file system has no locks, they stay.
    """
    for mark in out.parent.glob(f".{out.name}.*{PART}"):
        with suppress(OSError), open(mark, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_marked(mark)


def marked_folder(mark: Path) -> Path:
    """The unfinished folder that has this mark beside it."""
    return mark.with_name(f"{mark.name}.d")


def remove_marked(mark: Path) -> None:
    """Remove an unfinished folder, and then its mark."""
    folder = marked_folder(mark)
    if folder.exists():
        shutil.rmtree(folder)
    mark.unlink()


def find(folder):
    """The paths of a folder's shards, in the order in which they were made.

    If it has none, those of other courses: see `read_bin`.
    """
    for patterns in (dataset.SHARDS,), ("*_{}_*.bin", "{}.bin"):
        found = dataset.list_shards(folder, *patterns)
        if paths := found["val"] + found["train"]:
            return paths
    raise UserError(f"{folder} has no shards *_val_*.npy and *_train_*.npy")


def write(path, tokens):
    """Write `tokens`, uint16 of shape (n,), to `path`, all or nothing."""
    header = np.lib.format.header_data_from_array_1_0(tokens)

    def fill(file):  # np.save would not say why a write failed
        np.lib.format.write_array_header_1_0(file, header)
        file.write(tokens.data)

    write_atomically(
        path, fill,
        "; fix: free some space, and run the same command again")


def read(path):
    """The tokens of a shard, uint16 of shape (n,), memory-mapped."""
    with reading(path):
        map_file(path)
        tokens = read_bin(path) if path.suffix == ".bin" else (
            np.lib.format.open_memmap(path, mode="r"))
        require(tokens.ndim == 1 and tokens.dtype == np.uint16,
                f"it holds {tokens.dtype} of shape {tokens.shape}")
        return tokens


def read_bin(path):
    """The tokens of a shard of nanoGPT, which holds nothing else, or of llm.c
    and modded-nanogpt, where a header says how many there are.

    Raises `ValueError` if the header says something else, and `Damaged` for
    what is no list of GPT-2's tokens: see `refuse_other_formats`.
    """
    header = np.fromfile(path, np.int32, 256)
    begin = header.nbytes if header[:1].tolist() == [BIN_MAGIC] else 0
    if not begin:
        refuse_other_formats(path, header[:1])
    tokens = np.memmap(path, np.uint16, "r", begin)
    if begin and header[1:3].tolist() != [1, len(tokens)]:
        raise ValueError("not as many tokens as its header says")
    if not begin:
        refuse_wider_numbers(path, tokens[:1 << 20])
    return tokens


def refuse_other_formats(path: Path, magic: np.ndarray) -> None:
    """Raise `Damaged` for a file that is not a bare list of numbers.

    magic: the first four bytes, an int32 of shape (1,), or (0,).
    """
    dates = range(20240101, 20300101)  # llm.c's numbers are dates
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    for kind, begin in BEGINNINGS.items():
        require_tokens(not head.startswith(begin), path, f"is {kind}")
    for order, number in ("", magic), (
            ", in the byte order of another machine", magic.byteswap()):
        require_tokens(
            not number.size or int(number[0]) not in dates, path,
            f"begins with llm.c's number {number}{order}: only "
            f"{BIN_MAGIC}, GPT-2's tokens, is read")
    require_tokens(not is_text(head), path, "is a text: see fineweb.py")
    require_tokens(
        not path.with_name("meta.pkl").exists(), path, "has a vocabulary of "
        "its own, nanoGPT's meta.pkl beside it, such as single characters")


def refuse_wider_numbers(path: Path, tokens: np.ndarray) -> None:
    """Raise `Damaged` for what alternates as numbers of 32 or 64 bits do."""
    if len(tokens) < 16:
        return
    for values in tokens, tokens.byteswap():
        for high, low in (values[1::2], values[::2]), (
                values[::2], values[1::2]):
            # vocabularies have fewer than 2**18 tokens
            require_tokens(
                not high.max() <= 3 < low.max(), path, "holds numbers of 32 "
                "bits or more, not uint16: the tokens of another vocabulary, "
                "such as Llama's")


def refuse_other_tokens(
        path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise `Damaged` for ids that GPT-2's tokens of a text do not have."""
    highest = int(tokens.max(initial=0))
    require_tokens(
        highest < vocab_size, path, f"holds the id {highest}, which the "
        f"vocabulary of {vocab_size} does not have: another vocabulary's, or "
        "in another byte order")
    require_tokens(
        highest > 255 or len(tokens) < 1000, path, f"has no id above "
        f"{highest}: these are characters or bytes")


def is_text(head: bytes) -> bool:
    """Whether a file's beginning is text, which has no control characters."""
    try:
        text = head[:-3].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 7:  # a character that is cut is none
            return False
        text = head[:error.start].decode("utf-8-sig")
    controls = {chr(code) for code in range(32)} - {*"\t\n\r\f"}
    return len(text) >= 16 and not controls & {*text}


def require_tokens(condition: bool, path: Path, what: str) -> None:
    """Raise `Damaged` with a whole sentence unless the condition holds."""
    if not condition:
        raise Damaged(f"{path} {what}: it cannot be converted")


def describe(path, tokens, encoding):
    """A shard's entry in the manifest.

    It counts the documents that begin in the shard, and the bytes of its text.
    """
    size = np.zeros(encoding.n_vocab, np.int64)  # bytes of each token
    for token, rank in encoding._mergeable_ranks.items():
        size[rank] = len(token)
    times = histogram(tokens)[:encoding.n_vocab]
    return {"file": path.name, "tokens": len(tokens),
            "documents": int(times[encoding.eot_token]),
            "bytes": int(times @ size), "sha256": manifest.checksum(path)}


def histogram(tokens):
    """How often each id occurs in a shard: (65536,) int64."""
    times = np.zeros(65536, np.int64)
    for start in range(0, len(tokens), 1 << 20):  # bincount copies to int64
        times += np.bincount(tokens[start:start + (1 << 20)], minlength=65536)
    return times


def progress(*args, **options):
    """A tqdm bar, or a plain line now and then if there is no terminal."""
    if sys.stderr.isatty():
        return tqdm(*args, dynamic_ncols=True, **options)
    return tqdm(*args, file=Lines(), ncols=79, mininterval=30, maxinterval=30,
                **options)


class Lines:
    """A file for tqdm: each update of the bar becomes a line on stderr."""

    def write(self, text):
        if text := text.strip():
            print(text, file=sys.stderr, flush=True)

    def flush(self):
        pass
