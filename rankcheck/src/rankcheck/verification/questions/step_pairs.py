"""Steps of the ranks, beside those of one process that have their samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rankcheck.verification.comparison import Comparison, samples_of
from rankcheck.verification.questions.records import StepRecords


@dataclass(frozen=True)
class StepPair:
    """A step of the ranks, and the same samples in one process.

    Attributes:
        step: its number among the steps of the ranks.
        ranks: what each rank has recorded of it.
        single_process: its steps: one, or as many as there are ranks
            where the ranks read as many minibatches.
    """

    step: int
    ranks: StepRecords
    single_process: StepRecords


def find_comparable(case: Comparison) -> list[StepPair]:
    """Return the steps that can be compared though parameters are sharded.

    There are some if they are sharded by hand and their parts make up the
    tensors of one process: the first ones, as long as the samples are the
    same. Where the ranks train by themselves in between, as in local SGD, it
    is the first step alone.
    """
    if case.frozen_run or not case.skip_reason or not case.parts.make_up:
        return []
    pairs = pair_steps(case)
    if case.averaged:
        pairs = pairs[:1]
    if not pairs or not samples_of(pairs[0].ranks):
        return []
    return list(itertools.takewhile(has_same_samples, pairs))


def pair_steps(case: Comparison) -> list[StepPair]:
    """Return the steps of the ranks that have samples of one process."""
    if case.frozen_run:
        minibatches = [record for record in case.longest_single_steps
                       if record["optimizer"] == 0][:case.size]
        return [StepPair(0, case.steps[0], minibatches)]
    pairs = [StepPair(step, records, [single])
             for step, (records, single) in enumerate(
                 zip(case.steps, case.single_steps, strict=False))]
    return pairs[:case.compared_steps]


def has_same_samples(pair: StepPair) -> bool:
    """Return whether the ranks read the samples of one process.

    A second optimizer's step may have none, as the first one's had them.
    """
    return set(samples_of(pair.ranks)) == set(samples_of(pair.single_process))
