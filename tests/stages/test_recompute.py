"""Memory: activation checkpointing, and no device that holds the whole.

A model that is made for many devices is never whole on one of them: it is made
in the host's memory. There is no GPU here: what is made beside that model is
counted, on a rank of a pretended group.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import train_gpt2_3d as pipelined
import train_gpt2_std as std
from stages import train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backstage.flops import num_parameters
from notebooks.experiments.sharding import saved_bytes
from workshop.results import arithmetic

CONFIG = std.GPTConfig(
    block_size=64, vocab_size=512, n_layer=8, n_head=4, n_embd=64)


@contextmanager
def rank_of(size, rank=0):
    """This process as a rank of a group in which nothing is sent."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Peak(TorchDispatchMode):
    """The most bytes of new numbers that are on the CPU at a time: `most`.

    Of a DTensor, the part that is here. Without integers, and so without the
    states of random numbers, which take 5 kB for each weight.
    """

    def __init__(self, known=()):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (isinstance(tensor, torch.Tensor)
                    and not isinstance(tensor, DTensor)
                    and tensor.device.type == "cpu"
                    and tensor.is_floating_point()):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive and key not in self.known:
                    self.alive[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, key)
                    self.most = max(self.most, self.now)
        return out

    def free(self, key):
        self.now -= self.alive.pop(key, 0)


@pytest.mark.parametrize("rank", [0, 5, 15])
@pytest.mark.parametrize("stages, dp, tp", [(1, 16, 1), (1, 4, 4), (4, 2, 2)])
def test_a_device_gets_its_own_part(stages, dp, tp, rank):
    """As fsdp, tp and 3d do: a block and the shards are all there ever is."""
    torch.manual_seed(3)
    model = pipelined.GPT(CONFIG)
    whole = [*model.parameters()]
    size = 4 * sum(weight.numel() for weight in whole)
    with rank_of(16, rank):
        mesh = dist.init_device_mesh(
            "cpu", (stages, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        with Peak(known=whole) as peak:
            if tp > 1:
                pipelined.split_vocabulary(model, mesh["tp"])
            pipelined.cut(model, mesh["pp"])
            blocks = [*model.transformer.h.children()]
            for block in blocks:
                if tp > 1:
                    parallelize_module(
                        block, mesh["tp"], pipelined.BLOCK_PLAN)
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        largest = 4 * max(weight.numel() for weight in model.parameters())
        of_block = 4 * sum(weight.numel() for weight in block.parameters())
        mine = 4 * sum(weight.to_local().numel()
                       for weight in model.parameters())
    assert mine < size / 8
    assert peak.most < mine + of_block + 2 * largest  # a matrix, in passing
    assert len(model.transformer.h) == 8 / stages


# -------------------------------------------------- activation checkpointing


@pytest.mark.whole
def test_a_run_goes_on_with_it_or_without_it(data, tmp_path):
    """And computes exactly the same; in bf16, as most runs do."""
    half, whole = (train("std", tmp_path / flag, "--precision", "bf16", flag,
                         "--checkpoint-every", 7, data=data)
                   for flag in ("--recompute", "--no-recompute"))
    sorted(half.folder.glob("checkpoints/*.pt"))[-1].unlink()
    again = train("std", half.folder, "--no-recompute", "--resume")
    assert "resuming after step 13" in again.out
    for column in ("loss", "norm"):
        assert half.column(column) == whole.column(column)


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
