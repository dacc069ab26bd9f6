"""GPT-2's weights in Hugging Face's format: in with --init, and out.

transformers' model is GPT-2 as published: so is ours, if the logits agree.
"""

import json
import math

import pytest
import torch
import transformers
from conftest import python
from stages import GOLDEN, refused, same_state, train
from train_gpt2_std import GPT, GPTConfig

from backstage import ROOT, huggingface
from backstage.checkpoint import load_checkpoint
from workshop.stages import STAGES

TINY = {"n_positions": 32, "vocab_size": 300, "n_layer": 4, "n_head": 4,
        "n_embd": 32}


def make(**config):
    """A model of transformers with random weights, also where GPT-2 has 0."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **config, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def our_model(state):
    model = GPT(GPTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    return model


def compare(theirs, state):
    """The logits of both models in fp64; ours with the padded rows."""
    rows = theirs.config.vocab_size
    idx = torch.randint(rows, (2, 32))
    with pytest.MonkeyPatch.context() as patch:
        # ours would return them in fp32
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        logits = our_model(state).double()(idx)
    torch.testing.assert_close(logits[..., :rows], theirs.double()(idx).logits,
                               atol=1e-11, rtol=1e-11)
    return logits


@pytest.mark.parametrize("prefix", ("", "transformer."))
@torch.no_grad()
def test_the_logits_are_theirs(prefix, tmp_path):
    """Also of the older files, pickled and with their masks."""
    model = make(**TINY)
    model.transformer.wte.weight -= 0.5
    model.transformer.ln_f.bias += 3  # logits of about -50, as GPT-2's are
    model.save_pretrained(tmp_path)
    if not prefix:
        (tmp_path / "model.safetensors").unlink()
        torch.save({name.removeprefix("transformer."): weight
                    for name, weight in model.state_dict().items()} | {
            "h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().bool()},
            tmp_path / "pytorch_model.bin")
    logits = compare(model, load_checkpoint(tmp_path))
    # the padded rows take no more than their share of the probability
    rest = logits.logsumexp(-1) - logits[..., :300].logsumexp(-1)
    assert 0 < rest.max() <= math.log(384 / 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with the vocabulary of the golden tokens."""
    folder = tmp_path_factory.mktemp("theirs")
    make(**TINY | {"vocab_size": 257}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def first_losses(folder, tmp_path_factory):
    """Of the single device: from the folder's weights, and from new ones."""
    place = tmp_path_factory.mktemp("first")
    torch.save(load_checkpoint(folder) | {"step": 1}, place / "our.pt")
    return [train("std", place / str(len(flags)), "--max-steps", 1, *flags,
                  data=GOLDEN).column("loss")[0]
            for flags in (["--init", place / "our.pt"], [])]


@pytest.mark.parametrize("stage", [
    stage if stage in ("std", "ddp") else
    pytest.param(stage, marks=pytest.mark.whole) for stage in STAGES])
def test_every_stage_starts_from_a_folder(stage, folder, first_losses,
                                          tmp_path):
    result = train(stage, tmp_path / "run", "--init", folder, "--max-steps", 1,
                   data=GOLDEN, mesh=STAGES[stage].meshes[:2][-1])
    assert result.status == 0, result.err
    loss, new = first_losses
    assert result.column("loss") == [pytest.approx(loss, rel=1e-5)]
    assert abs(loss - new) > 0.1


@pytest.mark.parametrize(("change", "words"), [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"n_inner": 7}, "n_inner"),
    ({"n_layer": 5}, "holds another model"),
    ({"n_embd": 64, "n_head": 4}, "n_embd"),
    ({"n_head": 5}, "damaged"),
    ({}, "h.3.ln_2.bias: its weight is missing"),
], ids=str)
def test_another_model_is_one_line(change, words, tmp_path):
    theirs = tmp_path / "theirs"
    vocab_size = 300 if change else 257
    model = make(**TINY | {"vocab_size": vocab_size})
    weights = model.state_dict()
    del weights["transformer.h.3.ln_2.bias" if not change else
                "lm_head.weight"]
    theirs.mkdir()
    torch.save(weights, theirs / "pytorch_model.bin")
    (theirs / "config.json").write_text(json.dumps(
        model.config.to_dict() | change))
    refused(train("std", tmp_path / "run", "--init", theirs, data=GOLDEN),
            str(theirs), words)


@torch.no_grad()
@pytest.mark.whole
def test_an_export_is_theirs_and_comes_back(single, tmp_path):
    folder = tmp_path / "out"
    export = ("-m", "workshop", "export", single.folder, folder)
    result = python(ROOT, *export)
    assert result.returncode == 0, result.stderr
    state = single.checkpoint()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    compare(theirs, state)
    back = load_checkpoint(folder)
    assert back["config"] == state["config"]
    rows = theirs.config.vocab_size
    for name, weight in state["model"].items():
        tied = name in (huggingface.WTE, huggingface.LM_HEAD)
        kept = slice(rows if tied else None)
        assert same_state(weight[kept], back["model"][name][kept]), name
    text = python(ROOT, "code/generate.py", "--run", folder, "--device",
                  "cpu", "--max-new-tokens", 3)
    assert text.returncode == 0, text.stderr
    again = python(ROOT, *export)
    assert again.returncode == 1 and "name another" in again.stderr
