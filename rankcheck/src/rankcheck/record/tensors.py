"""A model's tensors as its ranks hold them, and put together afterwards.

A rank describes what it has of each tensor without asking another rank: a
script that is wrong must not hang in who watches it.
"""

from dataclasses import dataclass

import torch

# How torch's wrappers lengthen the names of a model's parameters.
WRAPPERS = ("_orig_mod.", "module.", "_checkpoint_wrapped_module.",
            "_fsdp_wrapped_module.")
LARGEST = 8192  # elements of a tensor that are kept by `thin`


def describe(named):
    """What this rank has of tensors, pairs of a name and a tensor or None.

    A dictionary for `torch.save`: `plain`, the name and shape of each tensor
    that is whole on this rank, their elements in one vector, `flat`; and
    `sharded`, name -> part, mesh, placements and shape of the others.
    """
    from torch.distributed.tensor import DTensor

    plain, flat, sharded = [], [], {}
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, DTensor):
            plain.append((plain_name(name), tuple(tensor.shape)))
            flat.append(tensor.detach().float().flatten().cpu())
            continue
        sharded[plain_name(name)] = {
            "part": tensor.to_local().detach().float().cpu().clone(),
            "mesh": tensor.device_mesh.mesh.clone(),
            "placements": [(type(p).__name__, getattr(p, "dim", None))
                           for p in tensor.placements],
            "shape": tuple(tensor.shape)}
    return {"plain": plain, "sharded": sharded,
            "flat": torch.cat(flat) if flat else torch.zeros(0)}


def thin(tensor):
    """A copy of a tensor: of a large one some elements and its sum, which are
    linear: they can be averaged over ranks.
    """
    from torch.distributed.tensor import DTensor

    if tensor is None or isinstance(tensor, DTensor):
        return tensor if tensor is None else tensor.detach().clone()
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).flatten()
    if len(tensor) <= LARGEST:
        return tensor.cpu().clone()
    some = tensor[::-(-len(tensor) // LARGEST)].float()
    return torch.cat([some, tensor.float().sum()[None]]).cpu()


def unwrap(value: object) -> object:
    """Return the tensor in whose place a transform of torch.func has put
    another, and anything else as it is.
    """
    while isinstance(value, torch.Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(value)):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def is_low(tensor):
    return tensor.dtype in (torch.bfloat16, torch.float16)


def plain_name(name):
    """A parameter's name in the model as it is taught."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass
class Whole:
    """Tensors by name, put together from the parts of all ranks."""

    tensors: dict
    holes: list  # names of tensors with a part that no rank has
    differing: dict  # rank -> the largest difference from a rank before it
    apart: set  # names of tensors whose copies differ

    def error(self, other):
        """How far off the other it is as one vector, relatively."""
        return relative_error(self.tensors, other.tensors)


def length(tensors):
    """Of all of them as one vector, as far as they are finite."""
    return sum(tensor[tensor.isfinite()].square().sum().item()
               for tensor in tensors.values()) ** 0.5


def relative_error(mine, good):
    """Of tensors by name, as one vector; nan where only one of them is."""
    off = sum(difference(mine.get(name, torch.zeros(())), tensor
                         ).square().sum().item()
              for name, tensor in good.items()) ** 0.5
    return off / max(length(good), 1e-30)


def difference(a, b):
    """a - b, but 0 where both are the same infinity, or both nan."""
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def assemble(ranks, same=None):
    """The `Whole` of what `describe` gave on each rank, a list.

    same: name -> another name of the same tensor, by which it is known.
    """
    tensors, filled, differing, apart = {}, {}, {}, set()
    for rank, state in enumerate(ranks):
        for name, shape, part, at in pieces(state, rank):
            name = (same or {}).get(name, name)
            if name not in tensors:
                tensors[name] = torch.zeros(shape)
                filled[name] = torch.zeros(shape, dtype=torch.bool)
            elif tensors[name].shape != shape:
                differing[rank] = float("inf")
                continue
            values, done = tensors[name].view(-1), filled[name].view(-1)
            again = done[at]
            off = difference(values[at], part)[again]
            if off.any():
                apart.add(name)
                differing[rank] = max(differing.get(rank, 0.0),
                    off.abs().nan_to_num(torch.inf).max().item())
            values[at] = torch.where(again, values[at], part)
            done[at] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    return Whole(tensors, holes, differing, apart)


def put_together(updates, what):
    """The `Whole` of what the ranks that have it recorded of an update."""
    return assemble([update[what] for update in updates if what in update])


def without(state, names):
    """The same, but these tensors, which are whole on a rank."""
    return describe((name, part) for name, part in whole_here(state).items()
                    if name not in names) | {"sharded": state["sharded"]}


def pieces(state, rank):
    """(name, the tensor's shape, elements, where they are) of a rank."""
    for name, part in whole_here(state).items():
        yield name, part.shape, part.flatten(), slice(None)
    for name, entry in state["sharded"].items():
        yield (name, torch.Size(entry["shape"]), entry["part"].flatten(),
               elements(entry, rank))


def whole_here(state):
    """The tensors that are whole on this rank, by name."""
    parts = torch.split(state["flat"], [
        torch.Size(shape).numel() for _, shape in state["plain"]])
    return {name: part.view(shape) for (name, shape), part
            in zip(state["plain"], parts, strict=True)}


def names(state):
    """The names that a rank has something of."""
    return {name for name, _ in state["plain"]} | state["sharded"].keys()


def elements(entry, rank):
    """The flat indices of the whole tensor's elements that a rank has."""
    shape, mesh = entry["shape"], entry["mesh"]
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    places = (mesh == rank).nonzero()[0].tolist()
    splits = list(zip(entry["placements"], mesh.shape, places, strict=True))
    if any(kind == "_StridedShard" for (kind, _), *_ in splits):
        splits.reverse()  # FSDP has sharded what was sharded before
    for (kind, dim), count, place in splits:
        if kind in ("Shard", "_StridedShard"):
            parts = index.chunk(count, dim)
            index = parts[place] if place < len(parts) else (
                index.narrow(dim, 0, 0))
    return index.flatten()
