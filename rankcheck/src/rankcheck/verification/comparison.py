"""The runs of a verified script, and what the questions read of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from rankcheck.engine.findings import Finding, fail
from rankcheck.engine.questions import Question
from rankcheck.engine.run_record import RunRecord
from rankcheck.record.rank_record import RankRecord
from rankcheck.record.tensors import names, put_together, whole_here, without
from rankcheck.verification.locate import OutputComparison, compare_outputs
from rankcheck.verification.parts import (
    HandShardedParts,
    PartVectors,
    find_moved,
    locate_parts,
    put_parts_beside,
)
from rankcheck.verification.runs import Runs

LOSS, GRADIENT, WEIGHT_UPDATE = 1e-4, 1e-3, 0.05  # relative
LOW = 30  # times that in bf16 or fp16

# Relative difference up to which learning rates and other settings of an
# optimizer are equal. Scripts set them, so only rounding in a schedule's
# arithmetic is left. A choice, not a measurement: smaller differences are not
# seen.
SAME_SETTING = 1e-3

# What a rank has recorded of a step; see rankcheck.record.rows
StepRecord: TypeAlias = dict[str, Any]
Answer: TypeAlias = "Callable[[Comparison], Iterable[Finding]]"

# In the order in which they are asked: causes before their effects
QUESTIONS: list[Question[Comparison]] = []


def shows_tensors(case: Comparison) -> bool:
    """Return whether tensors were seen: those of FSDP 1 cannot be."""
    return not case.facts("FSDP1")


def question(title: str, where: Callable[[Comparison], bool] = shows_tensors
             ) -> Callable[[Answer], Answer]:
    """Ask the decorated function about a `Comparison`.

    Args:
        title: what is right where the answer is "ok".
        where: whether it is asked about a comparison.
    """
    def add(find: Answer) -> Answer:
        QUESTIONS.append(Question(title, find, where))
        return find

    return add


@dataclass(frozen=True)
class Comparison:
    """A script's runs, and what the questions have learned of them.

    Attributes:
        runs: from which others can be had.
        single_process_run: None where it does not train with one process.
        multi_process_run: with several.
        frozen_run: with one that updates no weights, if that is compared.
        columns: whether the batch is the second dimension.
        skip_reason: why it is compared with neither of these, or "".
        compared_steps: only so many are, for the reason that `later_reason`
            says; None: all.
        later_reason: see `compared_steps`.
        rate: the learning rate, by that of one process.
        averaged: how often weights are, if gradients are not.
        hand_sharded: parameters of which ranks hold parts without DTensor.
        settings: which of the optimizer's are not one process's.
        failed: whether a question has found a FAIL.
        nodes: "" once it has run as two nodes, a text if it refuses that.
    """

    runs: Runs
    single_process_run: RunRecord | None
    multi_process_run: RunRecord
    frozen_run: RunRecord | None = None
    columns: bool = False
    skip_reason: str = ""
    compared_steps: int | None = None
    later_reason: str = ""
    rate: float = 1.0
    averaged: str = ""
    hand_sharded: frozenset[str] = frozenset()
    settings: str = ""
    failed: bool = False
    nodes: str | None = None

    @property
    def size(self) -> int:
        return len(self.multi_process_run.records)

    @cached_property
    def single_steps(self) -> list[StepRecord]:
        """What one process has recorded of its steps, [] if it has none."""
        if not self.single_process_run:
            return []
        return self.view(self.single_process_run)[0]

    @cached_property
    def longest_single_steps(self) -> list[StepRecord]:
        """The same of as many steps as have the same samples."""
        if not self.frozen_run:
            return self.single_steps
        return self.view(self.frozen_run)[0]

    @cached_property
    def steps(self) -> list[tuple[StepRecord, ...]]:
        """Of each step that all ranks have made, what each recorded."""
        return list(zip(*self.view(self.multi_process_run), strict=False))

    @cached_property
    def outputs(self) -> OutputComparison:
        """The modules' outputs in the first step."""
        single = self.frozen_run or self.single_process_run
        if single is None:
            raise ValueError("there is no run of one process")
        return compare_outputs(
            self.multi_process_run.all_records, single.record_of(0),
            "columns" if self.columns else "rows", self.hand_sharded,
            self.tolerance_factor)

    @cached_property
    def parts(self) -> HandShardedParts:
        """What the hand-sharded parameters are parts of."""
        if not self.single_process_run:
            return HandShardedParts()
        return locate_parts(self.single_process_run.record_of(0),
                            self.multi_process_run.all_records,
                            self.hand_sharded)

    def put_parts_beside(self, ranks: Iterable[Mapping[str, torch.Tensor]],
                         single_process: Mapping[str, torch.Tensor],
                         ) -> PartVectors | None:
        """Return hand-sharded tensors of the ranks, and of one process.

        Args:
            ranks: of each rank, its tensors as `thin` returns them.
            single_process: those of one process.
        """
        if not self.single_process_run:
            return None
        shapes = self.single_process_run.record_of(0).shapes
        return put_parts_beside(self.parts, [*ranks], single_process, shapes)

    def view(self, run: RunRecord) -> list[list[StepRecord]]:
        """Return what each rank has recorded of its steps.

        With its samples, but without the tensors that are split by hand:
        they are not to be compared by their names. As "recorded", each has
        the record with these.
        """
        return [[self.view_step(step) for step in record.steps]
                for record in run.all_records]

    def view_step(self, record: StepRecord) -> StepRecord:
        samples = record["columns" if self.columns else "rows"]
        shown = {**record, "samples": samples, "recorded": record}
        if not self.hand_sharded:
            return shown
        for name, state in record.items():
            has_tensors = isinstance(state, dict) and "plain" in state
            if has_tensors:  # as rankcheck.record.tensors describes them
                shown[name] = without(state, self.hand_sharded)
        return shown

    @property
    def tolerance_factor(self) -> int:
        """How much larger an error may be in low precision."""
        records = self.multi_process_run.all_records
        low = any(record.low_precision for record in records)
        return LOW if low else 1

    def elements(self, records: Sequence[StepRecord]) -> int:
        """Return how many elements a step's parameters have, on all ranks.

        With ZeRO-1 each rank's optimizer has some of them.
        """
        owned = [names(record["now"]) for record in records]
        if all(one == owned[0] for one in owned):
            elements: int = records[0]["elements"]
            return elements
        shapes: dict[str, tuple[int, ...]] = {}
        for record in self.multi_process_run.all_records:
            shapes |= record.shapes
        return sum(torch.Size(shapes[name]).numel()
                   for name in set().union(*owned))

    @property
    def reduces_in_step(self) -> bool:
        """Whether the optimizer reduces the gradients, when it is called."""
        return all(record.get("within", 0) > 0.5 * record["elements"]
                   for records in self.steps for record in records)

    @property
    def splits_matrices(self) -> bool:
        """Whether parameters are sharded, and not by fully_shard alone."""
        sharded = self.steps[0][0]["gradients"]["sharded"].values()
        if self.hand_sharded:
            return True
        fully_shard = self.facts("fully_shard")
        for entry in sharded:
            kinds = [kind for kind, _ in entry["placements"]]
            if not fully_shard or sum("Shard" in kind for kind in kinds) > 1:
                return True
        return False

    def facts(self, name: str) -> list[Any]:
        """Return the values of the facts of this name, of all ranks."""
        return [value for rank in range(self.size)
                for value in self.multi_process_run.facts(name, rank)]

    def named(self, names: Iterable[str]) -> str:
        """Return parameters in words, in the optimizer's order."""
        records = [*self.multi_process_run.all_records]
        if self.single_process_run:
            records += self.single_process_run.all_records
        order = [name for record in records
                 for name in (*record.shapes, *record.model)]
        models = {name.partition(":")[0] for name in order}
        shown = []
        for name in sorted(names, key=order.index):
            if len(models) > 1:
                shown.append(name.replace(":", "."))
            else:
                shown.append(name.partition(":")[2] or name)
        text = ", ".join(shown[:3])
        if len(shown) > 3:
            text += f" and {len(shown) - 3} more"
        return text


