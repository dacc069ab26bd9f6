"""Questions about what the ranks do together, without another run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from rankcheck.engine.findings import (
    Finding,
    Proof,
    counted,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.record.tensors import put_together
from rankcheck.verification.comparison import (
    GRADIENT,
    Comparison,
    gradients_of,
    off,
    question,
    rows,
)

REDUCED = frozenset({Proof.REDUCED})
EQUAL = frozenset({Proof.EQUAL})
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
    elements = [max(case.elements(updates), 1) for updates in case.updates]
    times = [update["reduced"] / count
             for update, count in zip(mine, elements, strict=True)]
    few = sum(times) < 0.5 * len(times)
    if few and case.by_step:
        return [ok("gradients are reduced by the optimizer, in its step()",
                   proves=REDUCED)]
    equal = not any(put_together(updates, "gradients").apart
                    for updates in case.updates)
    for step, updates in enumerate(case.updates):
        if times[step] >= 0.5:
            continue
        if few and shared(updates, "gradients"):
            break  # in another way
        if few or put_together(updates, "gradients").apart:
            return [not_reduced(case, step, elements[step])]
    findings = how_often(case, mine, elements, few) if equal else []
    if case.asked("clipped"):
        findings.append(warn(
            "gradients are clipped before scaler.unscale_(optimizer)", "call "
            "that first: the limit is for gradients without the scale"))
    if clipped_first(case):
        findings.append(fail("gradients are clipped before they are reduced",
                             "reduce first: the norm is that of the mean"))
    return findings


@dataclass
class Turn:
    """The steps of all optimizers, each once; before the first, all gradients
    may be reduced.

    Attributes:
        update: the number of its first step among those of all optimizers.
        reduced: how many elements of gradients were reduced before them.
        elements: how many elements the optimizers' parameters have.
    """

    update: int
    reduced: float = 0
    elements: int = 0

    @property
    def times(self) -> float:
        return self.reduced / max(self.elements, 1)


def how_often(case: Comparison, mine: list[dict], elements: list[int],
              otherwise: bool) -> list[Finding]:
    """Answer how often gradients are reduced in an update.

    Args:
        mine: what rank 0 has recorded of each step.
        elements: of the parameters of each step, on all ranks.
        otherwise: whether they are equal without a reduction that was seen.
    """
    if otherwise:
        words = "gradients are made equal in a way of the script's own"
        if case.asked("fully_shard") and not any(
                update["gradients"]["plain"] for updates in case.updates
                for update in updates):
            # a sharded parameter has no gradient before that
            words = ("gradients are reduced by fully_shard; how often was not "
                     "seen")
        return [ok(words, proves=REDUCED)]
    turns: list[Turn] = []
    for step, update in enumerate(mine):
        if not step or update["optimizer"] <= mine[step - 1]["optimizer"]:
            turns.append(Turn(step))
        turns[-1].reduced += update["reduced"]
        turns[-1].elements += elements[step]
    most = max(turns, key=lambda turn: turn.times)
    megabytes = sum(update["bytes"] for update in mine) / len(mine) / 1e6
    calls = max(update["calls"] for update in mine)
    sent = f"{megabytes:.3g} MB in {calls} calls"
    if most.times < 1.6:
        return [ok(f"gradients are reduced once an update, {sent}",
                   proves=REDUCED)]
    where = f"in update {most.update}"
    if most.times < 1.1 * min(turn.times for turn in turns):
        where = "an update"
    words = f"gradients are reduced {most.times:.2g} times {where}, {sent}"
    if case.asked("fully_shard"):  # it costs memory to do otherwise
        return [ok(words, proves=REDUCED)]
    advice = ("once is enough: all microbatches but the last under "
              "model.no_sync(), their forward pass, too; or does one loss "
              "take several passes?")
    if case.asked("no_sync") and not case.asked("forward in no_sync"):
        advice = ("model.no_sync() takes effect in the forward pass, and was "
                  "entered without one: call the model inside it, for all "
                  "microbatches but the last")
    return [warn(words, advice, proves=REDUCED)]


def shared(updates, what):
    """Whether ranks that have computed others have the same of that."""
    sums = put_together(updates, "sums")  # none of copies of the weights
    others = sums.apart if sums.tensors else len({
        (*update["samples"], *update["losses"]) for update in updates}) > 1
    whole = put_together(updates, what)
    return bool(others and whole.tensors and not whole.apart)


def not_reduced(case, step, elements):
    made, mine = case.asked("DistributedDataParallel"), case.updates[step][0]
    hint = ("wrap the model in DistributedDataParallel and call that; or "
            "all_reduce every gradient before optimizer.step()")
    if case.asked("fully_shard"):
        hint = ("fully_shard reduces those of the modules that it was called "
                "with, and not after set_requires_gradient_sync(False)")
        switched = case.asked("gradient sync")
        if switched and not any(switched):
            hint = ("set_requires_gradient_sync() was only called with False: "
                    "call it with True before the last microbatch")
    elif made and not any(updates[0]["wrapped"] for updates in case.updates):
        hint = ("the model is wrapped in DDP, but not called by it: call "
                "model(...), not model.module(...) or the one inside")
    elif made:
        hint = ("DDP reduces only parameters that it wraps and that required "
                "a gradient when it was made, in passes that call it, and not "
                "under no_sync()")
    words = (f"gradients are not reduced: {mine['reduced']:.0f} elements in "
             f"an update of {elements:.0f}")
    if step:
        words = f"in update {step} {words}"
    return fail(words, hint, numbers={"update": step})


@question("every parameter gets a gradient")
def unused(case):
    keys = {key for updates in case.updates for update in updates
            for key in update["without"] if key not in case.split}
    if not keys:
        return []
    switched = case.asked("gradient sync")
    if switched and not any(switched):
        return []  # FSDP2 has them elsewhere until it reduces them
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
            # by_step: the weights tell of the gradients
            shows = what == "gradients" or case.by_step
            yield ok(f"{what} are equal on all ranks in all "
                     f"{len(case.updates)} updates",
                     proves=EQUAL if shows else frozenset())


@question("gradients are the mean of the ranks' own")
def mean(case):
    worst, scaled = None, None  # of all updates; the first with a factor
    differ = False  # whether the ranks' own do, so that it is no mean of one
    sums = []  # where a sum is right
    for step, updates in enumerate(case.updates):
        # the script's hooks may have changed the first, or reduced them
        found = [gradients_of(updates, updates, what) for what in (
            "local", "sums")[shared(updates, "local"):]]
        if any(mine is None for mine, *_ in found):
            return []
        mine, each, keys = min(found, key=lambda one: off(
            one[0], sum(one[1]) / case.size))
        good = sum(each) / case.size
        if not good.any():
            continue
        bound = GRADIENT * case.loosely
        differ |= any(off(one, good) > bound for one in each)
        if off(mine, good) < bound:
            worst = max(worst or 0.0, off(mine, good))
        elif off(mine, case.size * good) < bound:
            finding = summed(case, step)
            if finding.verdict != "ok":
                return [finding]
            sums.append(finding)
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
                sums = find_sums(mine, good, keys, case)
                if sums:
                    return [some_summed(case, step, sums)]
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
    if sums:
        return sums[:1]
    return [] if worst is None else [ok(
        "gradients are the mean of the ranks' own, before they are clipped "
        f"(to {worst:.0e})", proves=REDUCED if differ else frozenset())]


def find_sums(mine: torch.Tensor, mean_of_ranks: torch.Tensor,
              keys: dict[str, int], case: Comparison) -> set[str]:
    """Return the parameters whose gradients are the sum over the ranks.

    None if the gradients of another parameter are not the mean.

    Args:
        mine: the gradients of all parameters, in one vector.
        mean_of_ranks: the mean of what the ranks have computed, likewise.
        keys: the parameters, with their number of elements.
    """
    bound = GRADIENT * case.loosely
    sizes = [*keys.values()]
    sums = set()
    for key, part, mean_part in zip(
            keys, mine.split(sizes), mean_of_ranks.split(sizes), strict=True):
        if part.equal(mean_part) or off(part, mean_part) < bound:
            continue
        if not off(part, case.size * mean_part) < bound:
            return set()
        sums.add(key)
    return sums


def some_summed(case: Comparison, step: int, sums: set[str]) -> Finding:
    """Say that the gradients of some parameters are the sum over the ranks.
    """
    return warn(
        f"in update {step} the gradients of {case.named(sums)} are the sum "
        "over all ranks, those of the others the mean", "right if the losses "
        "of these parameters are parts of one sum; else divide their "
        "gradients by the number of processes after all_reduce, as DDP does",
        numbers={"update": step})


def is_single_process_gradient(case: Comparison, step: int) -> bool:
    """Return whether an update has the gradients of one process, for the same
    samples: then a sum over the ranks is what it has to be.
    """
    if case.apart or case.still or step >= len(case.single) or (
            case.compared is not None and step >= case.compared):
        return False
    alone = case.single[step]
    if not alone["samples"] or sorted(rows(case.updates[step])) != sorted(
            alone["samples"]):
        return False
    mine, good, _ = gradients_of(case.updates[step], [alone])
    return mine is not None and bool(good[0].any()) and (
        off(mine, good[0]) < GRADIENT * case.loosely)


def summed(case, step):
    """The sum is wrong unless each rank divides its loss by their number."""
    mine, good = (sum(sum(update["losses"]) for update in updates)
                  / max(len(updates), 1) for updates in (
                      case.updates[0], case.single[:1]))
    text = f"in update {step} the gradients are the sum over all ranks"
    if is_single_process_gradient(case, step):
        return ok(f"{text}, and those of one process")
    advice = SUMMED
    if case.asked("register_comm_hook"):
        advice = ("a communication hook takes the place of DDP's average: "
                  "divide by the number of processes in it")
    if good and abs(mine / good - 1) < 0.2 < abs(case.size * case.rate - 1):
        return fail(f"{text}, not the mean: {case.size} times as much", advice)
    return warn(text, "right if each rank's loss is a sum divided by the "
                "whole minibatch, or with SGD, the learning rate is divided "
                "by their number; else " + advice)
