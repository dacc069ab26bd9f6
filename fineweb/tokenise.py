"""From text to GPT-2's tokens, the same as tiktoken's, on all cores.

tiktoken splits a text into words with a regular expression, and then each
word into tokens. GPT-2's expression looks ahead, to leave the last blank of a
run to the word that follows. An engine that has to look ahead is slow, and
panics on millions of blanks in a row. Here Python cuts the text before that
blank. Within such stretches an expression without look-ahead finds the same
words: the same tokens, from an engine that is twice as fast.
"""

import multiprocessing
import os
import re
import signal
import threading

import numpy as np
import tiktoken

from backstage.errors import UserError, require

# tiktoken has written GPT-2's expression in two ways that mean the same
GPT2_SPLITS = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+"""
    r"""| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++"""
    r"""| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
)
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"""

# Rust's \s, which differs from Python's
BLANK = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
LAST_BLANK = re.compile(f"[{BLANK}](?=[{BLANK}][^{BLANK}])")
LONG = 1_000_000  # characters
WORDS = re.compile(f"(?s:.){{0,{LONG - 1}}}[^{BLANK}](?=[{BLANK}])")


class Encoder:
    """Encodes texts with a vocabulary that splits words like GPT-2's."""

    def __init__(self, encoding):
        self.core = tiktoken.Encoding(
            encoding.name, pat_str=SPLIT,
            mergeable_ranks=encoding._mergeable_ranks,
            special_tokens=encoding._special_tokens)
        self.begin = np.array([encoding.eot_token], np.uint32)

    def __call__(self, texts):
        """The tokens of `texts`, each after `<|endoftext|>`: (n,) uint16."""
        found = []
        for text in texts:
            found.append(self.begin)
            # <|endoftext|> inside a document is plain text
            found += [self.core.encode_to_numpy(part, disallowed_special=())
                      for part in stretches(text)]
        return np.concatenate(found).astype(np.uint16)


def check_vocabulary(encoding):
    """Return `encoding` if an `Encoder` can replace it, else an error."""
    require(encoding._pat_str in GPT2_SPLITS, f"the vocabulary "
            f"{encoding.name} splits text differently from GPT-2's; fix: "
            "choose another --vocabulary")
    require(encoding.n_vocab <= 65536, f"the vocabulary {encoding.name} has "
            f"{encoding.n_vocab:,} tokens, but ids must be below 65,536; "
            "fix: choose another --vocabulary")
    return encoding


def stretches(text):
    """Cut a text where GPT-2's expression begins a word in any case.

    That is before the last blank of a run of blanks and, in a stretch of
    more than a million characters, before the last of its blanks that
    follows another character. A million blanks in a row, or a million
    characters without a blank, are cut although they are one word: only
    in such documents do the tokens differ from tiktoken's.
    """
    begin = 0
    for end in (*(m.end() for m in LAST_BLANK.finditer(text)), len(text)):
        while end - begin > LONG:
            words = WORDS.match(text, begin)
            cut = words.end() if words else begin + LONG
            yield text[begin:cut]
            begin = cut
        yield text[begin:end]
        begin = end


encoder = None  # each worker has its own


def start_worker(encoding):
    """Prepare a worker process, which ends when its parent does."""
    global encoder
    encoder = Encoder(encoding)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=follow_parent, daemon=True).start()


def follow_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def tokenise(batch):
    """In a worker: the tokens of a `documents.Batch`, (n,) uint16."""
    texts = batch.texts
    if not isinstance(texts, list):  # an Arrow array, not decoded yet
        try:
            texts = texts.to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(f"{batch.path}: one of the rows {batch.row:,} to "
                            f"{batch.row + len(texts):,} is not UTF-8 "
                            f"({error.reason}); fix: correct it") from error
    if None in texts:
        raise UserError(f"{batch.path}: row {batch.row + texts.index(None):,} "
                        "has no text (null); fix: remove that row")
    return encoder(texts)
