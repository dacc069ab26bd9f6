"""What a step sends and keeps: counted, and equal to the lesson's formulas.

    python tests/stages/test_traffic.py

writes the table in workshop/lessons/traffic.md from what it counts.
"""

import math
import re
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import train_gpt2_std as std
from stages import StepsRecord, make_dataset, sent_by, steps_seen, train

from backstage import ROOT
from backstage.flops import num_parameters, padded_vocab_size
from slides.text import cells
from workshop.results import arithmetic
from workshop.results.arithmetic import block_parameters, of_step
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
LESSONS = {  # the tables in others: (split, mesh, A, B), the rows' collectives
    "diff_fsdp": ("parameters", (1, 2, 1), 2, 2, {
        "DDP": "reduce_scatter_base", "FSDP": "allgather_base",
        "": "reduce_scatter_base"}),
    "diff_lit": ("parameters", (1, 2, 1), 2, 2, {
        "`ddp`": "reduce_scatter_base", "`fsdp2`": "allgather_base",
        "": "reduce_scatter_base"}),
    "diff_3d": ("layers", (2, 2, 2), 4, 1, {
        "pipeline": "send", "tensor parallel": "all_reduce",
        "FSDP": "allgather_base", "": "reduce_scatter_base"}),
}


def watch(stage, mesh, microbatches, data, folder, *flags):
    """What `steps_seen` sees of each rank."""
    seen = folder / "seen"
    seen.mkdir()
    train(stage, folder / "run", "--max-steps", 5, "--eval-minibatches", 1,
          "--microbatch-size", 8 // (mesh[1] * microbatches), *flags,
          data=data, mesh=mesh, log=seen, probes=[steps_seen],
          record=StepsRecord)
    return [StepsRecord.read_from(seen, rank)
            for rank in range(math.prod(mesh))]


def formula(stage, mesh, microbatches):
    return of_step(STAGES[stage].split, CONFIG, mesh, microbatches,
                   8 // (mesh[1] * microbatches), T)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_has_what_was_counted(case):
    assert set(rows(case, formula(*case))) <= set(
        TABLE.read_text().splitlines())


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_byte_tables_name_their_model(lesson):
    """Of each vocabulary in their heads."""
    split, mesh, A, B, names = LESSONS[lesson]
    head, table = re.search(r"^(\| .*V = .*)\n\|[-:| ]+\n((?:\|.*\n)+)",
                            "\n".join(cells(lesson)), re.M).groups()
    sizes = [int(size.replace(",", "")) for size in
             re.findall(r"V = ([\d,]+)", head)]
    assert 2048 in sizes  # the demo dataset's, which attendees have
    for row in table.splitlines():
        name, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        if name not in names:
            continue
        found = [int(cell.split()[-1].replace(",", ""))
                 for cell in row.strip("|").split("|")[-len(sizes):]]
        times = A if (lesson, name) == ("diff_lit", "") else 1  # each reduces
        assert found == [times * of_step(
            split, CONFIG | {"vocab_size": size}, mesh, A, B, 32)[0][
                names[name]][1] for size in sizes], row


@pytest.mark.whole
def test_what_the_lesson_says_of_fsdp2(data, tmp_path):
    """It sends with every microbatch. Each rank keeps a half of everything."""
    A, n, L = 2, 2, CONFIG["n_layer"]  # microbatches, ranks, blocks
    ranks = watch("lit", (1, n, 1), A, data, tmp_path, "--strategy", "fsdp2",
                  "--recompute")
    counted, = sent_by(ranks, (1, n, 1))
    P = num_parameters(std.GPTConfig(**CONFIG))
    P_b = L * block_parameters(CONFIG["n_embd"])  # gathered twice
    assert counted == {
        "all_reduce": (1, 4 * (12 * L + 4)),  # the norm of each parameter
        "allgather_base": (A * (2 * L + 1), 4 * A * (P_b + P) // n),
        "allreduce": (1, 8),  # the loss, and whether to stop
        "reduce_scatter_base": (A * (L + 1), 4 * A * P)}
    for rank in ranks:
        assert rank.kept == [4 * [P // n]] * 5


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
