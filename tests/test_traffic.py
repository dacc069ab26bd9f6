"""What a step sends and keeps: counted, and equal to the lesson's formulas.

    python tests/test_traffic.py

writes the table in workshop/lessons/traffic.md from what it counts.
"""

import json
import math
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import train_gpt2_std as std
from conftest import edit
from stages import make_dataset, sent_by, steps_seen, train

from backstage import ROOT
from backstage.flops import (
    block_parameters,
    num_parameters,
    padded_vocab_size,
)
from workshop import arithmetic, processes
from workshop.arithmetic import of_step
from workshop.stages import STAGES

TABLE = ROOT / "workshop" / "lessons" / "traffic.md"
T = 32
CONFIG = asdict(replace(std.MODELS["tiny"], block_size=T, vocab_size=257))
CASES = [  # stage, mesh, microbatches of a rank in a step
    ("ddp", (1, 2, 1), 2), ("ddp", (1, 4, 1), 1),
    ("fsdp", (1, 2, 1), 2), ("fsdp", (1, 4, 1), 1),
    ("tp", (1, 1, 2), 2), ("tp", (1, 2, 2), 1),
    ("3d", (4, 1, 1), 4), ("3d", (4, 1, 1), 8), ("3d", (2, 2, 1), 4),
    ("3d", (2, 1, 2), 4), ("3d", (2, 2, 2), 4)]


ZERO = """
import json
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from workshop.notebook.sharding import Traffic, std

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
found = {}
for each in (False, True):  # reduce once a step, or for each microbatch
    model = std.GPT(std.GPTConfig(32, 512, 4, 4, 32))
    P = sum(weight.numel() for weight in model.parameters())
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    with Traffic() as traffic:
        for last in (False, True):
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last or each)
            model(*torch.randint(512, (2, 2, 32))).backward()
            if not last:
                kept = [sum(x.nbytes for x in (
                    getattr(x, "_local_tensor", x) for x in tensors
                    if x is not None)) for tensors in (
                        [*model.parameters()],
                        [weight.grad for weight in model.parameters()])]
    found[each] = [4 * P, *kept, traffic.bytes["reduce_scatter_base"],
                   traffic.bytes["allgather_base"]]
if dist.get_rank() == 0:
    print(json.dumps([found[False], found[True]]))
dist.destroy_process_group()
"""


def test_fsdp_that_reduces_once_a_step_is_zero_1(tmp_path):
    """With two microbatches: what is kept between them, what is sent.

    Reduced for each, it is ZeRO-2, which sends (A + 1) / 2 times as much: a
    reduce-scatter for each microbatch, and one all-gather of the ranks' parts.
    """
    script = tmp_path / "zero.py"
    script.write_text(ZERO)
    first, *_ = processes.launch(script, world_size=2)
    once, each = json.loads(first.out.splitlines()[-1])
    whole = once[0]
    assert once[1:] == [whole, whole, whole, whole // 2]
    assert each[3:] == [2 * whole, whole // 2]


def watch(stage, mesh, microbatches, data, folder, *flags, script=None):
    """What `steps_seen` sees of each rank."""
    seen = folder / "seen"
    seen.mkdir()
    result = train(stage, folder / "run", "--max-steps", 5,
                   "--eval-minibatches", 1, "--microbatch-size",
                   8 // (mesh[1] * microbatches), *flags, data=data,
                   mesh=mesh, script=script, log=seen, probes=[steps_seen])
    assert result.status == 0, result.err
    return [torch.load(seen / f"{rank}.pt") for rank in range(math.prod(mesh))]


def formula(stage, mesh, microbatches):
    return of_step(STAGES[stage].split, CONFIG, mesh, microbatches,
                   8 // (mesh[1] * microbatches), T)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_has_what_was_counted(case):
    assert set(rows(case, formula(*case))) <= set(
        TABLE.read_text().splitlines())


@pytest.mark.whole
@pytest.mark.parametrize("stage, flags, changes", [
    ("lit", ("--strategy", "fsdp2", "--recompute"), ()),
    ("fsdp", (), [("            raw_model.set_requires_gradient_sync("
                   "is_last_microbatch)\n", "")])],
    ids=["lit-fsdp2", "fsdp-no-sync"])
def test_what_the_lessons_say_of_others(
        stage, flags, changes, data, tmp_path):
    """fsdp2 sends with every microbatch, as the stage fsdp would if it did
    not wait for the last one. Each rank keeps a half of everything."""
    script = tmp_path / "train_gpt2.py"
    script.write_text(edit(STAGES[stage].solution.read_text(), *changes))
    A, n, L = 2, 2, CONFIG["n_layer"]  # microbatches, ranks, blocks
    ranks = watch(stage, (1, n, 1), A, data, tmp_path, *flags, script=script)
    counted, = sent_by(ranks, (1, n, 1))
    P = num_parameters(std.GPTConfig(**CONFIG))
    P_b = L * block_parameters(CONFIG["n_embd"])  # gathered twice
    assert counted == {
        "all_reduce": (1, 4 * (12 * L + 4)),  # the norm of each parameter
        "allgather_base": (A * (2 * L + 1), 4 * A * (P_b + P) // n),
        "allreduce": (1, 8),  # the loss, and whether to stop
        "reduce_scatter_base": (A * (L + 1), 4 * A * P)}
    for rank in ranks:
        assert rank["kept"] == [4 * [P // n]] * 5


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
            lines += rows(case, sent_by(watch(*case, data, place), case[1]))
            print(lines[-1])
    TABLE.write_text(begin + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(write())
