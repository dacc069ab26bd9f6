"""Build a small dataset in seconds, from text that is already here.

    python fineweb/demo.py                    # Python's own documentation
    python fineweb/demo.py book.txt notes/    # or your own text
    python fineweb/demo.py --characters book.txt    # letter by letter

It writes `fineweb/demo/`: shards for training and validation, a vocabulary of
its own, and a manifest. If the dataset is already there, it does nothing. With
`--characters` each character is a token, nine tenths of the text are for
training and the rest for validation, and the folder is `fineweb/characters/`.
"""

import ast
import importlib
import random
import re
import shutil
import sysconfig
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from backstage import dataset
from backstage.errors import UserError, parse_flags, require, run_main
from workshop.vocabulary import save_vocabulary

import manifest
from documents import TEXT, walk

HERE = Path(__file__).resolve().parent
SEED = 1337
DOCUMENT = 2000  # its characters, at least
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = {"dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3",
            "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
# modules that have no Python source and are safe to import
COMPILED = ("builtins", "sys", "array", "binascii", "cmath", "fcntl", "gc",
            "itertools", "marshal", "math", "mmap", "posix", "select", "time",
            "unicodedata", "zlib", "_collections", "_signal", "_socket",
            "_thread")


@dataclass
class Flags:
    """Build a small dataset, by default from Python's documentation."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Text files to use instead, and folders of .txt, .md and .rst files."""
    out: Path | None = None
    """The folder to create (default: fineweb/demo or fineweb/characters)."""
    vocabulary_size: int = 2048
    """Tokens in the vocabulary, including `<|endoftext|>`."""
    characters: bool = False
    """Make each character a token instead, and leave the text as it is."""
    copy_from: Path | None = None
    """A folder that may hold this dataset: then it is copied, not built."""


def main():
    flags = parse_flags(Flags)
    require(257 <= flags.vocabulary_size <= 65536, "--vocabulary-size must be "
            "from 257 (each byte and <|endoftext|>) to 65536")
    out = flags.out or HERE / ("characters" if flags.characters else "demo")
    source = {"files": [str(path.resolve()) for path in flags.sources]
              or "the standard library's documentation",
              "vocabulary_size": "characters" if flags.characters
              else flags.vocabulary_size, "seed": SEED}
    if is_there(out, source):
        print(f"{out}: the dataset is already there")
        return
    if flags.copy_from and copy(flags.copy_from, out, source):
        print(f"{out}: copied from {flags.copy_from}")
        return
    texts = read_files(flags.sources) if flags.sources else read_library()
    if flags.characters:
        text = "\n\n".join(texts)
        require(len(text) >= 10, f"too little text: {len(text)} characters")
        alphabet = "".join(sorted({*text}))
        print(f"{len(text):,} characters, {len(alphabet):,} different ones: "
              f"{alphabet!r}")
        end = len(text) * 9 // 10
        write(out, source, [text[:end]], [text[end:]],
              character_vocabulary(alphabet))
        return
    if flags.sources:
        texts = chain.from_iterable(
            gather(re.split(r"\n\s*\n", text)) for text in texts)
    # a duplicate could put validation text into the training split
    documents = list(dict.fromkeys(texts))
    require(len(documents) >= 10, f"too little text: {len(documents)} "
            f"documents of about {DOCUMENT} characters, but two splits need "
            "at least 10; fix: add more text")
    random.Random(SEED).shuffle(documents)
    n_val = len(documents) // 10
    train, val = documents[n_val:], documents[:n_val]
    write(out, source, train, val,
          train_vocabulary(train, flags.vocabulary_size))


def is_there(out, source):
    """Whether `out` is this dataset; an error if it is something else."""
    found = manifest.read(out)
    if found is None:
        require(not out.exists() or (out.is_dir() and not any(out.iterdir())),
                f"{out} exists and is not a dataset; fix: choose another "
                "--out")
        return False
    other = manifest.difference(found, "demo", source)
    require(not other, f"{out} holds another dataset ({other}); fix: "
            "choose another --out, or delete the folder first")
    return True


def copy(folder, out, source):
    """Copy a dataset to `out` if it is this one and whole: whether it was."""
    import shards

    try:
        found = manifest.read(folder)
        if (found is None or not found["complete"]
                or manifest.difference(found, "demo", source)):
            return False
        with shards.new_folder(out) as copied:
            for path in folder.iterdir():
                shutil.copyfile(path, copied / path.name)
            require_sums(found, copied)
    except (OSError, UserError):  # not for us to read, or damaged
        return is_there(out, source)  # another process may have made it
    return True


def require_sums(found, folder):
    """Raise `UserError` unless the files are those of the manifest."""
    sums = {entry["file"]: entry["sha256"] for entry in found["shards"]}
    sums[dataset.TOKENS] = found["vocabulary"]["sha256"]
    for name, checksum in sums.items():
        require(manifest.checksum(folder / name) == checksum,
                f"{name} is corrupt")


def read_library():
    """The standard library's documentation, as documents (strings)."""
    yield from read_topics()
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.rglob("*.py"))
             if LEFT_OUT.isdisjoint(path.relative_to(library).parts)]
    seen = set()  # methods with the same name often have the same docstring
    modules = chain(map(compiled_docstrings, COMPILED),
                    map(docstrings, progress(paths, "reading modules")))
    for found in modules:
        yield from gather(unseen(found, seen))


