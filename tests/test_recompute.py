"""Activation checkpointing and the model that needs it: gpt2-xl."""

import pytest
import torch
from stages import agree, train
from test_memory_of_making import Peak

from backstage.flops import num_parameters
from workshop import arithmetic
from workshop.notebook.sharding import saved_bytes, std


def test_one_device_computes_exactly_the_same(data, tmp_path):
    """In bf16; in fp32 a run goes on without it: see below."""
    kept, again = (train("std", tmp_path / str(len(more)), "--precision",
                         "bf16", *more, data=data)
                   for more in ([], ["--recompute"]))
    assert again.status == 0, again.err
    for column in ("loss", "norm"):
        assert again.column(column) == kept.column(column)


FEWER = ("--max-steps", 8)


@pytest.fixture(scope="module")
def shorter(data, tmp_path_factory):
    """A run of the single device with fewer steps."""
    return train("std", tmp_path_factory.mktemp("shorter") / "run", *FEWER,
                 data=data)


@pytest.mark.whole
@pytest.mark.parametrize("stage, mesh, flags", [
    ("ddp", (1, 2, 1), []), ("lit", (1, 2, 1), ["--strategy", "fsdp2"]),
    ("fsdp", (1, 2, 1), []), ("3d", (2, 1, 2), []),
], ids=str)
def test_every_stage_computes_what_one_device_computes(
        data, shorter, tmp_path, stage, mesh, flags):
    result = train(stage, tmp_path / "run", "--recompute", *FEWER, *flags,
                   data=data, mesh=mesh)
    agree(result, shorter)


def test_a_run_goes_on_with_it_or_without_it(data, single, tmp_path):
    run = tmp_path / "run"
    half = train("std", run, "--recompute", "--max-steps", 20,
                 "--checkpoint-every", 7, data=data)
    assert half.status == 0, half.err
    sorted((run / "checkpoints").glob("*.pt"))[-1].unlink()
    assert train("std", run, "--no-recompute", "--resume").status == 0
    for column in ("loss", "norm"):
        assert half.column(column) == single.column(column)


@pytest.mark.parametrize("L, H, C, B", [(6, 4, 64, 2), (4, 3, 192, 3)])
def test_only_the_inputs_of_the_blocks_are_kept(L, H, C, B):
    """By the formulas of the lesson sharding, in fp32."""
    T, V = 64, 512
    kept, again = (std.GPT(std.GPTConfig(T, V, L, H, C), recompute)
                   for recompute in (False, True))
    x, y = torch.randint(V, (2, B, T))
    # ln_f with its input, the softmax; positions; the number of targets
    ends = 4 * (2 * B * T * C + 2 * B * T + B * T * V) + 8 * T + 4
    block = 4 * (16 * B * T * C + 4 * B * T + B * H * T)
    assert saved_bytes(kept, x, y) == L * block + ends
    assert saved_bytes(again, x, y) == L * 4 * B * T * C + ends


@pytest.mark.parametrize("recompute", [False, True])
def test_where_a_sample_takes_most(recompute):
    """At the gradient of the logits, of which the decisions know."""
    config = std.GPTConfig(64, 4096, 6, 4, 64)
    model = std.GPT(config, recompute)
    x, y = torch.randint(config.vocab_size, (2, 4, 64))
    model(x, y).backward()
    known = [tensor for weight in model.parameters()
             for tensor in (weight, weight.grad)]
    with Peak(known) as peak:
        model(x, y).backward()
    assert peak.most / 4 == pytest.approx(
        arithmetic.at_most(vars(config), recompute), rel=0.01)


def test_gpt2_xl_has_1558_million_parameters():
    config = std.MODELS["gpt2-xl"]
    with torch.device("meta"):
        model = std.GPT(config)
    number = sum(weight.numel() for weight in model.parameters())
    assert number == num_parameters(config) == 1_557_686_400
    assert std.PRESETS["gpt2-xl"].recompute
