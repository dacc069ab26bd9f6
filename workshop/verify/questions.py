"""What is asked about a script, causes before effects.

A question is a function of a `Case`; it gives findings. It knows nothing of
the script but what `watch` has recorded.
"""

import functools
import itertools
import re
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from workshop.check import endings
from workshop.findings import fail, ok, percent, warn
from workshop.parts import assemble, elements, pieces, whole_here

LOSS, GRADIENT, UPDATE = 1e-4, 1e-3, 0.05  # relative
LOW = 30  # times that in bf16 or fp16
EARLY = 8  # updates in which rounding does not grow that large
SUMMED = ("divide them by the number of processes after all_reduce, or call "
          "the DDP wrapper, which does")
AGAIN = ("verify runs it several times: {run} in a flag is another name each "
         "time, as in --run-dir /tmp/run-{run}")
HINTS = (
    ("finished reduction in the prior iteration", "some parameters get no "
     "gradient, for which DDP waits: remove them, or "
     "find_unused_parameters=True"),
    ("exists", AGAIN),
    ("multiprocessing.spawn", "verify starts the processes, as torchrun does: "
     "read RANK and WORLD_SIZE of the environment, without mp.spawn"),
)


@dataclass
class Case:
    """The script's runs. alone: as one process, or None where it does not
    train as one; together: as `size`.

    still: as one process that updates nothing, if that is what `together`
    has to be compared with. apart: why it is compared with neither, or "".
    """

    alone: object
    together: object
    size: int
    still: object = None
    apart: str = ""
    other_weights: bool = False  # than one process has before its updates
    try_out: object = None  # runs the script: see `verify`
    start: object = None  # function of a kind: one process once more
    averaged: str = ""  # how often weights are, if gradients are not
    weights: tuple = ()  # of the minibatches that `still` has read
    parts: tuple = ()  # how unequal parts are weighed, a text and a hint

    @property
    def single(self):
        """What one process has recorded of its updates, [] if it has none."""
        return self.alone.seen[0]["updates"] if self.alone else []

    @property
    def longest(self):
        """The same of as many updates as have the same samples."""
        return self.still.seen[0]["updates"] if self.still else self.single

    @property
    def updates(self):
        """Of each update that all ranks have made, what each recorded."""
        return list(zip(*(seen["updates"] for seen in self.together.seen),
                        strict=False))

    @property
    def loosely(self):
        """How much larger an error may be in low precision."""
        return LOW if any(seen["low"] for seen in self.together.seen) else 1

    def name(self, key):
        return self.together.seen[0]["names"].get(key, key)

    def asked(self, what):
        return [value for rank in range(self.size)
                for value in self.together.asked(what, rank)]


def verify(try_out, size, steps, more=()):
    """Findings, and what was not seen: a list of texts.

    try_out(size, steps, kind, more flags) runs the script: a `Trial`.
    more: questions about a resume.
    """
    alone, refused, on_cpu = starts(try_out, 1, steps)
    together, ended = None, refused
    if not refused:
        try_out = functools.partial(try_out, gpus=on_cpu)
        together = try_out(size, steps)
        ended = how_it_ends(together, size)
    elif not stopped(alone):  # as with an assertion that there are several
        together, ended, on_cpu = starts(try_out, size, steps)
        try_out = functools.partial(try_out, gpus=on_cpu)
    if refused and ended:
        return [refused], ["all else: it has to train as one process first"]
    case = Case(None if refused else alone, together, size, try_out=try_out,
                start=functools.cache(lambda kind: try_out(1, steps, kind)))
    if killed(together):
        return [ended], ["all else: not all ranks came to their end"]
    findings = counts(case)
    if findings or (ended and not all(
            seen and seen["updates"] for seen in case.together.seen)):
        return findings or [ended], ["all else: the ranks have not made the "
                                     "same number of updates"]
    findings = [ended] if ended else []
    if refused:
        findings = [warn(refused.text, "only what needs no run as one process "
                         "was looked at")]
    if on_cpu:
        findings.insert(0, ok("it does not run without a GPU: a CPU stands in "
                              'for GPUs, on which autocast("cuda") changes '
                              "nothing"))
    kept, columns = minibatch(case), minibatch(case, "columns")
    kind = "rows"
    if isinstance(kept, str) and isinstance(columns, int):
        kept, kind = columns, "columns"
    take(kind, *filter(None, (case.alone, case.together)))
    if kept == size:
        case.still = try_out(1, size * steps, "still")
        if how_it_ends(case.still, ""):
            case.still, kept = None, "the third run failed"
        else:
            take(kind, case.still)
    case.apart = kept if isinstance(kept, str) else ""
    if case.apart and any(rows(case.single)):
        findings += other_starts(case, kind)
    questions = (samples, samplers, files) if case.asked("FSDP1") else (
        QUESTIONS)
    for one in (*questions, *more):
        try:
            findings += one(case)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError,
                TypeError, ValueError) as error:
            findings.append(warn(
                f"verify cannot answer ({one.__doc__ or one.__name__}): "
                f"{type(error).__name__}: {error}", "the script does this "
                "in a way that verify does not know"))
    return findings, not_seen(case, steps, more)


