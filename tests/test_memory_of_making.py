"""No device, and no process, ever holds what it is to share.

A model that is made for many devices is never whole on one of them. There is
no GPU here: what would move to it is counted, on rank 0 of a pretended group.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import train_gpt2_3d as pipelined
import train_gpt2_std as std
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backstage.deferred import draw_weights, make_shapes

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
def test_a_rank_makes_its_own_part(stages, dp, tp, rank):
    """As fsdp, tp and 3d do: a block and the shards are all there ever is."""
    torch.manual_seed(3)
    whole = std.GPT(CONFIG)
    size = 4 * sum(weight.numel() for weight in whole.parameters())
    after = torch.get_rng_state()
    with rank_of(16, rank):
        mesh = dist.init_device_mesh(
            "cpu", (stages, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        torch.manual_seed(3)
        with Peak() as peak:
            model = make_shapes(pipelined.GPT, CONFIG)
            shapes = peak.now
            if tp > 1:
                pipelined.parallelize(model, mesh["tp"])
            pipelined.cut(model, mesh["pp"])
            pieces, made = [*model.transformer.h.children(), model], []
            for module in pieces:
                made.append(4 * sum(
                    weight.to_local().numel() if isinstance(weight, DTensor)
                    else weight.numel() for weight in module.parameters()
                    if weight.is_meta))
                draw_weights(model, module)
                fully_shard(module, mesh=mesh["dp"])
            largest = 4 * max(
                weight.numel() for weight in model.parameters())
            mine = 4 * sum(weight.to_local().numel()
                           for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), after)
    assert shapes == 0
    assert mine < size / 8
    assert peak.most < mine + max(made) + 2 * largest  # a matrix, in passing
    assert model.config.n_layer == 8
    assert len(model.transformer.h) == 8 / stages


def test_shapes_get_the_weights_of_the_whole_model():
    torch.manual_seed(5)
    whole = std.GPT(CONFIG)
    then = torch.rand(3)
    torch.manual_seed(5)
    model = make_shapes(std.GPT, CONFIG)
    assert all(weight.is_meta for weight in model.parameters())
    assert [*dict(model.named_parameters())] == [
        *dict(whole.named_parameters())]
    del model.transformer.h[5:]  # nobody needs them
    assert torch.equal(torch.rand(3), then)
    draw_weights(model, model)
    assert model.lm_head.weight is model.transformer.wte.weight
    good = whole.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, good[name]), name
