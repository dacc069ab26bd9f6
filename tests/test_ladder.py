"""The ladder: a university project's table, and ours beside it."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import needs

from backstage import ROOT, vocabulary
from backstage.errors import UserError
from workshop.results import plot
from workshop.results import runs as results

SCRIPT = ROOT / "benchmarks" / "ladder.py"


@pytest.fixture(scope="module")
def ladder():
    """The script as a module."""
    sys.path.append(str(SCRIPT.parent))  # it imports from beside it
    spec = importlib.util.spec_from_file_location("ladder", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ladder"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ladder"]
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(autouse=True)
def demo():
    if not (ROOT / "fineweb" / "demo").exists():
        pytest.skip("fineweb/demo is not built: source activate.sh")


def test_the_toy_dataset(ladder, tmp_path):
    ladder.make_dataset(tmp_path)
    train, val = (np.load(tmp_path / f"toy_{name}.npy")
                  for name in ("train_000001", "val_000000"))
    encoding = vocabulary.load(tmp_path)
    assert encoding.n_vocab == 172 and encoding.eot_token == 171
    assert len(train) == 52_600 and len(val) > 5_000
    assert train.dtype == np.uint16 and len(np.unique(train)) > 150
    assert encoding.decode(train[:1000].tolist()).count(" the ") > 1


@pytest.mark.whole
def test_all_rungs_compute_the_same(tmp_path):
    """On real launchers: the losses to 1e-5, and the texts."""
    needs("mpirun")
    output = tmp_path / "ladder.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", "tiny", "--seconds", "0.5",
         "--processes", "2", "--tokens", "20", "--output", output],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    first = rungs["std, 1 thread"]["losses"]
    assert {"mpi, 2 processes", "ddp, 2 processes"} < rungs.keys()
    for rung in rungs.values():
        both = list(zip(rung["losses"], first, strict=False))
        assert len(both) > 1 and rung["plain"] and rung["cached"]
        for loss, expected in both:
            assert loss == pytest.approx(expected, rel=1e-5)
        assert f"| ours: {rung['name']} |" in done.stdout
    assert record["same"] is True and record["distance"] <= 1e-5
    assert f"{len(first)} of 10,250 steps" in done.stdout


def test_losses_that_differ_are_seen(ladder):
    rungs = [ladder.Rung("std", 1, 1, "cpu", losses) for losses in (
        [5.0, 4.0, 3.0], [5.0, 4.0004])]
    assert ladder.distance(rungs[1], rungs[0]) == pytest.approx(1e-4)


def test_the_rungs_of_a_machine_with_gpus(ladder, monkeypatch):
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
        ("std, 1 GPU", 8), ("ddp, 2 GPUs", 4)]
    assert not lacks
    command = " ".join(rungs[-1].command("script.py", "--tokens", 3))
    assert command.endswith(
        "--nproc-per-node 2 -- script.py --tokens 3 --device cuda")


def test_the_table_shows_the_figures_of_the_example(ladder):
    record = json.loads((ROOT / "example-logs" / "ladder.json").read_text())
    assert record["model"] == "ladder" and record["steps"] == 600
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert ladder.table(record) in readme


def test_the_picture_shows_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RUNS", tmp_path)
    shown = plot.themed(lambda ax: plot.ladder(ax, []))
    for text in ("theirs: one CPU", "15,264", "mpi, 2 processes"):
        assert text in shown
    (tmp_path / "ladder.json").write_text("{")
    with pytest.raises(UserError, match=r"run benchmarks/ladder\.py again"):
        results.read_ladder()
