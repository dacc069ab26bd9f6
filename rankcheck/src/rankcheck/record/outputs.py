"""Records what each module puts out in the first step, in few numbers.

Several ranks and one process give the same numbers for the same samples, but
for rounding. So verify can say where they part: see `questions/where.py`.

outputs   `entries`, what `Entry` has of each tensor that a module has put out;
          `samples`, of each forward pass the hashes of its rows and columns;
          `flat`, the sketches of all entries one behind the other
outputs_error  why there are no more, "" if there are all
settings  of each optimizer, at its first step: the parameters' names and
          what is set for them, of each group
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rankcheck.record.rank_record import GroupSettings
from rankcheck.record.recorder import Log
from rankcheck.record.tensors import Hashes, plain_name, unwrap

SKETCH_SIZE = 4  # of a sample's sketch: its length, its sum, two projections
ELEMENTS = 256  # of a sample's part of an output that are looked at, about
AXES = ("rows", "columns", "whole")  # what is a sample; or the whole tensor
SAMPLES = 128  # of a forward pass that are looked at, about
CALLS = 20_000  # of modules, after which no more are recorded
# What changes a step. A rate is another question's
PLAIN_SETTINGS = (
    "weight_decay", "betas", "momentum", "dampening", "nesterov", "eps",
    "alpha", "rho", "lr_decay", "lambd", "etas", "amsgrad", "centered",
    "maximize", "momentum_decay")


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that a module has put out."""

    model: str  # the class of the outermost module
    name: str  # of the module in it, "" for itself
    kind: str  # its class
    call: int  # how often it was called before, in this forward pass
    leaf: int  # which of the tensors that it has put out
    part: int  # the number of the forward pass


@dataclass(frozen=True)
class Entry(OutputTensor):
    """The same, as the samples have parts of it."""

    axis: str  # of `AXES`
    layout: str  # how they lie in the tensor
    shape: tuple[int, ...]  # of each sample's part
    start: int  # in `flat`
    count: int  # of samples that were looked at


