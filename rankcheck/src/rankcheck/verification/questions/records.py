"""What the ranks have recorded, as the questions read it.

A rank writes plain dictionaries. Their keys are listed at the top of
rankcheck/src/rankcheck/record/training.py, of a run, and in
rankcheck/src/rankcheck/record/rows.py, of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from rankcheck.engine.findings import Line
from rankcheck.engine.run_record import RunRecord
from rankcheck.verification.comparison import StepRecord

# What several ranks, or one process in several steps, have recorded: for
# each of them a step.
StepRecords: TypeAlias = Sequence[StepRecord]

# Who opens a file: the number of a line of the script, 0 for another file
# beside it, or the name of a library; see rankcheck/src/rankcheck/record/
# files.py.
Opener: TypeAlias = int | str

Item = TypeVar("Item")


class SamplerStart(NamedTuple):
    """A DistributedSampler, as it begins an epoch.

    Attributes:
        ranks: among how many it divides its data.
        seed: of the order.
        subset: a digest of the indices of the `Subset` that it draws from;
            False if it draws from another dataset.
        dataset: the same number for the same dataset, on one rank.
    """

    ranks: int
    seed: int
    subset: str | bool
    dataset: int


def sampler_starts(run: RunRecord, rank: int) -> list[SamplerStart]:
    """Return each start of a DistributedSampler on a rank, in their order."""
    return [SamplerStart(*start) for start in run.facts("sampler", rank)]


def places_of(opener: Opener) -> list[Line]:
    """Return the line of the script that opens a file, if one does."""
    if isinstance(opener, int) and opener:
        return [Line(opener)]
    return []


def flatten(parts: Iterable[Iterable[Item]]) -> list[Item]:
    """Return the items of all parts in one list."""
    items: list[Item] = []
    for part in parts:
        items += part
    return items
