"""Where several ranks part from one process that has the same samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from rankcheck.record.outputs import SKETCH_SIZE, Entry
from rankcheck.record.rank_record import RankRecord, RecordedOutputs

# Of a sample's part of an output, relative to the length of all: what rounding
# makes of it is below the first: measured on a transformer of 24 layers, 1e-6
# in fp32 and 4e-6 in bf16. What is between them may be either.
SAME_OUTPUT, OTHER_OUTPUT = 3e-5, 1e-4

Axis: TypeAlias = Literal["rows", "columns"]  # of a tensor, with the samples


@dataclass(frozen=True, order=True)
class ModuleOutput:
    """One tensor that a module puts out, in one of its calls."""

    model: str
    name: str
    call: int
    leaf: int


@dataclass(frozen=True)
class View:
    """How a tensor has a part for each sample; see `Entry`."""

    axis: str
    layout: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What was computed of a sample in one of its forward passes.

    Attributes:
        name: the hash of what the model was given.
        time: how often it was seen before.
    """

    name: str
    time: int


@dataclass(frozen=True)
class OutputComparison:
    """The outputs of several ranks beside those of one process.

    Attributes:
        agreeing: those before the first that does not.
        first: the first that differs.
        ranks: those on which it does.
        kinds: the classes of the modules.
        unsure: whether one before is neither equal nor different for certain.
        whole: whether the last that one process has was compared.
        error: why nothing was recorded.
    """

    agreeing: tuple[ModuleOutput, ...]
    first: ModuleOutput | None = None
    ranks: tuple[int, ...] = ()
    kinds: Mapping[ModuleOutput, str] = field(default_factory=dict)
    unsure: bool = False
    whole: bool = False
    error: str = ""


# Of one output: the sketch of each sample, as each view shows it
Sketches: TypeAlias = dict[View, dict[Sample, torch.Tensor]]


class Recorded(NamedTuple):
    """What a rank has recorded, in the order of the calls.

    Attributes:
        sketches: of each output.
        kinds: the class of the module that has put it out.
    """

    sketches: dict[ModuleOutput, Sketches]
    kinds: dict[ModuleOutput, str]


def sort_outputs(record: RecordedOutputs | None) -> Recorded:
    """Sort what rankcheck.record.outputs has recorded on a rank."""
    found: dict[ModuleOutput, Sketches] = defaultdict(
        lambda: defaultdict(dict))
    kinds: dict[ModuleOutput, str] = {}
    times: Counter[tuple[ModuleOutput, View, str]] = Counter()
    if record is None:
        return Recorded(found, kinds)
    for values in record["entries"]:
        entry = Entry(**values)
        output = ModuleOutput(entry.model, entry.name, entry.call, entry.leaf)
        view = View(entry.axis, entry.layout, tuple(entry.shape))
        kinds.setdefault(output, entry.kind)
        end = entry.start + SKETCH_SIZE * entry.count
        sketches = record["flat"][entry.start:end].view(-1, SKETCH_SIZE)
        samples = record["samples"][entry.part][entry.axis]
        for name, sketch in zip(samples, sketches, strict=True):
            key = output, view, name
            found[output][view][Sample(name, times[key])] = sketch
            times[key] += 1
    return Recorded(found, kinds)


def compare_outputs(ranks: Sequence[RankRecord], single: RankRecord,
                    axis: Axis, hand_sharded: frozenset[str],
                    tolerance_factor: float,
                    ) -> OutputComparison:
    """Find the first output of one process that a rank has otherwise.

    Args:
        ranks: what each rank has recorded.
        single: what one process has recorded.
        axis: whichever are the samples.
        hand_sharded: parameters: what their modules put out may be a
            part of a sum.
        tolerance_factor: how much larger an error may be.
    """
    for record in (*ranks, single):
        if record.outputs_error:
            return OutputComparison((), error=record.outputs_error)
    expected, kinds = sort_outputs(single.outputs)
    each = [sort_outputs(record.outputs).sketches for record in ranks]
    agreeing: list[ModuleOutput] = []
    unsure, last = False, None
    for output in expected:
        if holds_part(output, hand_sharded):
            continue
        errors: dict[int, float] = {}  # of the ranks that have it
        for rank, sketches in enumerate(each):
            error = output_error(sketches.get(output), expected[output], axis)
            if error is not None:
                errors[rank] = error
        if not errors:
            continue
        last = output
        if max(errors.values()) > OTHER_OUTPUT * tolerance_factor:
            differing = tuple(rank for rank, error in errors.items()
                              if error > OTHER_OUTPUT * tolerance_factor)
            return OutputComparison(tuple(agreeing), output, differing, kinds,
                                    unsure)
        if max(errors.values()) > SAME_OUTPUT * tolerance_factor:
            unsure = True
        agreeing.append(output)
    return OutputComparison(tuple(agreeing), kinds=kinds, unsure=unsure,
                            whole=last is not None and last == [*expected][-1])


