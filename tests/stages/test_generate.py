"""code/generate.py: continuations, with and without the cache."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from stages import FOLDER

from backstage import ROOT
from backstage.checkpoint import write_checkpoint
from backstage.errors import UserError
from rankcheck.engine.ranks import launch

import generate

SCRIPT = ROOT / "code" / "generate.py"


@pytest.fixture
def run(single):
    return single.folder


@pytest.fixture
def write(monkeypatch, capsys):
    """A function: what the script prints, called in this process."""
    def write(*flags):
        monkeypatch.setattr(sys, "argv", ["x", "--device=cpu", *map(
            str, flags)])
        generate.main()
        return capsys.readouterr().out
    return write


def texts(out):
    return "\n".join(out.splitlines()[1:-1])


def test_the_cache_changes_nothing(run, write):
    """Also past the 32 positions of preset tiny, where the window moves."""
    flags = ("--run-dir", run, "--prompt", "the cat", "--max-new-tokens", 60,
             "--num-sequences", 3)
    fast, slow = write(*flags), write(*flags, "--no-cache")
    assert texts(fast) == texts(slow)
    assert texts(fast).count("> the cat") == 3
    assert "with key-value cache" in fast and "tok/s" in fast
    assert "without key-value cache" in slow


def test_logits_are_the_models(run):
    """One token at a time with the cache, the whole text without."""
    _, model = generate.load_trained(generate.find_checkpoint(run))
    idx = torch.randint(256, (2, 32), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = model(idx)[:, :, :257]
        cache, found = [], []
        for t in range(32):
            found.append(generate.forward(model, idx[:, t:t + 1], cache))
        cache = [(k[:, :, :20], v[:, :, :20]) for k, v in cache]
        several = generate.forward(model, idx[:, 20:], cache, last=8)
    for logits, right in ((torch.cat(found, 1), expected),
                          (several, expected[:, -8:])):
        torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-5)


def test_an_assistant_changes_only_the_number_of_calls(run, write, tmp_path):
    """Half of its layers, with other positions, or the model itself, which
    is always right: then 5 tokens come from a call, up to the 32 positions.
    """
    flags = ("--run-dir", run, "--prompt", "A", "--max-new-tokens", 40,
             "--temperature", 0, "--num-sequences", 2)
    alone = write(*flags)
    assert "calls" not in alone
    state = torch.load(generate.find_checkpoint(run))
    state["config"]["n_layer"] = 2
    state["model"] = {
        name: weight for name, weight in state["model"].items()
        if not name.startswith(("transformer.h.2.", "transformer.h.3."))}
    positions = state["model"]["transformer.wpe.weight"]
    positions[1::2] = 10 * torch.randn(
        16, 32, generator=torch.Generator().manual_seed(0))
    small = tmp_path / "small.pt"
    torch.save(state, small)
    calls = {}
    for assistant in run, small:
        found = write(*flags, "--assistant", assistant)
        assert texts(found) == texts(alone)
        calls[assistant] = int(re.search(r"(\d+) calls", found)[1])
    # 30 in 6 calls bring it to 31 positions; then one after the other
    assert calls[run] == 6 + 10 < calls[small] < 40


def test_choices(run, write):
    same = ("--run-dir", run, "--num-sequences", 1, "--max-new-tokens", 20)
    first = texts(write(*same))
    assert texts(write(*same)) == first != texts(write(*same, "--seed", 2))
    greedy = texts(write(*same, "--temperature", 0))
    assert greedy == texts(write(*same, "--top-k", 1, "--seed", 3))
    assert texts(write(*same, "--prompt", "", "--top-k", 0))


@pytest.mark.whole
def test_a_text_does_not_depend_on_the_others_or_who_writes(run, write):
    """Some of the processes have none to write; rank 0 alone prints."""
    flags = ("--run-dir", run, "--max-new-tokens", 40, "--num-sequences")
    first, *others = launch(SCRIPT, "--device=cpu", *flags, 3, world_size=4)
    assert ", 4 processes)" in first.out, first
    assert not any(rank.out for rank in others)
    three = texts(write(*flags, 3))
    assert texts(first.out) == three
    alone = texts(write(*flags, 1, "--seed", 1339))
    assert alone == f"> {three.split('> ')[3]}"


def test_choices_have_their_probabilities():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).repeat(1000, 1)
    evenly = (torch.arange(1000) / 1000)[:, None]
    for temperature, top_k, out in ((1.0, 0, []), (0.5, 3, [3])):
        expected = (logits[0] / temperature).index_fill(
            0, torch.tensor(out, dtype=torch.int64), -torch.inf).softmax(0)
        chosen = generate.choose(logits, temperature, top_k, evenly)
        counts = torch.bincount(chosen[:, 0], minlength=4) / 1000
        torch.testing.assert_close(counts, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("flag", "value", "words"), [
    ("--run-dir", "/no/such/run", "/no/such/run"),
    ("--run-dir", "~/no-such-run", str(Path.home() / "no-such-run")),
    ("--run-dir", FOLDER, "has no checkpoint"),
    ("--temperature", -1, "--temperature must be 0 or more"),
    ("--max-new-tokens", 0, "--max-new-tokens must be 1 or more"),
    ("--num-sequences", 0, "--num-sequences must be 1 or more"),
    ("--assistant", "runs/small", "--assistant needs greedy decoding")])
def test_bad_flags(flag, value, words, write):
    with pytest.raises(UserError, match=words):
        write(flag, value)


# ------------------------------------------------------- which checkpoint


def save(run, *steps):
    """Checkpoints after these steps, each newer by time than the next."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    for step in steps:
        write_checkpoint(run / "checkpoints", {"step": step})
    for age, file in enumerate(sorted(run.glob("checkpoints/*.pt"))):
        os.utime(file, (10**9 - age, 10**9 - age))