def unseen(texts, seen):
    """Yield the texts that are not in the set `seen`, and add them to it."""
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def read_topics():
    """Documents from the topics that Python's `help()` knows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems leave it out
        return
    # A section is part of several topics. How it is underlined depends on
    # its level there, so the underlines go.
    heading = re.compile(r"^([^\n]+)\n([*=~-])\2{2,}\n", re.MULTILINE)
    sections = dict.fromkeys(
        section.strip() for _, topic in sorted(topics.items())
        for section in heading.sub("\0\\1\n", topic).split("\0"))
    for section in sections:
        yield from gather(section.split("\n\n"))


def docstrings(path):
    """The docstrings of a module's source, without importing it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # it is a template, not a module
        return
    nodes = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        yield ast.get_docstring(node) or ""


def compiled_docstrings(name):
    """The docstrings of a module that has no source in Python."""
    try:
        module = importlib.import_module(name)
    except ImportError:  # only other systems have it
        return
    yield module.__doc__ or ""
    for member in vars(module).values():
        if getattr(member, "__module__", None) != name:
            continue
        for thing in member, *getattr(member, "__dict__", {}).values():
            if isinstance(text := getattr(thing, "__doc__", None), str):
                yield text


def read_files(sources):
    """The texts of the files and folders that the caller names."""
    paths = []
    for source in sources:
        require(source.exists(), f"{source}: no such file or folder")
        found = [source] if source.is_file() else sorted(
            path for path in walk(source) if path.suffix.lower() in TEXT)
        require(found, f"{source} holds no text: it has no files "
                + " or ".join(f"*{suffix}" for suffix in sorted(TEXT)))
        paths += found
    for path in progress(paths, "reading files"):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start:,} is not UTF-8; "
                            "fix: convert it, or leave it out") from error
        require("\0" not in text, f"{path} is not text; fix: leave it out")
        yield text


def gather(texts):
    """Join short texts, in order, into documents of a sensible length."""
    document = ""
    for text in texts:
        document = f"{document}\n\n{text}".strip()
        if len(document) >= DOCUMENT:
            yield document
            document = ""
    if document:
        yield document


def progress(paths, what):
    import shards  # here, since it is slow and a second run does not need it

    return shards.progress(paths, desc=what, unit=" files")


def train_vocabulary(documents, size):
    """A byte-pair vocabulary of at most `size` tokens, for tiktoken."""
    import rustbpe
    import tiktoken

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents, vocab_size=size - 1)
    ranks = {bytes(token): rank
             for token, rank in trainer.get_mergeable_ranks()}
    return tiktoken.Encoding(
        "demo", pat_str=trainer.get_pattern(), mergeable_ranks=ranks,
        special_tokens={dataset.END_OF_TEXT: len(ranks)})


def character_vocabulary(alphabet):
    """A token for each character, and for each byte: a prompt may have more.
    """
    import tiktoken

    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    tokens |= dict.fromkeys(map(str.encode, alphabet))  # some have two or more
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        "characters", pat_str="(?s:.)", mergeable_ranks=ranks,
        special_tokens={dataset.END_OF_TEXT: len(ranks)})


def encode(documents, encoding):
    """All documents, with `<|endoftext|>` before each, as (n,) uint16."""
    import numpy as np

    lists = encoding.encode_ordinary_batch(documents)
    return np.array([token for tokens in lists
                     for token in (encoding.eot_token, *tokens)], np.uint16)


def write(out, source, train, val, encoding):
    """Make the folder `out` from the two splits, lists of documents."""
    import numpy as np

    import shards

    try:
        with shards.new_folder(out) as folder:
            save_vocabulary(encoding, folder)
            made = manifest.new("demo", folder, source)
            for split, documents in ("val", val), ("train", train):
                tokens = encode(documents, encoding)
                cuts = range(shards.SIZE, len(tokens), shards.SIZE)
                for i, shard in enumerate(np.split(tokens, cuts),
                                          start=split == "train"):
                    path = folder / shards.file_name("demo", split, i)
                    shards.write(path, shard)
                    made["shards"].append(
                        shards.describe(path, shard, encoding))
            made["complete"] = True
            manifest.write(folder, made)
    except OSError:
        # another process may have made the folder in the meantime
        if not is_there(out, source):
            raise
    print(f"{out}: {encoding.n_vocab:,} tokens in the vocabulary\n"
          + manifest.table(made))


if __name__ == "__main__":
    run_main(main)
