"""The speed of turning text into shards, against the usual recipe.

    python benchmarks/tokenising.py                    # about two minutes
    python benchmarks/tokenising.py --parquet FILE     # a file of FineWeb-Edu

The recipe is that of build-nanogpt and its descendants: a pool of processes
to which `imap` hands one document at a time. Without a file, the text is
Python's documentation, repeated, with its paragraphs unwrapped like FineWeb's.
The two sides take turns, so that a busy machine slows both down. Each figure
is a median.
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import rustbpe
import tiktoken

from backstage import ROOT, vocabulary
from backstage.command_line import parse_flags
from backstage.errors import UserError, run_main

sys.path.insert(0, str(ROOT / "fineweb"))
import demo
import documents
import manifest
import tokenise

import fineweb

SHARD = 10_000_000  # tokens


@dataclass
class Flags:
    """Measure the speed of turning text into shards, against a recipe."""

    parquet: Path | None = None
    """A Parquet file with a column `text`, instead of the documentation."""
    megabytes: int = 60
    """How much text to make from the documentation."""
    rounds: int = 5
    """Turns of each side."""
    workers: tuple[int, ...] = ()
    """Numbers of workers to try (default: 1, 2, 4, ... up to the cores)."""


def recipe_tokens(text):
    """Tokenise one document as the recipe does, in a worker or not."""
    tokens = [encoding.eot_token]
    tokens.extend(encoding.encode_ordinary(text))
    tokens = np.array(tokens)
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def recipe_worker(vocabulary_to_use):
    global encoding
    encoding = vocabulary_to_use


def recipe(path, out, encoding, workers):
    """Turn a Parquet file into shards as the recipe does; count tokens."""
    def texts():
        for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
            yield from batch.column(0).to_pylist()

    shard, filled, count = np.empty(SHARD, np.uint16), 0, 0
    with multiprocessing.get_context("fork").Pool(
            workers, recipe_worker, (encoding,)) as pool:
        for tokens in pool.imap(recipe_tokens, texts(), chunksize=16):
            count += len(tokens)
            room = SHARD - filled
            shard[filled:filled + len(tokens)] = tokens[:room]
            filled += min(room, len(tokens))
            if filled == SHARD:
                np.save(out / str(count), shard)
                filled = len(tokens) - room
                shard[:filled] = tokens[room:]
    np.save(out / str(count), shard[:filled])
    return count


def ours(path, out, encoding, workers):
    """Do the same with fineweb.py, including manifest and checksums."""
    source = {"dataset": str(path), "subset": "", "text_column": "text",
              "shard_size": SHARD}
    revision, files = documents.list_files(str(path), "", "")
    vocabulary.save(encoding, out)
    made = manifest.new("fineweb", out, source, revision=revision,
                        files=files, next={"file": 0, "row": 0, "token": 0})
    stream = fineweb.tokenise_all(made, encoding, workers)
    fineweb.build(out, made, encoding, stream)
    return made["train"]["tokens"] + made["val"]["tokens"]


def compare(what, rounds, *sides):
    """Print how many tokens a second two sides process, taking turns.

    The ratio is the median of the rounds' ratios: whatever slows a round down
    slows both of its turns.
    """
    rates = []
    for _ in range(rounds):
        rates.append([])
        for side in sides:
            start = time.perf_counter()
            count = side()
            rates[-1].append(count / (time.perf_counter() - start) / 1e6)
    first, second = map(statistics.median, zip(*rates, strict=True))
    ratio = statistics.median(ours / recipe for recipe, ours in rates)
    print(f"{what:24} {first:10.2f} {second:10.2f} {ratio:8.2f}", flush=True)


def make_parquet(path, megabytes):
    """Write a file like one of FineWeb's, from Python's documentation."""
    texts = ["\n".join(" ".join(paragraph.split())
                       for paragraph in text.split("\n\n"))
             for text in demo.read_library()]
    times = 1 + megabytes * 1_000_000 // sum(map(len, texts))
    parquet.write_table(arrow.table({"text": texts * times}), path,
                        row_group_size=1000)


def find_vocabulary(texts):
    """GPT-2's vocabulary, or a new one of at most its size."""
    try:
        return vocabulary.gpt2()
    except UserError:
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(texts, vocab_size=50256,
                                    pattern=tokenise.GPT2_SPLITS[0])
        ranks = {bytes(token): rank
                 for token, rank in trainer.get_mergeable_ranks()}
        return tiktoken.Encoding(
            "of this text", pat_str=tokenise.GPT2_SPLITS[1],
            mergeable_ranks=ranks,
            special_tokens={vocabulary.END_OF_TEXT: len(ranks)})


def main():
    global encoding
    flags = parse_flags(Flags)
    cores = fineweb.count_cores()
    tries = flags.workers or [2**i for i in range(cores.bit_length())]
    with tempfile.TemporaryDirectory() as folder:
        path = flags.parquet
        if path is None:
            path = Path(folder) / "documentation.parquet"
            make_parquet(path, flags.megabytes)
        some = next(parquet.ParquetFile(path).iter_batches(
            10_000, columns=["text"])).column(0).to_pylist()
        encoding = find_vocabulary(some)
        print(f"{path.name}, {encoding.n_vocab:,} tokens in the vocabulary "
              f"{encoding.name}, {cores} cores\n"
              f"{'million tokens/s':24} {'recipe':>10} {'fineweb.py':>10} "
              f"{'ratio':>8}")

        fast = tokenise.Encoder(encoding)
        compare("tokenising, one process", flags.rounds,
                lambda: sum(len(recipe_tokens(text)) for text in some),
                lambda: sum(len(fast(some[i:i + documents.ROWS]))
                            for i in range(0, len(some), documents.ROWS)))

        def side(function, workers):
            def turn():
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    return function(path, Path(out), encoding, workers)
            return turn

        for workers in tries:
            compare(f"end to end, {workers} workers", flags.rounds,
                    side(recipe, workers), side(ours, workers))


if __name__ == "__main__":
    run_main(main)
