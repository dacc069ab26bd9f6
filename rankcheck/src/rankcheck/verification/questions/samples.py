"""Questions about who reads which samples, and about the learning rate."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from rankcheck.engine.findings import (
    Finding,
    count_of,
    counted,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.engine.questions import always
from rankcheck.verification.comparison import (
    LOSS,
    Comparison,
    StepRecord,
    are_close,
    question,
    samples_of,
)
from rankcheck.verification.questions.records import (
    SamplerStart,
    StepRecords,
    flatten,
    sampler_starts,
)
from rankcheck.verification.questions.step_pairs import find_comparable

READ_OWN = ("each rank must read different samples: use a "
            "DistributedSampler, or give each rank its own seed if samples "
            "are generated")

# Number of samples that may repeat under a DistributedSampler; where there are
# more ranks, that of the ranks. Samples of data with few distinct values are
# equal by chance: a right script with such data was refused once. A choice,
# not a measurement: data with still fewer values are refused.
BY_CHANCE = 5

# Share of the samples that may repeat beyond those of one process. Ranks that
# draw at random read some samples twice by chance; a right script was refused
# for that once. A choice, not a measurement.
TWICE = 0.05

# Relative difference below which two batch sizes are equal, or a factor of the
# learning rate is the one that a scaling rule gives. A batch size that is
# divided by the number of ranks is rounded. A choice, not a measurement.
SAME_SIZE = 0.1

# Relative difference above which a later step has another batch size than in
# the single-process run. A choice, not a measurement.
OTHER_SIZE = 0.2

# A sampler that gives more than this many samples for each one that the model
# gets shards data that are sharded again: two ranks make that 2. A choice
# between 1 and 2, not a measurement.
SHARDED_TWICE = 1.5

ONE_ORDER = ("use the same seed for shuffling on all ranks, for example the "
             "epoch's number: a DistributedSampler gives each rank its part "
             "of one common order")


@dataclass(frozen=True)
class StepReading:
    """The samples of one step of an optimizer.

    Attributes:
        number: its number among the steps of all optimizers.
        rows: the samples, as often as they are read, by all ranks.
    """

    number: int
    rows: list[str]

    @property
    def repeats(self) -> int:
        """How many samples the step reads more than once."""
        return len(self.rows) - len(set(self.rows))


@dataclass(frozen=True)
class Reading:
    """What the steps of one optimizer read.

    Attributes:
        steps: of all ranks together.
        single_process: the same of one process; [] if it cannot be compared.
        partitioned: whether a DistributedSampler has given each rank its
            part, in its first epoch: then no sample is read twice.
        streamed: whether several workers of a DataLoader iterate over a
            stream, which may give all of it to each of them.
    """

    steps: list[StepReading]
    single_process: list[list[str]]
    partitioned: bool
    streamed: bool


@dataclass(frozen=True)
class RateComparison:
    """How the learning rate is related to that of one process.

    Attributes:
        text: in words.
        factor: by which it is multiplied; None if by none.
        differs: whether the ranks have different ones.
        distinct: how many different rates the steps have.
        kind: of a finding about it, where the schedule is what differs.
    """

    text: str
    factor: float | None
    differs: bool = False
    distinct: int = 1
    kind: str = "batch-size"


@question("each rank reads different samples", always)
def verify_samples(case: Comparison) -> list[Finding]:
    """Answer whether each rank reads samples of its own, and how many."""
    sets = sample_sets(case)
    if not sets:
        return []
    if case.splits_matrices:
        return in_groups(case, sets)
    if has_equal_samples(case.single_steps):
        return [warn("all samples are identical, with 1 process as well, so "
                     "verify cannot tell which samples a rank reads",
                     "use data with different samples", learned={
                         "skip_reason": case.skip_reason
                         or "all samples are identical"},
                     kind="identical-samples")]
    if len(sets[0]) > 1 and all(map(read_the_same, sets)):
        return [all_read_the_same(case)]
    numbers = sorted({records[0]["optimizer"] for records in case.steps})
    readings = [read_by(case, number) for number in numbers]
    readings = [reading for reading in readings
                if any(step.rows for step in reading.steps)]
    count = len(sets[0][0])
    return [*pick_worst([repeats_in_a_step(reading, count, case.size)
                         for reading in readings]),
            *pick_worst([repeats_of_earlier(reading) for reading in readings]),
            *size_of_minibatch(case), *sizes_of_ranks(case),
            *lost_samples(case)]


def sample_sets(case: Comparison) -> list[list[set[str]]]:
    """Return the samples of each rank that reads some, by step.

    Steps in which no rank reads any are left out.
    """
    sets = []
    for records in case.steps:
        parts = [set(record["samples"]) for record in records
                 if record["samples"]]
        if parts:
            sets.append(parts)
    return sets


def has_equal_samples(single: StepRecords) -> bool:
    """Return whether in each step of one process all samples are equal."""
    if not single:
        return False
    return all(len(set(record["samples"])) == 1 < len(record["samples"])
               for record in single)


def read_the_same(parts: list[set[str]]) -> bool:
    """Return whether all ranks that read samples read the same ones."""
    return all(part == parts[0] for part in parts)


def all_read_the_same(case: Comparison) -> Finding:
    """Say that all ranks read the same samples."""
    text = f"all {case.size} ranks read the same samples"
    if divides(case):
        return warn(f"{text}, and compute parts of the single-process loss",
                    "check that the model divides them among the ranks",
                    kind="same-samples")
    return fail(text, READ_OWN, kind="same-samples")


def pick_worst(findings: list[Finding | None]) -> list[Finding]:
    """Return the first answer that is not ok, else the first; none of none."""
    known = [finding for finding in findings if finding is not None]
    bad = [finding for finding in known if finding.verdict != "ok"]
    return (bad or known)[:1]


def read_by(case: Comparison, number: int) -> Reading:
    """Return what the steps of the optimizer with this number read."""
    steps = [StepReading(step, samples_of(records))
             for step, records in enumerate(case.steps)
             if records[0]["optimizer"] == number]
    single = [record for record in case.longest_single_steps
              if record["optimizer"] == number]
    group = 1  # steps of one process that have the samples of one of all
    if case.frozen_run:
        group = case.size
    epochs = {len(starts_over_all(case, rank)) for rank in range(case.size)}
    return Reading(
        steps,
        [samples_of(single[i:i + group])
         for i in range(0, len(single), group)],
        partitioned=epochs == {1},
        streamed=bool(case.facts("stream with workers")))


def starts_over_all(case: Comparison, rank: int) -> list[SamplerStart]:
    """Return each start of a DistributedSampler over all ranks, on a rank."""
    return [start for start in sampler_starts(case.multi_process_run, rank)
            if start.ranks == case.size]


def divides(case: Comparison) -> bool:
    """Return whether the ranks' losses differ, with one process's as a mean.

    Then they have divided the samples among them, as a sequence.
    """
    losses = [sum(record["losses"]) for record in case.steps[0]]
    expected = 0.0
    if case.single_steps:
        expected = sum(case.single_steps[0]["losses"])
    limit = LOSS * abs(expected)
    return (abs(sum(losses) / case.size - expected) < limit
            < max(losses) - min(losses))


def in_groups(case: Comparison, sets: list[list[set[str]]]) -> list[Finding]:
    """Say which ranks read the same samples, as those of a group do.

    Args:
        sets: see `sample_sets`.
    """
    most = max(map(len, sets))
    if most < case.size:
        return [ok(f"{most} of {case.size} ranks read samples; the others "
                   "get their input from these",
                   numbers={"readers": most}, kind="samples-of-few-ranks")]
    size = size_of_groups(case, sets)
    text = "each rank reads different samples"
    if size == case.size:
        text = "all ranks read the same samples"
    elif size > 1:
        text = f"groups of {size} ranks read the same samples"
    if find_comparable(case):  # then what they compute of them is compared
        return [ok(f"{text}, together those of the single-process run",
                   numbers={"group": size}, kind="samples-of-groups")]
    return [warn(text, "check the groups: ranks of a tensor-parallel group "
                 "must read the same samples, other groups different ones",
                 numbers={"group": size},
                 kind="samples-of-groups")]


def size_of_groups(case: Comparison, sets: list[list[set[str]]]) -> int:
    """Return how many ranks read the same samples: 1 if each reads others."""
    for size in range(case.size, 1, -1):
        if all(are_groups(parts, size) for parts in sets):
            return size
    return 1


def are_groups(parts: list[set[str]], size: int) -> bool:
    """Return whether each part is read by so many, and no sample by others."""
    readers = Counter(map(frozenset, parts))
    if set(readers.values()) != {size}:
        return False
    return len(set.union(*parts)) * size == sum(map(len, parts))


def repeats_in_a_step(reading: Reading, each: int, size: int) -> Finding:
    """Answer whether ranks read the same sample in the same step.

    It is a failure if the same number repeats in each step from one on: where
    each rank draws at random, the number varies. With a partition, repeats of
    earlier steps count as well. So a right script is refused if by chance the
    number is the same in all of the few steps that are watched, and a wrong
    one gets only a warning if the number varies.

    Args:
        each: how many samples rank 0 reads in the first step.
        size: the number of ranks.
    """
    steps = [step for step in reading.steps if step.rows]
    # a DistributedSampler repeats fewer at its end than there are ranks
    more = repeats_beyond_one_process(reading)
    if reading.partitioned and more > max(size, BY_CHANCE):
        return fail(f"{more} samples are read more than once, although a "
                    "DistributedSampler gives each rank its part", ONE_ORDER,
                    kind="sampler-overlap")
    usual = usual_repeats(reading.single_process)
    twice = [step.repeats for step in steps]
    total = sum(len(step.rows) for step in steps)
    numbers: dict[str, float] = {"shared": sum(twice), "samples": total}
    text = (f"{sum(twice)} of {total} samples are read by several ranks in "
            "the same step")
    by_chance = f"{READ_OWN}; fine if they are drawn at random"
    for i, step in enumerate(steps):
        if twice[i] <= (usual + TWICE) * len(step.rows):
            continue
        if step.number:
            text += f", from step {step.number} on"
        numbers["step"] = step.number
        steady = len(twice) > i + 1 and len(set(twice[i:])) == 1
        if steady and reading.single_process:
            return fail(text, READ_OWN, numbers=numbers, kind="shared-samples")
        return warn(text, by_chance, numbers=numbers, kind="shared-samples")
    if sum(twice) > usual * total:
        return warn(text, by_chance, numbers=numbers, kind="shared-samples")
    return ok(f"in each step the ranks read different samples ({each} each)",
              numbers={"samples": each}, kind="distinct-samples")


def usual_repeats(single: list[list[str]]) -> float:
    """Return which share of a step one process reads twice, at most."""
    repeats = [1 - len(set(step)) / len(step) for step in single if step]
    return max(repeats, default=0.0)


def repeats_of_earlier(reading: Reading) -> Finding | None:
    """Answer whether samples of an earlier step are read once more.

    It is compared with as many samples of one process, which reads as many
    again where the dataset is small, or samples are drawn with replacement.
    Workers that all read the same do so with one process, too: then it is a
    warning. It is a failure if each step repeats the same number, more than
    one process does: where samples are drawn at random, the number varies.
    """
    steps = [[*dict.fromkeys(step.rows)] for step in reading.steps]
    single = [[*dict.fromkeys(step)] for step in reading.single_process]
    read, read_by_one = flatten(steps), flatten(single)
    most = len(read)
    if single:
        most = min(most, len(read_by_one))
    share = share_again(read[:most])
    usual = share_again(read_by_one[:most])
    numbers = {"percent": 100 * share}
    text = (f"of the first {most} samples, {percent(share)} had been read in "
            "an earlier step")
    if single:
        text += f" (with 1 process {percent(usual)})"
        numbers["single"] = 100 * usual
    counts = count_again(steps)
    steady = len(counts) > 1 and len(set(counts)) == 1
    if single and share > usual + TWICE and steady:
        return fail(text, "start each step where all ranks together ended "
                    "the previous one", numbers=numbers,
                    kind="repeated-samples")
    if share <= TWICE:
        return None
    if reading.streamed:
        return warn(text, "check whether every DataLoader worker iterates "
                    "over the whole dataset: select each worker's part by "
                    "torch.utils.data.get_worker_info(); fine if the dataset "
                    "is that small", numbers=numbers,
                    kind="repeated-samples")
    if single and share <= usual + TWICE:
        return ok(text, numbers=numbers, kind="repeated-samples")
    return warn(text, "check the order; fine if the dataset is that small, or "
                "samples are drawn with replacement", numbers=numbers,
                kind="repeated-samples")


def share_again(samples: list[str]) -> float:
    """Return which share of samples comes again, 0 of none."""
    if not samples:
        return 0.0
    return 1 - len(set(samples)) / len(samples)


def repeats_beyond_one_process(reading: Reading) -> int:
    """Count the samples that are read again, beyond those of one process."""
    read = flatten(step.rows for step in reading.steps)
    read_by_one = flatten(reading.single_process)
    most = min(len(read), len(read_by_one))
    repeats = most - len(set(read[:most]))
    return repeats - (most - len(set(read_by_one[:most])))


def count_again(steps: list[list[str]]) -> list[int]:
    """Count the samples of each step but the first that one before it read.
    """
    seen: set[str] = set()
    counts = []
    for step in steps:
        counts.append(len(seen.intersection(step)))
        seen.update(step)
    return counts[1:]


def lost_samples(case: Comparison) -> list[Finding]:
    """Answer whether what a DistributedSampler gave has reached the model.

    Both are counted from step to step, while the sampler gives something:
    what a loader has fetched before the first step does not count. It is said
    only if it is so in each of several steps: workers fetch in bursts.
    """
    for rank in range(case.size):
        records = [of_ranks[rank] for of_ranks in case.steps
                   if of_ranks[rank]["samples"]]
        if not records:
            continue
        for sampler in records[0]["drawn"]:
            finding = given_by(sampler, rank, records)
            if finding:
                return [finding]
    return []


def given_by(sampler: int, rank: int, records: StepRecords) -> Finding | None:
    """Say that a sampler gives more samples than the model gets.

    Args:
        sampler: its id.
        records: those of the rank in which it reads samples.
    """
    drawn, got = 0, 0
    steps = []  # whether it has given more in each step
    for before, record in itertools.pairwise(records):
        more = (record["drawn"].get(sampler, 0)
                - before["drawn"].get(sampler, 0))
        if more:
            drawn += more
            got += len(record["samples"])
            steps.append(more > SHARDED_TWICE * len(record["samples"]))
    if len(steps) < 2 or not all(steps):
        return None
    return warn(
        f"the model got {got} of {drawn} samples that a DistributedSampler "
        f"gave rank {rank} in {counted(steps, 'step')}",
        "shard the data once: Accelerate's prepare() and Lightning's Trainer "
        "add a sampler of their own; fine if the script drops some on "
        "purpose",
        ranks=[rank], numbers={"drawn": drawn, "samples": got},
        kind="dropped-samples")


def size_of_minibatch(case: Comparison) -> list[Finding]:
    """Say how many samples a step has, and whether the rate fits them."""
    counts = [len(samples_of(records)) for records in case.steps]
    single_counts = [len(samples_of([record])) for record
                     in case.single_steps]
    now = next(filter(None, counts), 0)
    before = next(filter(None, single_counts), 0)
    if not case.single_process_run:
        return [ok(f"global batch size is {now}", numbers={"samples": now},
                   kind="batch-size")]
    times = 1.0
    if before:
        times = now / before
    rate = learning_rate(case)
    numbers: dict[str, float] = {"samples": now, "single": before}
    if rate.factor is not None:
        numbers |= {"rate": rate.factor, "rates": rate.distinct}
    keep = ("keep the global batch size: divide the batch size, or the "
            "accumulation steps, by the number of processes; or adapt the "
            "learning rate")
    if before and abs(times - 1) < SAME_SIZE:
        step = first_other_size(counts, single_counts)
        if step is not None:
            return [warn(
                f"global batch size is {now} in step 0, as with 1 process, "
                f"but in step {step} it is {counts[step]}, not "
                f"{single_counts[step]}", keep, numbers={
                    "step": step, "samples": counts[step],
                    "single": single_counts[step]},
                kind="changed-batch-size")]
    text = f"global batch size is {now}"
    if before not in (0, now):
        text += f" with {case.size} processes, {before} with 1"
    elif before:
        text += ", as with 1 process"
    text += f"; {rate.text}"
    if rate.differs:
        return [warn(text, "use the same schedule on all ranks",
                     numbers=numbers, kind="unequal-learning-rates")]
    if abs(times - 1) < SAME_SIZE:
        if rate.factor == 1:
            return [ok(text, numbers=numbers, kind="batch-size")]
        return [warn(text, "keep the learning rate: the global batch size "
                     "is the same",
                     learned={"rate": rate.factor or 1.0}, numbers=numbers,
                     kind="learning-rate")]
    # by the linear rule, or by that of the square root
    if rate.factor and any(abs(rate.factor / power - 1) < SAME_SIZE
                           for power in (times, times ** 0.5)):
        return [ok(text, numbers=numbers, kind="batch-size")]
    return [warn(text, keep, numbers=numbers, kind=rate.kind)]


def first_other_size(counts: list[int], single_counts: list[int]
                     ) -> int | None:
    """Return the first step that has another number of samples.

    Each is compared by the largest number up to it: smaller ones end an epoch,
    which may come at other steps.
    """
    largest = zip(itertools.accumulate(counts, max),
                  itertools.accumulate(single_counts, max), strict=False)
    for step, (now, before) in enumerate(largest):
        if abs(now - before) > OTHER_SIZE * before:
            return step
    return None


def sizes_of_ranks(case: Comparison) -> list[Finding]:
    """Say whether the ranks read as many samples each, where they read any."""
    for step, records in enumerate(case.steps):
        counts = [len(record["samples"]) for record in records]
        least, most = min(counts), max(counts)
        rank = counts.index(least)
        if least == most:
            continue
        if not least and not case.steps[0][rank]["samples"]:
            continue  # from the first step on
        fix = ("use a DistributedSampler, which repeats some, drop_last, or "
               "weight the loss by the number of samples: a mean over ranks "
               "counts all ranks equally")
        if not least:
            fix = ("call model.train() after an evaluation: with "
                   "model.eval() no samples are seen")
        return [warn(
            f"in step {step} rank {rank} reads {count_of(least, 'sample')}, "
            f"rank {counts.index(most)} {most}", fix,
            ranks=[rank], numbers={"step": step, "fewest": least,
                                   "most": most}, kind="uneven-batches")]
    return []


def learning_rate(case: Comparison) -> RateComparison:
    """Compare the rate of each optimizer's first group with one process's."""
    for step, records in enumerate(case.steps):
        for rank, record in enumerate(records):
            rates = record["rates"][:1] + records[0]["rates"][:1]
            if len(rates) == 2 and not are_close(rates[0], rates[1]):
                return RateComparison(
                    f"the learning rate is {rates[0]:.3g} on rank {rank}, "
                    f"{rates[1]:.3g} on rank 0, in step {step}", None,
                    differs=True)
    together = case.multi_process_run.record_of(0).steps
    numbers = sorted({record["optimizer"]
                      for record in case.longest_single_steps})
    compared = [compare_rates(case,
                              rates_of(case.longest_single_steps, number),
                              rates_of(together, number))
                for number in numbers]
    for comparison in compared:
        if comparison.factor != 1:
            return comparison
    return compared[0]


def rates_of(records: list[StepRecord], number: int) -> list[float]:
    """Return the first group's rate in each step of an optimizer."""
    return [record["rates"][0] for record in records
            if record["optimizer"] == number and record["rates"]]


