"""Which parts of one process's tensors the ranks begin with.

A script that shards by hand gives its parts names of its own: in a pipeline,
"0.weight" is another layer's on each rank. So a part is known by its values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from rankcheck.record.rank_record import RankRecord
from rankcheck.record.tensors import MOST_KEPT

# Of each tensor, by its name; see `slice_fingerprints`
Fingerprints: TypeAlias = "Mapping[str, Sequence[torch.Tensor]]"


@dataclass(frozen=True)
class PartLocation:
    """Where a part is in a tensor of one process.

    Attributes:
        name: the tensor's.
        dim: along which it is a part.
        slices: which ones it has along that dimension; None if it is the
            whole tensor.
    """

    name: str
    dim: int = 0
    slices: torch.Tensor | None = None

    def is_kept(self, shape: Sequence[int]) -> bool:
        """Return whether records of the whole tensor have all of the part.

        They have each element of a small tensor; see `thin`.
        """
        return self.slices is None or torch.Size(shape).numel() <= MOST_KEPT

    def take(self, whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the part as a vector.

        Args:
            whole: the tensor, as `thin` returns it.
            shape: the tensor's.
        """
        if self.slices is None:
            return whole.flatten()
        return whole.view(tuple(shape) or (1,)).index_select(
            self.dim, self.slices).flatten()


@dataclass(frozen=True)
class HandShardedParts:
    """What the ranks have of one process's tensors.

    Attributes:
        of_ranks: of each rank, where its parts are, by their names.
        ambiguous: names of parts that could be in several places.
        unknown: names of parts that one process has nowhere.
        large: names of parts that are not whole tensors, and of which the
            records do not have all elements.
    """

    of_ranks: list[dict[str, PartLocation]] = field(default_factory=list)
    ambiguous: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    large: set[str] = field(default_factory=set)

    @property
    def make_up(self) -> bool:
        """Whether the ranks begin with what one process begins with."""
        found = any(self.of_ranks) or bool(self.ambiguous)
        return found and not self.unknown

    @property
    def uncompared(self) -> set[str]:
        """Names of parts whose gradients and weights cannot be compared."""
        return self.ambiguous | self.unknown | self.large


@dataclass(frozen=True)
class PartVectors:
    """The parts of all ranks, and what one process has in their places.

    Attributes:
        actual: the ranks' parts, in one vector.
        expected: those of one process.
        sizes: the number of elements of each part, by its rank and name.
    """

    actual: torch.Tensor
    expected: torch.Tensor
    sizes: dict[tuple[int, str], int]


def locate_parts(single_process: RankRecord, ranks: Sequence[RankRecord],
                 hand_sharded: Collection[str]) -> HandShardedParts:
    """Find the hand-sharded parameters of all ranks in those of one process.
    """
    known = single_process.fingerprints
    parts = HandShardedParts()
    for record in ranks:
        places: dict[str, PartLocation] = {}
        candidates: dict[str, list[PartLocation]] = {}
        for name, part in record.fingerprints.items():
            if name not in hand_sharded:
                continue
            found = find_places(part, known)
            if not found:
                parts.unknown.add(name)
            elif len(found) == 1 and is_certain(found[0], known):
                places[name] = found[0]
            else:
                candidates[name] = found
        by_neighbors = {name: place_by_neighbors(name, found, places)
                        for name, found in candidates.items()}
        for name, place in by_neighbors.items():
            if place is None:
                parts.ambiguous.add(name)
            else:
                places[name] = place
        parts.large.update(
            name for name, place in places.items()
            if not place.is_kept(single_process.shapes[place.name]))
        parts.of_ranks.append(places)
    return parts


def find_moved(single_process: RankRecord, ranks: Sequence[RankRecord],
               hand_sharded: Collection[str], unequal: Collection[str] = (),
               ) -> set[str]:
    """Return names by which a rank has a parameter that has another one in
    one process, though both begin with the same values.

    Of all layers, LayerNorm begins with ones: in a pipeline, stages that call
    theirs by one name do not share it. The parameters beside it tell. If they
    do not, as of copies of one layer, it may be shared or not: that the ranks
    have other gradients is no fault then.

    Args:
        single_process: the record of one process.
        ranks: those of the ranks.
        hand_sharded: what is known to be.
        unequal: names of parameters of which the ranks have other gradients.
    """
    moved: set[str] = set()
    if not hand_sharded:
        return moved
    parts = locate_parts(single_process, ranks, hand_sharded)
    for record, places in zip(ranks, parts.of_ranks, strict=True):
        for name, part in record.fingerprints.items():
            if name in hand_sharded:
                continue
            candidates = find_places(part, single_process.fingerprints)
            place = place_by_neighbors(name, candidates, places)
            if place is None:
                is_other = name in unequal and len(candidates) > 1
            else:
                is_other = place.name != name
            if is_other:
                moved.add(name)
    return moved