class Outputs:
    """The probe."""

    log: Log
    label: str  # of the outermost module of this forward pass
    sizes: list[int]  # how many rows it is given, and how many columns
    picks: dict[str, list[int]]  # by axis, which samples are looked at

    def __init__(self, steps: int) -> None:
        """Record the first so many steps, over all optimizers."""
        self.steps = steps
        self.entries: list[Entry] = []
        # of each forward pass, by axis, the hashes of what is looked at
        self.samples: list[dict[str, list[str]]] = []
        self.sketches: list[torch.Tensor] = []
        self.roots: dict[int, str] = {}  # id of an outermost module -> label
        self.names: dict[int, str] = {}  # id of a module in it -> its name
        self.calls: Counter[str] = Counter()  # of these, in a forward pass
        self.filled = 0  # numbers in `sketches`
        self.number = 0  # of calls
        self.begun = 0  # entries of the steps before
        # id of an optimizer -> what is set, of each group
        self.settings: dict[int, list[GroupSettings]] = {}

    def __call__(self, log: Log) -> None:
        self.log = log
        log.on("root", partial(self.watch, self.on_root))
        log.on("output", partial(self.watch, self.on_output))
        log.on("gradients", self.on_gradients)
        log.on("skipped", self.on_skipped)
        log.on("end", self.on_end)

    @property
    def records(self) -> bool:
        """Whether what a module puts out now is recorded."""
        return (len(self.log.record.steps) < self.steps
                and self.number < CALLS and not self.error
                and torch._C._current_graph_task_id() == -1)

    @property
    def error(self) -> str:
        """Why no more is recorded."""
        return self.log.record.outputs_error

    def watch(self, function: Callable[..., None], *about: Any) -> None:
        """Call it while outputs are recorded. The script goes on, anyway."""
        if not self.records:
            return
        try:
            with torch._C._DisableFuncTorch(), torch.no_grad():
                function(*about)
        except Exception as error:
            self.log.record.outputs_error = f"{type(error).__name__}: {error}"

    def on_root(self, module: nn.Module, hashes: Hashes | None) -> None:
        """Begin a forward pass.

        Args:
            module: the outermost one.
            hashes: of the rows and the columns of what it is given; None if
                that is no sample.
        """
        if id(module) not in self.roots:
            kind = type_of(module)
            others = sum(label.split(" ")[0] == kind
                         for label in self.roots.values())
            self.roots[id(module)] = f"{kind} {others + 1}" if others else kind
        self.label, self.calls = self.roots[id(module)], Counter()
        self.names = {id(part): plain_name(f"{name}.").rstrip(".")
                      for name, part in module.named_modules()}
        if hashes:
            self.sizes = [len(names) for names in hashes]
            by_axis = dict(zip(AXES, [*hashes, ["all"]], strict=True))
            self.picks = {axis: pick(names)
                          for axis, names in by_axis.items()}
            self.samples.append({
                axis: [names[i] for i in self.picks[axis]]
                for axis, names in by_axis.items()})

    def on_output(self, module: nn.Module, output: Any) -> None:
        """Record the tensors that a module has put out."""
        name = self.names.get(id(module))
        if not self.samples or name is None:
            return
        call = self.calls[name]
        self.calls[name] += 1
        self.number += 1
        for leaf, value in enumerate(tree_leaves(output)):
            tensor = plain(value)
            if tensor is not None:
                self.record(tensor, OutputTensor(
                    model=self.label, name=name, kind=type_of(module),
                    call=call, leaf=leaf, part=len(self.samples) - 1))

    def record(self, tensor: torch.Tensor, output: OutputTensor) -> None:
        """Record a tensor, in each way in which samples may lie in it."""
        for axis, layout, view in views(tensor, *self.sizes):
            picks = self.picks[axis]
            if not picks or math.prod(view.shape[1:]) == 0:
                continue
            values = sketch(view, picks)
            self.entries.append(Entry(
                **vars(output), axis=axis, layout=layout,
                shape=tuple(view.shape[1:]), start=self.filled,
                count=len(picks)))
            self.sketches.append(values)
            self.filled += len(values)

    def on_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what is set for an optimizer, at its first step."""
        self.begun = len(self.entries)
        if id(optimizer) not in self.settings:
            self.settings[id(optimizer)] = self.of_groups(optimizer)

    def of_groups(
            self, optimizer: torch.optim.Optimizer) -> list[GroupSettings]:
        """Return what is set for each group of an optimizer."""
        names, number, at = self.log.names, len(self.settings), 0
        groups: list[GroupSettings] = []
        for group in optimizer.param_groups:
            known = []
            for weight in group["params"]:
                known.append(names.get(id(weight), f"parameter {number}.{at}"))
                at += 1
            values = {}
            for key in (*PLAIN_SETTINGS, "lr"):
                value = plain_setting(group.get(key))
                if value is not None:
                    values[key] = value
            groups.append({"names": known, "values": values})
        return groups

    def on_skipped(self) -> None:
        """Forget what led to no step."""
        del self.entries[self.begun:]

    def on_end(self) -> None:
        """Put what was recorded into the process's record."""
        self.log.record.settings = list(self.settings.values())
        if self.entries:
            self.log.record.outputs = {
                "entries": [dict(vars(entry)) for entry in self.entries],
                "samples": self.samples, "flat": torch.cat(self.sketches)}


def type_of(module: nn.Module) -> str:
    """Return the name of a module's class, without what fully_shard puts
    before it.
    """
    for base in type(module).__mro__:
        if not base.__name__.startswith("FSDP"):
            return base.__name__
    return type(module).__name__