def samples_of(records: Iterable[StepRecord]) -> list[str]:
    """Return all samples of several steps, as often as they are read."""
    return [row for record in records for row in record["samples"]]


@dataclass(frozen=True)
class BatchComparison:
    """How the samples of a step relate to those of one process.

    Attributes:
        factor: 1, or the number of processes, if a step has the samples of
            one step of one process, or of that many; None if it has others.
        steps: in how many steps from the first on; None: in all.
        reason: why the others cannot be compared, "" if all can.
    """

    factor: int | None
    steps: int | None = None
    reason: str = ""


def compare_batches(case: Comparison) -> BatchComparison:
    """Compare the samples of each step of the first optimizer."""
    single = [set(record["samples"]) for record in case.single_steps
              if record["optimizer"] == 0]
    multi = [set(samples_of(records)) for records in case.steps
             if records[0]["optimizer"] == 0]
    if not case.single_process_run:
        return BatchComparison(None, reason="it does not train with 1 process")
    if not any(single) or not any(multi):
        return BatchComparison(None, reason="no samples were seen, so "
                               "ranks may all read the same")
    if all(read == expected
           for read, expected in zip(multi, single, strict=False)):
        return BatchComparison(1)
    first = set.union(*single[:case.size])
    if (multi[0] == first and single[0] != first
            and len(single) >= case.size):
        return BatchComparison(case.size)
    same = next(i for i, (read, expected) in enumerate(zip(
        multi, single, strict=False)) if read != expected)
    reason = ("the samples are not those of the single-process run: they are "
              "others, or padded or computed differently")
    one = case.single_process_run.record_of(0)
    if left_out(one) != left_out(case.multi_process_run.record_of(0)):
        reason = "it skips other steps than with 1 process"
    if same == 0 or not multi[0]:
        return BatchComparison(None, reason=reason)
    # the steps of all optimizers before the first of other samples
    numbers = [i for i, records in enumerate(case.steps)
               if records[0]["optimizer"] == 0]
    return BatchComparison(1, numbers[same],
                           f"from step {numbers[same]} on, {reason}")


