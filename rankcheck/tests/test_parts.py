"""Which parts of one process's tensors the ranks have: known by values."""

import pytest
import torch
from torch import nn

from rankcheck.record import fingerprints
from rankcheck.record.fingerprints import slice_fingerprints
from rankcheck.record.rank_record import RankRecord
from rankcheck.verification.parts import (
    find_moved,
    find_slices,
    locate_parts,
    put_parts_beside,
)

G = torch.Generator().manual_seed(0)
WHOLE = torch.randn(6, 4, 3, generator=G)


def record(tensors, model="Model"):
    named = {f"{model}:{name}": tensor.detach()
             for name, tensor in tensors.items()}
    return RankRecord(
        shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
        fingerprints={name: slice_fingerprints(tensor)
                      for name, tensor in named.items()})


def parts_of(single, *ranks, hand_sharded=None):
    """What is found of some tensors of each rank, with all names by default.
    """
    records = [record(rank) for rank in ranks]
    names = {name for one in records for name in one.shapes}
    if hand_sharded is not None:
        names = {f"Model:{name}" for name in hand_sharded}
    return locate_parts(record(single), records, names)


def tensors_of(*modules):
    return dict(nn.Sequential(*modules).named_parameters())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("block", [1, 7, 2 ** 22])
def test_a_part_is_found_along_each_dimension(dim, block, monkeypatch):
    """In whichever blocks it is hashed, and however it lies in memory."""
    monkeypatch.setattr(fingerprints, "BLOCK", block)
    chosen = torch.tensor([2, 0])
    part = WHOLE.index_select(dim, chosen)
    strided = part.movedim(0, 2).contiguous().movedim(2, 0)
    assert strided.stride() != part.stride()
    whole = slice_fingerprints(WHOLE)
    for one in part, strided, part.double():
        found = slice_fingerprints(one)[dim]
        assert torch.equal(find_slices(found, whole[dim]), chosen)
    changed = part.clone()
    changed.view(-1)[-1] += 1e-6
    assert find_slices(slice_fingerprints(changed)[dim], whole[dim]) is None


def test_a_fingerprint_tells_the_places_of_values():
    """Two elements that change places make another slice."""
    swapped = WHOLE.clone()
    swapped[0, 0, :2] = WHOLE[0, 0, :2].flip(0)
    hashes, others = slice_fingerprints(WHOLE)[0], slice_fingerprints(
        swapped)[0]
    assert (hashes != others).tolist() == [True] + [False] * 5
    assert len(set(hashes.tolist())) == 6


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1, 1)])
def test_tensors_without_slices_have_fingerprints(shape):
    found = slice_fingerprints(torch.zeros(shape))
    assert [len(hashes) for hashes in found] == list(shape or (1,))


def test_stages_of_a_pipeline_are_found_under_other_names():
    """And with a layer its LayerNorm, which begins as all others do."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
              for _ in range(4)]
    single = tensors_of(*layers)
    ranks = tensors_of(*layers[:2]), tensors_of(*layers[2:])
    found = parts_of(single, *ranks)
    assert found.make_up and not found.uncompared
    for rank, places in enumerate(found.of_ranks):
        assert {name: place.name for name, place in places.items()} == {
            f"Model:{i}.{rest}": f"Model:{2 * rank + i}.{rest}"
            for i in range(2)
            for rest in ("0.weight", "0.bias", "1.weight", "1.bias")}
    linear = {f"Model:{i}.1.{name}" for i in range(2)
              for name in ("weight", "bias")}
    assert find_moved(record(single), [*map(record, ranks)], linear) == {
        f"Model:{i}.0.{name}" for i in range(2) for name in ("weight", "bias")}


def test_copies_of_one_layer_may_be_shared_or_not():
    """Nothing tells: another gradient is no fault then, and no share."""
    torch.manual_seed(0)
    layer, head = nn.Linear(4, 4), nn.Linear(4, 2)
    single = record(tensors_of(layer, layer))
    single.fingerprints["Model:1.weight"] = single.fingerprints[
        "Model:0.weight"]
    single.fingerprints["Model:1.bias"] = single.fingerprints["Model:0.bias"]
    ranks = [record(tensors_of(layer)), record(tensors_of(layer))]
    shared = {"Model:0.weight", "Model:0.bias"}
    elsewhere = {"Model:1.weight", "Model:1.bias"}
    assert not find_moved(single, ranks, elsewhere)
    assert find_moved(single, ranks, elsewhere, shared) == shared
    single.fingerprints["Model:head"] = slice_fingerprints(head.weight)
    only = {"Model:head": slice_fingerprints(head.weight)}
    for one in ranks:
        one.fingerprints |= only
    assert find_moved(single, ranks, elsewhere, {"Model:head"}) == set()


def test_slices_of_a_layer_are_found_with_their_bias_of_zeros():
    """The bias is the same as any other zeros, but belongs to its weight."""
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    nn.init.zeros_(up.bias)
    single = {"up.weight": up.weight, "up.bias": up.bias,
              "down.weight": down.weight, "down.bias": torch.zeros(4)}
    ranks = [{"up.weight": up.weight.chunk(2)[rank],
              "up.bias": up.bias.chunk(2)[rank],
              "down.weight": down.weight.chunk(2, 1)[rank]}
             for rank in (0, 1)]
    found = parts_of(single, *ranks)
    assert found.make_up and not found.uncompared
    place = found.of_ranks[1]["Model:up.bias"]
    assert place.name == "Model:up.bias"
    assert place.slices.tolist() == [4, 5, 6, 7]
    # nor is what all ranks have under one process's name taken for another
    assert not find_moved(record(single), [*map(record, ranks)],
                          {"Model:up.weight", "Model:down.weight"})
    vectors = put_parts_beside(
        found, [{f"Model:{name}": tensor.detach()
                 for name, tensor in rank.items()} for rank in ranks],
        {f"Model:{name}": tensor.detach().flatten()
         for name, tensor in single.items()}, record(single).shapes)
    assert torch.equal(vectors.actual, vectors.expected)
    assert sum(vectors.sizes.values()) == len(vectors.actual) == 72


def test_what_cannot_be_told_is_not_compared():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    single = tensors_of(layer, nn.Linear(4, 4))
    copies = {**single, "1.weight": layer.weight, "1.bias": layer.bias}
    found = parts_of(copies, copies)  # both layers begin alike
    assert found.make_up and found.ambiguous == {
        f"Model:{i}.{name}" for i in range(2) for name in ("weight", "bias")}
    other = parts_of(single, tensors_of(layer, nn.Linear(4, 4)))
    assert other.unknown == {"Model:1.weight", "Model:1.bias"}
    assert not other.make_up
    assert not parts_of(single, single, hand_sharded=[]).make_up
    # two weights have different slices, and the bias may be of each
    single = {"a": torch.randn(8, 4), "b": torch.randn(8, 4),
              "a_bias": torch.zeros(8)}
    found = parts_of(single, {"a": single["a"][:4], "b": single["b"][::2],
                              "a_bias": torch.zeros(4)})
    assert found.make_up and found.ambiguous == {"Model:a_bias"}
    large = torch.randn(200, 100)  # of which a record has some elements
    found = parts_of({"a": large}, {"a": large[:50]})
    assert found.make_up and found.uncompared == {"Model:a"}
    assert not parts_of({"a": large}, {"b": large}).uncompared
