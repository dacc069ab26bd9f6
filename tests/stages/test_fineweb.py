"""Shards of FineWeb: every token, in order, whatever happens on the way."""

import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import time
from pydoc_data.topics import topics
from types import SimpleNamespace

import hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe
import splitfineweb
import stages
import tiktoken
from builders import FOLDER, contents, refuses, run, start, succeeds

from backstage import dataset
from backstage.errors import UserError
from workshop.vocabulary import save_vocabulary

import documents
import tokenise

NAME = "HuggingFaceFW/fineweb-edu"
SIZE = 50_000  # tokens in a shard


def shards(folder):
    return [np.load(folder / entry["file"]) for entry in
            json.loads((folder / "manifest.json").read_text())["shards"]]


def write_parquet(path, texts, rows=100):
    """A Parquet file with some of FineWeb-Edu's columns."""
    table = pa.table({"text": texts, "score": [3.1] * len(texts),
                      "language": ["en"] * len(texts)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Parquet files, a vocabulary that suits them, and the result of both."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    # words, blanks of all kinds, and what tokenisers fear
    words = topics["compound"].split() + (
        "isn't we'll 1984 3.14 naïve größer 世界 🦙 e\u0301 #tag".split() * 20)
    blanks = [" "] * 30 + ["\n", "\n\n", "  ", "\t", " \n ", "\u00a0", "\x1c",
                           "\r\n", "\u3000 ", "    "]
    texts = [["a document may say <|endoftext|> and mean the words", "",
              "   \n leading and trailing blanks \n\n  ",
              "x" * 3000 + "\n" * 500 + "y",
              *("".join(word + rng.choice(blanks) for word in
                        rng.choices(words, k=rng.randrange(400)))
                for _ in range(n))] for n in (900, 700, 1100)]
    for i, (some, rows) in enumerate(zip(texts, (100, 5000, 250),
                                         strict=True)):
        write_parquet(root / "data" / "sample" / "10BT" /
                      f"{i:03}_00000.parquet", some, rows)
    texts = [text for some in texts for text in some]
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts[:500], vocab_size=700,
                                pattern=tokenise.GPT2_SPLITS[0])
    ranks = {bytes(token): rank
             for token, rank in trainer.get_mergeable_ranks()}
    encoding = tiktoken.Encoding(
        "small", pat_str=tokenise.GPT2_SPLITS[0], mergeable_ranks=ranks,
        special_tokens={dataset.END_OF_TEXT: len(ranks)})
    (root / "vocabulary").mkdir()
    save_vocabulary(encoding, root / "vocabulary")
    # the plain loop that fineweb.py has to agree with
    tokens = [token for text in texts
              for token in (encoding.eot_token,
                            *encoding.encode_ordinary(text))]
    return SimpleNamespace(
        data=root / "data", texts=texts, encoding=encoding,
        tokens=np.array(tokens, np.uint16),
        flags=["--dataset", root / "data", "--vocabulary",
               root / "vocabulary", "--shard-size", SIZE, "--workers", 2])


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The dataset as it comes out when nothing disturbs it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    succeeds("fineweb", *corpus.flags, "--out", out)
    return out


# ------------------------------------------------------------------- tokens


@pytest.mark.whole
def test_the_tokens_are_those_of_a_plain_loop(corpus, whole):
    found = shards(whole)
    assert (np.concatenate(found) == corpus.tokens).all()
    assert {shard.dtype for shard in found} == {np.dtype(np.uint16)}
    assert [len(shard) for shard in found[:-1]] == [SIZE] * (len(found) - 1)
    assert 0 < len(found[-1]) <= SIZE
    assert len(found) > 8

    files = sorted(path.name for path in whole.iterdir())
    assert files == [*(f"fineweb_train_{i:06d}.npy"
                       for i in range(1, len(found))),
                     "fineweb_val_000000.npy", "manifest.json",
                     "vocabulary.json", "vocabulary.tiktoken"]
    made = json.loads((whole / "manifest.json").read_text())
    train, val = made["train"], made["val"]
    assert val["tokens"] == SIZE
    assert train["tokens"] == len(corpus.tokens) - SIZE
    assert train["documents"] + val["documents"] == len(corpus.texts)
    assert train["bytes"] + val["bytes"] == sum(
        len(text.encode()) for text in corpus.texts)
    assert made["vocabulary"]["size"] == corpus.encoding.n_vocab == 701
    saved = dataset.load_vocabulary(whole)
    assert saved.decode(corpus.tokens[1:500].tolist()) == (
        corpus.encoding.decode(corpus.tokens[1:500].tolist()))


@pytest.mark.parametrize("pattern", tokenise.GPT2_SPLITS)
def test_without_looking_ahead_the_words_are_the_same(corpus, pattern):
    plain = tiktoken.Encoding(
        "plain", pat_str=pattern,
        mergeable_ranks=corpus.encoding._mergeable_ranks,
        special_tokens=corpus.encoding._special_tokens)
    fast = tokenise.Encoder(plain)
    rng = random.Random(1)
    blanks = [chr(i) for i in range(0x3001) if chr(i).isspace()]
    alphabet = [*blanks, *" \n" * 9, *"ab1'.<>|", "'s", "'ll", "é", "世",
                "\u200b", "\u0085", "\ufeff", "🦙", "<|endoftext|>", "½"]
    for _ in range(5000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        assert fast([text]).tolist() == [plain.eot_token,
                                         *plain.encode_ordinary(text)], text


def test_long_documents_are_cut_by_the_stated_rule(corpus, monkeypatch):
    """The rule's million characters are a thousand here."""
    plain, long = corpus.encoding, 1000
    monkeypatch.setattr(tokenise, "LONG", long)
    monkeypatch.setattr(tokenise, "WORDS", re.compile(
        tokenise.WORDS.pattern.replace("999999", str(long - 1))))
    words = " ".join(random.Random(2).choices(
        " ".join(corpus.texts[5:9]).split(), k=1000))
    assert len(words) > 2 * long and "  " not in words
    begin, encode = plain.eot_token, plain.encode_ordinary
    found = tokenise.Encoder(plain)(
        [words, " " * 10 * long + "end", "x" * 2 * long + "x" * 500])
    assert found.tolist() == [
        # cut between words, and so the same as if it were not
        begin, *encode(words),
        # cut at each thousand, and before the last blank of the run
        begin, *encode(" " * long) * 9, *encode(" " * (long - 1)),
        *encode(" end"), begin, *encode("x" * long) * 2, *encode("x" * 500)]


def test_text_files_too(corpus, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "b.txt").write_bytes("ein Text, größer\r\nals  b\n".encode())
    (data / "a.txt").write_text("one\n\n<|endoftext|>\ntwo <|endoftext|>\n"
                                "<|endoftext|>\n \n<|endoftext|>\n")
    (data / "c.md").write_text("not asked for")
    out = tmp_path / "out"
    succeeds("fineweb", "--dataset", data, *corpus.flags[2:],
             "--shard-size", 10, "--files", "*.txt", "--name", "mine",
             "--out", out)
    assert (out / "mine_train_000001.npy").exists()
    plain = corpus.encoding
    assert np.concatenate(shards(out)).tolist() == [
        token for text in ("one\n\n", "two <|endoftext|>\n",
                           "ein Text, größer\r\nals  b\n")
        for token in (plain.eot_token, *plain.encode_ordinary(text))]


# ------------------------------------------------------------- interruptions


@pytest.mark.whole
def test_killed_three_times_the_bytes_are_the_same(corpus, whole, tmp_path):
    """Nor do they depend on the number of workers."""
    out = tmp_path / "out"
    rng = random.Random(3)
    between = 0  # kills after some shards and before the last
    for kill in range(20):
        if kill >= 3 and between >= 1:
            break
        before = len(list(out.glob("*.npy")))
        process = start("fineweb", *corpus.flags, "--out", out)
        if kill % 3 == 0:  # at any moment
            time.sleep(rng.uniform(0, 1.5))
        else:  # while a shard is written, or soon after
            while process.poll() is None and not list(out.glob(".*.npy.*")):
                time.sleep(0.001)
            time.sleep(rng.choice([0, rng.uniform(0, 0.1)]))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)  # its workers have the pipes, too
        done = list(out.glob("*.npy"))
        assert len(done) >= before  # it goes on, not back
        assert all((whole / path.name).read_bytes() == path.read_bytes()
                   for path in done)
        between += process.returncode < 0 and len(done) > 0
        if process.returncode == 0:  # too late: from the start again
            shutil.rmtree(out)
    assert between >= 1
    _, err = succeeds("fineweb", *corpus.flags[:-1], 3, "--out", out)
    assert contents(out) == contents(whole)
    # no terminal, and so plain lines
    assert "\r" not in err
    assert re.match(r"100%.* tokens/s\]$", err.splitlines()[-1])


@pytest.mark.whole
def test_two_at_once_and_other_settings(corpus, whole, tmp_path, tool):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    flags = "fineweb", *corpus.flags, "--out", out
    assert "another process is making this dataset" in tool(*flags)[1]
    os.close(handle)
    for more, message in (
            (["--shard-size", 7], f"shard_size {SIZE} instead of 7"),
            (["--name", "other"], "name fineweb instead of other"),
            (["--dataset", corpus.data / "sample"], "dataset ")):
        assert message in tool(*flags, *more)[1]
    assert contents(out) == contents(whole)
    assert not tool(*flags)[1]

    next(out.glob("*_train_000003.npy")).unlink()
    assert "fineweb_train_000003.npy is missing" in tool(*flags)[1]
    (out / "manifest.json").unlink()
    assert "holds shards from elsewhere" in tool(*flags)[1]


# ------------------------------------------------------------------ the hub
@pytest.mark.whole
def test_from_the_hub(corpus, whole, tmp_path):
    flags = *corpus.flags[2:], "--out", tmp_path / "out"
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert refuses(run("fineweb", *flags, env=offline),
                   "the hub cannot be reached")
    with hub.serve(NAME, corpus.data) as (endpoint, requests):
        env = {**offline, "HF_ENDPOINT": endpoint}
        for more, message in (
                (["--dataset", "no such"], "no such dataset on the hub"),
                (["--subset", "sample/11BT"], "has no folder sample/11BT")):
            assert refuses(run("fineweb", *flags, *more, env=env), message)
            assert not (tmp_path / "out").exists()
        _, err = succeeds("fineweb", *flags, "--download-only", env=env)
        assert "fetching sample/10BT/001_00000.parquet\n" in err
        gets = [line for line in requests if ".parquet" in line
                and line.startswith("GET")]
        assert len(gets) == 3
        assert not list(tmp_path.glob("out/*.npy"))
    succeeds("fineweb", *flags, env=offline)
    found = contents(tmp_path / "out")
    made = json.loads(found["manifest.json"])
    assert made["revision"] == hub.COMMIT
    assert made["source"]["subset"] == "sample/10BT"
    assert found | {"manifest.json": None} == contents(whole) | {
        "manifest.json": None}


# ---------------------------------------------------------------- bad input
def broken_footer(path, texts):
    write_parquet(path, texts)
    path.write_bytes(path.read_bytes()[:-100])


def broken_page(path, texts):
    write_parquet(path, texts)
    data = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0)
    at = begin.data_page_offset
    data[at:at + 200] = bytes(200)
    path.write_bytes(data)