def holds_part(output: ModuleOutput, hand_sharded: frozenset[str]) -> bool:
    """Return whether the module has a hand-sharded parameter of its own."""
    owners = {name.partition(":")[2].rpartition(".")[0]
              for name in hand_sharded}
    return output.name in owners


def output_error(actual: Sketches | None, expected: Sketches, axis: Axis
                 ) -> float | None:
    """Return how far off an output is for the samples of both.

    As the view shows it in which that is least; None if both have no samples,
    or none of which both have a part alike.
    """
    actual = actual or {}
    errors = []
    for view, values in expected.items():
        recorded = actual.get(view, {})
        both = [sample for sample in values if sample in recorded]
        if view.axis == axis and both:
            errors.append(sketch_distance([recorded[sample] for sample
                                           in both],
                                          [values[sample] for sample in both]))
    for view, values in expected.items():
        passes = [*actual.get(view, {}).values()]
        if errors and view.axis == "whole" and passes:
            # what is the same in each pass is no matter of the samples
            first, *others = values.values()
            several = [*others, *passes]
            errors.append(sketch_distance(several, [first] * len(several)))
    return min(errors, default=None)


def sketch_distance(actual: list[torch.Tensor],
                    expected: list[torch.Tensor]) -> float:
    """Return the largest difference of sketches, relative to their lengths.
    """
    found, known = torch.stack(actual), torch.stack(expected)
    same = (known == found) | (known.isnan() & found.isnan())
    scale = known[:, 0].square().mean().sqrt().clamp(min=1e-30)
    largest = torch.where(same, 0.0, (found - known).abs()).max()
    relative: float = (largest / scale).nan_to_num(torch.inf).item()
    return relative


def explain_outputs(found: OutputComparison) -> str:
    """Say where the ranks part from one process, "" if that was not seen."""
    modules = len({(one.model, one.name) for one in found.agreeing})
    if found.error:
        return ("where they differ is unknown, as recording the modules' "
                f"outputs failed with {found.error}")
    if found.first and found.unsure:
        return ""
    if found.first:
        before = "no earlier one can be compared"
        if modules == 1:
            before = "the one before it matches"
        elif modules:
            before = f"the {modules} before it match"
        if modules:
            last = found.agreeing[-1].name or "the model"
            before += f", so look in that module or between it and {last}"
        return ("the first module whose output differs for the same samples: "
                f"{name_module(found.first, found.kinds)}, on "
                f"{number_ranks(found.ranks)}; {before}")
    if not modules or found.unsure:
        return ""
    if not found.whole:
        last = name_module(found.agreeing[-1], found.kinds)
        return (f"for the same samples, module outputs match up to {last}, "
                "the last one that can be compared: look after it")
    if modules == 1:
        return "for the same samples, the model's output matches"
    return f"for the same samples, outputs of all {modules} modules match"


def number_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = f"ranks {', '.join(map(str, ranks[:4]))}"
    if len(ranks) > 4:
        text += f" and {len(ranks) - 4} more"
    return text


def name_module(output: ModuleOutput, kinds: Mapping[ModuleOutput, str]
                ) -> str:
    """Return a module's name, as its model calls it, with its class."""
    text = output.name or "the model"
    text += f" ({kinds[output]})"
    if output.call:
        text += f", call {output.call + 1} in a forward pass"
    return text
