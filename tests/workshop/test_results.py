"""What is read from runs, what is fitted to them, and the picture."""

import csv
import json
import os
import re
import shutil
import sys
from argparse import Namespace
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from conftest import workshop

from backstage import ROOT
from backstage.errors import UserError
from backstage.flops import num_parameters
from workshop.notebook import cells
from workshop.results import plot as panels
from workshop.results import runs as results

EXAMPLES = sorted(path for path in results.EXAMPLES.iterdir()
                  if path.is_dir())
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024,
        "vocab_size": 50257}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder for runs, with one in it."""
    folder = tmp_path / "runs"
    shutil.copytree(results.EXAMPLES / "ddp-2", folder / "mine")
    monkeypatch.setattr(results, "RUNS", folder)
    return folder


def change(folder, **hyperparameters):
    """Write other hyperparameters into a run."""
    file = folder / "hyperparameters.json"
    record = json.loads(file.read_text())
    record["hyperparameters"] |= hyperparameters
    file.write_text(json.dumps(record))


def rewrite(file, **columns):
    """Give the first rows of a metrics.csv other values; all that is left."""
    with open(file, newline="") as old:
        rows = list(csv.DictReader(old))
    for name, values in columns.items():
        rows = [row | {name: value} for row, value in zip(
            rows, values, strict=False)]
    with open(file, "w", newline="") as new:
        writer = csv.DictWriter(new, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_the_examples_train_the_same():
    found, notes = results.find_runs(EXAMPLES)
    assert not notes
    assert [(run.name, run.accumulation) for run in found] == [
        ("std x 1", 4), ("mpi x 2", 2), ("ddp x 1", 4), ("ddp x 2", 2),
        ("ddp x 4", 1), ("lit x 1", 4), ("lit x 2", 2), ("fsdp x 2", 2),
        ("tp x 3", 4), ("3d x 2", 4)]
    for run in found[1:]:
        for row, single in zip(run.rows, found[0].rows, strict=True):
            assert row["loss"] == pytest.approx(single["loss"], rel=1e-5)
    # relative to the same stage on one process, or to the single device
    speed = {run.name: run.tokens_per_second for run in found}
    for runs, one in ((found, "ddp x 1"), (
            [run for run in found if run.name != "ddp x 1"], "std x 1")):
        assert results.efficiency(runs)["ddp"][4] == pytest.approx(
            speed["ddp x 4"] / 4 / speed[one])


def test_the_newest_of_what_trains_the_same_is_shown(runs):
    """By the time of a file, for runs that do not say when they began."""
    shutil.copytree(runs / "mine", runs / "older")
    shutil.copytree(results.EXAMPLES / "std-1", runs / "single")
    shutil.copytree(runs / "mine", runs / "another")
    change(runs / "another", preset="tiny")
    for age, name in enumerate(("mine", "single", "older", "another")):
        file = runs / name / "hyperparameters.json"
        record = json.loads(file.read_text())
        del record["started"]
        file.write_text(json.dumps(record, indent=1))
        os.utime(runs / name / "metrics.csv", (10**9 - age, 10**9 - age))
    found, notes = results.find_runs()
    assert [run.folder.name for run in found] == ["single", "mine"]
    assert len(notes) == 1 and notes[0].startswith("Left out: 1 run")
    change(runs / "another", preset="nano")  # of another shape
    file = runs / "another" / "hyperparameters.json"
    file.write_text(file.read_text().replace('"n_layer": 2', '"n_layer": 5'))
    os.utime(runs / "another" / "metrics.csv", (10**9 - 9, 10**9 - 9))
    assert results.find_runs()[1] == notes


def test_a_copys_time_is_no_order(runs):
    """The runs say when they were started."""
    for day, name in enumerate(("c", "a", "b"), 1):
        shutil.copytree(runs / "mine", runs / name)
        file = runs / name / "hyperparameters.json"
        record = json.loads(file.read_text())
        record["started"] = f"2026-11-0{day}T00:00:00.000+00:00"
        file.write_text(json.dumps(record))
        os.utime(runs / name / "metrics.csv", (10**9 - day, 10**9 - day))
    shutil.rmtree(runs / "mine")
    assert [folder.name for folder in results.list_folders(runs)] == [
        "c", "a", "b"]
    found, _ = results.find_runs()
    assert [run.folder.name for run in found] == ["b"]


def test_another_strategy_is_not_the_newest_run_with_lightning(runs):
    """It has its own row, bar and line, and does not hide the run with DDP."""
    for name in ("copies", "shards"):
        shutil.copytree(results.EXAMPLES / "lit-2", runs / name)
    change(runs / "shards", strategy="fsdp2")
    shutil.copytree(results.EXAMPLES / "std-1", runs / "single")
    found, _ = results.find_runs()
    assert [run.name for run in found] == [
        "std x 1", "ddp x 2", "lit x 2", "lit fsdp2 x 2"]
    assert list(results.efficiency(found)) == [
        "std", "ddp", "lit", "lit fsdp2"]


def test_the_table_has_the_memory(runs):
    """The peak, wherever it was."""
    file = runs / "mine" / "metrics.csv"
    rows = rewrite(file, memory=[2**30, 5 * 2**29, 2**31])
    assert len(rows) == 3
    header, row = ([cell.text for cell in line] for line in ElementTree
                   .fromstring(re.search(r"<table.*?</table>",
                               cells.runs()._repr_html_(), re.S)[0])
                   .iter("tr"))
    assert row[header.index("GiB on rank 0")] == "2.5"
    rewrite(file, memory=["", "", ""])  # of an older run
    assert "<td>?</td>" in cells.runs()._repr_html_()


def test_what_cannot_be_read_is_said(runs, tmp_path):
    (runs / "empty").mkdir()
    shutil.copytree(runs / "mine", runs / "begun")
    (runs / "begun" / "metrics.csv").write_text("step,loss\n")
    shutil.copytree(runs / "mine", runs / "damaged")
    (runs / "damaged" / "hyperparameters.json").write_text("{")
    found, notes = results.find_runs()
    assert [run.folder.name for run in found] == ["mine"]
    text = "\n".join(notes)
    assert "empty: no hyperparameters.json" in text
    assert "begun: no step has finished yet" in text
    assert "damaged/hyperparameters.json is corrupt (" in text
    with pytest.raises(UserError, match="no hyperparameters"):
        results.find_runs([runs / "empty"])


NUM_BYTES = 4 * num_parameters(GPT2)
LADDER = [(1, 32, 1), (2, 16, 1), (4, 8, 1), (8, 4, 1)]  # n, A, nodes


@pytest.mark.parametrize(("between", "points", "odd", "others"), [
    (None, LADDER, (8, 1, 1), [(16, 2, 1)]),
    # it bends at the edge of a node
    (1 / 5e9, [*LADDER[:3], (8, 4, 2), (16, 2, 4)], (8, 1, 2),
     [(4, 8, 1), (8, 4, 2), (32, 1, 8)])])
def test_the_model_finds_the_times_it_was_made_of(
        between, points, odd, others):
    made = results.Model(0.03, 0.004, 1 / 50e9, between, NUM_BYTES)
    times = {point: made.seconds(*point) for point in [*points, odd]}
    fitted = results.fit(times, NUM_BYTES)
    assert fitted.told_apart
    for part in ("microbatch", "optimizer", "per_byte", "per_byte_between"):
        assert getattr(fitted, part) == pytest.approx(getattr(made, part))

    # with one minibatch size: the step's time, but not its parts
    times.pop(odd)
    fitted = results.fit(times, NUM_BYTES)
    assert not fitted.told_apart
    for point in others:
        assert fitted.seconds(*point) == pytest.approx(made.seconds(*point))
    assert results.fit({point: times[point] for point in points[:2]},
                       NUM_BYTES) is None


def test_a_model_without_a_microbatchs_time_is_not_drawn():
    """On two cores four processes take as long for a quarter each."""
    both = [results.read_run(results.EXAMPLES / f"ddp-{n}") for n in (1, 2, 4)]
    for drawn, times in ((True, (4, 2, 1)), (False, (1, 1.5, 1.9))):
        for run, seconds in zip(both, times, strict=True):
            run.seconds = seconds
        figure, ax = plt.subplots()
        panels.model(ax, both)
        assert bool(ax.patches) == drawn, results.fit_kind(both, "ddp")
        assert drawn or "do not fit the model" in ax.texts[0].get_text()
        plt.close(figure)


def test_the_model_of_nodes_of_one_gpu_each():
    made = results.Model(0.03, 0.004, 1 / 50e9, 1 / 5e9, NUM_BYTES)
    fitted = results.fit({(n, A, n): made.seconds(n, A, n) for n, A in (
        (1, 16), (2, 8), (4, 4), (4, 1))}, NUM_BYTES)
    assert fitted.told_apart and fitted.per_byte is None
    assert 1 / fitted.per_byte_between == pytest.approx(5e9)


def test_gpu_metrics_of_each_vendor(tmp_path):
    (tmp_path / "gpus-node1.txt").write_text("""\
