"""GPT-2's weights in Hugging Face's format: in with --init, and out.

Their model is stated here once more, in plain operations, from its
description; where transformers is installed, it is asked too.
"""

import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import needs
from safetensors.torch import load_file
from stages import FOLDER, same_state, train

from backstage import ROOT, huggingface
from backstage.checkpoint import load_checkpoint
from workshop.stages import STAGES

GOLDEN = FOLDER / "golden"
sys.path.insert(0, str(ROOT / "solutions"))
from train_gpt2_std import GPT, GPTConfig  # noqa: E402

TINY = {"n_positions": 32, "vocab_size": 300, "n_layer": 4, "n_head": 4,
        "n_embd": 32}


def make_weights(config):
    """Random weights under the names, and in the shapes, of transformers."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 0.2 * torch.randn(*shape, generator=random)

    width = config["n_embd"]
    weights = {"wte.weight": draw(config["vocab_size"], width),
               "wpe.weight": draw(config["n_positions"], width),
               "ln_f.weight": 1 + draw(width), "ln_f.bias": draw(width)}
    for i in range(config["n_layer"]):
        for name, rows, columns in (
                ("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1),
                ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            weights[f"h.{i}.{name}.weight"] = draw(
                rows * width, columns * width)
            weights[f"h.{i}.{name}.bias"] = draw(columns * width)
        for name in ("ln_1", "ln_2"):
            weights[f"h.{i}.{name}.weight"] = 1 + draw(width)
            weights[f"h.{i}.{name}.bias"] = draw(width)
    return weights


def their_logits(config, weights, idx):
    """What transformers' GPT2LMHeadModel computes: (B, T, vocab_size)."""
    def linear(x, name):  # Conv1D
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    T, width, heads = idx.shape[1], config["n_embd"], config["n_head"]
    x = weights["wte.weight"][idx] + weights["wpe.weight"][:T]
    for i in range(config["n_layer"]):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        outputs = []
        for k in range(heads):
            size = width // heads
            query, key, value = (
                part[..., k * size:(k + 1) * size]
                for part in qkv.split(width, dim=2))
            scores = query @ key.transpose(1, 2) / math.sqrt(size)
            future = torch.ones(T, T).triu(1).bool()
            scores = scores.masked_fill(future, -math.inf)
            outputs.append(scores.softmax(-1) @ value)
        x = x + linear(torch.cat(outputs, dim=2), f"h.{i}.attn.c_proj")
        hidden = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (
            hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


def write(folder, config, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "gpt2", **config}))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def our_model(state):
    model = GPT(GPTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model


def tokens(config, T=32):
    return torch.randint(config["vocab_size"], (2, T),
                         generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("prefix", ("", "transformer."))
@torch.no_grad()
def test_the_logits_are_theirs(prefix, tmp_path):
    weights = make_weights(TINY)
    weights["wte.weight"] -= 0.5  # logits of about -50, as GPT-2's are
    weights["ln_f.bias"] += 3
    saved = {prefix + name: weight for name, weight in weights.items()} | {
        f"{prefix}h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().bool(),
        "lm_head.weight": weights["wte.weight"]}
    state = load_checkpoint(write(tmp_path / "theirs", TINY, saved))
    idx = tokens(TINY)
    logits = our_model(state)(idx)
    theirs = their_logits(TINY, weights, idx)
    torch.testing.assert_close(logits[..., :300], theirs, atol=1e-5, rtol=1e-5)
    # the padded rows take no more than their share of the probability
    rest = logits.logsumexp(-1) - theirs.logsumexp(-1)
    assert 0 < rest.max() <= math.log(384 / 300)


@pytest.fixture(scope="module")
def first_loss(tmp_path_factory):
    """Of a run that starts from no other weights."""
    return train("std", tmp_path_factory.mktemp("new") / "run", "--max-steps",
                 1, data=GOLDEN).column("loss")[0]


@pytest.mark.parametrize("stage", [
    stage if stage in ("std", "ddp") else
    pytest.param(stage, marks=pytest.mark.whole) for stage in STAGES])
def test_every_stage_starts_from_a_folder(stage, first_loss, tmp_path):
    vocab_size = json.loads(
        (GOLDEN / "vocabulary.json").read_text())["special_tokens"]
    config = TINY | {"vocab_size": max(vocab_size.values()) + 1}
    folder = write(tmp_path / "theirs", config, make_weights(config))
    state = load_checkpoint(folder)
    results = [train(stage, tmp_path / name, "--init", init, "--max-steps", 2,
                     data=GOLDEN, mesh=STAGES[stage].meshes[:2][-1])
               for name, init in (("a", folder), ("b", tmp_path / "our.pt"))
               if torch.save(state | {"step": 1}, tmp_path / "our.pt") is None]
    assert results[0].status == 0, results[0].err
    assert results[0].column("loss") == results[1].column("loss")
    assert abs(results[0].column("loss")[0] - first_loss) > 0.1


@pytest.mark.parametrize(("change", "words"), [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"n_inner": 7}, "n_inner"),
    ({"n_layer": 5}, "holds another model"),
    ({"n_embd": 64, "n_head": 4}, "n_embd"),
    ({"n_head": 5}, "damaged"),
])
def test_another_model_is_one_line(change, words, tmp_path):
    folder = write(tmp_path / "theirs", TINY | change, make_weights(TINY))
    result = train("std", tmp_path / "run", "--init", folder, data=GOLDEN)
    (line,) = result.err.splitlines()
    assert result.status == 1 and line.startswith("error: ")
    assert str(folder) in line and words in line


