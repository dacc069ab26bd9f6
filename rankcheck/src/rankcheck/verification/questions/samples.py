"""Questions about who reads which samples, and about the learning rate."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from rankcheck.engine.findings import Finding, fail, ok, percent, warn
from rankcheck.verification.comparison import (
    LOSS,
    QUESTIONS,
    Comparison,
    rows,
)

OWN = ("each has to read its own: a DistributedSampler, or where they are "
       "drawn at random, as noise is, another seed on each rank")

BY_CHANCE = 5  # equal samples of data with few values, of some hundred
ONE_ORDER = ("a DistributedSampler gives each rank its part of one order: is "
             "the order drawn by a generator that differs between the ranks? "
             "Seed it alike on all ranks, as with the epoch")


@dataclass(frozen=True)
class Step:
    """The samples of one step of an optimizer.

    Attributes:
        update: its number among the steps of all optimizers.
        rows: the samples, as often as they are read, by all ranks.
    """

    update: int
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
        single: the same of one process; [] if it cannot be compared.
        partitioned: whether a DistributedSampler has given each rank its
            part, in its first epoch: then no sample is read twice.
    """

    steps: list[Step]
    single: list[list[str]]
    partitioned: bool


@QUESTIONS.add("the ranks read different samples")
def samples(case):
    sets = [parts for updates in case.updates if (parts := [
        set(update["samples"]) for update in updates if update["samples"]])]
    if not sets:
        return []
    if case.splits_matrices:
        return in_groups(case, sets)
    if all(len(set(update["samples"])) == 1 < len(update["samples"])
           for update in case.single) and case.single:
        return [warn("all samples are alike, with one process, too: who reads "
                     "which cannot be seen", "made data? each sample another",
                     learned={"apart": case.apart or "all samples are alike"})]
    if len(sets[0]) > 1 and all(
            part == one[0] for one in sets for part in one):
        words = f"all {case.size} ranks read the same samples"
        return [warn(f"{words}, and compute parts of one process's loss",
                     "right if the model divides them among the ranks")
                if divides(case) else fail(words, OWN)]
    readings = [read_by(case, number) for number in sorted({
        updates[0]["optimizer"] for updates in case.updates})]
    readings = [one for one in readings if any(step.rows for step
                                               in one.steps)]
    each = len(sets[0][0])
    return [*worst([at_once(one, each, case.size) for one in readings]),
            *worst([again(one) for one in readings]),
            *size_of_minibatch(case), *shares(case), *given_away(case)]


def worst(answers: list[Finding | None]) -> list[Finding]:
    """Return the first answer that is not ok, else the first; none of none."""
    known = [answer for answer in answers if answer is not None]
    bad = [answer for answer in known if answer.verdict != "ok"]
    return (bad or known)[:1]


def read_by(case: Comparison, number: int) -> Reading:
    """Return what the steps of the optimizer with this number read."""
    steps = [Step(update, rows(updates))
             for update, updates in enumerate(case.updates)
             if updates[0]["optimizer"] == number]
    single = [update for update in case.longest
              if update["optimizer"] == number]
    group = case.size if case.still else 1
    epochs = [len(sampler_starts(case, rank)) for rank in range(case.size)]
    return Reading(
        steps, [rows(single[i:i + group]) for i in range(0, len(single),
                                                         group)],
        partitioned=set(epochs) == {1})


def sampler_starts(case: Comparison, rank: int) -> list[tuple]:
    """Return each start of a DistributedSampler over all ranks, on a rank."""
    return [one for one in case.together.asked("sampler", rank)
            if one[0] == case.size]


def divides(case):
    """Whether the ranks' losses differ, and their mean is one process's."""
    losses = [sum(update["losses"]) for update in case.updates[0]]
    good = sum(case.single[0]["losses"]) if case.single else 0.0
    return abs(sum(losses) / case.size - good) < LOSS * abs(good) < (
        max(losses) - min(losses))


def in_groups(case, sets):
    """Which of them read the same samples, as those of a group do."""
    if max(map(len, sets)) < case.size:
        return [ok(f"{max(map(len, sets))} of {case.size} ranks read samples: "
                   "the others are given what ranks send them")]
    group = next((size for size in range(case.size, 1, -1) if all(
        set(Counter(map(frozenset, one)).values()) == {size}
        and len(set.union(*one)) * size == sum(map(len, one))
        for one in sets)), 1)
    return [warn("all ranks read the same samples" if group == case.size
                 else f"groups of {group} ranks read the same samples"
                 if group > 1 else "each rank reads other samples",
                 "ranks of one group of tensor parallelism read the same, "
                 "other groups other samples")]