def compare_rates(case: Comparison, single_rates: list[float],
                  rates: list[float]) -> RateComparison:
    """Compare the rates of an optimizer, step by step."""
    pairs = list(zip(rates, single_rates, strict=False))
    odd = [i for i, pair in enumerate(pairs) if not are_close(*pair)]
    if not odd:
        text = "the learning rate is the same"
        if case.frozen_run and len(set(rates)) > 1:
            text += " after as many steps, not after as many samples"
        return RateComparison(text, 1, distinct=len(set(rates)))
    first = odd[0]
    ratio = rates[first] / (single_rates[first] or 1e-30)
    if all(are_close(rate, ratio * expected) for rate, expected in pairs):
        return RateComparison(
            f"the learning rate is {ratio:.3g} times that of 1 process", ratio)
    text = (f"the learning rate is {rates[first]:.3g}, but "
            f"{single_rates[first]:.3g} with 1 process")
    if first:
        text += f", in step {first}"
    ahead = single_rates[::case.size]
    kind = "batch-size"
    if len(ahead) > first and all(map(are_close, rates, ahead)):
        text += (", as if its schedule advanced "
                 f"{case.size} times per step")
        if case.frozen_run:  # then that may be meant
            text += " (it is the same after as many samples)"
        else:
            kind = "schedule-stepped-by-each-rank"
    return RateComparison(text, None, kind=kind)


