"""Activation checkpointing and the model that needs it: gpt2-xl."""

import weakref

import pytest
import torch
from conftest import needs
from stages import agree, train, with_layers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backstage.flops import num_parameters
from workshop import arithmetic
from workshop.notebook.sharding import saved_bytes, std


@pytest.mark.parametrize("precision, flags", [
    ("fp32", []), ("bf16", []),
    pytest.param("fp32", ["--compile"], marks=pytest.mark.whole)], ids=str)
def test_one_device_computes_exactly_the_same(data, tmp_path, precision,
                                              flags):
    if flags:
        needs("g++")
    script = with_layers(1, "std", tmp_path) if flags else None
    kept, again = (train("std", tmp_path / name, "--precision", precision,
                         *flags, *more, data=data, script=script, timeout=290)
                   for name, more in (("kept", []),
                                      ("again", ["--recompute"])))
    assert again.status == 0, again.err
    assert "does not work here" not in again.err
    tolerance = 1e-6 if flags else 0
    for column in ("loss", "norm"):
        assert again.column(column) == pytest.approx(
            kept.column(column), rel=tolerance, abs=0)


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
    assert half.column("loss") == single.column("loss")


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


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that are there at a time: `most`."""

    def __init__(self, known):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if (key not in self.alive
                        and storage.data_ptr() not in self.known):
                    self.alive[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, key)
                    self.most = max(self.most, self.now)
        return out

    def free(self, key):
        self.now -= self.alive.pop(key, 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_where_a_sample_takes_most(recompute):
    """At the gradient of the logits, of which the decisions know."""
    config = std.GPTConfig(64, 4096, 6, 4, 64)
    model = std.GPT(config, recompute)
    x, y = torch.randint(config.vocab_size, (2, 4, 64))
    model(x, y).backward()
    known = [tensor for weight in model.parameters()
             for tensor in (weight, weight.grad)]
    with Peak([*known, x]) as peak:
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


def test_25_heads_have_no_half(data, tmp_path):
    result = train("tp", tmp_path / "run", "--preset", "gpt2-xl", data=data,
                   mesh=(1, 1, 2))
    assert result.status != 0
    assert ("the 25 heads of preset gpt2-xl are not divisible by "
            "--tensor-parallel 2") in result.err
