"""Turn a large dataset of text into shards of GPT-2's tokens.

    python fineweb/fineweb.py                              # FineWeb-Edu, 10BT
    python fineweb/fineweb.py --dataset my/parquet --out fineweb/mine

If it is killed at any moment and run again, it goes on where it was, and the
folder ends up the same, byte for byte. The first shard is for validation, the
others are for training. Documents keep their order, whatever the number of
workers.
"""

import os
import re
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tiktoken

from backstage import dataset
from backstage.errors import UserError, parse_flags, require, run_main
from backstage.files import (
    lock_folder,
    reading,
    remove_parts,
    require_like,
)
from workshop.vocabulary import save_vocabulary

import documents
import manifest
import shards
import tokenise

HERE = Path(__file__).resolve().parent
FINEWEB = "HuggingFaceFW/fineweb-edu"
NEXT = {"file": int, "row": int, "token": int}
AHEAD = 4  # batches per worker that are read before they are needed


@dataclass
class Flags:
    """Turn Parquet or text files into shards of GPT-2's tokens."""

    dataset: str = FINEWEB
    """A folder or a file, or the name of a dataset on the Hugging Face hub."""
    subset: str | None = None
    """Which folder of it: by default FineWeb-Edu's sample/10BT, or all."""
    files: str = "*.parquet"
    """Which of its files, as a pattern: Parquet or text."""
    text_column: str = "text"
    """The column of the Parquet files that holds the documents."""
    name: str = "fineweb"
    """What the names of the shards begin with."""
    shard_size: int = shards.SIZE
    """Tokens in a shard."""
    out: Path = HERE / "edu_fineweb10B"
    """The folder to create."""
    vocabulary: Path | None = None
    """A dataset folder whose vocabulary is used instead of GPT-2's."""
    workers: int = 0
    """Processes that tokenise; 0 means one for each core."""
    download_only: bool = False
    """Only download the files, for a machine without a network."""


def main():
    flags = parse_flags(Flags, shard_size=1)
    require(re.fullmatch(r"[a-zA-Z0-9-]+", flags.name),
            "--name must consist of letters, digits and dashes")
    # activate.sh keeps GPT-2's vocabulary there
    os.environ.setdefault("TIKTOKEN_CACHE_DIR",
                          str(documents.CACHE / "tiktoken"))
    with alone(flags.out):
        remove_parts(flags.out)  # of a process that was killed
        made = begin(flags)
        if made["complete"]:
            print(f"{flags.out}: the dataset is complete")
        elif flags.download_only:
            names = [entry["file"] for entry in made["files"]]
            for path in documents.fetch_all(
                    made["source"]["dataset"], made["revision"], names):
                print(f"{path} is here")
        else:
            encoding = dataset.load_vocabulary(flags.out)
            stream = with_progress(made, tokenise_all(
                made, encoding, flags.workers or count_cores()))
            with closing(stream):  # ends the bar before an error is shown
                build(flags.out, made, encoding, stream)
            print(f"{flags.out}: the dataset is complete\n"
                  + manifest.table(made))


@contextmanager
def alone(folder):
    """Make the folder and lock it; a second process gets an error."""
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock_folder(
        folder, f"{folder}: another process is making this dataset; fix: "
        "wait for it, or choose another --out")
    try:
        yield
    finally:
        os.close(handle)
        if not there:
            with suppress(OSError):
                folder.rmdir()  # if an error has left it empty


def begin(flags):
    """The manifest of the folder: as it was left, or a new one."""
    subset = flags.subset
    if subset is None:
        subset = "sample/10BT" if flags.dataset == FINEWEB else ""
    here = Path(flags.dataset)
    source = {
        "dataset": str(here.resolve()) if here.exists() else flags.dataset,
        "subset": subset.strip("/"), "files": flags.files,
        "text_column": flags.text_column, "shard_size": flags.shard_size,
        "vocabulary": str(flags.vocabulary.resolve() if flags.vocabulary
                          else "gpt2")}
    made = manifest.read(flags.out)
    other = made and manifest.difference(made, flags.name, source)
    if made is None or (other and not made["shards"]):
        require(not any(flags.out.glob("*.npy")), f"{flags.out} holds shards "
                "from elsewhere; fix: choose another --out")
        encoding = find_vocabulary(flags.vocabulary)
        if made is None and (flags.out / dataset.SETTINGS).exists():
            there = dataset.load_vocabulary(flags.out)  # of a killed process?
            require(there._mergeable_ranks == encoding._mergeable_ranks,
                    f"{flags.out} holds another vocabulary; fix: choose "
                    "another --out, or name it with --vocabulary")
        revision, files = documents.list_files(
            source["dataset"], source["subset"], source["files"])
        save_vocabulary(encoding, flags.out)
        made = manifest.new(
            flags.name, flags.out, source, revision=revision, files=files,
            next=dict.fromkeys(NEXT, 0))
        manifest.write(flags.out, made)
        return made
    require(not other, f"{flags.out} holds another dataset ({other}); fix: "
            "choose another --out, or delete the folder first")
    with reading(flags.out / dataset.MANIFEST, dataset.AGAIN):
        require_like(made, {"files": [{"file": str, "bytes": int}]} | (
            {} if made["complete"] else {"next": NEXT}))
    for entry in made["shards"]:
        require((flags.out / entry["file"]).exists(), f"{flags.out}: "
                f"{entry['file']} is missing; fix: delete the folder and "
                "start again")
    return made


