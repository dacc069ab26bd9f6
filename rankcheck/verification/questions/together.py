"""Questions about what the ranks do together, without another run."""

import itertools

from rankcheck.findings import counted, fail, ok, percent, warn
from rankcheck.tensors import put_together
from rankcheck.verification.comparison import (
    GRADIENT,
    gradients_of,
    off,
    question,
)

SUMMED = ("divide them by the number of processes after all_reduce, or call "
          "the DDP wrapper, which does")


@question("each rank draws random numbers of its own")
def same_numbers(case):
    drawn = [[update["random"] for update in updates]
             for updates in case.updates if updates[0]["optimizer"] == 0]
    names = [name for name in drawn[0][0]
             if len(drawn) == len({ranks[0][name] for ranks in drawn}) > 1
             and all(one[name] == ranks[0][name]
                     for ranks in drawn for one in ranks)]
    if not names or case.splits_matrices:
        return []
    return [warn("all ranks draw the same random numbers in each update: "
                 + " and ".join(names), "for dropout, noise and "
                 "augmentation another seed on each rank, once the model is "
                 "made; the same for what all ranks are to do alike")]


@question("the ranks train together at every update")
def averages(case):
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
    every = min((b - a for a, b in itertools.pairwise(at[1:])), default=0)
    words = f"weights are {'averaged' if whole else 'made equal'} " + (
        f"every {every} updates" if every > 1 else "every update" if every
        else f"before update {at[1]}")  # after others, perhaps
    return [warn(words, "before that each rank trains alone, on its part of "
                 "the minibatch: right for local SGD",
                 learned={"apart": words, "averaged": words})]


@question("buffers are equal on all ranks")
def buffers(case):
    for step, updates in enumerate(case.updates):
        whole = put_together(updates, "buffers")
        if whole.apart:
            names = sorted({key.partition(".")[2] for key in whole.apart})
            words = ("BatchNorm's running statistics" if any(
                "running_" in name for name in names) else "buffers")
            return [warn(
                f"{words} differ between the ranks, after update {step}: "
                f"{', '.join(names[:3])}", "if they are of each rank's own "
                "samples: SyncBatchNorm, or average them before you evaluate "
                "and save", numbers={"update": step})]
    return [ok("buffers are equal on all ranks")] * bool(whole.tensors)


def clipped_first(case):
    return any(update["late"] > 0.5 * update["elements"]
               for update, *_ in case.updates)


@question("gradients are reduced once, and clipped after that")
def reductions(case):
    """By what was sent of them, and by what the optimizers got."""
    if case.splits_matrices or case.averaged:
        return []  # activations are reduced, too; or weights
    mine = [updates[0] for updates in case.updates]
    times = [update["reduced"] / max(update["elements"], 1) for update in mine]
    few = sum(times) < 0.5 * len(times)
    if few and case.by_step:
        return [ok("gradients are reduced by the optimizer, in its step()")]
    for step, updates in enumerate(case.updates):
        if times[step] >= 0.5:
            continue
        if few and shared(updates, "gradients"):
            break  # in another way
        if few or put_together(updates, "gradients").apart:
            return [not_reduced(case, step)]
    turns = []  # of all optimizers: before the first, all may be reduced
    for step, update in enumerate(mine):
        if not step or update["optimizer"] <= mine[step - 1]["optimizer"]:
            turns.append([0, 0, step])
        turns[-1][0] += update["reduced"]
        turns[-1][1] += update["elements"]
    each = [reduced / max(elements, 1) for reduced, elements, _ in turns]
    often = max(each)
    once = often < 1.6
    words = "gradients are " + (
        "made equal in a way of the script's own" if few else "reduced " + (
            "once an update" if once else f"{often:.2g} times "
            + ("an update" if often < 1.1 * min(each) else
               f"in update {turns[each.index(often)][2]}"))
        + f", {sum(update['bytes'] for update in mine) / len(mine) / 1e6:.3g}"
        f" MB in {max(update['calls'] for update in mine)} calls")
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


def shared(updates, what):
    """Whether ranks that have computed others have the same of that."""
    sums = put_together(updates, "sums")  # none of copies of the weights
    others = sums.apart if sums.tensors else len({
        (*update["samples"], *update["losses"]) for update in updates}) > 1
    return bool(others and not put_together(updates, what).apart)