def starts(try_out, size, steps):
    """Run it as it is and, where it fails so, with a CPU in a GPU's place.

    (The trial, how it ends, whether it ran so on a CPU.)
    """
    trial = try_out(size, steps)
    ended = how_it_ends(trial, size)
    if not ended or stopped(trial):
        return trial, ended, False
    other = try_out(size, steps, gpus=True)
    fails = how_it_ends(other, size)
    if not fails:
        return other, None, True
    if fails.text != ended.text:  # it came farther
        trial, ended = other, fails
        if endings.ON_CPU not in ended.advice:
            ended.hint = [ended.advice + " " * bool(ended.advice),
                          endings.ON_CPU]
    return trial, ended, False


def stopped(trial):
    """Whether not all ranks came to an end of their own."""
    return trial.gave_up or killed(trial)


def killed(trial):
    return any(rank.status == -signal.SIGKILL for rank in trial.ranks)


def how_it_ends(trial, size):
    """A finding where it has failed or made no update, else None.

    size: of how many processes it speaks, or in words.
    """
    words = {1: "as one process "}.get(size, f"as {size} processes " if (
        isinstance(size, int)) else size)
    finding = endings.explain(trial)
    if finding:
        finding.sentence.insert(0, words)
        said = "".join(rank.err for rank in trial.ranks)
        finding.hint = next(([hint] for word, hint in HINTS if word in said),
                            finding.hint)
        return finding
    if not all(seen and seen["updates"] for seen in trial.seen):
        last = [line for line in trial.ranks[0].out.splitlines()
                if line.strip()][-1:]
        return fail(f"{words}it makes no update by an optimizer of PyTorch"
                    + "".join(f'; its last line: "{line[:200]}"'
                              for line in last),
                    "does it train with these flags, and without starting "
                    "processes of its own?")
    return None


def counts(case):
    made = [case.together.updates(rank) for rank in range(case.size)]
    for rank, count in enumerate(made):
        if abs(count - made[0]) > 1 or min(made[0], count) == 0 < max(made):
            return [fail(f"rank {rank} makes {count} updates, and rank 0 "
                         f"{made[0]}", "every rank calls optimizer.step() "
                         "after every minibatch")]
    return []


# -------------------------------------------------------------------- samples


def rows(updates):
    """All samples of several updates, as often as they are read."""
    return [row for update in updates for row in update["samples"]]


def read(updates, kind="samples"):
    """The distinct samples that each rank has read for an update."""
    return [set(update[kind]) for update in updates]


def take(kind, *trials):
    """Take rows for samples, or columns if the batch is the second dimension.
    """
    for update in (update for trial in trials for seen in trial.seen
                   for update in seen["updates"]):
        update["samples"] = update[kind]


def minibatch(case, kind="rows"):
    """How many times as many samples an update has as with one process.

    1 and the number of processes only where these are the samples that one
    process reads, in one or that many updates; else a text, why not.
    """
    alone = [set(update[kind]) for update
             in case.single if update["optimizer"] == 0]
    together = [set.union(*read(updates, kind)) for updates in case.updates
                if updates[0]["optimizer"] == 0]
    if not case.alone:
        return "it does not train as one"
    if not any(alone) or not any(together):
        return "no samples were seen, nor whether each rank reads its own"
    if all(mine == good for mine, good in zip(together, alone, strict=False)):
        return 1
    first = set.union(*alone[:case.size])
    if together[0] == first and len(alone) >= case.size:
        return case.size
    return "after the first update " * (together[0] == alone[0]) + (
        "one process reads other samples, or pads them to another length")


def other_starts(case, kind):
    """Does what one process reads depend on Python's hashes of strings?

    Each rank has its own, and so has each start.
    """
    def reads_the_same(name):
        trial = case.start(name)
        if how_it_ends(trial, ""):
            return None
        take(kind, trial)
        return [update["samples"] for update in trial.seen[0]["updates"]] == [
            update["samples"] for update in case.single]

    if reads_the_same("hashes") is not False:
        return []
    again = reads_the_same("again")
    if again is False:
        case.apart = ("one process reads other samples each time that it is "
                      "started: a seed makes them the same")
    return [warn("what the model is given depends on Python's hashes of "
                 "strings, which differ from rank to rank and from start to "
                 "start", "a set has another order each time: "
                 "sorted(set(words))")] if again else []


