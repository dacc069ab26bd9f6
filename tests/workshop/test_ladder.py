"""The ladder: a university project's table, and ours beside it."""

import json
import re
import sys
from importlib.util import find_spec

import ladder
import numpy as np
import pytest
import torch
import trained
from conftest import needs, python
from torch.nn import functional as F

from backstage import ROOT, dataset
from backstage.errors import UserError
from workshop.results import plot
from workshop.results import runs as results

import combine


@pytest.fixture(autouse=True)
def demo():
    if not (ROOT / "fineweb" / "demo").exists():
        pytest.skip("fineweb/demo is not built: source activate.sh")


def test_the_toy_dataset(tmp_path):
    ladder.make_dataset(tmp_path)
    train, val = (np.load(tmp_path / f"toy_{name}.npy")
                  for name in ("train_000001", "val_000000"))
    encoding = dataset.load_vocabulary(tmp_path)
    assert encoding.n_vocab == 172 and encoding.eot_token == 171
    assert len(train) == 52_600 and len(val) > 5_000
    assert train.dtype == np.uint16 and len(np.unique(train)) > 150
    assert encoding.decode(train[:1000].tolist()).count(" the ") > 1


@pytest.mark.whole
def test_all_rungs_compute_the_same(tmp_path, monkeypatch, capsys):
    """On real launchers: the losses to 1e-5, and the texts.

    What mpi and kernels do alone, the rung that has both does, too.
    """
    needs("mpirun")
    found, lacks = ladder.find_rungs((2,))
    rungs = {rung.name: rung for rung in found}
    assert {"std, 1 thread", "mpi, 2 processes", "ddp, 2 processes"} < {*rungs}
    tried = ["std, 1 thread", "ddp, 2 processes"]
    if find_spec("triton"):
        assert "kernels, 1 process, interpreted" in rungs
        tried.append("mpi with kernels, 2 processes, interpreted")
    monkeypatch.setattr(ladder, "find_rungs", lambda processes: (
        [rungs[name] for name in tried], lacks))
    output = tmp_path / "ladder.json"
    monkeypatch.setattr(sys, "argv", [
        "ladder.py", "--model", "tiny", "--seconds", "0.5", "--tokens", "2",
        "--output", str(output)])
    ladder.main()
    said, record = capsys.readouterr().out, json.loads(output.read_text())
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    assert {*tried} == {*rungs}
    first = rungs["std, 1 thread"]["losses"]
    for rung in rungs.values():
        short = "kernels" in rung["stage"]  # one step, of two samples
        both = list(zip(rung["losses"], first, strict=False))
        assert len(both) > (not short) and rung["samples"] == 8 - 6 * short
        assert None not in (rung["plain"], rung["cached"])
        for loss, expected in both[:0 if short else None]:
            assert loss == pytest.approx(expected, rel=1e-5)
        assert f"| ours: {rung['name']} |" in said
    assert record["same"] is True and record["distance"] <= 1e-5
    assert f"{len(first)} of 10,250 steps" in said


def test_what_differs_is_seen():
    rungs = [ladder.Rung("std", 1, 1, "cpu", 8, *numbers) for numbers in (
        ([5.0, 4.0, 3.0], [2.0, 1.0]), ([5.0, 4.0004], [2.0]),
        ([5.0], [2.002]))]
    assert ladder.distance(rungs[1], rungs[0]) == pytest.approx(1e-4)
    assert ladder.distance(rungs[2], rungs[0]) == pytest.approx(1e-3)
    texts = ["a cat", "a dog", "", "b"]
    assert ladder.is_same(["a c", "a d", "", ""], texts)
    assert not ladder.is_same(["a c", "a c", "", ""], texts)
    assert not ladder.is_same(texts[:3], texts)


@pytest.mark.whole
def test_the_kernels_write_the_texts(single, monkeypatch):
    needs("triton")
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        F.scaled_dot_product_attention)
    monkeypatch.setattr(trained, "std", trained.std)
    models = []

    def write(*_, **__):
        file = trained.find_checkpoint(single.folder)
        models.append(trained.load_trained(file)[1])

    monkeypatch.setattr(ladder.runpy, "run_path", write)
    ladder.write_with_kernels()
    script = sys.modules[type(models[0]).__module__]
    assert script.__spec__.origin == str(ladder.KERNELS)


def test_stages_that_change_the_same_lines(tmp_path):
    assert combine.combine("mpi", "kernels").splitlines()[1:] == (
        combine.combine("kernels", "mpi").replace(
            "kernels-mpi", "mpi-kernels").splitlines()[1:])
    with pytest.raises(UserError, match="both change line"):
        combine.combine("mpi", "ddp")
    with pytest.raises(UserError, match="there is no solutions/train_gpt2_x"):
        combine.combine("mpi", "x")
    file = tmp_path / "mine.py"
    for said in ("mine.py: std with the changes", "error: .*exists already"):
        end = python(ROOT, "benchmarks/combine.py", "mpi", "kernels", file)
        assert re.search(said, end.stdout + end.stderr)
    assert file.read_text() == combine.combine("mpi", "kernels")


def test_the_rungs_of_a_machine_with_gpus(monkeypatch):
    """As they would be: there is none here."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda: torch.device("cuda"))
    monkeypatch.setattr(ladder, "count_cores", lambda: 8)
    monkeypatch.setattr(ladder.shutil, "which", lambda name: name)
    rungs, lacks = ladder.find_rungs((2, 4))
    assert [(rung.name, rung.threads) for rung in rungs] == [
        ("std, 1 thread", 1), ("std, 8 threads", 8),
        ("mpi, 2 processes", 4), ("mpi, 4 processes", 2),
        ("ddp, 2 processes", 4), ("ddp, 4 processes", 2),
        ("std, 1 GPU", 8), ("kernels, 1 GPU", 8),
        ("mpi with kernels, 2 GPUs", 4), ("ddp, 2 GPUs", 4)]
    assert not lacks


def test_the_table_shows_the_figures_of_the_example():
    record = json.loads((ROOT / "example-logs" / "ladder.json").read_text())
    assert record["model"] == "ladder" and record["steps"] == 600
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert ladder.table(record) in readme


def test_rungs_of_another_time_or_machine(tmp_path, monkeypatch):
    record = json.loads((ROOT / "example-logs" / "ladder.json").read_text())
    for k, rung in enumerate(record["rungs"]):
        rung |= {"norms": [1.0], "load": float(k), "date": "2026-01-01"}
    said = ladder.table(record)
    assert "Losses and norms of the rungs differ" in said
    for k, rung in enumerate(record["rungs"]):
        assert f"{rung['name']}: 2026-01-01, load average {k}.0" in said
    file = tmp_path / "ladder.json"
    for other in ({"hardware": "an abacus"}, {"model": "tiny"}):
        file.write_text(json.dumps(
            record | {"hardware": ladder.hardware()} | other))
        monkeypatch.setattr(sys, "argv", [
            "ladder.py", "--only-kernels", "--output", str(file)])
        with pytest.raises(UserError, match=next(iter(other.values()))):
            ladder.main()


def test_the_picture_shows_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RUNS", tmp_path)
    shown = plot.themed(lambda ax: plot.ladder(ax, []))
    for text in ("theirs: one CPU", "15,264", "mpi, 2 processes"):
        assert text in shown