def left_out(record: RankRecord) -> list[int]:
    """Return how many steps came before each that a rank has left out.

    A GradScaler leaves one out, or the script throws its gradients away.
    """
    return sorted([*record.skipped_steps, *record.discarded_steps])


def gradient_decisions(record: RankRecord) -> list[str]:
    """Return what a rank did with its gradients, time after time.

    "makes" for a step, else how it was left out.
    """
    made: list[str] = []
    for step in range(len(record.steps) + 1):
        skipped = record.skipped_steps.count(step)
        made += ["its GradScaler skips it"] * skipped
        discarded = record.discarded_steps.count(step)
        made += ["it discards its gradients"] * discarded
        if step < len(record.steps):
            made.append("makes")
    return made


def find_skips(run: RunRecord) -> list[Finding]:
    """Return a failure where a rank makes a step that another leaves out.

    Where both have come to their last step, one of them has thrown more
    gradients away: it may have computed those for itself, as in a profile.
    """
    # one that has died has left no record
    each = {rank: gradient_decisions(record)
            for rank, record in enumerate(run.records) if record}
    ended = {rank for rank in each if run.facts("left", rank)}
    first = min(each, default=0)
    for rank, decided in each.items():
        if len(decided) != len(each[first]) and {rank, first} <= ended:
            continue
        for at, pair in enumerate(zip(each[first], decided, strict=False)):
            first_makes, rank_makes = (
                decision == "makes" for decision in pair)
            if first_makes == rank_makes:
                continue
            who, other, reason = first, rank, pair[0]
            if first_makes:
                who, other, reason = rank, first, pair[1]
            step = decided[:at].count("makes")
            return [fail(
                f"rank {who} skips step {step} ({reason}), but rank {other} "
                "does not",
                "make the same decision on all ranks: all_reduce what it "
                "depends on (a loss, a norm, found_inf)", ranks=[who],
                numbers={"step": step},
                learned={"skip_reason": "the ranks skip different steps"},
                kind="skipped-step")]
    return []