#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %
 20260101   10:00:00      0    250     50     48     97     40
 20260101   10:00:00      1     60     40      -      -      -
 20260101   10:00:10      0    251     50     48     99     41
 20260101   10:00:10      1    200     41      -     50      9
""")
    (tmp_path / "gpus-node2.txt").write_text("""\
Timestamp, DeviceId, GPU Utilization (%), GPU Power (W)
10:00:00.000,    0, 88.50, 400.10
10:00:00.000,    1, N/A, 400.10
10:00:10.000,    0, 90
""")
    (tmp_path / "gpus-node3.txt").write_text("""\
timestamp,gpu,xcp,power_usage,gfx,gfx_clk,mem,mem_clk
1780000000,0,0,251,93,1900,40,1900
1780000000,1,0,N/A,N/A,1900,40,1900
timestamp,gpu,xcp,power_usage,gfx,gfx_clk,mem,mem_clk
1780000010,0,0,251,95,1900,40,1900
""")
    assert results.utilisation(tmp_path) == {
        "node1 GPU 0": [97, 99], "node1 GPU 1": [50],
        "node2 GPU 0": [88.5, 90], "node3 GPU 0": [93, 95]}


def draw(output, folders):
    panels.main(Namespace(output=output, folders=folders))


@pytest.mark.whole
def test_plot_makes_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw("all.png", EXAMPLES)
    assert "all.png: std x 1, mpi x 2, ddp x 1" in capsys.readouterr().out
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")

    # one run is enough; the MFU is shown if it is known
    shutil.copytree(results.EXAMPLES / "std-1", tmp_path / "run")
    rewrite(tmp_path / "run" / "metrics.csv", mfu=["0.415"] * 20)
    draw("one.svg", ["run"])
    svg = (tmp_path / "one.svg").read_text()
    for text in ("MFU 42%", "there are only runs on one process",
                 "needs one stage on three numbers", "no GPU metrics"):
        assert text in svg

    def panel(name):
        monkeypatch.setattr(sys, "argv", [
            "", name, str(results.EXAMPLES / "ddp-2"), f"{name}.svg"])
        panels.write_panel()
        with pytest.raises(FileExistsError):  # which is said in a line
            panels.write_panel()
        return (tmp_path / f"{name}.svg").read_text()

    svg = panel("loss")
    title, about, *_ = ElementTree.fromstring(svg)
    assert title.text == "loss" and "ddp x 2: from 7.673 to" in about.text
    assert "on top of" not in svg
    svg = panel("scaling")
    assert "there is no run on one process" in svg
    assert "only runs on one" not in svg


def test_runs_of_other_lengths_part_after_the_warm_up():
    """Their learning rates decay at another pace."""
    both = [results.read_run(results.EXAMPLES / name)
            for name in ("std-1", "ddp-2")]
    title = "loss: on top of each other"
    assert title in panels.themed(lambda ax: panels.loss(ax, both))
    both[0].hyperparameters["max_steps"] += 1
    assert title not in panels.themed(lambda ax: panels.loss(ax, both))


@pytest.mark.whole
def test_plot_says_what_is_wrong_in_a_line(tmp_path, monkeypatch):
    """matplotlib would write folder.png for "folder"."""
    said = workshop(ROOT, "plot", "nowhere", status=1)
    assert "nowhere: no hyperparameters.json" in said
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, message in (
            ("folder", "folder: unknown format; fix: end the name"),
            ("all.xyz", "all.xyz: unknown format; fix: end the name"),
            ("not/there.png", "not/there.png could not be written")):
        with pytest.raises(UserError, match=message):
            draw(name, EXAMPLES)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_plot_replaces_only_what_it_has_made(tmp_path, kind):
    mine, link = tmp_path / f"mine.{kind}", tmp_path / f"link.{kind}"
    mine.write_text("MINE")
    link.symlink_to(mine)
    os.mkfifo(tmp_path / f"fifo.{kind}")
    for file in mine, link, tmp_path / f"fifo.{kind}":
        with pytest.raises(UserError, match="choose another file with -o"):
            draw(file, EXAMPLES[:1])
    assert mine.read_text() == "MINE"
    for _ in range(2):
        draw(tmp_path / f"ours.{kind}", EXAMPLES[:1])


@pytest.mark.whole
def test_plot_needs_no_display_and_no_backend(tmp_path):
    workshop(ROOT, "plot", EXAMPLES[0], "-o", tmp_path / "a.png",
             MPLBACKEND="module://no.no", DISPLAY="")
