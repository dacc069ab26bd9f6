"""Questions about what one process computes, and the ranks together."""

from dataclasses import dataclass

import torch

from rankcheck.engine.findings import Proof, fail, ok, percent, warn
from rankcheck.record.tensors import length, put_together
from rankcheck.verification.comparison import (
    GRADIENT,
    LOSS,
    UPDATE,
    flat,
    gradients_of,
    makes_up,
    off,
    question,
    rows,
)
from rankcheck.verification.locate import explain_outputs

COMPARED = frozenset({Proof.SINGLE})
# Equal to those of one process: then they were reduced, however that is done
AGREES = frozenset({Proof.SINGLE, Proof.REDUCED})
EXCUSED = 0.25  # of a difference from one process for which there is a reason
EARLY = 8  # updates in which rounding does not grow that large


@question("losses, gradients and weights are those of one process")
def same(case):
    if case.apart and not (case.split and makes_up(case)):
        return []
    if case.still:
        pairs = [(case.updates[0], [update for update in case.longest
                                    if update["optimizer"] == 0][:case.size])]
    else:
        pairs = [(updates, [alone]) for updates, alone
                 in zip(case.updates, case.single, strict=False)
                 ][:case.compared]
    if case.apart and not case.still:
        # parts of one process's tensors, until update 0
        together, alone = map(rows, pairs[0])
        return compare(case, loss_error, pairs[:1], Weights((1,))) if (
            together and set(together) == set(alone)) else []
    weights = weighting(case, *pairs[0])
    return [*[weights.finding] * bool(weights.finding), *(
        finding for error in (loss_error, gradient_error, weight_error)
        for finding in compare(case, error, pairs, weights))]


@dataclass(frozen=True)
class Weights:
    """How the minibatches of one process count in an update of several."""

    of_each: tuple
    finding: object = None  # what is to be said of that
    parts: tuple = ()  # a text and a hint, if its parts are no mean over all


def compare(case, error, pairs, weights):
    """The finding of one kind of error in a list, [] if none was seen.

    pairs: of what each rank recorded of an update, and the updates of one
    process that it has to be compared with.
    """
    agree, why = [], reason(case)
    for step, (updates, alone) in enumerate(pairs):
        if not (value := error(case, updates, alone, step, weights.of_each)):
            continue
        amount, bound, text, multiple = value
        if amount <= bound:  # nan is not
            agree.append(amount)
            continue
        text = f"in update {step} {text}"
        numbers = {"update": step, "off": amount, "limit": bound}
        if why and multiple:
            return [fail(f"{text}, about {multiple:.3g} times as much",
                         f"{why[0]}: that explains a few per cent, no such "
                         "factor: is something multiplied or divided by the "
                         "number of processes?",
                         numbers=numbers | {"factor": multiple})]
        if error is not weight_error and multiple and (
                abs(multiple * case.rate - 1) < 0.01):
            return [warn(text, "right with SGD: the learning rate is divided "
                         "by that", numbers=numbers, proves=COMPARED)]
        if step >= EARLY and amount < 10 * bound:
            return [warn(text, "rounding grows to that, too: watch fewer "
                         "updates, by --steps", numbers=numbers,
                         proves=COMPARED)]
        if why:  # a large difference would hide a fault
            shows = COMPARED if amount <= EXCUSED else frozenset()
            return [warn(f"{text}: {why[0]}", why[1], numbers=numbers,
                         proves=shows)]
        return [fail(text, ": ".join(weights.parts) or locate(
            case, error, step, pairs, weights.of_each), numbers=numbers)]
    words = {loss_error: "losses", gradient_error: "gradients",
             weight_error: "weights, relative to how far they have moved,"}
    less = (f" in {len(agree)} of {len(case.updates)} updates; the others are "
            "not compared") * (len(agree) < len(case.updates))
    proves = COMPARED if error is loss_error else AGREES
    return [ok(f"{words[error]} agree with a single process (to "
               f"{max(agree):.0e}){less}", numbers={"off": max(agree)},
               proves=proves)] if agree else []