def two_columns(path, texts):
    pq.write_table(pa.Table.from_arrays(
        [pa.array(texts), pa.array(texts)], names=["text", "text"]), path)


def invalid_unicode(path, texts):
    data = [text.encode() for text in texts]
    data[321] = b"caf\xe9"
    array = pa.array(data, pa.binary())
    array = pa.Array.from_buffers(pa.string(), len(array), array.buffers())
    write_parquet(path, array)


def test_what_other_machines_write_is_read(tmp_path):
    """Names in capitals, macOS's notes, and Arrow's newer type of text."""
    view = pa.table({"text": pa.array(["a", "b"], pa.string_view())})
    pq.write_table(view, tmp_path / "b.PARQUET")
    write_parquet(tmp_path / "a.parquet", ["c"])
    (tmp_path / "._a.parquet").write_bytes(b"\0\5\x16\7")
    _, files = documents.list_files(str(tmp_path), "", "*.parquet")
    names = [entry["file"] for entry in files]
    assert names == ["a.parquet", "b.PARQUET"]
    batch, = documents.read(tmp_path / "b.PARQUET", 0, 1, "text")
    assert batch.texts.to_pylist() == ["b"]


@pytest.mark.whole
@pytest.mark.parametrize("make, flags, message", [
    (write_parquet, ["--text-column", "body"],
     "no column 'body'; fix: choose"),
    (write_parquet, ["--text-column", "score"], "holds double, not text"),
    (write_parquet, ["--files", "*.csv"], "has no files *.csv"),
    (write_parquet, ["--shard-size", 10**9], "use a smaller --shard-size"),
    (write_parquet, ["--shard-size", 0], "--shard-size must be 1 or more"),
    (write_parquet, ["--name", "a/b"], "--name must consist of letters"),
    (write_parquet, ["--vocabulary", "/nowhere"], "has no vocabulary"),
    (write_parquet, ["--workers", "many"], "--workers"),
    (broken_footer, [], "corrupt; fix: replace it, or delete it if"),
    (broken_page, [], "is not a Parquet file, or is corrupt"),
    (lambda path, texts: write_parquet(path, [*texts[:20], None]), [],
     "row 20 has no text (null)"),
    (invalid_unicode, [], "is not UTF-8"),
    (two_columns, [], "has several columns 'text'"),
    (lambda path, _: path.with_suffix(".txt").write_bytes(b"caf\xe9"),
     ["--files", "*.txt"], "byte 3 is not UTF-8"),
])
def test_bad_input(make, flags, message, corpus, tmp_path, tool):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    make(data / "a.parquet", corpus.texts[:500])
    assert message in tool("fineweb", "--dataset", data, *corpus.flags[2:],
                           "--out", out, *flags)[1]
    if out.exists():
        made = json.loads((out / "manifest.json").read_text())
        assert not made["complete"]
        assert tool("countfineweb", out)[1]


