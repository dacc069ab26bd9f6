"""Datasets and runs for the tests of the stages."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch

from workshop import ROOT, vocabulary
from workshop.ranks import Launch

BYTES = tiktoken.Encoding(  # a vocabulary of 257 tokens
    "bytes", pat_str=r"[\s\S]",
    mergeable_ranks={bytes([i]): i for i in range(256)},
    special_tokens={vocabulary.END_OF_TEXT: 256})


def write_shards(folder, train, val, name="test"):
    """A dataset folder of lists of tokens: several for train, one for val."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{name}_val_000000.npy", np.asarray(val, np.uint16))
    for number, tokens in enumerate(train, 1):
        np.save(folder / f"{name}_train_{number:06d}.npy",
                np.asarray(tokens, np.uint16))
    return folder


def make_dataset(folder):
    """Learnable text in bytes: 262 samples of 32 tokens, in three shards."""
    words = "the cat sat on a mat and saw one more rat at the door".split()
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(words, 3000)).encode()
    tokens = np.frombuffer(text, np.uint8)[:8400]
    write_shards(folder, np.split(tokens, [2500, 2510]), tokens[:1100])
    vocabulary.save(BYTES, folder)
    return folder


@dataclass
class Result:
    """What a run of a stage left behind."""

    folder: Path
    ranks: list  # of workshop.ranks.Rank

    @property
    def status(self):
        """The one exit status of all ranks, or the list of them."""
        every = [rank.status for rank in self.ranks]
        return every[0] if len(set(every)) == 1 else every

    @property
    def out(self):
        return "".join(rank.out for rank in self.ranks)

    @property
    def err(self):
        return "".join(rank.err for rank in self.ranks)

    @property
    def rows(self):
        """metrics.csv as dictionaries of floats, None where it is empty."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return [{key: float(value) if value else None
                     for key, value in row.items()}
                    for row in csv.DictReader(file)]

    def column(self, name):
        return [row[name] for row in self.rows]

    def checkpoint(self, index=-1):
        files = sorted((self.folder / "checkpoints").glob("*.pt"))
        return torch.load(files[index], weights_only=True)


def start_stage(stage, run, *flags, data=None, **options):
    """Start a stage's solution on preset tiny: a `workshop.ranks.Launch`."""
    given = ["--run", run, *(["--data", data] if data else [])]
    if "--resume" not in flags:
        given += ["--preset", "tiny", "--device", "cpu"]
    script = ROOT / "solutions" / f"train_gpt2_{stage}.py"
    return Launch(script, *given, *flags, **options)


def train(stage, run, *flags, timeout=120, **options):
    """Run a stage's solution on preset tiny to its end: a `Result`."""
    launch = start_stage(stage, run, *flags, **options)
    return Result(Path(run), launch.wait(timeout))


def same_state(a, b):
    """Whether two nests of dictionaries, lists and tensors are equal."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(
            same_state(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def weight_distance(a, b):
    """The largest absolute difference of two models' weights."""
    return max((a[key] - b[key]).abs().max().item() for key in a)