def plain_setting(value: Any) -> tuple[float, ...] | None:
    """Return the numbers of a setting, None if there are none."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    numbers = [one.item() if isinstance(one, torch.Tensor)
               and one.numel() == 1 else one for one in several]
    if not all(isinstance(one, (int, float)) for one in numbers):
        return None
    return tuple(map(float, numbers))


def plain(value: Any) -> torch.Tensor | None:
    """Return what is looked at, if it is that: a tensor of numbers that is
    whole on this rank.
    """
    value = unwrap(value)
    if type(value) not in (torch.Tensor, nn.Parameter) or (
            value.layout != torch.strided or value.is_nested
            or value.is_quantized or value.is_meta):
        return None
    tensor: torch.Tensor = value.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dim() and tensor.numel() else None


def pick(names: list[str]) -> list[int]:
    """Return the places of some samples, by their hashes: the same ones on
    any rank.
    """
    if len(names) <= SAMPLES:
        return list(range(len(names)))
    bound = SAMPLES * 16**8 // len(names)
    return [i for i, name in enumerate(names) if int(name[:8], 16) < bound]


def views(tensor: torch.Tensor, rows: int, columns: int
          ) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the ways in which a tensor may have a part for each sample.

    Args:
        tensor: what a module has put out.
        rows: how many samples there are if each is a row of what the model is
            given.
        columns: the same, if each is a column.

    Yields:
        What a sample is, of `AXES`; how they lie; and the tensor with the
        samples first.
    """
    yield "whole", "", tensor[None]
    for axis, size in (("rows", rows), ("columns", columns)):
        if size == 0:
            continue
        for dim in range(min(tensor.dim(), 2)):
            if tensor.shape[dim] == size:
                yield axis, f"{dim}", tensor.movedim(dim, 0)
        length, rest = len(tensor), tensor.shape[1:]
        if length > size and length % size == 0 and size > 1:
            # flattened: samples outside, or inside
            yield axis, "outer", tensor.reshape(size, length // size, *rest)
            yield axis, "inner", tensor.reshape(
                length // size, size, *rest).movedim(1, 0)


def sketch(view: torch.Tensor, picks: list[int]) -> torch.Tensor:
    """Return `SKETCH_SIZE` numbers of each sample, one behind the other.

    All are as large as the length of its part, or smaller: a difference in
    few elements shows in the first two, one in their order in the others.
    """
    dims = tuple(range(1, view.dim()))
    size = math.prod(view.shape[1:])
    if not view.is_floating_point():
        view = view.double()
    precise = torch.promote_types(view.dtype, torch.float32)
    if dims:
        norm = torch.linalg.vector_norm(view, dim=dims, dtype=precise)
        total = view.sum(dims, dtype=precise) / size ** 0.5
    else:
        norm, total = view.abs(), view
    rows = torch.tensor(picks, dtype=torch.long)
    places = places_in(view.shape[1:])
    some = view[(rows[:, None], *places)].cpu().double()
    count = min(size, ELEMENTS)
    numbers = torch.empty(len(picks), SKETCH_SIZE)
    numbers[:, 0], numbers[:, 1] = norm[rows].cpu(), total[rows].cpu()
    numbers[:, 2:] = some @ random_columns(count) * (size / count) ** 0.5
    return numbers.flatten()


@cache
def places_in(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Return which elements of a part are looked at, as indices of each
    dimension.
    """
    size = math.prod(shape)
    at = torch.arange(min(size, ELEMENTS))
    if size > ELEMENTS:  # spread by the golden ratio
        at = ((at.double() + 0.5) * 0.6180339887).frac().mul(size).long()
    return torch.unravel_index(at, shape) if shape else ()


@cache
def random_columns(size: int) -> torch.Tensor:
    """Return two columns of numbers of mean 0 and length 1, alike in every
    process.

    Drawn without a generator, whose state is the script's.
    """
    at = torch.arange(1, size + 1, dtype=torch.float64)[:, None]
    seeds = torch.tensor([12.9898, 78.233], dtype=torch.float64)
    return ((at * seeds).sin() * 43758.5453).frac() * 3 ** 0.5