def at_once(reading: Reading, each: int, size: int) -> Finding:
    """Answer whether ranks read the same sample in the same step.

    It is a mistake if as many are read twice in each step from one on: where
    each rank draws at random, that varies. Where they are partitioned, those
    of earlier steps count as well.

    Args:
        each: how many samples rank 0 reads in the first step.
        size: the number of ranks.
    """
    steps = [step for step in reading.steps if step.rows]
    # a DistributedSampler repeats fewer at its end than there are ranks
    more = repeats_beyond_one_process(reading)
    if reading.partitioned and more > max(size, BY_CHANCE):
        return fail(f"{more} samples are read again, though a "
                    "DistributedSampler gives each rank its part", ONE_ORDER)
    twice = [step.repeats for step in steps]
    usual = max((1 - len(set(step)) / len(step)
                 for step in reading.single if step), default=0.0)
    first = next((i for i, step in enumerate(steps)
                  if twice[i] > (usual + 0.05) * len(step.rows)), None)
    total = sum(len(step.rows) for step in steps)
    words = (f"{sum(twice)} of {total} samples are read by several ranks in "
             "the same update")
    if first is not None:
        if steps[first].update:
            words += f", from update {steps[first].update} on"
        numbers = {"update": steps[first].update}
        steady = len(twice) > first + 1 and len(set(twice[first:])) == 1
        if steady and reading.single:
            return fail(words, OWN, numbers=numbers)
        return warn(words, f"by chance, if they are drawn at random; else "
                    f"{OWN}", numbers=numbers)
    if sum(twice) > usual * total:
        return warn(words, f"by chance, if they are drawn at random; else "
                    f"{OWN}")
    return ok(f"in each update the ranks read different samples ({each} each)")


def again(reading: Reading) -> Finding | None:
    """Answer whether samples of an earlier step are read once more.

    Of one process as many samples are looked at. It is a mistake if each step
    reads as many again: where they are drawn at random, that varies.
    """
    steps = [[*dict.fromkeys(step.rows)] for step in reading.steps]
    single = [[*dict.fromkeys(step)] for step in reading.single]
    runs = [[row for step in run for row in step] for run in (steps, single)]
    most = min(map(len, runs if single else runs[:1]))
    mine, before = (1 - len(set(run[:most])) / most if run and most else 0.0
                    for run in runs)
    words = (f"{percent(mine)} of the samples were read in an earlier update "
             "as well")
    if single:
        words += f", with one process {percent(before)} of as many"
    counts = count_again(steps)
    steady = len(counts) > 1 and len(set(counts)) == 1
    if single and mine > before + 0.05 and steady:
        return fail(words, "each step has to begin where all ranks together "
                    "ended the last one")
    if mine <= 0.05:
        return None
    return warn(words, "right if the dataset is that small, or samples are "
                "drawn with replacement; or does each worker of the "
                "DataLoader read all?")


def repeats_beyond_one_process(reading: Reading) -> int:
    """Count the samples that are read again, beyond those of one process."""
    mine = [row for step in reading.steps for row in step.rows]
    single = [row for step in reading.single for row in step]
    most = min(len(mine), len(single))
    return (most - len(set(mine[:most]))) - (most - len(set(single[:most])))


def count_again(steps: list[list[str]]) -> list[int]:
    """Count the samples of each step but the first that one before it read.
    """
    seen: set[str] = set()
    counts = []
    for step in steps:
        counts.append(len(seen.intersection(step)))
        seen.update(step)
    return counts[1:]


def given_away(case: Comparison) -> list[Finding]:
    """Answer whether what a DistributedSampler gave has reached the model.

    Both are counted from step to step, while the sampler gives something:
    what a loader has fetched before the first step does not count.
    """
    for rank in range(case.size):
        updates = [of_ranks[rank] for of_ranks in case.updates
                   if of_ranks[rank]["samples"]]
        for sampler in updates[0]["drawn"] if updates else ():
            drawn, got, steps = 0, 0, []
            for before, update in itertools.pairwise(updates):
                more = (update["drawn"].get(sampler, 0)
                        - before["drawn"].get(sampler, 0))
                if more:
                    drawn += more
                    got += len(update["samples"])
                    steps.append(more > 1.5 * len(update["samples"]))
            if len(steps) > 1 and all(steps):
                return [warn(
                    f"of {drawn} samples that a DistributedSampler gave rank "
                    f"{rank} in {len(steps)} updates, the model got {got}",
                    "is the data sharded twice, as by Accelerate's prepare() "
                    "or Lightning's Trainer, which add a sampler of their "
                    "own? Right if the script leaves some out on purpose",
                    ranks=[rank])]
    return []


