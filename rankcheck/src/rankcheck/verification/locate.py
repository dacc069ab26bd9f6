"""Where several ranks part from one process that has the same samples."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from rankcheck.record.outputs import NUMBERS, Entry

# Of a sample's part of an output, relative to the length of all: what rounding
# makes of it is below the first: measured on a transformer of 24 layers, 1e-6
# in fp32 and 4e-6 in bf16. What is between them may be either.
AGREES, DIFFERS = 3e-5, 1e-4


@dataclass(frozen=True, order=True)
class Output:
    """One tensor that a module puts out, in one of its calls."""

    model: str
    name: str
    call: int
    leaf: int


@dataclass(frozen=True)
class View:
    """How a tensor has a part for each sample."""

    axis: str
    layout: str
    shape: tuple


@dataclass(frozen=True)
class Sample:
    """What was computed of a sample in one of its forward passes."""

    name: str
    time: int


@dataclass(frozen=True)
class OutputComparison:
    """The outputs of several ranks beside those of one process."""

    agreeing: tuple[Output, ...]  # before the first that does not
    first: Output | None = None  # the first that differs
    ranks: tuple[int, ...] = ()  # on which it does
    kinds: dict[Output, str] | None = None  # the classes of their modules
    unsure: bool = False  # whether one before is neither
    whole: bool = False  # whether the last that one process has was compared
    error: str = ""  # why nothing was recorded


Sketches = dict[Output, dict[View, dict[Sample, torch.Tensor]]]


def read(record: dict | None) -> tuple[Sketches, dict[Output, str]]:
    """(what a rank has recorded, the classes), in the order of the calls."""
    found: Sketches = defaultdict(lambda: defaultdict(dict))
    kinds: dict[Output, str] = {}
    times: Counter = Counter()
    for values in record["entries"] if record else ():
        entry = Entry(**values)
        output = Output(entry.model, entry.name, entry.call, entry.leaf)
        view = View(entry.axis, entry.layout, tuple(entry.shape))
        kinds.setdefault(output, entry.kind)
        flat = record["flat"][entry.start:entry.start
                              + NUMBERS * entry.count].view(-1, NUMBERS)
        for name, sketch in zip(record["samples"][entry.part][entry.axis],
                                flat, strict=True):
            key = output, view, name
            found[output][view][Sample(name, times[key])] = sketch
            times[key] += 1
    return found, kinds


def compare_outputs(ranks: list[dict], single: dict, axis: str,
                    split: frozenset, loosely: float) -> OutputComparison:
    """Find the first output of one process that a rank has otherwise.

    ranks, single: what each has seen. axis: "rows" or "columns", whichever
    are the samples. split: hand-sharded parameters: what their modules put
    out may be a part of a sum. loosely: how much larger an error may be.
    """
    errors = [seen["outputs_error"] for seen in (*ranks, single)]
    if any(errors):
        return OutputComparison((), error=next(filter(None, errors)))
    good, kinds = read(single["outputs"])
    each = [read(seen["outputs"])[0] for seen in ranks]
    agreeing, unsure, last = [], False, None
    for output in good:
        if holds_part(output, split):
            continue
        amounts = [amount for one in each if (
            amount := error_of(one.get(output), good[output], axis))
            is not None]
        if not amounts:
            continue
        last = output
        if max(amounts) > DIFFERS * loosely:
            return OutputComparison(
                tuple(agreeing), output, tuple(
                    rank for rank, one in enumerate(each) if (error_of(
                        one.get(output), good[output], axis) or 0)
                    > DIFFERS * loosely), kinds, unsure)
        if max(amounts) > AGREES * loosely:
            unsure = True
        agreeing.append(output)
    return OutputComparison(tuple(agreeing), kinds=kinds, unsure=unsure,
                            whole=last is not None and last == [*good][-1])


def holds_part(output: Output, split: frozenset) -> bool:
    """Whether the module has a hand-sharded parameter of its own."""
    owners = {name.partition(":")[2].rpartition(".")[0] for name in split}
    return output.name in owners


def error_of(mine: dict | None, good: dict, axis: str) -> float | None:
    """How far off it is for the samples of both, as the best view shows it;
    None if there are none, or none of which both have a part alike.
    """
    errors = []
    for view, values in good.items():
        theirs = (mine or {}).get(view, {})
        both = [sample for sample in values if sample in theirs]
        if view.axis == axis and both:
            errors.append(distance([theirs[sample] for sample in both],
                                   [values[sample] for sample in both]))
    for view, values in good.items():
        theirs = [*(mine or {}).get(view, {}).values()]
        if errors and view.axis == "whole" and theirs:
            # what is the same in each pass is no matter of the samples
            first, *others = values.values()
            several = [*others, *theirs]
            errors.append(distance(several, [first] * len(several)))
    return min(errors, default=None)


def distance(mine: list[torch.Tensor], good: list[torch.Tensor]) -> float:
    """The largest difference of sketches, relative to their lengths."""
    ours, known = torch.stack(mine), torch.stack(good)
    same = (known == ours) | (known.isnan() & ours.isnan())
    scale = known[:, 0].square().mean().sqrt().clamp(min=1e-30)
    largest = torch.where(same, 0.0, (ours - known).abs()).max()
    return (largest / scale).nan_to_num(torch.inf).item()


def explain_outputs(found: OutputComparison) -> str:
    """Where the ranks part from one process, "" if that was not seen."""
    modules = len({(one.model, one.name) for one in found.agreeing})
    if found.error:
        return ("where they part was not seen: recording the modules' outputs "
                f"failed with {found.error}")
    if found.first and found.unsure:
        return ""
    if found.first:
        before = "none comes before it that can be compared"
        if modules == 1:
            before = "the one before it agrees"
        elif modules:
            before = f"the {modules} before it agree"
        if modules:
            last = found.agreeing[-1].name or "the model"
            before += f", so it is in that module or between it and {last}"
        return ("the first module whose output differs for the same samples "
                f"is {words_of(found.first, found.kinds)}, on "
                f"{join_ranks(found.ranks)}; {before}")
    if not modules or found.unsure:
        return ""
    if not found.whole:
        last = words_of(found.agreeing[-1], found.kinds)
        return (f"for the same samples the modules' outputs agree up to {last}"
                ", the last that can be compared: what differs comes after it")
    if modules == 1:
        return "for the same samples the model's output agrees"
    return f"for the same samples the outputs of all {modules} modules agree"


def join_ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    words = f"ranks {', '.join(map(str, ranks[:4]))}"
    if len(ranks) > 4:
        words += f" and {len(ranks) - 4} more"
    return words


def words_of(output: Output, kinds: dict[Output, str]) -> str:
    """A module's name, as its model calls it, with its class."""
    text = output.name or "the model"
    text += f" ({kinds[output]})"
    if output.call:
        text += f", in its call {output.call + 1} of a forward pass"
    return text
