"""Questions about who reads which samples, and about the learning rate."""

import itertools
from collections import Counter

from rankcheck.findings import fail, ok, percent, warn
from rankcheck.verification.comparison import LOSS, QUESTIONS, rows


@QUESTIONS.add("the ranks read different samples")
def samples(case):
    sets = [parts for updates in case.updates if (parts := [
        set(update["samples"]) for update in updates if update["samples"]])]
    if not sets:
        return []
    share = ("each has to read its own: a DistributedSampler, or where they "
             "are drawn at random, as noise is, another seed on each rank")
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
                if divides(case) else fail(words, share)]
    alone = [update for update in case.longest if update["optimizer"] == 0]
    group = case.size if case.still else 1
    alone = [rows(alone[i:i + group]) for i in range(0, len(alone), group)]
    steps = [rows(updates) for updates in case.updates]
    return [*at_once(steps, alone, len(sets[0][0]), share),
            *again(steps, alone), *size_of_minibatch(case), *shares(case)]


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


def at_once(steps, alone, each, share):
    """Samples that are in an update more often than as one process."""
    twice = [len(step) - len(set(step)) for step in steps]
    usual = max((1 - len(set(step)) / len(step) for step in alone if step),
                default=0.0)
    worst = [i for i, step in enumerate(steps)
             if step and twice[i] / len(step) > usual + 0.05]
    words = (f"{sum(twice)} of {sum(map(len, steps))} samples are read by "
             "several ranks in the same update"
             + "".join(f", from update {i} on" for i in worst[:1] if i))
    if worst:
        return [(fail if alone else warn)(
            words, share, numbers={"update": worst[0]})]
    return [warn(words, f"by chance, if they are drawn at random; else {share}"
                 ) if sum(twice) > usual * sum(map(len, steps)) else ok(
        f"in each update the ranks read different samples ({each} each)")]


def again(steps, alone):
    """Samples that were in an earlier update, among as many of both."""
    runs = [[row for step in one for row in dict.fromkeys(step)]
            for one in (steps, alone)]
    most = min(map(len, runs if alone else runs[:1]))
    mine, before = (1 - len(set(read[:most])) / most if read and most else 0.0
                    for read in runs)
    words = (f"{percent(mine)} of the samples were read in an earlier update "
             "as well" + f", with one process {percent(before)} of as many"
             * bool(alone))
    if alone and mine > before + 0.05:
        return [fail(words, "each step has to begin where all ranks together "
                     "ended the last one")]
    return [warn(words, "right if the dataset is that small; or does each "
                 "worker of the DataLoader read all?")] * (mine > 0.05)


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