def find_hand_sharded(single_run: RunRecord, multi_run: RunRecord,
                      ended: Finding | None
               ) -> frozenset[str]:
    """Return the parameters that are others, or smaller, than with one
    process.

    A script that shards by hand has them. With them, those of which the ranks
    have other numbers: each may own a table of its own. A parameter that is
    whole in each rank's model is not sharded, whichever optimizer has it
    (ZeRO-1), nor if one process has no such parameter (`find_extra`).

    ended: a failure of the ranks, perhaps before an optimizer that no rank
    came to.
    """
    expected = all_shapes(single_run.record_of(0))
    known: set[str] = set()
    for record in multi_run.all_records:
        known |= record.shapes.keys()
    if not ended:
        known |= single_run.record_of(0).shapes.keys()
    known -= find_extra(single_run, multi_run)
    hand_sharded = {name for record in multi_run.all_records for name in known
                    if all_shapes(record).get(name) != expected.get(name)}
    kinds = []  # of tensors that show which parameters have other numbers
    if hand_sharded:
        kinds = ["before"]
    elif any("alltoall" in call["call"].replace("_", "")
             for call in multi_run.calls(0)):
        kinds = ["before", "gradients"]  # an expert is of one rank
    for records in zip(*(record.steps for record in multi_run.all_records),
                       strict=False):
        if kinds and all(record["before"] for record in records):
            hand_sharded |= set.intersection(*(
                put_together(records, kind).unequal for kind in kinds))
    firsts = [record.steps[0] for record in multi_run.all_records
              if record.steps]
    return frozenset(hand_sharded | find_moved(
        single_run.record_of(0), multi_run.all_records, hand_sharded,
        put_together(firsts, "gradients").unequal))


def all_shapes(record: RankRecord) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a rank's parameters, in an optimizer or not."""
    return {**record.model, **record.shapes}


def find_extra(single_run: RunRecord, multi_run: RunRecord) -> set[str]:
    """Return the parameters that each rank has whole, and one process has not.

    Their ranks have all of one process's parameters beside them, and begin
    with the same values in them: else they may be parts of those.
    """
    shapes = [all_shapes(record) for record in multi_run.all_records]
    expected = all_shapes(single_run.record_of(0))
    if any(own.get(name) != shape for own in shapes
           for name, shape in expected.items()):
        return set()
    extra = {name for name in set.intersection(*map(set, shapes))
             if name not in expected
             and len({own[name] for own in shapes}) == 1}
    firsts = zip(*(record.steps[:1] for record in multi_run.all_records),
                 strict=True)
    differing = {name for records in firsts
                 for name in put_together(records, "before").unequal}
    return extra - differing


def initial_weights(record: RankRecord) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the values of each whole tensor, as a rank begins.
    """
    for step in record.steps:
        if step["before"]:
            yield from whole_here(step["before"]).items()


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return what the tensor has in memory, to compare it bit by bit.

    Without NumPy, which may not be installed, and has no bfloat16.
    """
    own = tensor.detach().cpu().contiguous()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())


class SharedGradients(NamedTuple):
    """The gradients that the ranks and several others all have.

    Attributes:
        applied: of all ranks, in one vector; None if there are none.
        each: of each of the others, likewise; [] if there are none.
        keys: the names of the parameters, with their number of elements.
    """

    applied: torch.Tensor | None
    each: list[torch.Tensor]
    keys: dict[str, int]


def gradients_of(records: Sequence[StepRecord],
                 single_steps: Iterable[StepRecord],
                 what: str = "gradients") -> SharedGradients:
    """Return the gradients of a step, and what each of `single_steps` has.

    what: of the latter: "gradients", "local", "sums" or "weighed".
    """
    whole = put_together(records, "gradients")
    each = [put_together([record], what).tensors for record in single_steps]
    keys = {key: tensor.numel() for key, tensor in whole.tensors.items()
            if all(key in one and tensor.shape == one[key].shape
                   for one in each)}
    if whole.unequal or not keys:
        return SharedGradients(None, [], keys)
    return SharedGradients(flat(whole.tensors, keys),
                           [flat(one, keys) for one in each], keys)


def flat(tensors: Mapping[str, torch.Tensor], keys: Iterable[str]
         ) -> torch.Tensor:
    """Return tensors in one vector, in the order of the keys."""
    return torch.cat([tensors[key].flatten() for key in keys])


def off(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error of a vector, relative to the length of another."""
    error: float = (
        (value - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    return error


def are_close(one: float, other: float) -> bool:
    """Return whether two settings are the same, but for rounding."""
    return one == other or abs(one - other) <= SAME_SETTING * abs(other)
