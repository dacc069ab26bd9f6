"""What is recorded of modules' outputs, and where two runs are said to part.

No process is started: modules are called in this one.
"""

import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

from rankcheck.record.outputs import Outputs, sketch, views
from rankcheck.record.recorder import Log
from rankcheck.record.training import hash_each
from rankcheck.verification.locate import (
    OutputComparison,
    compare_outputs,
    explain_outputs,
)


def record(model, batches, loss=torch.sum, steps=1):
    """What one rank has seen that trains with these microbatches."""
    log = Log(None, 0)
    probe = Outputs(steps)
    probe(log)
    hooks = [part.register_forward_hook(
        lambda module, _, output: log.tell("output", module, output))
        for part in model.modules()]
    for batch in batches:
        log.tell("root", model, [hash_each([batch], axis) for axis in (0, 1)])
        loss(model(batch)).backward()
    log.tell("end")
    for hook in hooks:
        hook.remove()
    return log.record


def compare(single, *ranks, axis="rows", split=frozenset()):
    return compare_outputs(list(ranks), single, axis, split, 1.0)


class Scaled(nn.Module):
    """What it gives depends on how many samples there are."""

    def forward(self, x):
        return x * len(x) ** 0.01


def model_of(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(),
                         nn.Linear(16, 2))


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("parts", [(2, 2, 2, 2), (4, 4), (1, 7)])
def test_the_same_model_agrees_however_the_samples_are_divided(parts):
    model = model_of()
    each = [record(model, [part]) for part in X.split(parts)]
    found = compare(record(model, [X]), *each)
    assert (found.first, found.unsure, found.whole) == (None, False, True)
    assert "all 4 modules" in explain_outputs(found)


def test_the_first_module_that_differs_is_named():
    model = model_of(Scaled())
    found = compare(record(model, [X]), record(model, [X[:4]]),
                    record(model, [X[4:]]))
    assert (found.first.name, found.ranks) == ("1", (0, 1))
    assert [output.name for output in found.agreeing] == ["0"]
    assert "1 (Scaled), on ranks 0, 1" in explain_outputs(found)


def test_one_rank_alone_differs():
    model, other = model_of(), model_of()
    other[2].weight.data[0] += 0.1
    found = compare(record(model, [X]), record(model, [X[:4]]),
                    record(other, [X[4:]]))
    assert found.ranks == (1,) and found.first.name == "2"


class Twice(nn.Module):
    """Calls one module several times; what it gives has no single form."""

    def __init__(self, factor):
        super().__init__()
        self.cell, self.mix, self.factor = nn.Linear(6, 6), Mix(), factor

    def forward(self, x):
        first = self.mix(self.cell(x), 1.0)
        second = self.mix(self.cell(first), self.factor * len(x))
        return {"a": (second, [None, 3]), "b": first, "n":
                torch.nested.nested_tensor([x[0], x[-1, :2]])}


class Mix(nn.Module):
    def forward(self, x, factor):
        return x.mul(factor).relu_()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_module_that_is_called_again_is_named_with_its_call():
    def loss(output):
        return output["a"][0].sum()

    torch.manual_seed(0)
    model = Twice(0.1)
    single = record(model, [X], loss)
    found = compare(single, record(model, [X[:4], X[4:]], loss))
    assert (found.first.name, found.first.call, found.ranks) == (
        "mix", 1, (0,))
    assert found.agreeing[-1].name == "cell"
    assert "mix (Mix), call 2" in explain_outputs(found)
    assert not single.outputs_error


class Flat(nn.Module):
    """Tokens of all samples in one row, in the one order or the other."""

    def __init__(self, inside):
        super().__init__()
        self.embed, self.layer, self.inside = (
            nn.Embedding(9, 4), nn.Linear(4, 4), inside)

    def forward(self, ids):
        h = self.embed(ids.T if self.inside else ids)
        return self.layer(h.flatten(0, 1)).view(h.shape).sum(
            int(not self.inside)).square()


@pytest.mark.parametrize("inside", [False, True])
def test_flattened_samples_are_found(inside):
    torch.manual_seed(0)
    model, ids = Flat(inside), torch.arange(24).view(8, 3) % 9
    found = compare(record(model, [ids]), record(model, [ids[:2]]),
                    record(model, [ids[2:]]))
    assert found.first is None and found.whole
    assert {"embed", "layer"} <= {one.name for one in found.agreeing}


class Weighted(nn.Module):
    """A module puts out a weight whose length is that of a microbatch."""

    def __init__(self):
        super().__init__()
        self.make, self.weight = nn.Identity(), nn.Parameter(torch.rand(4, 6))

    def forward(self, x):
        return x @ self.make(self.weight).T


def test_what_does_not_depend_on_the_samples_is_no_sample():
    """With microbatches of one size, as with one process."""
    torch.manual_seed(0)
    model = Weighted()
    single = record(model, [X[:4], X[4:]])
    found = compare(single, record(model, [X[4:]]), record(model, [X[:4]]))
    assert found.first is None and found.whole


