"""code/hellaswag.py: how endings are scored, on a file in its format."""

import json

import hellaswag
import pytest
import torch

from backstage import ROOT
from backstage.dataset import load_vocabulary
from backstage.errors import UserError
from rankcheck.engine.ranks import launch

import generate

SCRIPT = ROOT / "code" / "hellaswag.py"
ENDINGS = ["the cat.", "sat on the mat, and then went", "an", "ran to him"]


def score(*flags, **options):
    return launch(SCRIPT, "--device", "cpu", *flags, **options)


@pytest.fixture
def model(single):
    return generate.load_trained(generate.find_checkpoint(single.folder))[1]


def alone(model, tokenizer, context, ending):
    """The losses of an ending's tokens, from one text and token by token."""
    before = tokenizer.encode_ordinary(context)
    tokens = before + tokenizer.encode_ordinary(" " + ending)
    tokens = tokens[-model.config.block_size - 1:]
    count = len(tokenizer.encode_ordinary(" " + ending))
    logits = model(torch.tensor([tokens[:-1]]))[0, :, :257].log_softmax(-1)
    return [-logits[i, tokens[i + 1]].item()
            for i in range(len(tokens) - 1 - count, len(tokens) - 1)]


@pytest.mark.whole
@torch.no_grad()
def test_endings_are_scored_by_their_tokens_alone(single, model, tmp_path):
    """Also behind a context that is longer than the model's block."""
    hp = json.loads((single.folder / "hyperparameters.json").read_text())
    tokenizer = load_vocabulary(hp["hyperparameters"]["data"])
    lines, best = [], []
    for context in "The dog", "He says: " * 20:
        found = [alone(model, tokenizer, context, end) for end in ENDINGS]
        sums, means = hellaswag.losses(model, tokenizer, context, ENDINGS)
        torch.testing.assert_close(
            sums, torch.tensor([sum(one) for one in found]))
        torch.testing.assert_close(
            means, torch.tensor([sum(one) / len(one) for one in found]))
        best.append((sums.argmin().item(), means.argmin().item()))
        lines.append({"ctx": context, "endings": ENDINGS})
    # one question is right by the mean, the other by neither
    right = [best[0][1], next(i for i in range(4) if i not in best[1])]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(line | {"label": label}) + "\n"
                            for line, label in zip(lines, right,
                                                   strict=True)))
    for size in None, 2:
        first, *_ = score("--file", file, "--run-dir", single.folder,
                          world_size=size)
        assert " 50.0% of 2 right, by their mean, acc_norm" in first.out
        assert first.out.count("of 2 right, by ") == 2


@pytest.mark.parametrize("line", [
    "no json", "[" * 100_000, "", '{"ctx": 3, "endings": [], "label": 0}',
    '{"ctx": "a", "endings": {"a": 1, "b": 2, "c": 3, "d": 4}, "label": 0}',
    '{"ctx": ["a"], "endings": ["b", "c", "d", "e"], "label": 0}',
    '{"ctx": "a", "endings": ["b", "c", "d", 5], "label": 0}',
    *(f'{{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": {label}}}'
      for label in ("1e999", "true", "1.5", "-1", "null", "[0]")),
    '{"ctx": "a", "endings": ["b"], "label": 0}',
    '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "[]"])
def test_another_file_is_named_in_one_line(line, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(UserError,
                       match=r"other\.jsonl, line 1: not a question"):
        hellaswag.read(file)
