"""The speed of turning text into shards, against the usual recipe.

The recipe is that of build-nanogpt and its descendants: a pool of processes
to which `imap` hands one document at a time. Without a file, the text is
Python's documentation, repeated, with its paragraphs unwrapped like FineWeb's.
"""

import multiprocessing
import tempfile
import time
from functools import partial
from pathlib import Path

import demo
import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import rustbpe
import tiktoken

import fineweb
from backstage import dataset
from workshop.vocabulary import save_vocabulary

import documents
import manifest
import tokenise
from turns import show, summary, take_turns

SHARD = 10_000_000  # tokens


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
    save_vocabulary(encoding, out)
    made = manifest.new("fineweb", out, source, revision=revision,
                        files=files, next={"file": 0, "row": 0, "token": 0})
    stream = fineweb.tokenise_all(made, encoding, workers)
    fineweb.build(out, made, encoding, stream)
    return made["train"]["tokens"] + made["val"]["tokens"]


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
    if dataset.gpt2_is_cached():
        return tiktoken.get_encoding("gpt2")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts, vocab_size=50256,
                                pattern=tokenise.GPT2_SPLITS[0])
    ranks = {bytes(token): rank
             for token, rank in trainer.get_mergeable_ranks()}
    return tiktoken.Encoding(
        "of this text", pat_str=tokenise.GPT2_SPLITS[1],
        mergeable_ranks=ranks,
        special_tokens={dataset.END_OF_TEXT: len(ranks)})


def measure(flags, device):
    """Million tokens/s of both: {what: {side: figures}}."""
    global encoding, SHARD
    if flags.quick:
        SHARD = 100_000
    cores = fineweb.count_cores()
    with tempfile.TemporaryDirectory() as folder:
        path = flags.parquet
        if path is None:
            path = Path(folder) / "documentation.parquet"
            make_parquet(path, 1 if flags.quick else 60)
        some = next(parquet.ParquetFile(path).iter_batches(
            10_000, columns=["text"])).column(0).to_pylist()
        encoding = find_vocabulary(some)
        fast = tokenise.Encoder(encoding)

        def write(function, workers):
            with tempfile.TemporaryDirectory(dir=folder) as out:
                return function(path, Path(out), encoding, workers)

        sides = {"tokenising, one process": (
            lambda: sum(len(recipe_tokens(text)) for text in some),
            lambda: sum(len(fast(some[i:i + documents.ROWS]))
                        for i in range(0, len(some), documents.ROWS)))}
        for workers in [2**i for i in range(cores.bit_length())]:
            sides[f"end to end, {workers} workers"] = (
                partial(write, recipe, workers), partial(write, ours, workers))
        results = {}
        for what, pair in sides.items():
            found = take_turns({
                name: partial(million_tokens_per_second, side) for name, side
                in zip(("recipe", "fineweb.py"), pair, strict=True)},
                flags.rounds)
            results[what] = {name: summary(turns, found["recipe"])
                             for name, turns in found.items()}
    print(f"{path.name}, {encoding.n_vocab:,} tokens in the vocabulary "
          f"{encoding.name}, {cores} cores")
    show(("million tokens/s", "recipe", "fineweb.py", "ratio"), *(
        (what, *(f"{row['median']:.2f}" for row in rows.values()),
         f"{rows['fineweb.py']['ratio']:.2f}")
        for what, rows in results.items()))
    return results


def million_tokens_per_second(side):
    start = time.perf_counter()
    return side() / (time.perf_counter() - start) / 1e6
