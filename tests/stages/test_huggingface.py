"""GPT-2's weights in Hugging Face's format: code/huggingface.py import, export

transformers' model is GPT-2 as published: so is ours, if the logits agree.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
from huggingface import export_run, import_folder
from stages import same_state, train
from train_gpt2_std import GPT, GPTConfig

from backstage import ROOT
from backstage.checkpoint import TIED, load_checkpoint
from backstage.errors import UserError
from rankcheck.engine.ranks import launch

TINY = {"n_positions": 32, "vocab_size": 300, "n_layer": 4, "n_head": 4,
        "n_embd": 32}


def make(**config):
    """A model of transformers with random weights, also where GPT-2 has 0."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **config, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def imported(folder, file):
    import_folder(folder, file)
    return load_checkpoint(file)


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


@pytest.mark.whole
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
    logits = compare(model, imported(tmp_path, tmp_path / "our.pt"))
    # the padded rows take no more than their share of the probability
    rest = logits.logsumexp(-1) - logits[..., :300].logsumexp(-1)
    assert 0 < rest.max() <= math.log(384 / 300)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A checkpoint of theirs, with the vocabulary of the dataset."""
    folder = tmp_path_factory.mktemp("theirs")
    make(**TINY | {"vocab_size": 257}).save_pretrained(folder)
    import_folder(folder, folder / "our.pt")
    return folder / "our.pt"


@pytest.mark.whole
@torch.no_grad()
def test_a_stage_starts_from_it(file, data, tmp_path):
    """All load it as --resume does, which test_contract.py tries."""
    result = train("ddp", tmp_path / "run", "--init", file, "--max-steps", 1,
                   data=data, world_size=2)
    tokens = torch.from_numpy(np.load(data / "test_train_000001.npy")
                              .astype(np.int64))
    x, y = tokens[:8 * 32].view(8, 32), tokens[1:8 * 32 + 1].view(8, 32)
    loss = our_model(load_checkpoint(file))(x, y).item()
    assert result.column("loss") == [pytest.approx(loss, rel=1e-5)]
    assert result.err == (
        "warning: the run ends before the learning rate's warm-up: "
        "--warmup-steps is 4, --max-steps 1; fix: use fewer --warmup-steps\n")


@pytest.mark.parametrize(("change", "words"), [
    ({"activation_function": "relu"}, "activation_function is relu"),
    ({"n_inner": 7}, "n_inner"),
    ({"n_embd": "x"}, "n_embd is x"),
    ({"n_layer": 5}, "is missing"),
    ({"n_embd": 64, "n_head": 4}, "its weight is float ("),
    ({"n_head": 5}, "corrupt"),
    ({"n_embd": 10**9, "n_head": 1}, "config.json is corrupt"),
    ({"n_layer": 10**7}, "has n_layer 10000000"),
    ({}, "h.3.ln_2.bias: its weight is missing"),
], ids=str)
def test_another_model_is_one_line(change, words, tmp_path):
    model = make(**TINY)
    weights = model.state_dict()
    del weights["transformer.h.3.ln_2.bias" if not change else
                "lm_head.weight"]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(
        model.config.to_dict() | change))
    with pytest.raises(UserError, match=re.escape(words)) as error:
        import_folder(tmp_path, tmp_path / "our.pt")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "our.pt").exists()


@torch.no_grad()
@pytest.mark.whole
def test_an_export_is_theirs_and_comes_back(single, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setenv("HOME", str(tmp_path))

    folder = tmp_path / "out"
    said, = launch(ROOT / "code/huggingface.py", "export",
                   single.folder, "~/out")  # as no shell has replaced it
    assert said.status == 0, said.err
    state = single.checkpoint()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    compare(theirs, state)
    file = tmp_path / "back.pt"
    back = imported(folder, file)
    assert back["config"] == state["config"]
    rows = theirs.config.vocab_size
    for name, weight in state["model"].items():
        kept = slice(rows if name in TIED else None)
        assert same_state(weight[kept], back["model"][name][kept]), name
    text, = launch(ROOT / "code" / "generate.py", "--run-dir", file,
                   "--device", "cpu", "--max-new-tokens", 3)
    assert text.status == 0, text.err
    for again in (export_run, single.folder, folder), (
            import_folder, folder, file):
        with pytest.raises(UserError, match="choose another"):
            again[0](*again[1:])
