"""The model against GPT-2's published formula, in a plain version."""

import math
from dataclasses import replace

import pytest
import torch
from stages import FOLDER
from test_std import std

CONFIG = replace(std.MODELS["tiny"], vocab_size=257)


def layer_norm(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True)
    return x / (variance + 1e-5).sqrt() * weight + bias


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def published(weights, config, idx):
    """Logits of GPT-2 as its authors' code computes them, sample by sample.

    There c_attn has all queries first, then all keys, then all values; here
    each head's query, key and value are neighbours. idx: int64 (T,).
    """
    T, C, heads = len(idx), config.n_embd, config.n_head
    size = C // heads
    future = torch.ones(T, T).triu(1).bool()
    x = (weights["transformer.wte.weight"][idx]
         + weights["transformer.wpe.weight"][:T])
    for layer in range(config.n_layer):
        w = {name.split(f"h.{layer}.")[1]: weight
             for name, weight in weights.items() if f".h.{layer}." in name}
        y = layer_norm(x, w["ln_1.weight"], w["ln_1.bias"])
        y = y @ w["attn.c_attn.weight"].T + w["attn.c_attn.bias"]
        columns = torch.arange(3 * C).view(heads, 3, size).transpose(0, 1)
        query, key, value = y[:, columns.flatten()].split(C, dim=1)
        out = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[:, part] @ key[:, part].T / math.sqrt(size)
            scores = scores.masked_fill(future, -math.inf)
            out.append(scores.softmax(dim=-1) @ value[:, part])
        y = torch.cat(out, dim=1)
        x = x + y @ w["attn.c_proj.weight"].T + w["attn.c_proj.bias"]
        y = layer_norm(x, w["ln_2.weight"], w["ln_2.bias"])
        y = gelu(y @ w["mlp.c_fc.weight"].T + w["mlp.c_fc.bias"])
        x = x + y @ w["mlp.c_proj.weight"].T + w["mlp.c_proj.bias"]
    x = layer_norm(x, weights["transformer.ln_f.weight"],
                   weights["transformer.ln_f.bias"])
    return x @ weights["transformer.wte.weight"].T


def trained_model():
    """A model with random weights, biases and LayerNorms."""
    torch.manual_seed(0)
    model = std.GPT(CONFIG).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def test_logits_are_those_of_the_published_formula(monkeypatch):
    # the model would return them in fp32
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = trained_model()
    idx = torch.randint(0, 257, (3, 20))
    logits = model(idx)
    for sample, row in zip(idx, logits, strict=True):
        expected = published(model.state_dict(), CONFIG, sample)
        assert (row - expected).abs().max() < 1e-12


def test_a_slice_of_c_attn_is_a_set_of_whole_heads():
    """What tensor parallelism cuts: half the rows, half the heads."""
    model = trained_model()
    attention = model.transformer.h[0].attn
    x = torch.randn(2, 20, CONFIG.n_embd).double()
    whole = attention(x) - attention.c_proj.bias
    parts = torch.zeros_like(whole)
    half = 3 * CONFIG.n_embd // 2
    for begin in (0, half):
        part = std.CausalSelfAttention(CONFIG).double()
        part.c_attn.weight = torch.nn.Parameter(
            attention.c_attn.weight[begin:begin + half])
        part.c_attn.bias = torch.nn.Parameter(
            attention.c_attn.bias[begin:begin + half])
        columns = slice(begin // 3, (begin + half) // 3)
        part.c_proj.weight = torch.nn.Parameter(
            attention.c_proj.weight[:, columns])
        part.c_proj.bias = None
        parts += part(x)
    assert (parts - whole).abs().max() < 1e-12


def test_biases_and_layer_norms_are_not_decayed():
    model = std.GPT(CONFIG)
    optimizer = model.configure_optimizers(std.PRESETS["tiny"])
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [
        0.1, 0.0]
    assert {weight.dim() for weight in decayed} == {2}
    assert {weight.dim() for weight in others} == {1}
    assert len(decayed) + len(others) == len(list(model.parameters()))


def test_the_golden_losses_come_from_the_tokens_beside_them():
    """The first of them, computed by the published formula."""
    torch.manual_seed(std.PRESETS["tiny"].seed)
    model = std.GPT(CONFIG)
    data = std.DataIterator(
        std.get_shards(FOLDER / "golden", "train"), 8, 32)
    x, y = next(data)
    losses = []
    for idx, targets in zip(x, y, strict=True):
        logits = published(model.state_dict(), CONFIG, idx)
        losses.append(-logits.log_softmax(dim=-1).gather(
            1, targets[:, None]).mean())
    row = (FOLDER / "golden" / "metrics.csv").read_text().splitlines()[1]
    assert sum(losses).item() / 8 == pytest.approx(
        float(row.split(",")[1]), rel=1e-6)
