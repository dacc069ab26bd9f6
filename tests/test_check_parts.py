"""A sharded model's parameters, put together from what each rank has."""

import ast

import pytest
import torch

from workshop.check.command import lines_as_in
from workshop.check.questions.process import undefined_name
from workshop.parts import TIED, assemble, describe
from workshop.processes import launch

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
from workshop.parts import describe

dp, tp, drift = map(int, sys.argv[2:])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 6), nn.LayerNorm(6))
mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
torch.save(dict(model.state_dict()), f"{sys.argv[1]}/whole.pt")
if tp > 1:
    parallelize_module(model, mesh["tp"], {
        "0": ColwiseParallel(), "1": RowwiseParallel()})
if dp > 1:
    fully_shard(model, mesh=mesh["dp"])
if drift and dist.get_rank() == 1:
    with torch.no_grad():
        for weight in model[2].parameters():
            getattr(weight, "_local_tensor", weight).add_(1)
torch.save(describe(model.named_parameters()),
           f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.barrier()
"""


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_parts_of_all_ranks_are_the_whole(tmp_path, dp, tp):
    whole = shards(tmp_path, dp, tp, 0)
    good = torch.load(tmp_path / "whole.pt")
    assert not whole.holes and not whole.differing
    assert whole.tensors.keys() == good.keys()
    for name, tensor in good.items():
        assert torch.equal(whole.tensors[name], tensor), name


def test_copies_that_drift_apart_are_seen(tmp_path):
    """LayerNorms are copied over tensor-parallel ranks."""
    assert shards(tmp_path, 1, 2, 1).differing == {1: 1.0}


def test_a_missing_part_is_a_hole(tmp_path):
    shards(tmp_path, 2, 1, 0)
    assert "0.weight" in assemble([torch.load(tmp_path / "0.pt")]).holes


def shards(folder, dp, tp, drift):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ranks = launch(script, folder, dp, tp, drift, world_size=dp * tp)
    assert all(rank.status == 0 for rank in ranks), ranks[0].err
    return assemble([torch.load(folder / f"{rank}.pt")
                     for rank in range(dp * tp)])


def test_names_without_wrappers():
    weight = torch.ones(2, 3)
    described = describe([("module._orig_mod.h.0.weight", weight),
                          ("without", None)])
    assert described["plain"] == [("h.0.weight", (2, 3))]


def test_the_ends_of_a_pipeline_have_one_matrix():
    first = describe([("transformer.wte.weight", torch.ones(2, 3))])
    last = describe([("lm_head.weight", torch.ones(2, 3))])
    assert not assemble([first, last]).apart
    last = describe([("lm_head.weight", torch.zeros(2, 3))])
    whole = assemble([first, last])
    assert whole.apart == {TIED} and whole.differing == {1: 1.0}


@pytest.mark.parametrize(("text", "missing"), [
    ("import a\n\ndef f(b):\n    c = a.d\n    return [b + c for b in c]\n",
     None),
    ("def f():\n    return g\n\ndef g():\n    return f\n", None),
    ("def f():\n    global a\n    a = 1\n\ndef g():\n    return a\n", None),
    ("from a import *\n\ndef f():\n    return b\n", None),
    ("def f(a):\n    print(a)\n    return lambda: a.b + c\n", ("c", 3)),
    ("class A:\n    x = 1\n\n    def f(self):\n        return x\n", ("x", 5)),
])
def test_a_name_that_nothing_defines(text, missing):
    assert undefined_name(ast.parse(text)) == missing


def test_a_line_is_named_as_in_the_script_that_one_sees():
    yours = b"import a\n\n# mine\nx = 1\ny = 2\n"
    tried = b"import a\nz = 3\nx = 1\ny = 2\n"
    name = lines_as_in(yours, tried)
    assert name("it waits in line 3, and line 4") == (
        "it waits in line 4, and line 5")
    assert name("an error (line 2)") == "an error (the lesson's line `z = 3`)"
    assert name("in line 400 of it") == "in line 400 of it"
