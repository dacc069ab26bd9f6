"""The demo dataset: honest, the same every time, complete or absent."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from builders import FOLDER, contents, refuses, run, start, succeeds

from backstage import ROOT, dataset

import shards


def documents(path, encoding):
    """The texts of a shard, which has to begin with a document."""
    tokens = np.load(path)
    begins = np.flatnonzero(tokens == encoding.eot_token)
    assert begins[0] == 0
    return [encoding.decode(document[1:].tolist())
            for document in np.split(tokens, begins[1:])]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    succeeds("demo", "--out", folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """A folder of texts, and one file next to it."""
    rng = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog größer 世界".split()
    (tmp_path / "texts" / "deeper").mkdir(parents=True)
    for name in ("texts/one.txt", "texts/deeper/two.md", "three.log"):
        paragraphs = (" ".join(rng.choices(words, k=60)) for _ in range(150))
        (tmp_path / name).write_text("\n\n".join(paragraphs), "utf-8")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG\xff\0")
    return tmp_path / "texts", tmp_path / "three.log"


@pytest.mark.whole
def test_the_default_dataset(demo):
    """The same bytes as activate.sh has made, wherever it has."""
    built = ROOT / "fineweb" / "demo"
    assert not built.exists() or contents(built) == contents(demo)
    assert sorted(path.name for path in demo.iterdir()) == [
        "demo_train_000001.npy", "demo_val_000000.npy", "manifest.json",
        "vocabulary.json", "vocabulary.tiktoken"]
    encoding = dataset.load_vocabulary(demo)
    assert encoding.n_vocab == 2048
    train = documents(demo / "demo_train_000001.npy", encoding)
    val = documents(demo / "demo_val_000000.npy", encoding)
    assert len(val) == (len(train) + len(val)) // 10
    assert not set(train) & set(val)
    assert len(set(train + val)) == len(train + val)
    assert 1.5e6 < sum(len(text.encode()) for text in train + val) < 4e6
    assert 1000 < np.median([len(text) for text in train + val]) < 4000

    made = json.loads((demo / "manifest.json").read_text())
    assert made["complete"]
    for split, texts in ("train", train), ("val", val):
        tokens = np.load(next(demo.glob(f"*_{split}_*.npy")))
        assert tokens.dtype == np.uint16
        assert made[split] == {
            "shards": 1, "tokens": len(tokens), "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts)}
        # the byte-pair vocabulary is used as tiktoken would use it
        assert tokens.tolist() == [
            token for text in texts
            for token in (encoding.eot_token, *encoding.encode_ordinary(text))]


def test_text_of_ones_own(texts, tmp_path):
    out = tmp_path / "out"
    succeeds("demo", *texts, "--out", out, "--vocabulary-size", 300)
    encoding = dataset.load_vocabulary(out)
    assert encoding.n_vocab == 300
    found = [text for path in out.glob("*.npy")
             for text in documents(path, encoding)]
    folder, file = texts
    for path in folder / "one.txt", folder / "deeper" / "two.md", file:
        for paragraph in path.read_text("utf-8").split("\n\n"):
            assert any(paragraph in text for text in found)


def test_characters_of_ones_own_text(tmp_path):
    """As nanoGPT has them: all of the text in order, nine tenths to train."""
    book, out = tmp_path / "book.txt", tmp_path / "out"
    text = "To be, or not?\n\n\n  Ein König in 世界. \n" * 101
    book.write_text(text, "utf-8")
    printed, _ = succeeds("demo", "--characters", book, "--out", out)
    assert (f"{len(text):,} characters, {len(set(text))} different ones: "
            f"{''.join(sorted(set(text)))!r}") in printed
    encoding = dataset.load_vocabulary(out)
    end = int(0.9 * len(text))
    for split, part in ("train", text[:end]), ("val", text[end:]):
        path = next(out.glob(f"*_{split}_*.npy"))
        assert documents(path, encoding) == [part]
        assert len(np.load(path)) == 1 + len(part)
        assert f"{split:5}    1 shards" in printed
        assert f" {1 + len(part):,} tokens" in printed
    assert len(encoding.encode("König")) == 5
    assert encoding.decode(encoding.encode("½ é 😀")) == "½ é 😀"  # not in it
    assert refuses(run("demo", book, "--out", out), "holds another dataset")


@pytest.mark.whole
def test_two_at_once_and_killed_it_leaves_all_or_nothing(texts, tmp_path):
    whole = tmp_path / "whole"
    begun = time.monotonic()
    both = [start("demo", *texts, "--out", whole) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert not list(tmp_path.glob(".*"))
    took = time.monotonic() - begun
    for share in 0.4, 0.8:
        out = tmp_path / str(share)
        process = start("demo", *texts, "--out", out)
        try:
            process.wait(share * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists() or contents(out) == contents(whole)
        succeeds("demo", *texts, "--out", out, env={"PYTHONHASHSEED": "1"})
        assert contents(out) == contents(whole)
        assert not list(tmp_path.glob(".*"))


def test_the_next_one_removes_what_a_killed_one_has_left(tmp_path):
    """But no folder of somebody's, nor that of one which is at work."""
    theirs, out = tmp_path / ".demo.notes", tmp_path / "demo"
    theirs.mkdir()
    (theirs / ".demo.1-0").touch()
    child = os.fork()
    if not child:
        with shards.new_folder(out):
            os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob(".*"))) == 3  # the folder, and its mark
    with shards.new_folder(out) as at_work:
        with shards.new_folder(out):
            pass
        assert at_work.exists()
    assert list(tmp_path.glob(".*")) == [theirs]