def samples(case):
    """Do the ranks read different samples, and how many?"""
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
    if all(part == one[0] for one in sets for part in one):
        return [fail(f"all {case.size} ranks read the same samples", share)]
    group = case.size if case.still else 1
    alone = [update for update in case.longest if update["optimizer"] == 0]
    drawn = rows(alone)
    usual = 0.05 if len(set(drawn)) < len(drawn) else 0.0
    alone = [rows(alone[i:i + group]) for i in range(0, len(alone), group)]
    if twice and within(map(rows, case.updates)) > within(alone) + usual:
        return [(fail if alone else warn)(
            f"{twice} of {total} samples are read by several ranks in the "
            "same update", share)]
    texts = [ok(f"in each update the ranks read different samples "
                f"({len(sets[0][0])} each)")]
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


def within(steps):
    """Which part of the samples had been in the same update."""
    steps = list(steps)
    count = sum(map(len, steps))
    return 1 - sum(len(set(step)) for step in steps) / count if count else 0.0


def repeated(steps):
    """Which part of the samples had been in an earlier update."""
    steps = [step for step in steps if step]
    later = sum(map(len, steps[1:]))
    seen, count = set(steps[0]) if steps else set(), 0
    for step in steps[1:]:
        count += len(step & seen)
        seen |= step
    return count / max(later, 1)


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
    if abs(times - 1) < 0.1:
        words = f"an update has {now} samples, as with one process; {rate}"
        return [ok(words) if factor == 1 else warn(
            words, "with the same minibatch it need not change")]
    words = f"an update has {now} samples, with one process {alone}; {rate}"
    if factor and any(abs(factor / power - 1) < 0.1
                      for power in (times, times ** 0.5)):
        return [ok(words)]
    return [warn(words, "keep the minibatch: divide the batch size, or "
                 "the accumulation steps, by the number of processes; or "
                 "choose another learning rate")]


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
                     "all ranks")]
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


# ------------------------------------------------------------------ gradients


def splits_matrices(case):
    """Whether parameters are sharded, and not by fully_shard alone."""
    sharded = case.updates[0][0]["gradients"]["sharded"].values()
    return any(sum("Shard" in kind for kind, _ in entry["placements"]) > 1
               or not case.asked("fully_shard") for entry in sharded)


def in_groups(sets):
    """How many ranks at a time read the same samples, as those of a group.
    """
    for size in range(len(sets[0]), 1, -1):
        if all(set(Counter(map(frozenset, one)).values()) == {size}
               and len(set.union(*one)) * size == sum(map(len, one))
               for one in sets):
            return size
    return 1


def leftovers(case):
    """Does a run begin with what the one before has saved?"""
    results, used = set(), set()
    for trial in filter(None, (case.alone, case.together, case.still)):
        for seen in trial.seen:
            used |= results.intersection(seen["read"])
        for seen in trial.seen:
            results.update(seen["results"])
    names = ", ".join(sorted({Path(path).name for path in used})[:3])
    return [fail(f"it begins with {names}, which verify's run before has "
                 "saved", AGAIN)] if used else []


def numbers(case):
    """Are weights and losses numbers, and gradients not all 0?"""
    for step, updates in enumerate(case.updates):
        odd = {key for rank, update in enumerate(updates) if update["before"]
               for key, _, part, _ in pieces(update["before"], rank)
               if not part.isfinite().all()}
        if odd:
            return [fail("the first weights are not finite numbers: "
                         f"{named(case, odd)}", "to_empty() leaves what was "
                         "in memory: give each of them a value")]
        if any(loss != loss for update in updates
               for loss in update["losses"]):
            alone = any(loss != loss for update in case.single
                        for loss in update["losses"])
            return [fail(f"in update {step} the loss is nan"
                         + ", with one process, too" * alone, "with nan "
                         "nothing else can be compared")]
    some = [part.any() for updates in case.updates
            for rank, update in enumerate(updates)
            for _, _, part, _ in pieces(update["gradients"], rank)]
    if some and not any(some):
        return [warn("all gradients are 0", "does the loss depend on the "
                     "weights? nothing is learnt, nor compared")]
    return []


def joined(case):
    """Do the ranks know of each other?"""
    if case.asked("init_process_group") or any(
            seen["joined"] for seen in case.together.seen) or any(
            update["reduced"] for updates in case.updates
            for update in updates):
        return []
    flag = re.search(r"--local[_-]rank", case.together.script.read_text(
        errors="replace"))
    return [fail("no rank joins a process group: each trains alone",
                 f"is it to be told its rank? {flag[0]} {{rank}} among its "
                 "flags" if flag else "torch.distributed.init_process_group()"
                 )]


