"""Score a trained model with HellaSwag: which of four endings is right?

    python code/hellaswag.py --file hellaswag_val.jsonl
    torchrun --standalone --nproc-per-node 4 code/hellaswag.py --file ...

The file has a question on each line, as JSON with a text `ctx`, four texts
`endings`, and `label`, the number of the right one from 0. It is not part of
the course: https://github.com/rowanz/hellaswag has 10,042 of them, in
data/hellaswag_val.jsonl.

The model does not see that it is asked. Each ending is put behind the context,
and the loss of its tokens says how likely it is: the likeliest is the answer.
A sum over its tokens prefers short endings, so the mean is what is usually
quoted, as "acc_norm". Guessing is right 25% of the time.
"""

import json
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from backstage.errors import parse_flags, require, run_main, to_count
from backstage.files import Damaged, reading, reason, require_like
from backstage.process import name_ranks
from backstage.world import on_every_rank

from generate import load


@dataclass
class Flags:
    """Score a trained model with questions in HellaSwag's format."""

    file: str  # of questions, a line of JSON each
    run_dir: str = ""  # folder of a run, or a checkpoint (empty: newest run)
    most: int = 0  # how many questions (0: all)
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator if any)


def read(file):
    """The questions: (context, four endings, the number of the right one)."""
    questions = []
    with reading(file), open(
            file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                it = json.loads(line)
                require_like(it, {"ctx": str, "endings": [str]})
                right = to_count(str(it["label"]))
                require(len(it["endings"]) == 4 and right in range(4),
                        "not one of four endings")
            except Exception as error:  # JSON has many
                raise Damaged(f"{file}, line {number}: not a question in "
                              f"HellaSwag's format ({reason(error)})"
                              ) from error
            questions.append((it["ctx"], it["endings"], right))
    require(questions, f"{file} is empty")
    return questions


@torch.no_grad()
def losses(model, tokenizer, context, endings):
    """The sum of each ending's losses, and their mean: two tensors (4,)."""
    context = tokenizer.encode_ordinary(context) or [tokenizer.eot_token]
    most = model.config.block_size + 1  # the first tokens may be cut off
    rows = [tokenizer.encode_ordinary(f" {text}") for text in endings]
    lengths = [min(len(row), most - 1) for row in rows]
    rows = [torch.tensor((context + row)[-most:]) for row in rows]
    device = model.lm_head.weight.device
    idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    logits = model(idx[:, :-1])[:, :, :model.config.vocab_size]
    loss = F.cross_entropy(logits.transpose(1, 2), idx[:, 1:],
                           reduction="none")
    sums = torch.stack([loss[i, len(row) - 1 - length:len(row) - 1].sum()
                        for i, (row, length) in enumerate(
                            zip(rows, lengths, strict=True))])
    return sums, sums / torch.tensor(lengths, device=device)


def main():
    name_ranks()
    flags = parse_flags(Flags)
    questions = read(flags.file)[:flags.most or None]
    rank, world_size, _, model, tokenizer = load(flags.run_dir, flags.device)
    model.eval()
    right = [0, 0]
    for context, endings, answer in questions[rank::world_size]:
        for i, loss in enumerate(losses(model, tokenizer, context, endings)):
            right[i] += loss.argmin().item() == answer
    shares = on_every_rank(right)
    if rank == 0:
        for i, name in enumerate(("the sum of its losses", "their mean, "
                                  "acc_norm")):
            number = sum(share[i] for share in shares)
            print(f"{100 * number / len(questions):5.1f}% of "
                  f"{len(questions):,} right, by {name}")
    on_every_rank(None)  # who leaves early can make another abort


if __name__ == "__main__":
    run_main(main)