def locate(case, error, step, pairs, of_each):
    """Where the ranks part from the single process, as far as it was seen."""
    general = ("the ranks hold parts of the single process's weights, and have"
               " its samples: is something added on each rank, as a bias, or "
               "left out?" if case.split else
               "the ranks read the samples of the single process: what else "
               "differs, a scale, a seed, an order, the number or pairs that "
               "a mean is of?")
    updates, alone = pairs[step]

    def agrees(kind):
        value = kind(case, updates, alone, step, of_each)
        return value is not None and value[0] <= value[1]

    if error is weight_error and agrees(gradient_error):
        if case.settings:
            return f"the gradients agree: {case.settings}"
        if case.rate != 1:
            return (f"the gradients agree: the learning rate is "
                    f"{case.rate:.3g} times that of one process")
        return ("the gradients agree before they are clipped, and the "
                "optimizer's settings are the same: does clipping, or what the"
                " script does around optimizer.step(), depend on the number of"
                " processes?")
    if step:
        if put_together(pairs[step - 1][0], "weights").apart:
            return (f"it follows from the weights after update {step - 1}, "
                    "which are not the same on all ranks")
        before = weight_error(case, *pairs[step - 1], step - 1, of_each)
        if before and not before[0] <= before[1]:
            return f"it follows from the weights after update {step - 1}"
        if case.settings:
            return f"the optimizers have other settings: {case.settings}"
        names = other_buffers(case, pairs[:step + 1])
        if names:
            return ("by then these buffers are not those of the single "
                    f"process: {', '.join(names[:3])}; does the forward pass "
                    "use them?")
        return general
    text = explain_outputs(case.outputs)
    if not text:
        return general
    if case.outputs.error or case.split or not case.outputs.agreeing:
        return f"{text}; {general}"
    if case.outputs.first:
        return text
    if not agrees(loss_error):
        return (f"{text}, the loss does not: how is it averaged, weighted or "
                "scaled, and has each sample its own target? a mean divides "
                "by the number over all ranks, and by that of the microbatches"
                " once")
    if error is loss_error:
        return general
    if adds_up(case, updates, alone, of_each):
        return (f"{text}; the ranks' losses add up to the single process's, "
                "and their gradients are averaged: is each loss divided by a "
                "number over all ranks? then its gradients are to be added up,"
                " or it is multiplied by the number of processes")
    return f"{text}, and so do the losses: {in_backward(case, pairs[0])}"


def adds_up(case, updates, alone, of_each):
    """Whether the losses are one process's as a sum, and not as a mean."""
    whole = sum(sum(update["losses"]) for update in updates)
    good = mix(of_each, [sum(update["losses"]) for update in alone])
    return abs(whole / len(updates) - good) > (
        LOSS * case.loosely * abs(good))


def in_backward(case, pair):
    """Whether each rank's own gradients are other ones, or their mean is."""
    updates, alone = pair
    general = "what differs comes in the backward pass, or as it is reduced"
    good, own, _ = gradients_of(alone, updates, "sums")
    if good is None or len(alone) > 1 or not own:
        return general
    if off(sum(own) / case.size, good) < GRADIENT * case.loosely:
        return ("the mean of the ranks' own gradients is the single process's,"
                " so what differs comes as they are reduced")
    return ("the ranks' own gradients differ before they are reduced, so it "
            "is in the backward pass: does a collective of the forward pass "
            "lack one (those of torch.distributed.nn.functional have it), or "
            "is a gradient scaled?")


def other_buffers(case, pairs):
    """Names of those that are not one process's after one of the updates."""
    names = set()
    for updates, alone in pairs:
        if len(alone) > 1 or "buffers" not in alone[0]:
            continue
        good = by_name(put_together(alone, "buffers").tensors)
        names |= {name for update in updates if "buffers" in update
                  for name, tensor in by_name(put_together(
                      [update], "buffers").tensors).items()
                  if name in good and good[name].shape == tensor.shape
                  and off(tensor, good[name]) > GRADIENT * case.loosely}
    return sorted(names)


def by_name(buffers):
    """The same, but each without the number of its module."""
    return {key.partition(".")[2]: tensor for key, tensor in buffers.items()}