def find_vocabulary(folder):
    """GPT-2's vocabulary, or that of a dataset folder."""
    if folder is not None:
        require((folder / dataset.SETTINGS).exists(), f"{folder} has no "
                "vocabulary; fix: name a dataset folder that has one")
        return tokenise.check_vocabulary(dataset.load_vocabulary(folder))
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:
        raise UserError("GPT-2's vocabulary cannot be downloaded; fix: run "
                        "this once with a network connection") from error


def build(out, made, encoding, stream):
    """Write the missing shards, and the manifest after each of them.

    `stream` yields (batch, tokens) from the place that "next" in the manifest
    names: a document in the files, and how many of the tokens from there on
    are already in a shard.
    """
    size = made["source"]["shard_size"]
    shard = np.empty(size, np.uint16)
    filled = 0
    skip = made["next"]["token"]

    def finish(position):
        """Write the filled part of the shard; the next starts at position."""
        index = len(made["shards"])
        path = out / shards.file_name(
            made["name"], "train" if index else "val", index)
        if filled:
            shards.write(path, shard[:filled])
            made["shards"].append(
                shards.describe(path, shard[:filled], encoding))
        made["next"] = position
        manifest.write(out, made)

    for batch, tokens in stream:
        at = min(skip, len(tokens))
        skip -= at
        while at < len(tokens):
            some = tokens[at:at + size - filled]
            shard[filled:filled + len(some)] = some
            filled += len(some)
            at += len(some)
            if filled == size:
                finish({"file": batch.file, "row": batch.row, "token": at})
                filled = 0
    require(len(made["shards"]) + (filled > 0) > 1, f"{out}: the text has "
            f"{sum(e['tokens'] for e in made['shards']) + filled:,} tokens, "
            f"too few for shards of {size:,}; fix: use a smaller --shard-size")
    made["complete"] = True
    finish(None)


def tokenise_all(made, encoding, workers):
    """Yield (batch, its tokens), in order; the batches lose their texts."""
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), tokenise.start_worker, (encoding,))
    waiting = deque()

    def oldest():
        batch, tokens = waiting.popleft()
        return batch, tokens.result()

    try:
        for batch in read_all(made):
            tokens = pool.submit(tokenise.tokenise, batch)
            waiting.append((replace(batch, texts=None), tokens))
            if len(waiting) > AHEAD * workers:
                yield oldest()
        while waiting:
            yield oldest()
    except BrokenProcessPool as error:
        raise UserError("a worker was killed, perhaps because memory is full; "
                        "fix: use fewer --workers; the same command continues "
                        "from the last shard") from error
    finally:
        pool.shutdown(cancel_futures=True)


def read_all(made):
    """Yield the batches of documents that are not in a shard yet."""
    source, position = made["source"], made["next"]
    first = position["file"]
    files = made["files"][first:]
    paths = documents.fetch_all(source["dataset"], made["revision"],
                                [entry["file"] for entry in files])
    row = position["row"]
    for file, (entry, path) in enumerate(zip(files, paths, strict=True),
                                         start=first):
        require(path.stat().st_size == entry["bytes"], f"{path} has changed "
                "since the dataset was started; fix: delete the dataset and "
                "start again")
        yield from documents.read(path, file, row, source["text_column"])
        row = 0


def with_progress(made, stream):
    """Pass a stream of (batch, tokens) on, and show its progress."""
    sizes = [entry["bytes"] for entry in made["files"]]
    begun, count = time.monotonic(), 0
    with shards.progress(total=sum(sizes), unit="B", unit_scale=True,
                         initial=sum(sizes[:made["next"]["file"]])) as bar:
        for batch, tokens in stream:
            count += len(tokens)
            rate = count / (time.monotonic() - begun)
            done = sum(sizes[:batch.file]) + batch.done * sizes[batch.file]
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(int(done) - bar.n)
            yield batch, tokens


def count_cores():
    if hasattr(os, "sched_getaffinity"):  # SLURM may give us only some
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


if __name__ == "__main__":
    run_main(main)
