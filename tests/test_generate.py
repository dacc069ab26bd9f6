"""code/generate.py: continuations, with and without the cache."""

import importlib.util

import pytest
import torch
from stages import Result, make_dataset, train

from backstage import ROOT
from workshop.processes import launch

SCRIPT = ROOT / "code" / "generate.py"


def load_script():
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    data = make_dataset(folder / "data")
    assert train("std", folder / "run", data=data).status == 0
    return folder / "run"


def write(*flags, **options):
    result = Result(
        None, launch(SCRIPT, "--device", "cpu", *flags, **options))
    assert "Traceback" not in result.err
    return result


def texts(result):
    """The continuations that it printed."""
    assert result.status == 0, result.err
    return "\n".join(result.out.splitlines()[1:-1])


def test_the_cache_changes_nothing(run):
    """Also past the 32 positions of preset tiny, where the window moves."""
    flags = ("--run", run, "--prompt", "the cat", "--max-new-tokens", 60,
             "--num-sequences", 3)
    fast, slow = write(*flags), write(*flags, "--no-cache")
    assert texts(fast) == texts(slow)
    assert texts(fast).count("> the cat") == 3
    assert "with key-value cache" in fast.out and "tok/s" in fast.out
    assert "without key-value cache" in slow.out


def test_logits_are_the_models(run):
    """One token at a time with the cache, the whole text without."""
    generate = load_script()
    state = generate.load_checkpoint(generate.find_checkpoint(run))
    model = generate.GPT(generate.GPTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    idx = torch.randint(256, (2, 32), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = model(idx)[:, :, :257]
        cache, found = [], []
        for t in range(32):
            found.append(generate.forward(model, idx[:, t:t + 1], cache))
    torch.testing.assert_close(torch.stack(found, 1), expected,
                               rtol=1e-4, atol=1e-5)


def test_choices(run):
    same = ("--run", run, "--num-sequences", 1, "--max-new-tokens", 20)
    assert texts(write(*same)) == texts(write(*same))
    assert texts(write(*same)) != texts(write(*same, "--seed", 2))
    greedy = texts(write(*same, "--temperature", 0))
    assert greedy == texts(write(*same, "--top-k", 1, "--seed", 3))
    assert texts(write(*same, "--prompt", "", "--top-k", 0))


@pytest.mark.parametrize("world_size", [2, 7])
def test_several_processes_write_the_same(run, world_size):
    """Also if some have no text to write; rank 0 alone prints."""
    flags = ("--run", run, "--num-sequences", 5, "--max-new-tokens", 40)
    shared = write(*flags, world_size=world_size)
    assert texts(shared) == texts(write(*flags))
    assert f", {world_size} processes)" in shared.out
    assert not any(rank.out for rank in shared.ranks[1:])


def test_a_text_does_not_depend_on_the_others(run):
    flags = ("--run", run, "--max-new-tokens", 40)
    three = texts(write(*flags, "--num-sequences", 3)).split("> ")[1:]
    alone = texts(write(*flags, "--num-sequences", 1, "--seed", 1339))
    assert len(set(three)) == 3 and alone == f"> {three[2]}"


def test_choices_have_their_probabilities():
    generate = load_script()
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).repeat(1000, 1)
    evenly = (torch.arange(1000) / 1000)[:, None]
    for temperature, top_k, out in ((1.0, 0, []), (0.5, 3, [3])):
        expected = (logits[0] / temperature).index_fill(
            0, torch.tensor(out, dtype=torch.int64), -torch.inf).softmax(0)
        chosen = generate.choose(logits, temperature, top_k, evenly)
        counts = torch.bincount(chosen[:, 0], minlength=4) / 1000
        torch.testing.assert_close(counts, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("flags", "words"), [
    (["--run", "/no/such/run"], "/no/such/run"),
    (["--temperature", -1], "--temperature"),
    (["--max-new-tokens", 0], "--max-new-tokens"),
    (["--num-sequences", 0], "--num-sequences"),
    (["--promt", "x"], "--promt"),
])
def test_bad_flags(flags, words):
    result = write(*flags)
    assert result.status == 1
    line, = result.err.splitlines()
    assert line.startswith("error: ") and words in line


def test_no_checkpoint_and_a_damaged_one(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint is there" in write("--run", tmp_path).err
    (tmp_path / "checkpoints" / "step_00000001.pt").write_bytes(b"PK no")
    assert "not a checkpoint" in write("--run", tmp_path).err