def test_columns_are_samples_where_a_sequence_is_divided():
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), (
        torch.arange(64).view(4, 16) ** 2 % 9)
    single = record(model, [ids])
    halves = [record(model, [part]) for part in ids.split(8, 1)]
    found = compare(single, *halves, axis="columns")
    assert found.first is None and found.whole
    assert not compare(single, *halves).agreeing  # no row is the same


def test_a_hand_sharded_module_is_left_out():
    model, other = model_of(), model_of()
    other[0].weight.data *= 2
    split = frozenset({"Sequential:0.weight"})
    found = compare(record(model, [X]), record(other, [X]), split=split)
    assert found.first.name == "1"


def test_rounding_that_grows_is_no_difference():
    model, other = model_of(), model_of()
    other[0].weight.data *= 1 + 6e-5
    found = compare(record(model, [X]), record(other, [X]))
    assert found.unsure and not explain_outputs(found)


def test_a_recording_that_fails_is_said():
    seen = record(model_of(), [X])
    broken = dataclasses.replace(seen, outputs_error="TypeError: no")
    assert "TypeError: no" in explain_outputs(compare(seen, broken))
    nothing = compare(seen, dataclasses.replace(seen, outputs=None))
    assert nothing == OutputComparison((), kinds=nothing.kinds)
    assert not explain_outputs(nothing)


def test_a_script_goes_on_where_the_recording_fails():
    log = Log(None, 0)
    Outputs(1)(log)
    log.tell("root", nn.Linear(1, 1), [["zz"], 3])
    assert log.record.outputs_error.startswith("TypeError")
    log.tell("output", nn.Linear(1, 1), torch.ones(1))


def test_nothing_is_left_of_it(recwarn):
    """No tensor is kept, no random number drawn, no graph made longer."""
    model, kept = model_of(), []
    state = torch.get_rng_state()
    model[0].register_forward_hook(
        lambda *given: kept.append(weakref.ref(given[2])))
    seen = record(model, [X])
    gc.collect()
    assert torch.equal(state, torch.get_rng_state())
    assert not any(one() is not None for one in kept)
    assert not seen.outputs["flat"].requires_grad
    assert not recwarn.list


def test_later_steps_and_recomputed_passes_are_not_recorded():
    class Recomputes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.two(checkpoint(self.one, x, use_reentrant=False))

    seen = record(Recomputes(), [X])
    calls = {(entry["name"], entry["call"])
             for entry in seen.outputs["entries"]}
    assert calls == {("one", 0), ("two", 0), ("", 0)}
    assert record(Recomputes(), [X], steps=0).outputs is None


def test_within_a_transform():
    model = model_of()
    plain = record(model, [X])
    log = Log(None, 0)
    Outputs(1)(log)
    for part in model.modules():
        part.register_forward_hook(
            lambda module, _, output: log.tell("output", module, output))
    log.tell("root", model, [hash_each([X], axis) for axis in (0, 1)])
    grad(lambda weights: functional_call(model, weights, X).sum())(
        dict(model.named_parameters()))
    log.tell("end")
    found = compare(plain, log.record)
    assert found.first is None and found.whole


@pytest.mark.parametrize("change", [
    lambda x: x + 0.01 * x.abs().mean(), lambda x: 1.01 * x,
    lambda x: x.flip(-1), lambda x: x.roll(1, 1),
    lambda x: torch.cat([x[:, :-1], 1.5 * x[:, -1:]], 1)])
@pytest.mark.parametrize("shape", [(4, 50), (4, 64, 700)])
def test_a_sketch_sees(change, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    mine, good = (sketch(value, [0, 1, 2, 3]).view(4, -1)
                  for value in (change(x), x))
    assert ((mine - good).abs().amax(1) > 1e-3 * good[:, 0]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_a_sketch_of_any_numbers(dtype):
    x = torch.arange(12).view(3, 4).remainder(3).to(dtype)
    assert sketch(x, [0, 2]).isfinite().all()
    assert len([*views(x, 3, 4)]) == 3


def test_settings_are_those_of_each_group():
    log = Log(None, 0)
    probe = Outputs(1)
    probe(log)
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    log.names = {id(weight): f"Net:{i}" for i, weight in enumerate(weights)}
    optimizer = torch.optim.AdamW([
        {"params": weights[:1], "weight_decay": 0.5},
        {"params": weights[1:], "betas": (0.5, torch.tensor(0.75))}], 0.25)
    log.tell("gradients", optimizer)
    optimizer.param_groups[0]["weight_decay"] = 1.0
    log.tell("gradients", optimizer)
    log.tell("end")
    first, second = log.record.settings[0]
    assert first["names"] == ["Net:0"] and first["values"][
        "weight_decay"] == (0.5,)
    assert second["values"]["betas"] == (0.5, 0.75)
    assert second["values"]["lr"] == (0.25,)


def test_an_entry_can_be_read_again():
    entry = record(model_of(), [X]).outputs["entries"][0]
    fields = partial(map, lambda field: field.name)
    from rankcheck.record.outputs import Entry

    assert set(entry) == set(fields(dataclasses.fields(Entry)))