def find_places(part: Sequence[torch.Tensor], known: Fingerprints
                ) -> list[PartLocation]:
    """Return where a part can be in tensors of one process.

    Args:
        part: its fingerprints.
        known: those of one process's tensors.
    """
    places = []
    for name, whole in known.items():
        if len(whole) != len(part):
            continue
        dims = [dim for dim, (own, all_) in enumerate(
            zip(part, whole, strict=True)) if len(own) != len(all_)]
        if not dims and part[0].equal(whole[0]):
            places.append(PartLocation(name))
        if len(dims) == 1:
            slices = find_slices(part[dims[0]], whole[dims[0]])
            if slices is not None:
                places.append(PartLocation(name, dims[0], slices))
    return places


def find_slices(part: torch.Tensor, whole: torch.Tensor
                ) -> torch.Tensor | None:
    """Return where a part's fingerprints are among those of a whole tensor.

    None if one of them is nowhere there, so that it is no part of it.
    """
    if len(whole) < len(part):
        return None
    ordered, order = whole.sort()
    at = torch.searchsorted(ordered, part).clamp(max=len(whole) - 1)
    if not ordered[at].equal(part):
        return None
    return order[at]


def is_certain(place: PartLocation, known: Fingerprints) -> bool:
    """Return whether a part has slices that the whole tensor has once."""
    if place.slices is None:
        return True
    fingerprints = known[place.name][place.dim].tolist()
    counts = Counter(fingerprints)
    return all(counts[fingerprints[at]] == 1 for at in place.slices.tolist())


def place_by_neighbors(name: str, candidates: Sequence[PartLocation],
                       places: Mapping[str, PartLocation],
                       ) -> PartLocation | None:
    """Return where a part is, by where the parameters beside it are.

    A bias of zeros could be in many places, but belongs to its weight.

    Args:
        name: the part's.
        candidates: where it can be, by its values.
        places: where other parts of the rank are, by their names.

    Returns:
        None if no neighbor tells, or the closest ones do not agree.
    """
    by_name = {split_name(place.name): place for place in candidates}
    own = split_name(name)
    closest = 0
    found: set[tuple[tuple[str, ...], str]] = set()
    for other, place in places.items():
        prefix, whole_prefix = strip_common_end(split_name(other),
                                                split_name(place.name))
        if own[:len(prefix)] != prefix:
            continue
        distance = count_common(own, split_name(other))
        if distance > closest:
            closest = distance
            found.clear()
        if distance == closest:
            found.add((whole_prefix + own[len(prefix):], other))
    names = {candidate for candidate, _ in found}
    if len(names) != 1 or not names <= by_name.keys():
        return None
    candidate = by_name[names.pop()]
    if candidate.slices is None:
        return candidate
    # a bias has the same slices as its weight, if there is one such weight
    likely = set()
    for _, other in found:
        slices = places[other].slices
        if slices is not None and len(slices) == len(candidate.slices):
            likely.add(tuple(slices.tolist()))
    if len(likely) != 1:
        return None
    return PartLocation(candidate.name, candidate.dim,
                        torch.tensor(likely.pop()))


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of a parameter's name: its model's class comes first.
    """
    return tuple(re.split("[:.]", name))


def count_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many items two sequences have in common at their beginnings.
    """
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def strip_common_end(first: tuple[str, ...], second: tuple[str, ...]
                     ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two sequences without what they have in common at their ends."""
    count = count_common(first[::-1], second[::-1])
    return first[:len(first) - count], second[:len(second) - count]


def put_parts_beside(parts: HandShardedParts,
                     ranks: Sequence[Mapping[str, torch.Tensor]],
                     single_process: Mapping[str, torch.Tensor],
                     shapes: Mapping[str, Sequence[int]],
                     ) -> PartVectors | None:
    """Return tensors of all ranks' parts, and those of one process.

    Args:
        parts: where they are.
        ranks: of each rank, its tensors as `thin` returns them.
        single_process: those of one process.
        shapes: of its parameters.

    Returns:
        None if there is no part of which both have a tensor.
    """
    actual, expected, sizes = [], [], {}
    for rank, (places, own) in enumerate(
            zip(parts.of_ranks, ranks, strict=True)):
        for name, place in places.items():
            whole = single_process.get(place.name)
            shape = shapes[place.name]
            if name not in own or whole is None or not place.is_kept(shape):
                continue
            actual.append(own[name].flatten())
            expected.append(place.take(whole, shape))
            sizes[rank, name] = own[name].numel()
    if not sizes:
        return None
    return PartVectors(torch.cat(actual), torch.cat(expected), sizes)