def test_in_a_run_the_step_decides(tmp_path):
    """Copied files have the times of the copy, in any order."""
    run = tmp_path / "copy"
    save(run, 2, 4)
    assert generate.find_checkpoint(run).name == "step_00000004.pt"
    save(run / "of-another", 7)  # somebody's, in the run's own folder
    assert generate.find_checkpoint(run).name == "step_00000004.pt"


def test_a_damaged_one_is_passed_over_with_a_word(tmp_path, capsys):
    save(tmp_path, 2, 4)
    newest = tmp_path / "checkpoints" / "step_00000004.pt"
    newest.write_bytes(newest.read_bytes()[:50])
    assert generate.find_checkpoint(tmp_path).name == "step_00000002.pt"
    line, = capsys.readouterr().err.splitlines()
    assert newest.name in line and "using the one before it" in line


def test_of_several_runs_the_one_started_last_is_taken(
        tmp_path, monkeypatch):
    """As the record says; an older run's date is in its name."""
    monkeypatch.setattr("trained.ROOT", tmp_path)
    names = ("4711", "4712", "20200101-000000-std", "20250101-000000-ddp")
    for age, name in enumerate(names):
        run = tmp_path / "runs" / name
        save(run, 1)
        for path in (run / "checkpoints" / "step_00000001.pt", run):
            os.utime(path, (10**9 - age, 10**9 - age))

    def found():
        return generate.find_checkpoint("").parent.parent.name

    assert found() == "20250101-000000-ddp"
    record = tmp_path / "runs" / "4712" / "hyperparameters.json"
    record.write_text('{"started": "2026-11-29T07:30:00.123+00:00"}')
    assert found() == "4712"
    for damage in "[1]", '{"started": 3}', '{"started": "soon"}', "":
        record.write_text(damage)
        os.utime(record.parent, (10**9, 10**9))
        assert found() == "20250101-000000-ddp"