def start(case):
    """Are the weights equal before the first update?"""
    firsts = [[update["before"] for update in updates]
              for updates in case.updates if updates[0]["before"]]
    for states in firsts:
        whole = assemble(states)
        if whole.apart:
            rank = min(whole.differing)
            return [fail(f"rank {rank} begins with other weights than rank "
                         f"0: {named(case, whole.apart)}", "the same seed on "
                         "all ranks before the model is made, or wrap it in "
                         "DDP, which sends rank 0's")]
    mine, alone = assemble(firsts[0]), assemble([
        update["before"] for update in case.single[:1]])
    alike = all(mine.tensors[name].shape == tensor.shape for name, tensor
                in alone.tensors.items() if name in mine.tensors)
    if alike and not mine.error(alone) <= 1e-6:  # nan is not
        case.apart = case.apart or "the first weights are not"
        case.other_weights = True
        again = case.start("again")
        if not how_it_ends(again, "") and not assemble([
                again.seen[0]["updates"][0]["before"]]).error(alone) <= 1e-6:
            return [warn("one process begins with other weights each time "
                         "that it is started", "set a seed, to compare")]
        twins = drawn_twice(firsts[0])
        if twins:
            return [warn("all ranks have the same numbers in their parts of "
                         f"{named(case, twins)}", "on a CPU a sharded tensor "
                         "is filled so at random; GPUs draw others for each "
                         "part")]
        return [(fail if firsts[0][0]["sharded"] else warn)(
            "they are not the first weights of one process", "the same seed "
            "on all ranks right before the model is made")]
    count = sum(len(state["plain"]) + len(state["sharded"])
                for state, *_ in firsts)
    return [ok(f"all ranks begin with the same weights ({count} parameters)")]


def drawn_twice(states):
    """Names of which two ranks have other elements, but the same numbers."""
    parts, twins = {}, set()
    for rank, state in enumerate(states):
        for key, entry in state["sharded"].items():
            part, at = entry["part"].flatten(), elements(entry, rank)
            other, there = parts.setdefault(key, (part, at))
            some = min(len(part), len(other)) // 2  # they may be unequal
            if (some > 1 and not (part == part[0]).all()  # it was drawn
                    and part[:some].equal(other[:some])
                    and not at[:some].equal(there[:some])):
                twins.add(key)
    return twins


