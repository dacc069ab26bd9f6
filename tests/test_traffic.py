"""What a step sends and keeps: counted, and equal to the lesson's formulas.

    python tests/test_traffic.py

writes the table in workshop/lessons/traffic.md from what it counts.
"""

import gc
import re
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stages import CollectivesSeen, make_dataset, train
from test_std import std
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from backstage import ROOT
from backstage.flops import block_parameters, padded_vocab_size
from workshop import arithmetic
from workshop.arithmetic import of_step
from workshop.stages import STAGES

TABLE = ROOT / "workshop" / "lessons" / "traffic.md"
T = 32
CONFIG = {"block_size": T, "vocab_size": 257, "n_layer": 4, "n_head": 4,
          "n_embd": 32}  # preset tiny, with the tests' vocabulary
CASES = [  # stage, mesh, microbatches of a rank in a step
    ("ddp", (1, 2, 1), 2), ("ddp", (1, 4, 1), 1),
    ("fsdp", (1, 2, 1), 2), ("fsdp", (1, 4, 1), 1),
    ("tp", (1, 1, 2), 2), ("tp", (1, 2, 2), 1),
    ("3d", (4, 1, 1), 4), ("3d", (4, 1, 1), 8), ("3d", (2, 2, 1), 4),
    ("3d", (2, 1, 2), 4), ("3d", (2, 2, 2), 4)]


def count(stage, mesh, microbatches, data, folder):
    """What each pipeline stage sends, as `of_step` says it.

    It is the same for all of its ranks, and in every step but the first: with
    that one comes what the run begins with, and then DDP orders its buckets.
    """
    _, dp, tp = mesh
    result = train(stage, folder / "run", "--max-steps", 4,
                   "--microbatch-size", 8 // (dp * microbatches), data=data,
                   mesh=mesh, observe=CollectivesSeen())
    assert result.status == 0, result.err
    found = []
    for rank in result.ranks:
        lines = [line for line in rank.out.splitlines() if "sent:" in line]
        assert len(lines) == 4 and lines[2] == lines[3], lines
        found.append({name: (int(calls), int(size)) for name, calls, size
                      in re.findall(r"(\w+) (\d+) (\d+)", lines[3])})
    stages = [found[i:i + dp * tp] for i in range(0, len(found), dp * tp)]
    assert all(rank == ranks[0] for ranks in stages for rank in ranks)
    return [ranks[0] for ranks in stages]


def formula(stage, mesh, microbatches):
    return of_step(STAGES[stage].split, CONFIG, mesh, microbatches,
                   8 // (mesh[1] * microbatches), T)


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(
    map(str, case)))
def test_what_a_step_sends(case, data, tmp_path):
    counted = count(*case, data, tmp_path)
    assert counted == formula(*case)
    assert set(rows(case, counted)) <= set(TABLE.read_text().splitlines())


def test_the_arithmetic_is_of_the_scripts_models():
    for preset, config in (("gpt2", arithmetic.GPT2),
                           ("gpt2-xl", arithmetic.XL)):
        assert config == asdict(std.MODELS[preset])
    config = std.GPTConfig(**CONFIG)
    for vocab_size in (1, 128, 129, 50257):
        model = std.GPT(replace(config, vocab_size=vocab_size))
        assert padded_vocab_size(vocab_size) == len(model.lm_head.weight)
    block = model.transformer.h[0]
    assert block_parameters(config.n_embd) == sum(
        weight.numel() for weight in block.parameters())


@pytest.fixture
def eight():
    """This process as rank 0 of eight; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield 8
    dist.destroy_process_group()


def kept():
    """The bytes of all numbers in tensors, without integers."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects()
               if issubclass(type(thing), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors
                if tensor.is_leaf and tensor.grad is not None]
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor
             for tensor in tensors)
    storages = [part.untyped_storage() for part in parts
                if part.is_floating_point()]
    return sum({storage._cdata: storage.nbytes()
                for storage in storages}.values())


def test_what_fsdp_keeps(eight):
    """The gradients are whole while it accumulates without reducing.

    What is in no block is whole from the forward to the backward pass.
    """
    before = kept()
    config = std.GPTConfig(64, 512, 4, 4, 64)
    model, x = std.GPT(config), torch.zeros(2, 64, dtype=torch.int64)
    parameters = list(model.parameters())
    assert kept() - before == sum(weight.nbytes for weight in parameters)
    del parameters
    for module in (*model.transformer.h, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for reduces in (True, False, False, True):
        model.set_requires_gradient_sync(reduces)
        loss = model(x, x)
        assert arithmetic.gathered(vars(config)) == 4 * (
            block_parameters(config.n_embd) + sum(
                weight.numel() for weight in model.parameters()
                if not isinstance(weight, DTensor)))
        loss.backward()
        del loss
        if not found:
            optimizer.step()
            optimizer.zero_grad()
            steps = sum(state["step"].nbytes
                        for state in optimizer.state.values())
        found.append(kept() - before - steps)
    assert found[1:] == [arithmetic.state(vars(config), eight, *which) for
                         which in 2 * [[arithmetic.ACCUMULATING]] + [[]]]


def test_the_table_has_these_cases():
    for case in CASES:
        for row in rows(case, formula(*case)):
            assert row in TABLE.read_text(), row


def rows(case, counted):
    """The lines of the table, with both numbers."""
    stage, mesh, microbatches = case
    pairs = zip(counted, formula(*case), strict=True)
    for number, (seen, expected) in enumerate(pairs):
        for name, (calls, size) in seen.items():
            yield (f"| {stage} | {' x '.join(map(str, mesh))} | "
                   f"{microbatches} | {number} | {name} | {calls} | "
                   f"{size:,} | {expected.get(name, (0, 0))[1]:,} |")


def write():
    """Count, and write the table."""
    begin = TABLE.read_text().split("| stage |")[0]
    lines = ["| stage | mesh | A | pipeline stage | collective | calls | "
             "bytes counted | by formula |",
             "|---|---|---:|---:|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(Path(folder) / "data")
        for number, case in enumerate(CASES):
            place = Path(folder) / str(number)
            place.mkdir()
            lines += rows(case, count(*case, data, place))
            print(lines[-1])
    TABLE.write_text(begin + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(write())
