"""The lesson about one fast device: its rows, at a small size."""

import contextlib
import io
import json
import re
import sys
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from backstage import ROOT, dataset
from backstage.errors import UserError
from backstage.flags import DEMO, parse
from backstage.flops import PEAKS, flops_per_token
from notebooks.experiments import one_gpu
from notebooks.experiments.sharding import std
from workshop.notebook import ranks
from workshop.results import plot

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = {"--preset": "tiny", "--minibatch-size": 8,
         "--microbatch-size": 2,
         "--max-steps": one_gpu.ALONE + one_gpu.TURNS}


def flags(name, device=CPU):
    return " ".join(one_gpu.flags_of(name, device, one_gpu.sizes(device)))


def test_each_row_has_one_change_more(data, monkeypatch, gpu):
    gpu()
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    rows, compiled = [flags(name, GPU) for name in one_gpu.STEPS], []
    for row in rows:  # as the stage reads it
        monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *row.split()])
        hp, _ = parse(std.Hyperparameters, std.PRESETS, std.MODELS)
        compiled.append(hp.compile)
    assert compiled == [False] * 3 + [True] * 6
    assert rows[0].endswith("--microbatch-size 4 --max-steps 24 "
                            "--device cuda --no-compile --precision fp32")
    assert rows[0] == rows[1] and "bf16 --compile" in rows[3]
    assert "--microbatch-size 16" in rows[6] and rows[6] == rows[7]
    assert rows[8] == f"{rows[7]} --recompute"
    texts = [one_gpu.edited(*step.edits) for step in one_gpu.STEPS.values()]
    assert texts[5] == texts[6] == one_gpu.edited()  # the script as it is
    assert len(set(texts[:6])) == 4  # bf16 and compile: the text of fp32
    # a CPU compiles in one row alone; it may have no bf16
    assert [name for name in one_gpu.STEPS
            if "--compile" in flags(name)] == ["compile"]
    assert "no TF32" in one_gpu.lacks("tf32", CPU)
    monkeypatch.setattr(one_gpu, "has_bf16", lambda device: False)
    assert "stays in fp32" in one_gpu.lacks("bf16", CPU)
    assert "bf16" not in flags("recompute")


def test_a_scaler_without_unscale_makes_tiny_updates():
    """By the factor that the lesson names, as its cell is run."""
    book = json.loads((ROOT / "notebooks/one_gpu.ipynb").read_text("utf-8"))
    cell, = ("".join(cell["source"]) for cell in book["cells"]
             if cell["id"] == "one_gpu-scaler-cell")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ranks.answer(cell.removeprefix("%%ranks 1"), 1, 60)
    right, wrong = (float(moved) for moved in re.findall(
        r"moved ([\d.e+-]+)", out.getvalue()))
    assert right / wrong == pytest.approx(2**16, rel=0.01)
    right, wrong = (float(norm) for norm in re.findall(
        r"norm ([\d.e+-]+)", out.getvalue()))
    assert wrong / right == pytest.approx(2**16, rel=0.01)


def test_the_mfu_of_the_h200_is_that_of_the_demos_vocabulary():
    notebook = (ROOT / "notebooks/one_gpu.ipynb").read_text("utf-8")
    table = notebook.partition("On an H200 ")[2].partition("Predict")[0]
    config = std.replace(std.MODELS["gpt2"], vocab_size=2048)
    each, rows = flops_per_token(config, 1024), re.findall(
        r"([\d,]+) \| ([\d,]+) \| (\d+)% \|", table)
    assert len(rows) == 3 and "with the demo's vocabulary" in table
    for row in rows:
        speed, ms, percent = (int(cell.replace(",", "")) for cell in row)
        assert speed * ms / 1000 == pytest.approx(64 * 1024, rel=2e-3)
        assert percent == round(100 * speed * each / (PEAKS["H200"][0] * 1e12))


def test_the_limit_is_that_of_the_rows_dataset(
        data, tmp_path, monkeypatch, capsys, gpu):
    gpu()
    own = dataset.vocabulary_size(data)
    for folder, size in ((data, own), (tmp_path, 50257)):
        monkeypatch.setenv("WORKSHOP_DATA", str(folder))
        one_gpu.limit(GPU, tmp_path / "one_gpu.json")
        config = std.replace(std.MODELS["gpt2"], vocab_size=size)
        each = flops_per_token(config, 1024) / 1e6
        assert f"{each:,.1f} MFLOP" in capsys.readouterr().out


