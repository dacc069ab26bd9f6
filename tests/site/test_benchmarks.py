"""benchmarks/run.py: what it compares is the same, and it says what it saw."""

import json
import math
import os
import subprocess
import sys
import time

import first_gpu
import first_run
import kernels
import matplotlib
import pytest
import run as benchmark
import speed
import torch
from conftest import needs, program

from backstage import ROOT
from backstage.errors import UserError
from rankcheck.engine.ranks import launch

import turns

Item = first_gpu.Item
sides_of = speed.sides_of


@pytest.mark.whole
def test_a_table_and_json_come_out_and_all_train_the_same(
        tmp_path, monkeypatch, capsys):
    """One of the course's scripts beside another loop; nanoGPT's is below."""
    needs("transformers")
    monkeypatch.setattr(speed, "sides_of", lambda *asked: {
        name: side for name, side in sides_of(*asked).items()
        if name in ("std, fp32", speed.BASE)})
    monkeypatch.setattr(sys, "argv", [
        "run.py", "--device", "cpu", "--quick", "--rounds", "1", "--output",
        str(tmp_path / "b.json")])
    benchmark.main()
    said = capsys.readouterr().out.splitlines()
    record = json.loads((tmp_path / "b.json").read_text())
    sides = record["speed"]["tiny"]
    assert list(sides) == ["std, fp32", speed.BASE, "matmul, fp32"]
    assert sides.pop("matmul, fp32") > 1e9
    losses = sides["std, fp32"]["losses"]
    assert losses[5] < losses[0]  # there was something to learn
    assert sides[speed.BASE]["losses"][0] == pytest.approx(
        losses[0], rel=1e-3)  # its vocabulary is not padded
    for name, row in sides.items():
        assert 0 < row["least"] <= row["median"] <= row["most"]
        assert row["memory"] > 50 * 2**20 and row["of_matmul"] > 0
        line = next(line for line in said if line.startswith(name))
        assert f"{row['median']:,.0f}" in line
        assert f"{row['ratio']:.2f}" in line


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


@pytest.mark.parametrize(("bf16", "precision"), [
    (True, "bf16"), (False, "fp32")])
def test_a_gpu_that_emulates_bf16_trains_without(
        monkeypatch, bf16, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: bf16 or
                        including_emulation)
    sides = speed.sides_of("nano", torch.device("cuda"), "data")
    for name in ("std", "ddp", "lit", "nanoGPT"):
        _, flags, _ = sides[f"{name}, {precision}"]
        assert flags[flags.index("--precision") + 1] == precision