def test_a_weight_that_is_missing_is_named(tmp_path):
    config = TINY | {"vocab_size": 257}
    weights = make_weights(config)
    del weights["h.3.ln_2.bias"]
    folder = write(tmp_path / "theirs", config, weights)
    result = train("std", tmp_path / "run", "--init", folder, data=GOLDEN)
    (line,) = result.err.splitlines()
    assert "h.3.ln_2.bias: its weight is missing" in line


def workshop(*arguments):
    return subprocess.run([sys.executable, "-m", "workshop", *arguments],
                          cwd=ROOT, capture_output=True, text=True)


@torch.no_grad()
def test_an_export_is_theirs_and_comes_back(single, tmp_path):
    folder = tmp_path / "out"
    result = workshop("export", single.folder, folder)
    assert result.returncode == 0, result.stderr
    config = json.loads((folder / "config.json").read_text())
    theirs = load_file(folder / "model.safetensors")
    state = single.checkpoint()
    idx = tokens(config)
    model, plain = our_model(state), {
        name.removeprefix("transformer."): weight
        for name, weight in theirs.items()}
    assert "lm_head.weight" not in theirs  # tied
    logits = model(idx)[..., :config["vocab_size"]]
    torch.testing.assert_close(
        their_logits(config, plain, idx), logits, atol=1e-5, rtol=1e-5)
    again = load_checkpoint(folder)
    assert again["config"] == state["config"]
    rows = config["vocab_size"]
    for name, weight in state["model"].items():
        back = again["model"][name]
        if name in (huggingface.WTE, huggingface.LM_HEAD):
            weight, back = weight[:rows], back[:rows]
        assert same_state(weight, back), name
    text = subprocess.run(
        [sys.executable, ROOT / "code" / "generate.py", "--run", folder,
         "--device", "cpu", "--max-new-tokens", "3"], cwd=ROOT,
        capture_output=True, text=True)
    assert text.returncode == 0, text.stderr
    again = workshop("export", single.folder, folder)
    assert again.returncode == 1 and "name another" in again.stderr


@torch.no_grad()
def test_transformers_loads_an_export_and_we_load_its_own(single, tmp_path):
    needs("transformers")
    import transformers

    folder = tmp_path / "out"
    assert workshop("export", single.folder, folder).returncode == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    ours = our_model(single.checkpoint())
    rows = theirs.config.vocab_size
    idx = torch.randint(rows, (2, 32))
    torch.testing.assert_close(theirs(idx).logits, ours(idx)[..., :rows],
                               atol=1e-5, rtol=1e-5)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **TINY, bos_token_id=0, eos_token_id=0)).eval()
    made.save_pretrained(tmp_path / "made")
    ours = our_model(load_checkpoint(tmp_path / "made"))
    idx = tokens(TINY)
    torch.testing.assert_close(made(idx).logits, ours(idx)[..., :300],
                               atol=1e-5, rtol=1e-5)