def not_reduced(case, step):
    made, mine = case.asked("DistributedDataParallel"), case.updates[step][0]
    hint = ("fully_shard reduces those of the modules that it was called with,"
            " and not after set_requires_gradient_sync(False)"
            if case.asked("fully_shard") else
            "wrap the model in DistributedDataParallel and call that; or "
            "all_reduce every gradient before optimizer.step()"
            if not made else
            "the model is wrapped in DDP, but not called by it: call "
            "model(...), not model.module(...) or the one inside"
            if not any(updates[0]["wrapped"] for updates in case.updates) else
            "DDP reduces only parameters that it wraps and that required a "
            "gradient when it was made, in passes that call it, and not under "
            "no_sync()")
    return fail((f"in update {step} " if step else "")
                + f"gradients are not reduced: {mine['reduced']:.0f} elements "
                f"in an update of {mine['elements']:.0f}", hint,
                numbers={"update": step})


@question("every parameter gets a gradient")
def unused(case):
    keys = {key for updates in case.updates for update in updates
            for key in update["without"] if key not in case.split}
    if not keys:
        return []
    words = f"{counted(keys, 'parameter')} got no gradient in "
    if not any(update["gradients"][part] for updates in case.updates
               for update in updates for part in ("plain", "sharded")):
        return [fail(f"{words}any update: {case.named(keys)}", "the "
                     "optimizer has other parameters than the model"
                     + ": make it after fully_shard, which replaces them"
                     * bool(case.asked("fully_shard")) if all(
                         key.startswith("parameter ") for key in keys) else
                     "does backward() come to them?")]
    words = f"{words}some update: {case.named(keys)}"
    return [ok(f"{words}, as DDP was told") if any(
        case.asked("DistributedDataParallel")) else warn(
            words, "unused? DDP then needs find_unused_parameters=True")]


@question("gradients and weights are equal on all ranks")
def equal(case):
    if case.averaged:
        return
    for when, what, hint in (
            ("in", "gradients", "all ranks have to reduce all of them, after "
             "the last backward()"),
            ("after", "weights", "the same update on all ranks, from the same "
             "weights and gradients")):
        if what == "gradients" and (clipped_first(case) or case.by_step):
            continue  # they are seen before that
        for step, updates in enumerate(case.updates):
            whole = put_together(updates, what)
            if not whole.tensors:
                break
            if whole.apart:
                yield fail(
                    f"{when} update {step} the {what} of rank "
                    f"{min(whole.differing)} are not rank 0's: "
                    f"{case.named(whole.apart)}", hint,
                    ranks=sorted(whole.differing), numbers={"update": step})
                break
        else:
            yield ok(f"{what} are equal on all ranks in all "
                     f"{len(case.updates)} updates")


@question("gradients are the mean of the ranks' own")
def mean(case):
    worst, scaled = None, None  # of all updates; the first with a factor
    for step, updates in enumerate(case.updates):
        # the script's hooks may have changed the first, or reduced them
        found = [gradients_of(updates, updates, what) for what in (
            "local", "sums")[shared(updates, "local"):]]
        if any(mine is None for mine, *_ in found):
            return []
        mine, each, _ = min(found, key=lambda one: off(
            one[0], sum(one[1]) / case.size))
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
            scaled = scaled or (step, factor)
            if not error <= bound:
                return [warn(f"in update {step} the gradients are not the "
                             "mean of the ranks' own, off by "
                             f"{percent(off(mine, good))}",
                             "right if DDP's communication hook changes them"
                             if case.asked("register_comm_hook") else
                             "does the script change them otherwise, too?")]
    if scaled:
        step, factor = scaled
        return [warn(f"in update {step} the gradients are {factor:.4g} times "
                     "the mean of the ranks' own", "right if the script "
                     "scales them by itself, for the number of microbatches or"
                     " to clip them; else it multiplies or divides once too "
                     "often", numbers={"update": step, "factor": factor})]
    return [] if worst is None else [ok(
        "gradients are the mean of the ranks' own, before they are clipped "
        f"(to {worst:.0e})")]


def summed(case, step):
    """The sum is wrong unless each rank divides its loss by their number."""
    mine, good = (sum(sum(update["losses"]) for update in updates)
                  / max(len(updates), 1) for updates in (
                      case.updates[0], case.single[:1]))
    text = f"in update {step} the gradients are the sum over all ranks"
    if good and abs(mine / good - 1) < 0.2 < abs(case.size * case.rate - 1):
        return fail(f"{text}, not the mean: {case.size} times as much", SUMMED)
    return warn(text, "right if each rank's loss is a sum divided by the "
                "whole minibatch, or with SGD, the learning rate is divided "
                "by their number; else " + SUMMED)
