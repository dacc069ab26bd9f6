"""What makes a run slow: what `workshop why` says of our own runs."""

import gzip
import json
import re
import shutil

import numpy as np
import pytest

from backstage import ROOT
from backstage.flops import num_parameters, padded_vocab_size
from slides.text import cells
from workshop import why as speed
from workshop.results import limit
from workshop.results.arithmetic import (
    FP32,
    GPT2,
    LINK,
    XL,
    hiding_tokens,
    ring,
)
from workshop.results.runs import (
    EXAMPLES,
    lost_seconds,
    published_efficiency,
    read_run,
)


def write_trace(file, data, message):
    """A step of 400 ms: these milliseconds, and 100 of the backward pass."""
    events, at = [], 0
    for name, number, milliseconds in (
            ("end of step 4", None, 0), ("", None, data),
            ("aten::embedding", 9, 0),
            ("autograd::engine::evaluate_function: X", 9, 100),
            ("gloo:all_reduce", None, message),
            ("", None, 300 - data - message), ("end of step 5", None, 0)):
        events.append({"ph": "X", "ts": at, "dur": 1000 * milliseconds,
                       "name": name, "tid": 1, "cat": "cpu_op",
                       "args": {"Sequence number": number}})
        at += 1000 * milliseconds
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps(
        {"traceEvents": events}).encode()))


def write_slow_run(folder, nodes, tokens, **parts):
    """A run of DDP with two processes on each node, and its profile.

    parts: milliseconds on each of two ranks.
    """
    shutil.copytree(ROOT / "example-logs" / "ddp-2", folder)
    file = folder / "hyperparameters.json"
    record = json.loads(file.read_text()) | {
        "nodes": nodes, "world_size": 2 * nodes}
    file.write_text(json.dumps(record))
    (folder / "metrics.csv").write_text(
        "step,loss,lr,norm,seconds,tokens_per_second\n"
        + "".join(f"{step},1,1,1,0.4,{tokens}\n" for step in range(9)))
    for rank in 0, 1:
        write_trace(folder / "profile" / "1-trace" / f"rank{rank}.json.gz",
                    parts.get("data", (1, 1))[rank],
                    parts.get("message", (1, 1))[rank])


def test_two_nodes_are_slower_than_one(tmp_path, monkeypatch, snapshot):
    network = tmp_path / "network.json"
    monkeypatch.setattr(speed, "NETWORK_FILE", network)
    one, two = tmp_path / "one", tmp_path / "two"
    write_slow_run(one, 1, 1000, message=(20, 20))
    write_slow_run(two, 2, 800, message=(290, 290))
    said = speed.explain_speed(two)
    network.write_text('{"in the nodes": 10, "between nodes": 0.1}')
    said += speed.explain_speed(two)[-1:]
    snapshot("slow.txt", "\n".join(said).replace(f"{tmp_path}/", ""))
    sent, message = (float(re.search(pattern, said[-1])[1]) for pattern in (
        r"sends ([\d.]+) MB", r"or ([\d.]+) ms between nodes \(0.10 GB/s\)"))
    assert message == pytest.approx(10 * sent, rel=0.05)


@pytest.mark.parametrize(("parts", "words"), [
    ({"data": (290, 290)}, "fix: input"),
    ({"message": (1, 290)}, "slowest rank (rank 0)"),
    ({}, "nearly all of it is computation"), (None, "--profile 10")])
def test_what_to_try_first(parts, words, tmp_path):
    run = tmp_path / "run"
    write_slow_run(run, 1, 1000, **parts or {})
    if parts is None:
        shutil.rmtree(run / "profile")
    said = speed.explain_speed(run)
    assert words in said[-1]
    assert speed.explain_speed(tmp_path) == []


@pytest.mark.parametrize(("device", "counts"), [
    ("A100-40 fp16", (4, 8, 16)), ("Max 1550 bf16", (4, 8, 16)),
    ("Max 1550 bf16", (2, 3))])
def test_what_is_normal_is_what_was_published(device, counts):
    kept = published_efficiency(device, "16")
    *most, last = (f"{kept[number]:.0%}" for number in counts)
    assert f"{', '.join(most)} and {last}" in " ".join(
        (ROOT / "docs" / "troubleshooting.md").read_text().split())


@pytest.mark.parametrize("config", [GPT2, XL], ids=["gpt2", "gpt2-xl"])
def test_what_hides_the_all_reduce_depends_on_no_model(config):
    """The backward pass of those tokens takes as long as the ring."""
    flops, parameters = 1e14, num_parameters(config)
    backward = 4 * parameters * hiding_tokens(flops, LINK) / flops
    sent = ring(10**9, FP32 * parameters) / LINK
    assert backward == pytest.approx(sent)


@pytest.fixture
def results_text():
    return " ".join("\n".join(cells("results")).split())


def test_results_has_the_limits_of_two_gpus(
        results_text, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "NETWORK_FILE", tmp_path / "network.json")
    run = read_run(EXAMPLES / "ddp-2")
    mine, a100, h200 = limit.scaling_limits(run)
    assert (f"keep {int(a100.devices)} A100s busy, but only "
            f"{int(h200.devices)} H200s.") in results_text
    share = padded_vocab_size(GPT2["vocab_size"]) * GPT2["n_embd"] / (
        num_parameters(GPT2))
    assert f"in GPT-2 it is {share:.0%} of all bytes" in results_text
    # the run's own: where its network is slowest
    assert mine.bandwidth == LINK
    (tmp_path / "network.json").write_text(
        '{"in the nodes": 10, "between nodes": 0.5}')
    again, *_ = limit.scaling_limits(run)
    assert again.bandwidth == 0.5e9
    assert again.tokens == pytest.approx(50 * mine.tokens)
    assert again.devices * again.tokens == pytest.approx(8 * 128)


def test_what_the_published_curves_lose_with_each_step(results_text):
    """Fitted by a + b / batch size: b is lost in each step, a is not."""
    devices = {"A100-40": "A100-40 fp16", "Max 1550": "Max 1550 bf16"}
    shares = {}
    for name, device in devices.items():
        lost = lost_seconds(device)
        row = " | ".join(f"{seconds:.0f}" for seconds in lost.values())
        assert f"| {name} | {row} |" in results_text
        steps = np.array([16 / size for size in lost])
        matrix = np.stack((np.ones_like(steps), steps), axis=1)
        (constant, stepwise), *_ = np.linalg.lstsq(
            matrix, np.array(list(lost.values())), rcond=None)
        shares[name] = stepwise / (stepwise + constant)
    assert f"{shares['A100-40']:.0%} of what the A100s lose" in results_text
    assert (f"the Max 1550 that is {shares['Max 1550']:.0%}: the rest, "
            f"{constant:.0f} seconds") in results_text