def weighting(case, updates, alone):
    """How do the parts of an update count in its gradients? Its `Weights`.

    A loss that is a mean over all targets of all ranks weighs the parts by
    their targets; if each backward pass takes the mean of its own, all parts
    count alike.
    """
    alike = (1 / len(alone),) * len(alone)
    mine, each, _ = gradients_of(updates, alone)
    if mine is None:
        return Weights(alike)
    bound = GRADIENT * case.loosely

    def agrees(one, other):
        return off(one, other) < bound

    counts = sorted({count for update in updates
                     for count in update["counts"]})
    here, own, _ = gradients_of(updates, updates, "local")
    (_, ours, keys), (_, theirs, others) = (
        gradients_of(updates, some, "weighed") for some in (updates, alone))
    if (counts and counts[-1] > 1.01 * counts[0]
            and own and len(here) == len(mine)
            and agrees(here, sum(own) / len(own)) and keys == others
            and agrees(over_all(updates, ours), over_all(alone, theirs))):
        part = "rank's" if all(len(update["counts"]) == 1
                               for update in updates) else "microbatch's"
        words = " or ".join(map(str, counts[:4])) + (
            " targets" if updates[0]["targets"] else " samples")
        parts = (
            f"each {part} loss is the mean over its own {words}, and all "
            "count alike", "divide each sum by the mean number over all "
            "ranks (all_reduce it) and microbatches: that is the mean over "
            "all")
        return Weights(alike, warn(*parts) if case.still else None, parts)
    if len(alone) == 1 or parallel(mine, mix(alike, each), bound):
        return Weights(alike)
    targets = [sum(update["counts"]) for update in alone]
    whole = [count / max(sum(targets), 1) for count in targets]
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
            return Weights(tuple(weights), finding if agrees(
                mine, mix(weights, each)) else None)
    return Weights(alike)


def over_all(updates, weighed):
    """Their gradients, if all targets of their passes had counted alike."""
    return sum(len(update["counts"]) * vector for update, vector in zip(
        updates, weighed, strict=True)) / sum(
            sum(update["counts"]) for update in updates)


def mix(weights, vectors):
    return sum(weight * vector for weight, vector
               in zip(weights, vectors, strict=True))


def ratio_of(mine, good):
    """The factor that brings the second closest to the first."""
    return (mine @ good / good.square().sum().clamp(min=1e-30)).item()


def parallel(mine, good, bound):
    return off(mine, ratio_of(mine, good) * good) < bound


def multiple_of(mine, good, size):
    """The factor between two vectors of one direction, if it is nearly the
    number of processes or its inverse, or certainly not 1; else None.
    """
    ratio = ratio_of(mine, good)
    alike = (mine @ good / (mine.norm() * good.norm()).clamp(min=1e-30)).item()
    near = any(abs(ratio / factor - 1) < 0.15 for factor in (size, 1 / size))
    far = abs(ratio - 1) > 0.5 and alike > 0.98
    return ratio if alike > 0.9 and (near or far) else None


def loss_error(case, updates, alone, step, weights):
    losses = [sum(update["losses"]) for update in updates]
    if not all(update["losses"] for update in (*updates, *alone)):
        return None
    good = mix(weights, [sum(update["losses"]) for update in alone])
    mine = sum(losses) / len(losses)
    if abs(sum(losses) - good) < LOSS * case.loosely * abs(good):
        mine = good  # each has divided its sum by the whole minibatch
    first = sum(case.single[0]["losses"])
    ratio = mine / (good or 1e-30)
    here, each, _ = gradients_of(updates, alone)
    multiple = each and multiple_of(here, mix(weights, each), case.size)
    return (abs(mine - good) / max(abs(good), abs(first), 1e-30),
            LOSS * case.loosely,
            f"the mean loss is {mine:.6g}, with one process {good:.6g}",
            ratio if multiple and abs(ratio / multiple - 1) < 0.15 else None)


def gradient_error(case, updates, alone, step, weights):
    mine, each, keys = gradients_of(updates, alone)
    if mine is None:
        return None
    good = mix(weights, each)
    first = length(put_together(
        [first_update(case, updates)], "gradients").tensors)
    whole = ((mine - good).norm() / max(good.norm(), first, 1e-30)
             ).item()  # what has converged is but noise
    bound = GRADIENT * case.loosely * (10 if step else 1)
    parts = (vector.split([*keys.values()]) for vector in (mine, good))
    first = [key for key, *pair in zip(keys, *parts, strict=True)
             if off(*pair) > bound]
    factor = f"{ratio_of(mine, good):.3g}"
    return whole, bound, (
        f"the gradients are {factor} times those of one process"
        if factor != "1" and parallel(mine, good, bound)
        else f"the gradients differ by {percent(whole)} from those of one "
        f"process, first {case.named(first or keys)}"), multiple_of(
            mine, good, case.size)


def weight_error(case, updates, alone, step, weights):
    """By how much of the way from the first weights they are off."""
    if case.still or "weights" not in updates[0] or (
            alone[0]["optimizer"] != updates[0]["optimizer"]):
        return None
    begin = put_together([first_update(case, updates)], "before").tensors
    mine = put_together(updates, "weights")
    good = put_together(alone, "weights").tensors
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


def reason(case):
    """Why they differ by a few per cent though nothing is wrong, or None."""
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
