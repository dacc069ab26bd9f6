"""benchmarks/run.py: what it compares is the same, and it says what it saw."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from backstage import ROOT
from backstage.errors import UserError

sys.path.append(str(ROOT / "solutions"))
sys.path.append(str(ROOT / "benchmarks"))
import speed
import turns


def run(output, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", "--device", "cpu",
         "--quick", "--rounds", "1", "--output", output, *arguments],
        capture_output=True, text=True, timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.whole
def test_a_table_and_json_come_out_and_all_train_the_same(tmp_path):
    end = run(tmp_path / "b.json")
    assert end.returncode == 0, end.stderr
    record = json.loads((tmp_path / "b.json").read_text())
    sides = record["speed"]["tiny"]
    others = ["transformers, fp32"] * bool(
        importlib.util.find_spec("transformers"))
    assert list(sides) == ["std, fp32", "ddp, fp32", "lit, fp32",
                           "nanoGPT, fp32", *others, "matmul, fp32"]
    assert sides.pop("matmul, fp32") > 1e9
    losses = sides["std, fp32"]["losses"]
    assert losses[5] < losses[0]  # there was something to learn
    for name in ("ddp, fp32", "lit, fp32", "nanoGPT, fp32"):
        assert sides[name]["losses"] == pytest.approx(losses, rel=1e-5)
    for name in others:  # its vocabulary is not padded
        assert sides[name]["losses"][0] == pytest.approx(losses[0], rel=1e-3)
    for name, row in sides.items():
        assert 0 < row["least"] <= row["median"] <= row["most"]
        assert row["memory"] > 50 * 2**20 and 0 < row["of_matmul"] < 1
        line = next(line for line in end.stdout.splitlines()
                    if line.startswith(name))
        assert f"{row['median']:,.0f}" in line
        assert f"{row['ratio']:.2f}" in line
        assert (" s" in line) == ("first_step" in row) == (
            name[:3] in ("std", "ddp", "lit"))


def test_a_side_that_trains_otherwise_is_seen():
    def sides(name, losses):
        return {"std, fp32": [{"losses": (5.0, 4.0)}],
                name: [{"losses": losses}]}

    speed.check(sides("nanoGPT, fp32", (5.0001, 4.0001)))
    speed.check(sides("nanoGPT, bf16", (5.01, 3.0)))
    speed.check(sides(speed.BASE, (5.001, 3.0)))  # it has its own optimizer
    for name, losses in (("nanoGPT, fp32", (5.0, 4.01)),
                         ("lit, fp32", (5.01, 4.0)),
                         ("nanoGPT, bf16", (5.1, 4.0)),
                         (speed.BASE, (5.01, 4.0))):
        with pytest.raises(UserError, match="do not train the same"):
            speed.check(sides(name, losses))


def test_ratios_are_those_of_the_turns():
    """A turn in which the machine was slow counts like any other."""
    row = turns.summary([2, 20, 6], [1, 10, 2])
    assert row == {"median": 6, "least": 2, "most": 20, "ratio": 2}
    order = []
    found = turns.take_turns({
        "a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "a", "b"] and found == {
        "a": [None] * 2, "b": [None] * 2}


@pytest.mark.whole
def test_a_side_that_fails_is_shown():
    with pytest.raises(UserError, match="--no-such"):
        turns.train("nanogpt", "--no-such", "flag")
    end = run("nowhere.json", "nonsense")
    assert end.returncode == 1 and end.stderr.startswith("error: ")