def named(case, keys):
    """Parameters in words, in the optimizer's order."""
    keys = sorted(keys, key=lambda key: [int(n) for n in key.split(".")])
    return ", ".join(case.name(key) for key in keys[:3]) + (
        f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def averages(case):
    """Do the ranks train alone, with their weights made equal at times?"""
    of_one = [updates for updates in case.updates
              if updates[0]["optimizer"] == 0 and "weights" in updates[0]]
    at, whole = [0], True
    for i, (last, updates) in enumerate(itertools.pairwise(of_one), 1):
        ended = [update["weights"]["flat"] for update in last]
        begun = [update["now"]["flat"] for update in updates]
        if (all(one.equal(begun[0]) for one in begun)
                and not any(one.equal(begun[0]) for one in ended)
                and not all(one.equal(ended[0]) for one in ended)):
            at.append(i)
            whole &= off(begun[0], sum(ended) / case.size) < 1e-5
    if len(at) == 1:
        return []
    every = min(b - a for a, b in itertools.pairwise(at))
    case.apart = case.averaged = (
        f"weights are {'averaged' if whole else 'made equal'} every "
        + (f"{every} updates" if every > 1 else "update"))
    return [warn(case.averaged, "until then each rank trains alone, on its "
                 "part of the minibatch: right for local SGD")]


def same_numbers(case):
    """Do all ranks draw the same random numbers?"""
    of_one = [updates for updates in case.updates
              if updates[0]["optimizer"] == 0]
    names = [name for name in of_one[0][0]["random"]
             if len(of_one) == len({updates[0]["random"][name]
                                    for updates in of_one}) > 1
             and all(update["random"][name] == updates[0]["random"][name]
                     for updates in of_one for update in updates)]
    if not names or splits_matrices(case):
        return []
    return [warn("all ranks draw the same random numbers in each update: "
                 + " and ".join(names), "for dropout, noise and "
                 "augmentation another seed on each rank, once the model is "
                 "made; the same for what all ranks are to do alike")]


def clipped_first(case):
    return any(update["late"] > 0.5 * update["elements"]
               for update, *_ in case.updates)


def reductions(case):
    """Are gradients reduced, how often, and before they are clipped?"""
    if splits_matrices(case) or case.averaged:
        return []  # activations are reduced, too; or weights
    mine = [updates[0] for updates in case.updates]
    reduced, elements, sent = (
        sum(update[key] for update in mine) / len(mine)
        for key in ("reduced", "elements", "bytes"))
    times = reduced / max(elements, 1)
    if times < 0.5:
        made = case.asked("DistributedDataParallel")
        hint = ("the model is wrapped in DDP, but not called by it: call "
                "model(...), not model.module(...) or the one inside"
                if made and not any(update["wrapped"] for update in mine) else
                "wrap the model in DistributedDataParallel and call that; or "
                "all_reduce every gradient before optimizer.step()")
        return [fail(f"gradients are not reduced: {reduced:.0f} "
                     f"elements in an update of {elements:.0f}", hint)]
    once = times < 1.9  # copies of shards (HSDP) are reduced, too
    often = "once" if once else f"{times:.2g} times"
    words = (f"gradients are reduced {often} an update, "
             f"{sent / 1e6:.3g} MB in {mine[-1]['calls']} calls")
    findings = [ok(words)] if once else [warn(
        words, "once is enough: all microbatches but the last under "
        "model.no_sync(), their forward pass, too; or does one loss take "
        "several passes?")]
    if case.asked("clipped"):
        findings.append(warn(
            "gradients are clipped before scaler.unscale_(optimizer)", "call "
            "that first: the limit is for gradients without the scale"))
    if clipped_first(case):
        findings.append(fail("gradients are clipped before they are reduced",
                             "reduce first: the norm is that of the mean"))
    return findings


def unused(case):
    keys = {key for updates in case.updates for update in updates
            for key in update["without"]}
    if not keys:
        return []
    words = f"{len(keys)} parameters got no gradient in "
    if not any(update["gradients"][part] for updates in case.updates
               for update in updates for part in ("plain", "sharded")):
        return [fail(f"{words}any update: {named(case, keys)}", "the "
                     "optimizer has other parameters than the model"
                     + ": make it after fully_shard, which replaces them"
                     * bool(case.asked("fully_shard")))]
    return [warn(f"{words}some update: {named(case, keys)}", "unused? DDP "
                 "then needs find_unused_parameters=True")]


def equal(case):
    """Are gradients and weights the same on all ranks?"""
    findings = []
    if case.averaged:
        return findings
    for what, hint in (
            ("gradients", "all ranks have to reduce all of them, after the "
             "last backward()"),
            ("weights", "the same update on all ranks, from the same weights "
             "and gradients")):
        if what == "gradients" and clipped_first(case):
            continue  # they are seen before that
        for step, updates in enumerate(case.updates):
            whole = assemble([update[what] for update in updates
                              if what in update])
            if whole.apart:
                findings.append(fail(
                    f"after update {step} the weights of rank "
                    f"{min(whole.differing)} are not rank 0's: "
                    f"{named(case, whole.apart)}" if what == "weights" else
                    f"in update {step} the gradients of rank "
                    f"{min(whole.differing)} are not rank 0's: "
                    f"{named(case, whole.apart)}", hint))
                break
        else:
            findings.append(ok(f"{what} are equal on all ranks in all "
                               f"{len(case.updates)} updates"))
    return findings


def mean(case):
    """Are the gradients the mean of what each rank has computed?"""
    worst, scale = None, ""
    for step, updates in enumerate(case.updates):
        local = [whole_here(update["local"]) for update in updates]
        used = assemble([update["gradients"] for update in updates])
        keys = [key for key in used.tensors
                if all(key in one for one in local) and all(
                    one[key].shape == used.tensors[key].shape
                    for one in local)]
        if not keys or used.apart:
            return []
        mine = torch.cat([used.tensors[key] for key in keys])
        each = [torch.cat([one[key] for key in keys]) for one in local]
        good = sum(each) / case.size
        if not good.any():
            continue
        bound = GRADIENT * case.loosely
        if off(mine, good) < bound:
            worst = max(worst or 0.0, off(mine, good))
        elif off(mine, case.size * good) < bound:
            return [summed(case, step)]
        else:
            owner = [r for r, one in enumerate(each) if off(mine, one) < bound]
            if owner:
                return [fail(f"in update {step} all ranks have the gradients "
                             f"of rank {owner[0]} alone", "all_reduce adds "
                             "up those of all ranks; broadcast does not")]
            factor = (mine @ good / (good @ good)).item()
            error = off(mine, factor * good)
            worst = max(worst or 0.0, error)
            scale = (", times a GradScaler's scale" if case.asked("scaler")
                     else f", times {factor:.3g}")
            if not error <= bound:
                return [warn(f"in update {step} the gradients are not the "
                             "mean of the ranks' own, off by "
                             f"{percent(off(mine, good))}", "does the script "
                             "change them otherwise, too?")]
    return [] if worst is None else [ok(
        f"gradients are the mean of the ranks' own{scale}, before they are "
        f"clipped (to {worst:.0e})")]


def off(value, good):
    return ((value - good).norm() / good.norm().clamp(min=1e-30)).item()


def summed(case, step):
    """The sum is wrong unless each rank divides its loss by their number."""
    mine, good = (sum(map(sum, [update["losses"] for update in updates]))
                  / len(updates) for updates in (
                      case.updates[0], case.single[:1] or [
                          {"losses": []}]))
    text = f"in update {step} the gradients are the sum over all ranks"
    if good and abs(mine / good - 1) < 0.2:
        return fail(f"{text}, not the mean: {case.size} times as much", SUMMED)
    return warn(text, "right if each rank's loss is a sum divided by the "
                "whole minibatch; else " + SUMMED)


# --------------------------------------------------- as with a single process


def same(case):
    """Where the samples are the same: losses, gradients, weights."""
    if case.apart:
        return []
    good, mine = case.single, case.updates
    if case.still:
        mine, good = mine[:1], [
            update for update in case.still.seen[0]["updates"]
            if update["optimizer"] == 0][:case.size]
    why = reason(case)
    findings = weighting(case, mine[0], good if case.still else good[:1])
    for what in (loss_error, gradient_error, weight_error):
        finding = compare(case, what, mine, good, why)
        if finding:
            findings.append(finding)
    return findings


def compare(case, error, mine, good, why):
    largest = None
    for step, updates in enumerate(mine):
        if not case.still and step >= len(good):
            break
        alone = good if case.still else good[step:step + 1]
        value = error(case, updates, alone, step)
        if value is None:
            continue
        amount, bound, text, multiple = value
        if not amount <= bound:
            text = f"in update {step} {text}"
            if why and multiple:
                return fail(f"{text}, about {multiple:.3g} times as much",
                            f"{why[0]}: that explains a few per cent, no "
                            "such factor: is something multiplied or divided "
                            "by the number of processes?")
            if step >= EARLY and amount < 10 * bound:
                return warn(text, "rounding grows to that, too: watch fewer "
                            "updates, by --steps")
            return warn(f"{text}: {why[0]}", why[1]) if why else fail(
                text, "the ranks read the samples of the single process: "
                "what else differs, a scale, a seed, an order, the number "
                "that a mean is taken over?" if not case.parts else
                ": ".join(case.parts))
        largest = max(largest or 0.0, amount)
    if largest is None:
        return None
    words = {loss_error: "losses", gradient_error: "gradients",
             weight_error: "weights, relative to how far they have moved,"
             }[error]
    return ok(f"{words} agree with a single process (to {largest:.0e})")


def weighting(case, updates, alone):
    """How do the parts of an update count in its gradients?

    A loss that is a mean over all targets of all ranks weighs the ranks'
    parts by their targets; if each rank takes the mean of its own, all parts
    count alike. Sets case.weights: of the minibatches of one process.
    """
    case.weights = [1 / len(alone)] * len(alone)
    mine, each, _ = gradients_of(case, updates, alone)
    if mine is None:
        return []
    bound = GRADIENT * case.loosely

    def agrees(one, other):
        return off(one, other) < bound

    counts, whole = count_of(updates), shares(count_of(alone))
    uneven = max(counts) > 1.01 * min(counts)
    here, own, _ = gradients_of(case, updates, updates, "local")
    words = " or ".join(map(str, sorted(set(counts))[:4])) + (
        " targets" if updates[0]["targets"] else " samples")
    if (uneven and own and len(here) == len(mine)
            and agrees(here, sum(own) / len(own))
            and agrees(mix(shares(counts), own), mix(whole, each))):
        case.parts = (
            f"each rank's loss is the mean over its own {words}, "
            "and all ranks count alike", "divide the sum by the "
            "mean number over all ranks (all_reduce it): that is the mean "
            "over all")
        return [warn(*case.parts)] if case.still else []
    if len(alone) == 1 or parallel(mine, mix(case.weights, each), bound):
        return []
    fitted = torch.linalg.lstsq(torch.stack(each).T.double(),
                                mine.double()[:, None]).solution[:, 0]
    fitted = (fitted / fitted.sum()).tolist()
    for weights, finding in (
            (whole, ok("the loss is the mean over all targets of all ranks")),
            (fitted, warn("the gradients are a weighted mean of those of "
                          f"{len(each)} minibatches, with weights from "
                          f"{min(fitted):.2f} to {max(fitted):.2f}", "right "
                          "if these follow the numbers of tokens or samples"))
    ):
        if parallel(mine, mix(weights, each), bound) and min(weights) > 0 and (
                weights is whole or len(mine) > 8 * len(each)):
            case.weights = weights
            return [finding] * agrees(mine, mix(weights, each))
    return []


def count_of(updates):
    """How many targets each has, or samples."""
    counts = [update["targets"] for update in updates]
    return counts if all(counts) else [
        max(len(update["samples"]), 1) for update in updates]


def shares(counts):
    return [count / sum(counts) for count in counts]


def mix(weights, vectors):
    return sum(weight * vector for weight, vector
               in zip(weights, vectors, strict=True))


def gradients_of(case, updates, alone, what="gradients"):
    """(the ranks' together, a list of what each of `alone` has, their names).

    Both are vectors of all that they share, None and [] if that is nothing;
    the names come with their number of elements.
    """
    mine = assemble([update["gradients"] for update in updates])
    each = [assemble([update[what]]).tensors if what == "gradients" else
            whole_here(update[what]) for update in alone]
    keys = {key: tensor.numel() for key, tensor in mine.tensors.items()
            if all(key in one and tensor.shape == one[key].shape
                   for one in each)}
    if mine.apart or not keys:
        return None, [], keys
    return flat(mine.tensors, keys), [flat(one, keys) for one in each], keys


def ratio_of(mine, good):
    """The factor that brings the second closest to the first."""
    return (mine @ good / good.square().sum().clamp(min=1e-30)).item()


def parallel(mine, good, bound):
    return off(mine, ratio_of(mine, good) * good) < bound


def multiple_of(mine, good, size):
    """The factor between two vectors of one direction, None if there is none.

    Nearly the number of processes or a part of it, or certainly not 1.
    """
    ratio = ratio_of(mine, good)
    alike = (mine @ good / (mine.norm() * good.norm()).clamp(min=1e-30)).item()
    near = any(abs(ratio / factor - 1) < 0.15 for factor in (size, 1 / size))
    far = abs(ratio - 1) > 0.5 and alike > 0.98
    return ratio if alike > 0.9 and (near or far) else None


def losses_apart(case):
    """Are the losses of other samples those of one process, but a factor?"""
    alone = case.single
    if not (case.apart and alone) or case.other_weights or reason(case):
        return []
    here, own, _ = gradients_of(case, case.updates[0], case.updates[0],
                                "local")
    if own and off(here, sum(own)) < GRADIENT * case.loosely:
        return []  # `summed` has looked at the losses
    each = [sum(update["losses"]) for update in case.updates[0]]
    mean, good = sum(each) / case.size, sum(alone[0]["losses"])
    if good > 0 and max(each) < 1.2 * min(each) and any(  # not by chance
            abs(mean / good / factor - 1) < 0.2
            for factor in (case.size, 1 / case.size)):
        return [warn(
            f"in update 0 the mean loss is about {mean / good:.2f} times that "
            "of one process", "and so are the gradients: are they divided or "
            "multiplied by the number of processes, and by DDP as well, which "
            "takes the mean?")]
    return []


def loss_error(case, updates, alone, step):
    losses = [sum(update["losses"]) for update in updates]
    if not all(update["losses"] for update in (*updates, *alone)):
        return None
    good = mix(case.weights, [sum(update["losses"]) for update in alone])
    mine = sum(losses) / len(losses)
    if abs(sum(losses) - good) < LOSS * case.loosely * abs(good):
        mine = good  # each has divided its sum by the whole minibatch
    first = sum(case.single[0]["losses"])
    ratio = mine / (good or 1e-30)
    here, each, _ = gradients_of(case, updates, alone)
    multiple = each and multiple_of(here, mix(case.weights, each), case.size)
    return (abs(mine - good) / max(abs(good), abs(first), 1e-30),
            LOSS * case.loosely,
            f"the mean loss is {mine:.6g}, with one process {good:.6g}",
            ratio if multiple and abs(ratio / multiple - 1) < 0.15 else None)


def gradient_error(case, updates, alone, step):
    mine, each, keys = gradients_of(case, updates, alone)
    if mine is None:
        return None
    good = mix(case.weights, each)
    first = assemble([first_update(case, updates)["gradients"]]).length()
    whole = ((mine - good).norm() / max(good.norm(), first, 1e-30)
             ).item()  # what has converged is but noise
    bound = GRADIENT * case.loosely * (10 if step else 1)
    sizes = list(keys.values())
    first = [key for key, *pair in zip(
        keys, mine.split(sizes), good.split(sizes), strict=True)
        if off(*pair) > bound]
    return whole, bound, (
        f"the gradients are {ratio_of(mine, good):.3g} times those of one "
        "process" if parallel(mine, good, bound)
        else f"the gradients differ by {percent(whole)} from those of one "
        f"process, first {named(case, first or keys)}"), multiple_of(
            mine, good, case.size)


def weight_error(case, updates, alone, step):
    """By how much of the way from the first weights they are off."""
    if case.still or "weights" not in updates[0]:
        return None
    begin = assemble([first_update(case, updates)["before"]]).tensors
    mine = assemble([update["weights"] for update in updates])
    good = assemble([alone[0]["weights"]]).tensors
    keys = [key for key in good if key in mine.tensors and key in begin
            and mine.tensors[key].shape == good[key].shape]
    if mine.apart or not keys:
        return None
    begin, good, mine = (flat(tensors, keys) for tensors in (
        begin, good, mine.tensors))
    error = off(mine - begin, good - begin)
    return error, min(0.5, UPDATE * case.loosely), (
        f"the weights are off by {percent(error)} of the way that one process "
        "has gone"), multiple_of(mine - begin, good - begin, case.size)


def first_update(case, updates):
    """Of the same optimizer, as one process."""
    return next(update for update in case.single
                if update["optimizer"] == updates[0]["optimizer"])


def flat(tensors, keys):
    return torch.cat([tensors[key].flatten() for key in keys])


def reason(case):
    """A known reason why they differ though nothing is wrong, or None.

    It explains no factor: see `multiple_of`.
    """
    if any(seen["batchnorm"] for seen in case.together.seen):
        return ("BatchNorm takes the mean over the samples of one process",
                "nn.SyncBatchNorm.convert_sync_batchnorm(model) takes it over "
                "all, on GPUs")
    if any(seen["draws"] for seen in case.together.seen):
        return ("the model draws random numbers, each rank its own",
                "right if that is wanted: switch it off by a flag, if there "
                "is one, to compare the rest")
    if case.still and any(update["mixed"] for update in case.updates[0]):
        return ("ranks gather something before backward()", "a loss that "
                "depends on the samples of all ranks is not the mean of "
                f"those of {case.size} minibatches; keep the minibatch, to "
                "compare")
    return None


# --------------------------------------------------------------- what is left


def buffers(case):
    last = [updates for updates in case.updates if "buffers" in updates[0]]
    whole = assemble([update["buffers"] for update in last[-1]]) if last else (
        None)
    if not whole or not whole.tensors:
        return []
    if not whole.apart:
        return [ok("buffers are equal on all ranks")]
    names = sorted({key.partition(".")[2] for key in whole.apart})
    words = ("BatchNorm's running statistics" if any(
        "running_" in name for name in names) else "buffers")
    return [warn(f"{words} differ between the ranks: {', '.join(names[:3])}",
                 "each rank has those of its own samples, and rank 0's are "
                 "saved: SyncBatchNorm, or average them before you evaluate")]


def copies(case):
    """Are copies of the model, such as an average, equal on all ranks?"""
    each = [seen["copies"] for seen in case.together.seen]
    if len({len(one) for one in each}) > 1:
        return []
    apart = set().union(*(assemble(states).apart for states
                          in zip(*each, strict=True)))
    return [warn("a copy of the model differs between the ranks: "
                 + ", ".join(sorted(apart)[:3]), "all ranks copy it once DDP "
                 "has made the weights equal, and update it (EMA) after each "
                 "step; right if only rank 0 uses it")] if apart else []


def files(case):
    """What ranks other than 0 write and print."""
    findings, seen = [], case.together.seen
    written = Counter(chain.from_iterable(one["written"] for one in seen))
    both = sorted(Path(path).name for path, times in written.items()
                  if times > 1)
    if both:
        findings.append(fail(f"several ranks write {', '.join(both[:3])}",
                             "only one should: if rank == 0:"))
    lines = [set(rank.out.splitlines()) - {""} for rank
             in case.together.ranks]
    if any(lines[0] & other for other in lines[1:]):
        findings.append(warn("several ranks print the same lines",
                             "rank 0 is enough: if rank == 0:"))
    return findings


QUESTIONS = (leftovers, numbers, joined, start, samples, samplers,
             same_numbers, averages, reductions, unused, equal, mean, same,
             losses_apart, buffers, copies, files)


def not_seen(case, steps, resumes):
    seen = case.together.seen
    texts = [f"anything after update {steps - 1}: the end of an epoch, "
             "validation" + ", checkpoints, resuming" * (not resumes),
             "GPUs and NCCL; compiled code: all was run on the CPU, with gloo "
             "and without torch.compile",
             "whether the targets belong to the samples: a sample is a row of "
             "what the model is given"]
    if splits_matrices(case):
        texts.append("whether gradients are reduced: with tensor parallelism, "
                     "so are activations")
    if case.asked("FSDP1"):
        texts.append("gradients and weights: FullyShardedDataParallel keeps "
                     "them in its own way; of fully_shard they are seen")
    if any(one["dropout"] for one in seen):
        texts.append("dropout: it was switched off, to compare")
    if case.apart:
        texts.append("whether losses, gradients and weights are those of one "
                     f"process: {case.apart}")
    elif case.still:
        texts.append("whether the weights are those of one process: the "
                     "minibatch is not; gradients and losses were compared "
                     f"with the mean of {case.size} minibatches")
    if case.updates[0][0]["local"]["flat"].numel() == 0:
        texts.append("what each rank alone has computed of the gradients")
    if not any(update["losses"] for update in case.updates[0]):
        texts.append("losses: there was no loss.backward()")
    return texts
