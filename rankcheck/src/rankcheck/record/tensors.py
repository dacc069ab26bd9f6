"""A model's tensors as its ranks hold them, and put together afterwards.

A rank describes what it has of each tensor without asking another rank: a
script that is wrong must not hang in who watches it.
"""

from __future__ import annotations

import sys
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, overload

import torch

if TYPE_CHECKING:
    from typing import TypeGuard  # new in Python 3.10

    from torch.distributed.tensor import DTensor

# How torch's wrappers lengthen the names of a model's parameters.
WRAPPERS = ("_orig_mod.", "module.", "_checkpoint_wrapped_module.",
            "_fsdp_wrapped_module.")
MOST_KEPT = 8192  # elements of a tensor that are kept by `thin`

# For the inputs of a model: one list for its rows, one for its columns
Hashes = list[list[str]]


class LocalShard(TypedDict):
    """What a rank has of a DTensor."""

    part: torch.Tensor  # float32, on the CPU
    mesh: torch.Tensor  # the ranks of its device mesh
    # for each dimension of the mesh, as ("Shard", 0) or ("Replicate", None)
    placements: list[tuple[str, int | None]]
    shape: tuple[int, ...]  # of the whole tensor


class LocalTensors(TypedDict):
    """What a rank has of a model's tensors: a dictionary for `torch.save`."""

    plain: list[tuple[str, tuple[int, ...]]]  # name and shape of whole ones
    sharded: dict[str, LocalShard]  # the others, by name
    flat: torch.Tensor  # the elements of the whole ones, in one vector


class TensorPart(NamedTuple):
    """Elements of a tensor that a rank has."""

    name: str
    shape: torch.Size  # of the whole tensor
    elements: torch.Tensor  # one dimension
    at: slice | torch.Tensor  # where they are in the whole tensor, flattened


def describe_tensors(
        named: Iterable[tuple[str, torch.Tensor | None]]) -> LocalTensors:
    """Return what this rank has of tensors, as float32 on the CPU.

    Args:
        named: names, as a model's wrappers lengthen them, and tensors. None
            stands for a tensor that there is not.
    """
    plain: list[tuple[str, tuple[int, ...]]] = []
    flat: list[torch.Tensor] = []
    sharded: dict[str, LocalShard] = {}
    for name, tensor in named:
        if tensor is None:
            continue
        if is_dtensor(tensor):
            sharded[plain_name(name)] = {
                "part": tensor.to_local().detach().float().cpu().clone(),
                "mesh": tensor.device_mesh.mesh.clone(),
                "placements": [(type(p).__name__, getattr(p, "dim", None))
                               for p in tensor.placements],
                "shape": tuple(tensor.shape)}
            continue
        plain.append((plain_name(name), tuple(tensor.shape)))
        flat.append(tensor.detach().float().flatten().cpu())
    return {"plain": plain, "sharded": sharded,
            "flat": torch.cat(flat) if flat else torch.zeros(0)}


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor, without importing what makes those.

    The import takes half as long as that of torch, and where nothing has
    imported it there are none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