def test_what_does_not_fit_or_is_missing(corpus, tmp_path, tool):
    save_vocabulary(stages.BYTES, tmp_path)
    (tmp_path / "theirs").mkdir()
    for name in "theirs", "out":
        flags = [*corpus.flags, "--out", tmp_path / name]
        assert "splits text differently" in tool(
            "fineweb", *flags, "--vocabulary", tmp_path)[1]
    # the empty folder that it has made goes, another's stays
    assert (tmp_path / "theirs").exists() and not (tmp_path / "out").exists()
    # a vocabulary of somebody's own is not written anew
    save_vocabulary(stages.BYTES, tmp_path / "theirs")
    before = contents(tmp_path / "theirs")
    assert "holds another vocabulary" in tool(
        "fineweb", *corpus.flags, "--out", tmp_path / "theirs")[1]
    assert contents(tmp_path / "theirs") == before
    (tmp_path / "pyarrow.py").write_text(  # as if it were not installed
        "raise ModuleNotFoundError(\"No module named 'pyarrow'\")\n")
    assert refuses(run("fineweb", *flags, env={
        "PYTHONPATH": f"{tmp_path}:{FOLDER.parent}"}),
                   "pyarrow is missing; fix: source activate.sh fineweb")


# ----------------------------------------------- counting, splitting, reading
@pytest.mark.whole
def test_counting_and_verifying(corpus, whole, tmp_path, tool):
    n = len(corpus.tokens)
    out, _ = tool("countfineweb", whole)
    assert f"{n - SIZE:,} tokens" in out and f"{SIZE:,} tokens" in out
    out, error = tool("countfineweb", whole, "--verify")
    assert out.endswith("verified\n") and not error

    def damage(change, message, *flags):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        change(copy / "fineweb_train_000002.npy", copy)
        out, error = tool("countfineweb", copy, *flags)
        assert message in out and "problem" in error
        shutil.rmtree(copy)

    def add(number):
        def change(path, _):
            tokens = np.load(path)
            tokens[77] += number
            np.save(path, tokens)
        return change

    def begin_late(_, copy):
        first = copy / "fineweb_val_000000.npy"
        np.save(first, np.load(first)[1:])

    damage(add(1), "sha256", "--verify")
    damage(add(60_000), "holds ids beyond the vocabulary's 701", "--verify")
    damage(begin_late, "does not begin with a document", "--verify")
    damage(lambda _, copy: save_vocabulary(stages.BYTES, copy),
           "the vocabulary is not the one in the manifest", "--verify")
    damage(lambda path, _: path.write_bytes(path.read_bytes()[:-2]),
           "is corrupt")
    damage(begin_late, f"tokens {SIZE - 1} instead of the manifest's {SIZE}")
    damage(lambda path, _: path.unlink(), "000002.npy is missing")
    damage(lambda path, _: np.save(path, np.load(path).astype(np.int32)),
           "it holds int32")
    damage(lambda path, copy: shutil.copy(path, copy / "more_train_9.npy"),
           "more_train_9.npy: tokens")
    assert "has no shards" in tool("countfineweb", tmp_path)[1]
    assert refuses(run("countfineweb", tmp_path / "none"), "No such file")