def changes_seed(case: Comparison) -> bool:
    """Whether a dataset's samples are drawn with another seed, too, as by a
    new sampler in each epoch.
    """
    seeds: dict[int, int] = {}  # by the dataset
    return any(
        seeds.setdefault(start.dataset, start.seed) != start.seed
        for start in sampler_starts(case.multi_process_run, 0))


@question("the ranks' samplers divide the same order", always)
def verify_samplers(case: Comparison) -> list[Finding]:
    """Answer whether the ranks' DistributedSamplers divide one order."""
    starts = flatten(sampler_starts(case.multi_process_run, rank)[:1]
                     for rank in range(case.size))
    first = [start for start in starts if start.ranks == case.size]
    for kind, values in (
            ("seeds", {start.seed for start in first}),
            ("subsets of the data", {start.subset for start in first})):
        if len(values) > 1:
            return [fail("the ranks' DistributedSamplers have different "
                         f"{kind}, so together they do not read each sample "
                         "once", "use the same seed on all ranks, for "
                         "random_split as well", kind="unequal-samplers")]
    # rank 0's: (sampler, epoch)
    epochs = case.multi_process_run.facts("epochs")
    if len(epochs) > len(set(epochs)) == len(dict(epochs)):
        return [warn(f"set_epoch({epochs[0][1]}) is called in several epochs",
                     "call sampler.set_epoch(epoch) with the epoch's number: "
                     "otherwise every epoch has the same order",
                     kind="constant-epoch")]
    if False in case.facts("epoch") and not changes_seed(case):
        return [warn("a DistributedSampler shuffles, but set_epoch was not "
                     "called before its first epoch", "call sampler.set_epoch("
                     "epoch) in each epoch: without it, or another seed, "
                     "every epoch has the same order", kind="no-set-epoch")]
    return []