def size_of_minibatch(case):
    mine, alone = ([len(rows(updates)) for updates in some] for some in (
        case.updates, [[update] for update in case.single]))
    now, before = (next(filter(None, sizes), 0) for sizes in (mine, alone))
    if not case.alone:
        return [ok(f"an update has {now} samples")]
    times = now / before if before else 1.0
    rate, factor = learning_rate(case)
    keep = ("keep the minibatch: divide the batch size, or the accumulation "
            "steps, by the number of processes; or choose another learning "
            "rate")
    if before and abs(times - 1) < 0.1:
        # smaller ones end an epoch
        for step, pair in enumerate(zip(
                itertools.accumulate(mine, max),
                itertools.accumulate(alone, max), strict=False)):
            if abs(pair[0] - pair[1]) > 0.2 * pair[1]:
                return [warn(
                    f"the first update has {now} samples, as with one process,"
                    f" but update {step} has {mine[step]}, with one process "
                    f"{alone[step]}", keep, numbers={"update": step})]
    words = (f"an update has {now} samples" + (
        ", as with one process" * bool(before) if before in (0, now) else
        f", with one process {before}") + f"; {rate}")
    if factor == 0:
        return [warn(words, "one schedule for all who train the same weights")]
    if abs(times - 1) < 0.1:
        return [ok(words) if factor == 1 else warn(
            words, "with the same minibatch it need not change",
            learned={"rate": factor or 1.0})]
    return [ok(words)] if factor and any(
        abs(factor / power - 1) < 0.1 for power in (times, times ** 0.5)
        ) else [warn(words, keep)]


def shares(case):
    """Whether the ranks read as many samples each, where they read any."""
    for step, updates in enumerate(case.updates):
        counts = [len(update["samples"]) for update in updates]
        rank = counts.index(min(counts))
        if counts[rank] < max(counts) and (
                counts[rank] or case.updates[0][rank]["samples"]):
            return [warn(
                f"in update {step} rank {rank} reads {counts[rank]} samples, "
                f"and rank {counts.index(max(counts))} {max(counts)}",
                "a mean of the ranks' gradients counts them alike: a "
                "DistributedSampler, which repeats some, drop_last, or a loss "
                "that is weighed by their number" if counts[rank] else
                "with model.eval() none are seen: is model.train() called "
                "after an evaluation?", numbers={"update": step})]
    return []


def learning_rate(case):
    """Words, its factor from one process if it is one; 0: ranks differ."""
    for step, updates in enumerate(case.updates):
        for rank, update in enumerate(updates):
            pair = update["rates"][:1] + updates[0]["rates"][:1]
            if len(pair) == 2 and not alike(*pair):
                return (f"the learning rate of rank {rank} is {pair[0]:.3g}, "
                        f"of rank 0 {pair[1]:.3g}, in update {step}"), 0
    compared = [compare_rates(case, *(
        [update["rates"][0] for update in updates
         if update["optimizer"] == number and update["rates"]]
        for updates in (case.longest, case.together.seen[0]["updates"])))
        for number in sorted({update["optimizer"] for update in case.longest})]
    return next((one for one in compared if one[1] != 1), compared[0])


def compare_rates(case, good, mine):
    """The same of one optimizer's rates, update by update."""
    pairs = list(zip(mine, good, strict=False))
    odd = [i for i, pair in enumerate(pairs) if not alike(*pair)]
    if not odd:
        return "the learning rate is the same" + (
            " after as many updates, not after as many samples"
            if case.still and len(set(mine)) > 1 else ""), 1
    ratio = mine[odd[0]] / (good[odd[0]] or 1e-30)
    if all(alike(one, ratio * other) for one, other in pairs):
        return f"the learning rate is {ratio:.3g} times as large", ratio
    words = (f"the learning rate is {mine[odd[0]]:.3g}, with one process "
             f"{good[odd[0]]:.3g}" + f", in update {odd[0]}" * bool(odd[0]))
    ahead = good[::case.size]
    if len(ahead) > odd[0] and all(map(alike, mine, ahead)):
        words += (", as if its schedule were stepped "
                  f"{case.size} times an update" + (
                      ": after as many samples it is the same"
                      if case.still else ""))
    return words, None


def alike(one, other):
    return abs(one - other) <= 1e-3 * abs(other)


@QUESTIONS.add("the ranks' samplers agree")
def samplers(case):
    each = [case.together.asked("sampler", rank) for rank in range(case.size)]
    first = [one for asked in each for one in asked[:1] if one[0] == case.size]
    for i, kind in (1, "seeds"), (2, "subsets of the data"):
        if len({one[i] for one in first}) > 1:
            return [fail("the ranks' DistributedSamplers have different "
                         f"{kind}: together they do not read each sample once",
                         "the same seed on all ranks, for random_split, too: "
                         "each takes its part")]
    epochs = case.together.asked("epochs")
    if len(epochs) > len(set(epochs)) == len(dict(epochs)):
        return [warn(f"set_epoch({epochs[0][1]}) is called in several epochs",
                     "sampler.set_epoch(epoch), the number of the epoch: with "
                     "the same one all epochs have the same order")]
    if False in case.asked("epoch"):
        return [warn("a DistributedSampler shuffles, and set_epoch was not "
                     "called before its first epoch", "sampler.set_epoch("
                     "epoch) in each epoch: without it, or another seed, all "
                     "epochs have the same order")]
    return []