A_MANIFEST = json.loads((FOLDER / "demo" / "manifest.json").read_text())


@pytest.mark.parametrize("text", [
    "", "[]", "null", "1e999", '{"a":' * 100_000,
    *(json.dumps({name: value for name, value in A_MANIFEST.items()
                  if name != missing}) for missing in (
        "name", "complete", "source", "vocabulary", "train", "shards")),
    *(json.dumps(A_MANIFEST | changed) for changed in (
        {"complete": 1}, {"source": "here"}, {"vocabulary": {}},
        {"shards": [{"file": "a"}]}, {"shards": [3]}, {"train": {}}))],
    ids=lambda text: text[:9])
def test_a_manifest_that_is_none(text, tmp_path, tool):
    folder = shutil.copytree(FOLDER / "demo", tmp_path / "demo")
    (folder / "manifest.json").write_text(text)
    for name, *args in (("countfineweb", folder), ("demo", "--out", folder),
                        ("fineweb", "--dataset", folder, "--out", folder)):
        error = tool(name, *args)[1]
        assert "manifest.json is corrupt" in error and len(error) < 300


@pytest.mark.whole
def test_splitting_changes_no_token(whole, tmp_path, tool):
    shard, parts = whole / "fineweb_train_000002.npy", tmp_path / "parts"
    succeeds("splitfineweb", shard, "--parts", 7, "--out", parts)
    found = [np.load(parts / f"fineweb_train_{i:06d}.npy")
             for i in range(1, 8)]
    assert {len(part) for part in found} == {SIZE // 7, SIZE // 7 + 1}
    assert (np.concatenate(found) == np.load(shard)).all()

    everything = tmp_path / "all"
    assert not tool(
        "splitfineweb", whole, "--parts", 3, "--out", everything)[1]
    for split, first in ("val", 0), ("train", 1):
        before, after = ([np.load(path) for path in
                          sorted(folder.glob(f"*_{split}_*.npy"))]
                         for folder in (whole, everything))
        assert len(after) == 3 * len(before)
        assert (np.concatenate(after) == np.concatenate(before)).all()
        assert (everything / f"fineweb_{split}_{first:06d}.npy").exists()
    assert not tool("countfineweb", everything, "--verify")[1]

    other = tmp_path / "a_train_000001.npy"
    np.save(other, np.ones((3, 4)))
    for args, message in (
            ([tmp_path / "none.npy"], "no such shard"),
            ([shutil.copy(other, tmp_path / "weights.npy")],
             "not named as a shard"),
            ([other], "it holds float64 of shape (3, 4)"),
            ([shard, "--parts", 0], "set --parts from 1"),
            ([shard, "--out", parts], "already exists"),
            ([whole], "the new folder has no name")):
        before = contents(parts)
        assert message in tool("splitfineweb", *args)[1]
        assert contents(parts) == before
    assert not (tmp_path / "a_train_000001").exists()


HEADER = np.array([20240520, 1, 700, *[0] * 253], np.int32).tobytes()
TOKENS = np.arange(700, dtype=np.uint16)


@pytest.mark.parametrize(("header", "name", "number"), [
    (b"", "", ""), (HEADER, "fineweb_", "_000009")])
def test_shards_of_other_courses_are_named_and_converted(
        header, name, number, tmp_path, tool):
    theirs, out = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    for i, split in enumerate(("val", "train")):
        (theirs / f"{name}{split}{number}.bin").write_bytes(
            header + (TOKENS + i).tobytes())
    with pytest.raises(UserError, match=f"{name}.*bin; fix: if nanoGPT, "):
        dataset.check_shards(theirs, 32)
    assert not tool("splitfineweb", theirs, "--parts", 2, "--out", out)[1]
    dataset.check_shards(out, 32)
    for i, split in enumerate(("val", "train")):
        parts = [np.load(path) for path in sorted(out.glob(f"*_{split}_*"))]
        assert np.array_equal(np.concatenate(parts), TOKENS + i)


def as_npy(tokens):
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


LLAMA = np.arange(4000, dtype=np.uint32) % 250 + 70_000
GPT2 = np.random.default_rng(0).integers(0, 50257, 4000).astype(np.uint16)
TEXT = "First Citizen: Before we proceed any further, hear me.\n" * 90


def llama_header(magic, order="<"):
    return np.array([magic, 7, 700, *[0] * 253], f"{order}i4").tobytes()


@pytest.mark.parametrize(("content", "says"), [
    (LLAMA.tobytes(), "numbers of 32 bits"),
    (LLAMA.astype(">u4").tobytes(), "numbers of 32 bits"),
    (GPT2.astype(np.int64).tobytes(), "numbers of 32 bits"),
    (llama_header(20240801) + LLAMA.tobytes(), "20240801"),
    (llama_header(20240522) + GPT2.tobytes(), "20240522"),
    (llama_header(20240520, ">") + GPT2.tobytes(), "another machine"),
    (GPT2.astype(">u2").tobytes(), "does not have"),
    (TEXT.encode(), "is a text"), (("ä€" * 2000).encode(), "is a text"),
    (TEXT.encode("utf-16"), "UTF-16"),
    (as_npy(GPT2), "a NumPy array"),
    (np.arange(4000).astype(np.uint16) % 65, "no id above 64"),
    (None, "meta.pkl")], ids=lambda value: str(value)[:20])
def test_a_bin_that_is_not_gpt2s_tokens(content, says, tmp_path, tool):
    theirs, out = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    if content is None:  # characters
        content = GPT2
        (theirs / "meta.pkl").write_bytes(b"\x80\4K\1.")
    for split in "train", "val":
        (theirs / f"{split}.bin").write_bytes(bytes(content))
    _, error = tool("splitfineweb", theirs, "--parts", 1, "--out", out)
    assert says in error and "corrupt" not in error and "\n" not in error
    assert not out.exists()


def test_right_tokens_are_no_other_format(tmp_path, tool):
    """As random as they may be, with small ids, and few of them."""
    rng = np.random.default_rng(1)
    some = [GPT2, np.full(4000, 198, np.uint16) + np.arange(4000) % 70 * 3,
            np.where(rng.random(4000) < .5, 0, GPT2), GPT2[:15]]
    for number, tokens in enumerate(some):
        theirs = tmp_path / str(number)
        theirs.mkdir()
        for split in "train", "val":
            tokens.astype(np.uint16).tofile(theirs / f"{split}.bin")
        out = tmp_path / f"ours{number}"
        assert not tool("splitfineweb", theirs, "--parts", 1, "--out", out)[1]


@pytest.mark.parametrize("content", [
    b"", b"123", HEADER, HEADER[:1000], HEADER + bytes(1398),
    HEADER.replace(b"\1\0\0\0", b"\2\0\0\0", 1) + bytes(1400)])
def test_a_damaged_shard_of_another_course(content, tmp_path):
    file = tmp_path / "train.bin"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is corrupt"):
        splitfineweb.shards.read(file)


@pytest.mark.whole
def test_training_reads_it(whole, tmp_path):
    stages.train("std", tmp_path / "run", "--max-steps", 2, data=whole)
    (shutil.copytree(whole, tmp_path / "plain") / "manifest.json").unlink()
    out, _ = succeeds("countfineweb", tmp_path / "plain", "--verify")
    assert "there is no manifest" in out  # as of another course


def test_fineweb_as_a_job(slurm, corpus, whole, tmp_path):
    """From small Parquet files."""
    job = slurm.submit("fineweb", *corpus.flags, "--out", tmp_path / "a b",
                       options=["--cpus-per-task=2"])
    assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)
    for ours, theirs in zip(shards(tmp_path / "a b"), shards(whole),
                            strict=True):
        assert (ours == theirs).all()
