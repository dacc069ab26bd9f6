"""Questions about who reads which samples, and about the learning rate."""

from collections import Counter

from rankcheck.findings import fail, ok, percent, warn
from rankcheck.verification.comparison import read, rows, splits_matrices
from rankcheck.verification.questions.question import always, question


@question("the ranks read different samples", where=always)
def samples(case):
    sets = [read(updates) for updates in case.updates]
    sets = [one for one in sets if any(one)]
    if not sets:
        return []
    total = sum(len(part) for one in sets for part in one)
    twice = total - sum(len(set.union(*one)) for one in sets)
    share = ("each has to read its own: a DistributedSampler, or where they "
             "are drawn at random, as noise is, another seed on each rank")
    if splits_matrices(case):
        group = in_groups(sets)
        return [warn("all ranks read the same samples" if group == case.size
                     else f"groups of {group} ranks read the same samples"
                     if group > 1 else "each rank reads other samples",
                     "ranks of one group of tensor parallelism read the same, "
                     "other groups other samples")]
    if all(len(set(update["samples"])) == 1 < len(update["samples"])
           for update in case.single) and case.single:
        case.apart = case.apart or "all samples are alike"
        return [warn("all samples are alike, with one process, too: who reads "
                     "which cannot be seen", "made data? each sample another")]
    if all(part == one[0] for one in sets for part in one):
        return [fail(f"all {case.size} ranks read the same samples", share)]
    group = case.size if case.still else 1
    alone = [update for update in case.longest if update["optimizer"] == 0]
    alone = [rows(alone[i:i + group]) for i in range(0, len(alone), group)]
    more = within(map(rows, case.updates)) - within(alone) if twice else 0.0
    words = (f"{twice} of {total} samples are read by several ranks in the "
             "same update")
    if more > 0.05:
        return [(fail if alone else warn)(words, share)]
    texts = [ok("in each update the ranks read different samples "
                f"({len(sets[0][0])} each)") if more <= 0 else warn(
        words, f"by chance, if they are drawn at random; else {share}")]
    steps, alone = [set.union(*one) for one in sets], list(map(set, alone))
    again, before = repeated(steps), repeated(alone)
    most = min(sum(map(len, steps)), sum(map(len, alone)))
    words = (f"{percent(again)} of the samples were read in an earlier update "
             "as well" + f", with one process {percent(before)}" * bool(alone))
    if repeats(steps, most) > repeats(alone, most) + 0.05:
        texts.append(fail(words, "each step has to begin where all ranks "
                          "together ended the last one"))
    elif again > 0.05:
        texts.append(warn(words, "right if the dataset is that small; or "
                          "does each worker of the DataLoader read all?"))
    return texts + size_of_minibatch(case)


def in_groups(sets):
    """How many ranks at a time read the same samples, as those of a group.
    """
    for size in range(len(sets[0]), 1, -1):
        if all(set(Counter(map(frozenset, one)).values()) == {size}
               and len(set.union(*one)) * size == sum(map(len, one))
               for one in sets):
            return size
    return 1


def within(steps):
    """Which part of the samples had been in the same update."""
    steps = list(steps)
    count = sum(map(len, steps))
    return 1 - sum(len(set(step)) for step in steps) / count if count else 0.0


def repeated(steps):
    """Which part of the samples had been in an earlier update."""
    first, *later = [step for step in steps if step] or [set()]
    count = sum(map(len, later))
    new = len(first.union(*later)) - len(first)
    return (count - new) / max(count, 1)


def repeats(steps, most):
    """Which part of the first samples, at most so many, are no new ones."""
    count, seen = 0, set()
    for step in steps:
        if count + len(step) > most:
            break
        count += len(step)
        seen |= step
    return 1 - len(seen) / count if count else 0.0


def first_size(steps):
    """How many samples the first update has that has any."""
    return next(filter(None, (len(rows(step)) for step in steps)), 0)


def size_of_minibatch(case):
    alone, now = first_size([update] for update in case.single), first_size(
        case.updates)
    if not case.alone:
        return [ok(f"an update has {now} samples")]
    times = now / alone if alone else 1.0
    rate, factor = learning_rate(case)
    keep = ("keep the minibatch: divide the batch size, or the accumulation "
            "steps, by the number of processes; or choose another learning "
            "rate")
    both = list(zip(case.updates, case.single, strict=False))
    total = sum(len(rows(updates)) for updates, _ in both)
    good = sum(len(update["samples"]) for _, update in both)
    if alone and abs(times - 1) < 0.1 and abs(total - good) > 0.2 * good:
        return [warn(f"the first update has {now} samples, as with one "
                     f"process, but {len(both)} updates have {total}, with "
                     f"one process {good}", keep)]
    if abs(times - 1) < 0.1:
        same = "" if now and not alone else ", as with one process"
        words = f"an update has {now} samples{same}; {rate}"
        return [ok(words) if factor == 1 else warn(
            words, "with the same minibatch it need not change")]
    words = f"an update has {now} samples, with one process {alone}; {rate}"
    if factor and any(abs(factor / power - 1) < 0.1
                      for power in (times, times ** 0.5)):
        return [ok(words)]
    return [warn(words, keep)]


def learning_rate(case):
    """How it compares with one process: words, and a factor if it is one."""
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
    if len(ahead) > 1 and all(map(alike, mine, ahead)):
        words += (", as if its schedule were stepped "
                  f"{case.size} times an update" + (
                      ": after as many samples it is the same"
                      if case.still else ""))
    return words, None


def alike(one, other):
    return abs(one - other) <= 1e-3 * abs(other)


@question("the ranks' samplers agree", where=always)
def samplers(case):
    first = [case.together.asked("sampler", rank)[:1]
             for rank in range(case.size)]
    if any(one != first[0] for one in first):
        return [fail("the ranks' DistributedSamplers have different seeds: "
                     "together they do not read each sample once",
                     "the same seed on all ranks: each takes its part")]
    read, mine = Counter(rows(case.single)), [[] for _ in first]
    for updates in case.updates:  # as many samples as one process
        if sum(map(len, mine)) + len(rows(updates)) <= read.total():
            for own, update in zip(mine, updates, strict=True):
                own += update["samples"]
    known = [sum(row in read for row in own) / max(len(own), 1)
             for own in mine]
    if case.apart and all(first) and known[0] > 0.9 and min(known) < 0.5:
        return [warn(f"rank {known.index(min(known))} does not read its part "
                     "of what one process reads, and rank 0 does, though their"
                     " DistributedSamplers agree", "the ranks' datasets "
                     "differ: random_split and its like need the same seed on "
                     "all ranks", ranks=[known.index(min(known))])]
    epochs = case.together.asked("epochs")
    if len(epochs) > len(set(epochs)) == len(dict(epochs)):
        return [warn(f"set_epoch({epochs[0][1]}) is called in several epochs",
                     "sampler.set_epoch(epoch), the number of the epoch: with "
                     "the same one all epochs have the same order")]
    if False in case.asked("epoch"):
        return [warn("a DistributedSampler shuffles, and set_epoch was not "
                     "called before its first epoch", "sampler.set_epoch("
                     "epoch) in each epoch: without it all epochs have the "
                     "same order")]
    return []