@overload
def thin(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def thin(tensor: None) -> None: ...


def thin(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of a tensor, of a large one less than all.

    These are some elements and the sum, in one vector. They are linear: they
    can be averaged over ranks. A DTensor is copied as it is.
    """
    if tensor is None:
        return None
    tensor = tensor.detach()
    if is_dtensor(tensor):
        return tensor.clone()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.flatten()
    if len(tensor) <= MOST_KEPT:
        return tensor.cpu().clone()
    some = tensor[::-(-len(tensor) // MOST_KEPT)].float()
    return torch.cat([some, tensor.float().sum()[None]]).cpu()


def unwrap(value: Any) -> Any:
    """Return the tensor in whose place a transform of torch.func has put
    another, and anything else as it is.
    """
    while isinstance(value, torch.Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(value)):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def is_low(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in half precision."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without torch's wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass
class Whole:
    """Tensors by name, put together from the parts of all ranks."""

    tensors: dict[str, torch.Tensor]
    holes: list[str]  # names of tensors with a part that no rank has
    # rank -> the largest difference from a rank before it
    differing: dict[int, float]
    unequal: set[str]  # names of tensors whose copies differ

    def error(self, other: Whole) -> float:
        """Return the relative error of these, the other ones being right."""
        return relative_error(self.tensors, other.tensors)


def length(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the length of tensors as one vector, without what is not finite.
    """
    squares = sum(tensor[tensor.isfinite()].square().sum().item()
                  for tensor in tensors.values())
    return float(squares ** 0.5)


def relative_error(actual: Mapping[str, torch.Tensor],
                   expected: Mapping[str, torch.Tensor]) -> float:
    """Return the relative error of tensors by name, as one vector.

    Only the names in `expected` count. It is nan where only one of them is.
    """
    missing = torch.zeros(())
    squares = sum(
        subtract(actual.get(name, missing), tensor).square().sum().item()
        for name, tensor in expected.items())
    return float(squares ** 0.5) / max(length(expected), 1e-30)


def subtract(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a - b, but 0 where both are the same infinity, or both nan."""
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def assemble(ranks: Iterable[LocalTensors],
             same: Mapping[str, str] | None = None) -> Whole:
    """Put tensors together from what `describe_tensors` returned on each rank.

    Args:
        ranks: what each rank has, in the order of their ranks.
        same: name -> another name of the same tensor, by which it is known.
    """
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    differing: dict[int, float] = {}
    unequal: set[str] = set()
    names = same or {}
    for rank, state in enumerate(ranks):
        for name, shape, part, at in pieces(state, rank):
            name = names.get(name, name)
            if name not in tensors:
                tensors[name] = torch.zeros(shape)
                filled[name] = torch.zeros(shape, dtype=torch.bool)
            elif tensors[name].shape != shape:
                differing[rank] = float("inf")
                continue
            values, done = tensors[name].view(-1), filled[name].view(-1)
            again = done[at]
            off = subtract(values[at], part)[again]
            if off.any():
                unequal.add(name)
                largest = off.abs().nan_to_num(torch.inf).max().item()
                differing[rank] = max(differing.get(rank, 0.0), largest)
            values[at] = torch.where(again, values[at], part)
            done[at] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    return Whole(tensors, holes, differing, unequal)


def put_together(records: Iterable[Mapping[str, Any]], what: str) -> Whole:
    """Put together what the ranks that have it recorded of a step.

    Args:
        records: of each rank, a step as rows.py records it.
        what: the key of what `describe_tensors` returned, as "gradients".
    """
    return assemble([record[what] for record in records if what in record])


def without(state: LocalTensors, names: Collection[str]) -> LocalTensors:
    """Return the same, but these tensors, which are whole on a rank."""
    others = describe_tensors((name, part) for name, part
                              in whole_here(state).items()
                              if name not in names)
    return {"plain": others["plain"], "sharded": state["sharded"],
            "flat": others["flat"]}


def pieces(state: LocalTensors, rank: int) -> Iterator[TensorPart]:
    """Yield what a rank has of each tensor."""
    for name, part in whole_here(state).items():
        yield TensorPart(name, part.shape, part.flatten(), slice(None))
    for name, entry in state["sharded"].items():
        yield TensorPart(name, torch.Size(entry["shape"]),
                         entry["part"].flatten(),
                         elements(entry, rank))


def whole_here(state: LocalTensors) -> dict[str, torch.Tensor]:
    """Return the tensors that are whole on this rank, by name."""
    sizes = [torch.Size(shape).numel() for _, shape in state["plain"]]
    parts: Sequence[torch.Tensor] = torch.split(state["flat"], sizes)
    return {name: part.view(shape) for (name, shape), part
            in zip(state["plain"], parts, strict=True)}


def names(state: LocalTensors) -> set[str]:
    """Return the names of the tensors that a rank has something of."""
    return {name for name, _ in state["plain"]} | state["sharded"].keys()


def elements(entry: LocalShard, rank: int) -> torch.Tensor:
    """Return the flat indices of the whole tensor's elements that a rank has.
    """
    shape, mesh = entry["shape"], entry["mesh"]
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    places = (mesh == rank).nonzero()[0].tolist()
    splits = list(zip(entry["placements"], mesh.shape, places, strict=True))
    if any(kind == "_StridedShard" for (kind, _), *_ in splits):
        splits.reverse()  # FSDP has sharded what was sharded before
    for (kind, dim), count, place in splits:
        if kind not in ("Shard", "_StridedShard") or dim is None:
            continue
        parts = index.chunk(count, dim)
        if place < len(parts):
            index = parts[place]
        else:
            index = index.narrow(dim, 0, 0)
    return index.flatten()