def test_another_side_begins_each_turn():
    order = []
    found = turns.take_turns({name: lambda name=name: order.append(name)
                              or len(order) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


@pytest.mark.whole
def test_a_stage_computes_attention_as_it_was_asked_to(tmp_path):
    script = program(tmp_path / "script.py", """\
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled
print(cudnn_sdp_enabled(), flash_sdp_enabled())
""")
    end = subprocess.run(
        [sys.executable, turns.SIDE, script], text=True, capture_output=True,
        env=os.environ | {"BENCHMARK_ATTENTION": "CUDNN_ATTENTION"})
    assert end.stdout.startswith("True False\n"), end.stderr


def test_a_side_that_fails_is_shown():
    with pytest.raises(UserError, match="failed:\nwhy"):
        turns.follow([sys.executable, "-c", "raise SystemExit('why')"], 1,
                     None, None)


def test_each_kernel_is_timed_alone(tmp_path, monkeypatch, capsys):
    needs("triton")
    x = torch.ones(3, requires_grad=True)
    assert min(kernels.seconds(torch.sin, [x], 2)) > 0
    assert x.grad is None  # the backward pass has ended before it
    file = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--output", str(file)])
    file.write_text("those of before")
    kernels.main()
    record, said = json.loads(file.read_text()), capsys.readouterr().out
    kept, = tmp_path.glob("kernels.*.json")
    assert kept.read_text() == "those of before" and str(kept) in said
    assert record["torch"] == torch.__version__ and record["triton"]
    assert len(record["milliseconds"]) == 8
    for name, row in record["milliseconds"].items():
        assert f"{name:28}{row['ours']:10.3f}{row['PyTorch']:10.3f}" in said
        assert (row["of copy"] is None) == name.startswith("attention")


# ------------------------------------------------- what one GPU can prove


@pytest.mark.whole
def test_without_a_gpu_it_goes_as_far_as_a_cpu(
        tmp_path, monkeypatch, capsys):
    folder, names = tmp_path / "run", [  # one of each kind
        "both devices", "kernels", "3d, resumed by std", "SIGKILL", "why",
        "std", "nanoGPT", "std, eager", "gpt2-xl, fsdp", "one_gpu"]
    monkeypatch.setattr(sys, "argv", [
        "first_gpu.py", "--device", "cpu", "--seconds", "1500", "--output",
        str(folder), *names])
    first_gpu.main()
    said = capsys.readouterr().out
    items = json.loads((folder / "first_gpu.json").read_text())["items"]
    assert list(items) == names
    left_out = {name for name, item in items.items()
                if item["status"] == "left out"}
    assert left_out == {"both devices", "kernels", "std, eager", "one_gpu"}
    for name, item in items.items():
        assert item["status"] == ("left out" if name in left_out else "ok")
        assert f"\n{item['status']:8}  {name}: " in said
    resumed = items["3d, resumed by std"]["found"]["std resumed"]
    assert items["nanoGPT"]["found"]["nanoGPT"]["losses"] == pytest.approx(
        resumed["losses"], rel=1e-4)
    assert items["gpt2-xl, fsdp"]["found"]["gpt2-xl, fsdp"]["memory"] > 2**26
    assert len((folder / "metrics.csv").read_text().splitlines()) == 13
    assert [*folder.glob("profile/*-trace/rank0.json.gz")]
    assert "--- SIGKILL" in (folder / "logs.txt").read_text()


def test_an_unknown_item_is_told_those_that_there_are(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", "gpt2"])
    with pytest.raises(UserError, match="nanoGPT ddp fsdp 'std, eager'"):
        first_gpu.main()


@pytest.fixture
def bench(tmp_path):
    flags = first_gpu.Flags(device="cpu", output=tmp_path / "output")
    return first_gpu.Bench(flags, tmp_path)


@pytest.mark.whole
def test_after_a_failure_the_next_item_follows(bench, capsys, tmp_path):
    def fail(bench, seen):
        bench.found["seen"] = 1
        raise UserError("as expected")

    def leave_out(bench, seen):
        raise first_gpu.LeftOut("it needs a GPU")

    script = program(tmp_path / "waits.py", "import time\ntime.sleep(1000)\n")
    now = time.monotonic()
    for name, item, end in (
            ("one", Item(holds=fail), now + 60),
            ("two", Item(holds=leave_out), now + 60),
            ("three", Item(), now + 60), ("four", Item(), now),
            ("five", Item(script, seconds=1), now + 60)):
        bench.run(name, item, end)
    said = capsys.readouterr().out.splitlines()
    items = json.loads((bench.output / "first_gpu.json").read_text())["items"]
    assert items["one"]["found"] == {"seen": 1}
    assert [(row["status"], row["why"]) for row in items.values()] == [
        ("FAILED", "as expected"), ("left out", "it needs a GPU"),
        ("ok", ""),
        ("left out", "no time is left: try it alone, --seconds 90"),
        ("FAILED", "five: not done in time")]
    assert said[0].startswith("FAILED    one: ")


def test_what_one_gpu_did_is_what_we_say_of_it():
    record = json.loads((ROOT / "example-logs/first_gpu.json").read_text())
    said = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    assert len(first_gpu.measured(record)) == 7
    assert f"\n{first_gpu.table(record)}\n" in said
    losses = [found["losses"] for name, item in first_gpu.ITEMS.items()
              if item.holds is first_gpu.as_std or "resumed" in name
              for found in record["items"].get(
                  name, {"found": {}})["found"].values()]
    assert len(losses) == 12  # on the CPU, on the GPU, on ranks that share it
    for others in losses:
        assert others == pytest.approx(losses[0], rel=1e-6)


def test_a_run_with_other_losses_is_seen():
    first_gpu.require_same([5.0, 4.0], [5.0001, 4.0])
    for losses in ([5.001, 4.0], [5.0], [5.0, math.nan]):
        with pytest.raises(UserError):
            first_gpu.require_same(losses, [5.0, 4.0])


@pytest.mark.whole
def test_what_is_loaded_before_the_fork_asks_for_no_gpu(tmp_path):
    """A process that has asked CUDA for it cannot fork ranks that use it."""
    script = tmp_path / "loads.py"
    script.write_text("""\
import importlib, sys, torch
def fail(*_):
    raise SystemExit("it asks for a GPU")
for owner in torch.cuda, torch.xpu, torch.accelerator:
    owner.is_available = owner.device_count = fail
for name in [*sys.modules]:
    if name.startswith(("backstage", "workshop", "lightning")):
        del sys.modules[name]
from workshop.stages import modules_of
for name in modules_of("lit"):
    importlib.import_module(name)
""")
    rank, = launch(script, place=ROOT)
    assert rank.status == 0, rank.err


def test_a_recipe_is_the_preset():
    std = first_run.std
    preset, model = std.PRESETS["nano"], std.MODELS["nano"]
    recipe = first_run.RECIPES["nano"]
    for name in ("max_steps", "minibatch_size", "sequence_length",
                 "learning_rate", "warmup_steps", "weight_decay"):
        assert getattr(recipe, name) == getattr(preset, name), name
    for name in ("n_layer", "n_head", "n_embd"):
        assert getattr(recipe, name) == getattr(model, name), name
    assert recipe.sequence_length == model.block_size
    optimizer = std.GPT(std.MODELS["tiny"]).configure_optimizers(preset)
    assert optimizer.defaults["betas"] == (0.9, recipe.beta2)


@pytest.mark.parametrize(("target", "steps"), [
    (2.5, 150), (2.0, 200), (1.5, 400), (1.4, None), (9.0, 100)])
def test_a_recipe_reaches_a_target_between_two_validations(target, steps):
    curve = first_run.Curve(
        "one", first_run.BEFORE, 0, "bf16", [100, 200, 400], [3.0, 2.0, 1.5])
    assert curve.steps_to(target) == steps


def test_the_curves_of_recipes_are_drawn(tmp_path):
    """Each recipe is named once, also if it has several seeds."""
    curves = [first_run.Curve(name, first_run.NANO, seed, "bf16", [100, 200],
                              [3.0, 2.0], cpu_seconds=9.0)
              for name in ("before", "nano") for seed in (1, 2)]
    file = tmp_path / "new" / "curves.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        first_run.draw(file, curves)
    text = file.read_text("utf-8")
    assert text.count(">before</text>") == text.count(">nano</text>") == 1