@pytest.mark.whole
@pytest.mark.parametrize("text, flags, message", [
    (None, [], "no such file or folder"),
    ("a folder", [], "holds no text"),
    (b"plain \xff\xfe" * 9999, [], "byte 6 is not UTF-8"),
    (b"\0" * 99999, [], "is not text"),
    (b"too short", [], "too little text"),
    (b"too short", ["--characters"], "too little text: 9 characters"),
    (b"text", ["--vocabulary-size", "65537"],
     "--vocabulary-size must be from 257"),
    (b"text", ["--colour", "red"], "--colour"),
], ids=lambda value: str(value)[:20])
def test_bad_input(text, flags, message, tmp_path, tool):
    source, out = tmp_path / "source", tmp_path / "out"
    if text == "a folder":
        source.mkdir()
    elif text:
        source.write_bytes(text)
    assert message in tool("demo", source, "--out", out, *flags)[1]
    assert not out.exists()


@pytest.mark.whole
def test_a_folder_that_is_there_is_left_alone(demo, texts, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in demo.iterdir()}
    assert refuses(run("demo", *texts, "--out", demo), "holds another dataset")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("irreplaceable")
    assert refuses(run("demo", *texts, "--out", mine), "is not a dataset")
    assert [*contents(mine)] == ["thesis.txt"]
    # a second run would be slow if it imported what it does not need
    process = subprocess.run(
        [sys.executable, "-X", "importtime", FOLDER / "demo.py", "--out",
         demo], capture_output=True, text=True, timeout=60)
    assert process.stdout == f"{demo}: the dataset is already there\n"
    for heavy in "numpy", "rustbpe", "torch", "tqdm":
        assert f" {heavy}\n" not in process.stderr
    assert before == {path: path.stat().st_mtime_ns
                      for path in demo.iterdir()}


def test_no_space_for_a_shard(texts, tmp_path):
    def limit():  # a file of more than this cannot be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    out = tmp_path / "out"
    assert refuses(run("demo", *texts, "--out", out, preexec_fn=limit),
                   "File too large")
    assert not out.exists() and not list(tmp_path.glob(".*"))


@pytest.mark.whole
def test_one_that_is_there_is_copied_if_it_is_the_same(texts, tmp_path):
    """And built where it is another one, or damaged."""
    there, out = tmp_path / "there", tmp_path / "out"
    succeeds("demo", *texts, "--out", there)
    small = shutil.copytree(there, tmp_path / "small")
    there.chmod(0o555)  # as in somebody else's environment
    said, progress = succeeds(
        "demo", *texts, "--out", out, "--copy-from", there)
    assert "copied from" in said and "modules" not in progress
    assert contents(out) == contents(small)
    assert os.access(out, os.W_OK)
    there.chmod(0o755)

    def is_built():
        shutil.rmtree(out)
        said, _ = succeeds(
            "demo", *texts, "--out", out, "--copy-from", there)
        assert "copied" not in said
        assert contents(out) == contents(small)

    shard = there / "demo_val_000000.npy"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    is_built()
    shard.unlink()
    is_built()
    shard.write_bytes(data)
    record = there / "manifest.json"
    found = json.loads(record.read_text())
    found["source"]["vocabulary_size"] = 300
    record.write_text(json.dumps(found))
    is_built()
    shutil.rmtree(there)
    is_built()
