"""What a step sends: counted in real runs, equal to the lesson's formulas.

    python tests/test_traffic.py

writes the table in workshop/lessons/traffic.md from what it counts.
"""

import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from stages import CollectivesSeen, make_dataset, train
from test_std import std

from backstage import ROOT
from workshop.notebook import decisions
from workshop.results.traffic import of_step
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
    """What each stage of the pipeline sends, as `of_step` says it.

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


def arithmetic(stage, mesh, microbatches):
    return of_step(STAGES[stage].divided, CONFIG, mesh, microbatches,
                   8 // (mesh[1] * microbatches), T)


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(
    map(str, case)))
def test_what_a_step_sends(case, data, tmp_path):
    counted = count(*case, data, tmp_path)
    assert counted == arithmetic(*case)
    assert set(rows(case, counted)) <= set(TABLE.read_text().splitlines())


def test_the_arithmetic_is_of_the_scripts_models():
    for preset, config in (("gpt2", decisions.GPT2), ("gpt2-xl",
                                                      decisions.XL)):
        assert config == asdict(std.MODELS[preset])


def test_the_table_has_these_cases():
    for case in CASES:
        for row in rows(case, arithmetic(*case)):
            assert row in TABLE.read_text(), row


def rows(case, counted):
    """The lines of the table, with both numbers."""
    stage, mesh, microbatches = case
    pairs = zip(counted, arithmetic(*case), strict=True)
    for number, (seen, expected) in enumerate(pairs):
        for name, (calls, size) in seen.items():
            yield (f"| {stage} | {' x '.join(map(str, mesh))} | "
                   f"{microbatches} | {number} | {name} | {calls} | "
                   f"{size:,} | {expected.get(name, (0, 0))[1]:,} |")


def write():
    """Count, and write the table."""
    lines = TABLE.read_text().split("\n| stage |")[0].splitlines()
    lines += ["| stage | mesh | A | stage of the pipeline | collective | "
              "calls | bytes counted | by formula |",
              "|---|---|---:|---:|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(Path(folder) / "data")
        for number, case in enumerate(CASES):
            place = Path(folder) / str(number)
            place.mkdir()
            lines += rows(case, count(*case, data, place))
            print(lines[-1])
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(write())