def a_row(name, seconds, recorded):
    return {"what": name, "seconds": seconds, "memory": 2**30, "mfu": 0.5,
            "parts": dict.fromkeys(plot.PART_COLOURS, recorded),
            "tokens_per_second": 1e7}


def test_the_bars_are_as_long_as_the_tables_steps(monkeypatch):
    """Also where the profiler made the faster one slower."""
    rows = {name: a_row(name, seconds, recorded)
            for name, seconds, recorded in (
                ("fp32", 2.0, 1.0), ("bf16", 1.0, 3.0), *(
                    (str(number), 1.0, 1.0) for number in range(7)))}
    monkeypatch.setattr(plot, "themed", lambda panel: panel)
    assert len(one_gpu.table({"rows": rows, "hardware": "", "date": ""}
                             ).splitlines()) == 1 + 9 + 1
    figure, ax = plt.subplots(figsize=(6.4, 3.6))
    one_gpu.draw({"rows": rows})(ax)
    ends = [max(bar.get_x() + bar.get_width() for bar in ax.patches
                if bar.get_y() < y < bar.get_y() + 1) for y in range(9)]
    assert ends == pytest.approx([2000, *[1000] * 8])
    plt.close(figure)


def a_run(seconds):
    """One that trained in turns, after steps of which none counts."""
    return SimpleNamespace(rows=[{"seconds": value} for value in (
        *[9.0] * one_gpu.ALONE, *seconds)])


def test_rows_are_compared_step_by_step():
    """So other work slows both down; where it does not, there is no row."""
    slow = [1.0 + (turn > 4) + 3.0 * (turn == 9)
            for turn in range(one_gpu.TURNS)]
    plain, half = a_run(slow), a_run([value / 2 for value in slow])
    assert one_gpu.compare(plain, half) == 0.5
    with pytest.raises(UserError, match="the machine was busy: run it again"):
        one_gpu.compare(a_run([1.0] * one_gpu.TURNS), a_run(slow))


@pytest.mark.whole
def test_the_table_grows(tmp_path, monkeypatch, capsys):
    if not DEMO.exists():
        pytest.skip("fineweb/demo is not built: source activate.sh")
    monkeypatch.setattr(one_gpu, "find_peak", lambda _: (1e11, "planted"))
    file = tmp_path / "one_gpu.json"
    one_gpu.limit(CPU, file)
    monkeypatch.setattr(one_gpu, "find_peak", None)  # it is kept
    later = a_row("recompute", 1.0, 1.0)
    later["parts"]["waiting"] = 0.0
    file.write_text(json.dumps(json.loads(file.read_text()) | {
        "rows": {"recompute": later}}))
    record = one_gpu.add("fp32", CPU, SMALL, file)
    rows = record["rows"]
    assert json.loads(file.read_text()) == record
    assert [*rows] == ["fp32", "recompute"]
    config = std.replace(std.MODELS["tiny"], vocab_size=2048)
    row = rows["fp32"]
    assert row["mfu"] == pytest.approx(
        row["tokens_per_second"] * flops_per_token(config, 32) / 1e11)
    assert row["parts"]["backward"] > 0 and row["parts"]["data"] > 0
    monkeypatch.setattr(one_gpu, "compare", lambda plain, other: (
        len(plain.rows) == len(other.rows) == 24) / 2)
    capsys.readouterr()
    record = one_gpu.add("padded", CPU, SMALL, file)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "vocabulary padded: it starts, and trains in turns with fp32.")
    assert second.startswith("This takes half a minute")
    assert max(map(len, (first, second))) <= 72  # on half a laptop's screen
    padded = record["rows"].pop("padded")
    assert padded["seconds"] == rows["fp32"]["seconds"] / 2
    said = one_gpu.table(record)
    assert len(said.splitlines()) == 4 and f"{rows['fp32']['mfu']:.1%}" in said
    drawn = one_gpu.draw(record)
    assert "recompute" in drawn and "optimizer" in drawn
    assert "currentColor" in drawn and "waiting" not in drawn
