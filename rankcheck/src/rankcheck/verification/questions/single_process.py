"""Questions about what one process computes, and the ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

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
from rankcheck.record.tensors import length, put_together, whole_here
from rankcheck.record.tensors import names as names_of
from rankcheck.verification.comparison import (
    GRADIENT,
    LOSS,
    WEIGHT_UPDATE,
    Comparison,
    StepRecord,
    are_close,
    flat,
    gradients_of,
    off,
    question,
)
from rankcheck.verification.locate import explain_outputs
from rankcheck.verification.parts import PartVectors
from rankcheck.verification.questions.records import StepRecords, flatten
from rankcheck.verification.questions.step_pairs import (
    StepPair,
    find_comparable,
    pair_steps,
)
from rankcheck.verification.questions.vectors import (
    TINY,
    add_up,
    are_parallel,
    mix,
    multiple_of,
    ratio_of,
)

COMPARED = frozenset({Proof.SINGLE})
# Equal to those of one process: then they were reduced, however that is done
AGREES_PROVES = frozenset({Proof.SINGLE, Proof.REDUCED})

# Those of all hand-sharded parameters, if there are no others: then the ranks
# that have the same part have the same gradients
PARTS_PROVE = frozenset({Proof.SINGLE, Proof.REDUCED, Proof.EQUAL})

# Largest relative error that still counts as a comparison if there is an
# explanation, such as BatchNorm. A larger one gets the same warning, but
# proves nothing, as it could hide a fault. A choice, not a measurement.
EXCUSED = 0.25

# From this step on, counted from 0, rounding may exceed a limit: an error of
# less than `LATE_FACTOR` times the limit is a warning. A right script with
# Adam was refused when 60 steps were watched. Both numbers are choices, not
# measurements: a small fault that shows later than this is a warning, too.
EARLY = 8
LATE_FACTOR = 10

# How much larger the limit for gradients is after the first step, when the
# weights differ by rounding. A choice, not a measurement.
LATER_GRADIENT = 10

# Upper bound of the limit for weights. In low precision, 30 times
# `WEIGHT_UPDATE` would be 1.5, and weights that have not moved, with an error
# of 1, would pass.
LARGEST_WEIGHT_LIMIT = 0.5


# What to look at where hand-sharded parameters differ
HOW_SHARDED = ("look at how the gradients of hand-sharded parameters are "
               "reduced, scaled and clipped")


@dataclass(frozen=True)
class Explanation:
    """Why something differs from one process, and what can be done."""

    cause: str
    fix: str


@dataclass(frozen=True)
class MinibatchWeights:
    """How the minibatches of one process count in a step of several.

    Attributes:
        of_each: the weight of each minibatch; their sum is 1.
        finding: what is to be said of that, if anything.
        own_means: set if each part's loss is the mean over its own targets,
            so that the sum is no mean over all.
    """

    of_each: Sequence[float]
    finding: Finding | None = None
    own_means: Explanation | None = None


@dataclass(frozen=True)
class Quantity:
    """What is compared with one process.

    Attributes:
        kind: the first part of a finding's kind.
        name: in words.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class RelativeError:
    """How far the ranks are from one process in one step.

    Attributes:
        amount: relative; may be nan.
        limit: the largest amount that rounding explains.
        text: both in words.
        factor: about how many times as large the ranks' values are, if that
            tells of a factor; else None. See `multiple_of`.
    """

    amount: float
    limit: float
    text: str
    factor: float | None

    @property
    def is_small(self) -> bool:
        """Whether rounding explains it; false for nan."""
        return self.amount <= self.limit


Key = TypeVar("Key")

Measure: TypeAlias = Callable[
    [Comparison, StepPair, Sequence[float]], RelativeError | None]


@question("losses, gradients and weights match the single-process run")
def verify_single_process(case: Comparison) -> list[Finding]:
    """Answer whether the ranks compute what one process does.

    Where parameters are sharded by hand, their parts are compared with what
    one process has in their places, if they begin with its values.
    """
    findings = []
    if case.skip_reason and not case.frozen_run:
        pairs = find_comparable(case)
        weights = MinibatchWeights((1.0,))
    elif case.skip_reason and not case.parts.make_up:
        return []
    else:
        pairs = pair_steps(case)
        weights = weigh_minibatches(case, pairs[0])
    if weights.finding:
        findings.append(weights.finding)
    for measure in MEASURED:
        findings += compare_errors(case, measure, pairs, weights)
    return findings


def compare_errors(case: Comparison, measure: Measure,
                   pairs: Sequence[StepPair],
                   weights: MinibatchWeights) -> list[Finding]:
    """Return the finding of one kind of error in a list, [] if none was seen.

    Args:
        measure: gives the error of that kind.
        pairs: the steps, from 0 on.
    """
    amounts = []  # of the errors that rounding explains
    for pair in pairs:
        error = measure(case, pair, weights.of_each)
        if error is None:
            continue
        if not error.is_small:
            return [explain_error(case, measure, error, pair.step, pairs,
                                  weights)]
        amounts.append(error.amount)
    if not amounts:
        return []
    name = MEASURED[measure].name
    if case.hand_sharded and measure in (gradient_error, weight_error):
        name += " of the other parameters"
    text = (f"{name} match the single-process run (relative error "
            f"{max(amounts):.0e})")
    if len(amounts) < len(case.steps):
        text += (f", in {len(amounts)} of {counted(case.steps, 'step')}; "
                 "the others are not compared")
    proves = AGREES_PROVES
    if measure is loss_error:
        proves = COMPARED
    elif measure in (part_gradient_error, part_weight_error):
        proves = COMPARED
        if not find_uncompared_parts(case, pairs) and (
                not has_other_parameters(case)):
            proves = PARTS_PROVE
    numbers = {"error": max(amounts), "compared": len(amounts)}
    return [ok(text, numbers=numbers, proves=proves,
               kind=f"{MEASURED[measure].kind}-match")]


def is_size(factor: float | None, size: int) -> bool:
    """Return whether a factor between gradients is the number of processes.
    """
    return factor is not None and abs(factor / size - 1) < GRADIENT


def find_uncompared_parts(case: Comparison, pairs: Sequence[StepPair]
                          ) -> set[str]:
    """Return the names of hand-sharded parameters that are not compared.

    Also of those that the ranks' optimizers have in other steps than the
    optimizers of one process.
    """
    compared: set[tuple[int, str]] = set()
    for pair in pairs:
        whole = names_of(pair.single_process[0]["recorded"]["now"])
        for rank, (places, record) in enumerate(
                zip(case.parts.of_ranks, pair.ranks, strict=True)):
            own = names_of(record["recorded"]["now"])
            compared |= {(rank, name) for name, place in places.items()
                         if name in own and place.name in whole}
    located = {(rank, name) for rank, places in enumerate(case.parts.of_ranks)
               for name in places}
    return case.parts.uncompared | {
        name for _, name in located - compared}


def has_other_parameters(case: Comparison) -> bool:
    """Return whether a rank has parameters that are not hand-sharded."""
    return any(record.shapes.keys() - case.hand_sharded
               for record in case.multi_process_run.all_records)


def explain_error(case: Comparison, measure: Measure, error: RelativeError,
                  step: int,
                  pairs: Sequence[StepPair],
                  weights: MinibatchWeights) -> Finding:
    """Say whether an error that is not small is a fault, and of what.

    Args:
        measure: has given the error.
        step: the step in which it was found, the first of all.
    """
    text = f"in step {step} {error.text}"
    kind = f"{MEASURED[measure].kind}-differ"
    numbers = {"step": step, "error": error.amount, "limit": error.limit}
    if error.factor:
        numbers["factor"] = error.factor
    explanation = explain_small_error(case)
    if explanation and error.factor:
        return fail(f"{text}, about {error.factor:.3g} times as large",
                    "look for something multiplied or divided by the number "
                    f"of processes ({explanation.cause}, but that explains "
                    "only a few per cent)",
                    numbers=numbers,
                    kind=kind)
    if measure is not weight_error and error.factor and (
            abs(error.factor * case.rate - 1) < 0.01):
        return warn(text, "check that the optimizer is SGD: then it is fine, "
                    "as the learning rate is divided by the same factor",
                    numbers=numbers, proves=COMPARED,
                    kind=kind)
    if step >= EARLY and error.amount < LATE_FACTOR * error.limit:
        return warn(text, "use fewer --steps: accumulated rounding can "
                    "explain this", numbers=numbers, proves=COMPARED,
                    kind=kind)
    if explanation:
        shows: frozenset[Proof] = frozenset()
        if error.amount <= EXCUSED:
            shows = COMPARED
        return warn(f"{text}: {explanation.cause}", explanation.fix,
                    numbers=numbers, proves=shows, kind=kind)
    if weights.own_means:
        fix = f"{weights.own_means.cause}: {weights.own_means.fix}"
    elif measure is loss_error and case.hand_sharded and error.factor:
        fix = ("the gradients are as many times as large: check what the loss "
               "is divided by, such as the number of microbatches")
    elif measure is part_gradient_error and is_size(error.factor, case.size):
        fix = ("check whether they are divided by the number of processes: "
               "other gradients are means over the ranks")
    else:
        fix = locate(case, measure, step, pairs, weights.of_each)
    return fail(text, fix, numbers=numbers, kind=kind)


def locate(case: Comparison, measure: Measure, step: int,
           pairs: Sequence[StepPair], of_each: Sequence[float]) -> str:
    """Say where the ranks part from one process, as far as it was seen."""
    general = ("check what else differs, as the samples are the same: a "
               "scale, a seed, an order, what a mean is taken over")
    if case.hand_sharded:
        general = ("look for a term that is added on every rank, such as a "
                   "bias, or missing: the ranks hold parts of the "
                   "single-process weights, and read its samples")
    gradients_of_weights = {weight_error: gradient_error,
                            part_weight_error: part_gradient_error}
    if measure in gradients_of_weights and has_small_error(
            case, gradients_of_weights[measure], pairs[step], of_each):
        return explain_weights(case, pairs[:step + 1])
    if step:
        if case.hand_sharded and not all(
                has_small_error(case, one, pairs[step - 1], of_each)
                for one in (part_gradient_error, part_weight_error)):
            general = HOW_SHARDED
        return explain_later(case, step, pairs, of_each) or general
    if measure in (part_gradient_error, part_weight_error):
        return HOW_SHARDED
    text = explain_outputs(case.outputs)
    if not text:
        return general
    if case.outputs.error or case.hand_sharded or not case.outputs.agreeing:
        return f"{text}; {general}"
    if case.outputs.first:
        return text
    if not has_small_error(case, loss_error, pairs[0], of_each):
        return (f"{text}, but not the loss: check how it is averaged, "
                "weighted and scaled (a mean divides by the number over all "
                "ranks, and once by the number of microbatches), and that "
                "each sample has its own target")
    if measure is loss_error:
        return general
    if adds_up(case, pairs[0], of_each):
        return (f"{text}; the ranks' losses add up to the single-process "
                "loss, but their gradients are averaged: if each loss is "
                "divided by a number over all ranks, sum the gradients, or "
                "multiply the loss by the number of processes")
    return f"{explain_backward(case, pairs[0])}; {text}, and the losses match"


def has_small_error(case: Comparison, measure: Measure, pair: StepPair,
                    of_each: Sequence[float]) -> bool:
    """Return whether an error was measured, and rounding explains it."""
    error = measure(case, pair, of_each)
    return error is not None and error.is_small


def explain_weights(case: Comparison, pairs: Sequence[StepPair]) -> str:
    """Say why weights differ where the gradients agree.

    Args:
        pairs: the steps up to the first whose weights differ.
    """
    if case.settings:
        return f"the gradients match, but {case.settings}"
    if case.rate != 1:
        return (f"the gradients match, but the learning rate is "
                f"{case.rate:.3g} times that of 1 process")
    rate = describe_other_rate(pairs)
    if rate:
        return f"the gradients match, but {rate}"
    return ("check whether clipping, or code around optimizer.step(), depends "
            "on the number of processes: the gradients match before clipping, "
            "and so do the learning rates and, in its first step, the "
            "optimizer's other settings")


def describe_other_rate(pairs: Sequence[StepPair]) -> str:
    """Name the first step in which a rank has another learning rate than one
    process; "" if there is none.
    """
    for pair in pairs:
        expected = pair.single_process[0]["rates"]
        for record in pair.ranks:
            rates = zip(record["rates"], expected, strict=False)
            for rate, single_rate in rates:
                if not are_close(rate, single_rate):
                    return (f"in step {pair.step} the learning rate is "
                            f"{rate:.3g}, not {single_rate:.3g} as with 1 "
                            "process")
    return ""


def explain_later(case: Comparison, step: int, pairs: Sequence[StepPair],
                  of_each: Sequence[float]) -> str:
    """Say why a step after the first differs; "" if nothing tells."""
    previous = pairs[step - 1]
    if put_together(previous.ranks, "weights").unequal:
        return (f"this follows from the weights after step {step - 1}, "
                "which differ between ranks")
    for measure in (weight_error, part_weight_error):
        error = measure(case, previous, of_each)
        if error and not error.is_small:
            return f"this follows from the weights after step {step - 1}"
    if case.settings:
        return f"optimizer settings differ: {case.settings}"
    names = other_buffers(case, pairs[:step + 1])
    if names:
        return ("check whether the forward pass uses these buffers, which "
                "differ from the single-process run by then: "
                f"{', '.join(names[:3])}")
    return ""


def adds_up(case: Comparison, pair: StepPair, of_each: Sequence[float]
            ) -> bool:
    """Return whether the losses are one process's as a sum, not as a mean.

    It assumes that `loss_error` was small: that accepts both.
    """
    mean = sum(losses_of(pair.ranks)) / len(pair.ranks)
    expected = weighted_sum(of_each, losses_of(pair.single_process))
    return abs(mean - expected) > LOSS * case.tolerance_factor * abs(expected)


def losses_of(records: StepRecords) -> list[float]:
    """Return the loss of each step, its microbatches added up."""
    return [sum(record["losses"]) for record in records]


def explain_backward(case: Comparison, pair: StepPair) -> str:
    """Say whether each rank's own gradients differ, or only their mean."""
    general = "look at the backward pass and at the reduction"
    expected, own, _ = gradients_of(pair.single_process, pair.ranks, "sums")
    if expected is None or len(pair.single_process) > 1 or not own:
        return general
    error = off(add_up(own) / case.size, expected)
    if error < GRADIENT * case.tolerance_factor:
        return ("look at how gradients are reduced: before that they are "
                "right, as the mean of the ranks' own gradients matches the "
                "single-process run")
    return ("look at the backward pass: the ranks' own gradients differ "
            "before they are reduced; look for a collective in the forward "
            "pass without a gradient (those of "
            "torch.distributed.nn.functional have one), or a scaled gradient")


def other_buffers(case: Comparison, pairs: Sequence[StepPair]) -> list[str]:
    """Return the buffers that are not one process's after one of the steps.
    """
    limit = GRADIENT * case.tolerance_factor
    found: set[str] = set()
    for pair in pairs:
        first = pair.single_process[0]
        if len(pair.single_process) > 1 or "buffers" not in first:
            continue
        expected = buffers_by_name(first)
        for record in pair.ranks:
            if "buffers" not in record:
                continue
            for name, tensor in buffers_by_name(record).items():
                if (name in expected and expected[name].shape == tensor.shape
                        and off(tensor, expected[name]) > limit):
                    found.add(name)
    return sorted(found)


def buffers_by_name(record: StepRecord) -> dict[str, torch.Tensor]:
    """Return the buffers of one process, without the numbers of modules."""
    buffers = put_together([record], "buffers").tensors
    return {key.partition(".")[2]: tensor for key, tensor in buffers.items()}


def weigh_minibatches(case: Comparison, pair: StepPair) -> MinibatchWeights:
    """Find how the parts of a step count in its gradients.

    If the loss is a mean over all targets of all ranks, each part counts by
    its number of targets. If each backward pass takes the mean over its own
    targets, all parts count alike. If neither fits, the weights are fitted by
    least squares. They are taken if all are positive, if their sum has the
    direction of the gradients, and if there are more than eight elements for
    each weight: fewer could fit by chance. Eight is a choice, not a
    measurement.
    """
    count = len(pair.single_process)
    alike = [1 / count] * count
    gradients, each, _ = gradients_of(pair.ranks, pair.single_process)
    if gradients is None:
        return MinibatchWeights(alike)
    limit = GRADIENT * case.tolerance_factor
    own_means = find_own_means(pair, gradients, limit)
    if own_means:
        finding = None
        if case.frozen_run:
            finding = warn(own_means.cause, own_means.fix,
                           kind="mean-of-means")
        return MinibatchWeights(alike, finding, own_means)
    if count == 1 or are_parallel(gradients, mix(alike, each), limit):
        return MinibatchWeights(alike)
    targets = [sum(record["counts"]) for record in pair.single_process]
    whole = [number / max(sum(targets), 1) for number in targets]
    if has_weights(whole, gradients, each, limit):
        return with_finding(whole, gradients, each, limit, ok(
            "the loss is the mean over all targets of all ranks",
            kind="mean-over-targets"))
    fitted = fit_weights(gradients, each)
    if has_weights(fitted, gradients, each, limit) and (
            len(gradients) > 8 * len(each)):
        return with_finding(fitted, gradients, each, limit, warn(
            f"the gradients are a weighted mean over {len(each)} minibatches, "
            f"with weights from {min(fitted):.2f} to {max(fitted):.2f}",
            "check that these follow the numbers of tokens or samples",
            numbers={"minibatches": len(each)}, kind="weighted-mean"))
    return MinibatchWeights(alike)


def has_weights(weights: Sequence[float], gradients: torch.Tensor,
                each: Sequence[torch.Tensor], limit: float) -> bool:
    """Return whether these weights give the direction of the gradients."""
    return min(weights) > 0 and are_parallel(
        gradients, mix(weights, each), limit)


def with_finding(weights: Sequence[float], gradients: torch.Tensor,
                 each: Sequence[torch.Tensor], limit: float, finding: Finding
                 ) -> MinibatchWeights:
    """Return the weights, with the finding if the gradients agree as well."""
    if off(gradients, mix(weights, each)) < limit:
        return MinibatchWeights(weights, finding)
    return MinibatchWeights(weights)


def fit_weights(gradients: torch.Tensor, each: Sequence[torch.Tensor]
                ) -> list[float]:
    """Return the weights of vectors whose sum is closest to another vector.

    They are divided by their sum.
    """
    solution = torch.linalg.lstsq(torch.stack([*each]).T.double(),
                                  gradients.double()[:, None]).solution[:, 0]
    fitted: list[float] = (solution / solution.sum()).tolist()
    return fitted


def find_own_means(pair: StepPair, gradients: torch.Tensor, limit: float
                   ) -> Explanation | None:
    """Say that each part's loss is the mean over its own targets, if it is.

    All of this has to hold:

    - The numbers of targets of the parts differ by more than 1%.
    - The gradients are the mean of the ranks' own.
    - With all targets counting alike, they would be those of one process.

    Args:
        gradients: the gradients of the ranks, in one vector.
        limit: relative; of gradients that agree.
    """
    counts: list[int] = sorted({*flatten(
        record["counts"] for record in pair.ranks)})
    if not counts or counts[-1] <= 1.01 * counts[0]:
        return None
    here, own, _ = gradients_of(pair.ranks, pair.ranks, "local")
    if here is None or not own or len(here) != len(gradients):
        return None
    if not off(here, add_up(own) / len(own)) < limit:
        return None
    _, ours, keys = gradients_of(pair.ranks, pair.ranks, "weighed")
    _, theirs, others = gradients_of(pair.ranks, pair.single_process,
                                     "weighed")
    if keys != others:
        return None
    if not off(over_all(pair.ranks, ours),
               over_all(pair.single_process, theirs)
               ) < limit:
        return None
    part = "microbatch's"
    if all(len(record["counts"]) == 1 for record in pair.ranks):
        part = "rank's"
    amount = " or ".join(map(str, counts[:4]))
    if pair.ranks[0]["targets"]:
        amount += " targets"
    else:
        amount += " samples"
    return Explanation(
        f"each {part} loss is the mean over its own {amount}, and all "
        "count equally", "divide each sum by the mean number over all "
        "ranks (all_reduce it) and microbatches, to get the mean over all")


def over_all(records: StepRecords, weighed: Sequence[torch.Tensor]
             ) -> torch.Tensor:
    """Return the gradients if all targets of the steps had counted alike.

    Args:
        weighed: of each step, the gradients of its backward passes, each
            times the number of its targets, added up.
    """
    sums = [len(record["counts"]) * vector
            for record, vector in zip(records, weighed, strict=True)]
    return add_up(sums) / sum(sum(record["counts"]) for record in records)


def weighted_sum(weights: Sequence[float], numbers: Sequence[float]) -> float:
    """Return the weighted sum of numbers."""
    return sum(weight * number for weight, number
               in zip(weights, numbers, strict=True))


def loss_error(case: Comparison, pair: StepPair, weights: Sequence[float]
               ) -> RelativeError | None:
    """Measure the error of the mean loss; None if a loss was not seen.

    It is relative to the loss of one process, or to its first one if that is
    larger: a loss that has come close to 0 is but noise. Losses that add up to
    one process's count as the same: each rank may have divided its sum by the
    whole minibatch. A factor is one only if the gradients have the same, to
    15%.
    """
    ranks = pair.ranks
    if case.hand_sharded:  # of a pipeline, only the last stage has a loss
        ranks = [record for record in ranks if record["losses"]]
    if not ranks or not all(record["losses"]
                            for record in (*ranks, *pair.single_process)):
        return None
    losses = losses_of(ranks)
    expected = weighted_sum(weights, losses_of(pair.single_process))
    mean_loss = sum(losses) / len(losses)
    limit = LOSS * case.tolerance_factor
    if abs(sum(losses) - expected) < limit * abs(expected):
        mean_loss = expected  # each has divided its sum by the whole minibatch
    first = sum(case.single_steps[0]["losses"])
    amount = abs(mean_loss - expected) / max(abs(expected), abs(first), TINY)
    ratio = mean_loss / (expected or TINY)
    factor = None
    if not amount <= limit:
        multiple = gradient_multiple(case, pair, weights)
        if multiple and abs(ratio / multiple - 1) < 0.15:
            factor = ratio
    return RelativeError(
        amount, limit,
        f"the mean loss is {mean_loss:.6g}, but {expected:.6g} with 1 process",
        factor)


def gradient_multiple(case: Comparison, pair: StepPair,
                      weights: Sequence[float]) -> float | None:
    """Return how many times as large the ranks' gradients are, if that tells
    of a factor; see `multiple_of`. Of hand-sharded parameters if there are no
    others.
    """
    own, each, _ = gradients_of(pair.ranks, pair.single_process)
    if own is not None:
        return multiple_of(own, mix(weights, each), case.size)
    parts = part_gradients(case, pair.ranks, pair.single_process, weights)
    if parts is not None:
        return multiple_of(parts.actual, parts.expected, case.size)
    return None


def gradient_error(case: Comparison, pair: StepPair,
                   weights: Sequence[float]) -> RelativeError | None:
    """Measure the error of all gradients as one vector.

    It is relative to their length, or to that of the first gradients of one
    process if that is larger: what has converged is but noise. None if they
    differ between the ranks, or one process has none of these parameters.
    """
    gradients, each, keys = gradients_of(pair.ranks, pair.single_process)
    if gradients is None:
        return None
    expected = mix(weights, each)
    first = put_together([first_step_record(case, pair.ranks)], "gradients")
    limit = gradient_limit(case, pair)
    names = find_differing(keys, gradients, expected, limit) or keys
    return gradient_difference(
        case, gradients, expected, limit, length(first.tensors),
        "gradients", where=f", first in {case.named(names)}")


def gradient_limit(case: Comparison, pair: StepPair) -> float:
    """Return the largest relative error of gradients that rounding explains.
    """
    limit = GRADIENT * case.tolerance_factor
    if pair.step:
        limit *= LATER_GRADIENT
    return limit


def gradient_difference(case: Comparison, actual: torch.Tensor,
                        expected: torch.Tensor, limit: float,
                        first_length: float, subject: str, *,
                        where: str, whose: str = "") -> RelativeError:
    """Say how far gradients are from those of one process.

    Args:
        actual: the ranks' gradients, in one vector.
        expected: those of one process.
        limit: see `gradient_limit`.
        first_length: of the first gradients of one process.
        subject: what they are gradients of, in words.
        where: they differ first, for the end of the text.
        whose: gradients have a factor, likewise.
    """
    scale = max(expected.norm().item(), first_length, TINY)
    amount = ((actual - expected).norm() / scale).item()
    factor = f"{ratio_of(actual, expected):.3g}"
    if factor != "1" and are_parallel(actual, expected, limit):
        text = f"the {subject} are {factor} times those with 1 process{whose}"
    else:
        text = (f"the {subject} have a relative error of {percent(amount)} "
                f"against 1 process{where}")
    return RelativeError(amount, limit, text,
                         multiple_of(actual, expected, case.size))


def find_differing(sizes: Mapping[Key, int], actual: torch.Tensor,
                   expected: torch.Tensor, limit: float) -> list[Key]:
    """Return the parameters whose parts of two vectors differ.

    Args:
        sizes: the parameters, with their number of elements.
    """
    counts = [*sizes.values()]
    parts = zip(sizes, torch.split(actual, counts),
                torch.split(expected, counts), strict=True)
    return [key for key, part, expected_part in parts
            if off(part, expected_part) > limit]


def weight_error(case: Comparison, pair: StepPair, weights: Sequence[float]
                 ) -> RelativeError | None:
    """Measure by how much of the way from the first weights they are off.

    None if the weights after the step are not known, or not of the same
    optimizer, or differ between the ranks.
    """
    records, single = pair.ranks, pair.single_process
    if case.frozen_run or "weights" not in records[0] or (
            single[0]["optimizer"] != records[0]["optimizer"]):
        return None
    first = put_together([first_step_record(case, records)], "before").tensors
    ranks = put_together(records, "weights")
    expected = put_together(single, "weights").tensors
    keys = [key for key in expected if key in ranks.tensors and key in first
            and ranks.tensors[key].shape == expected[key].shape]
    if ranks.unequal or not keys:
        return None
    begin = flat(first, keys)
    return update_difference(case, flat(ranks.tensors, keys) - begin,
                             flat(expected, keys) - begin, "weight update")


def weight_limit(case: Comparison) -> float:
    """Return the largest relative error of a weight update that rounding
    explains.
    """
    return min(LARGEST_WEIGHT_LIMIT, WEIGHT_UPDATE * case.tolerance_factor)


def update_difference(case: Comparison, moved: torch.Tensor,
                      expected: torch.Tensor, subject: str, where: str = ""
                      ) -> RelativeError:
    """Say how far a weight update is from that of one process.

    Args:
        moved: by how much the ranks' weights have moved, in one vector.
        expected: those of one process.
        subject: whose update it is, in words.
        where: they differ first, for the end of the text.
    """
    amount = off(moved, expected)
    return RelativeError(
        amount, weight_limit(case),
        f"the {subject} has a relative error of {percent(amount)} against "
        f"1 process{where}", multiple_of(moved, expected, case.size))


def part_gradient_error(case: Comparison, pair: StepPair,
                        weights: Sequence[float]) -> RelativeError | None:
    """Measure the error of hand-sharded parameters' gradients as one vector.

    It is relative to their length, or to that of the first gradients of one
    process, as `gradient_error` is. None if no rank has any.
    """
    vectors = part_gradients(case, pair.ranks, pair.single_process, weights)
    if vectors is None or not vectors.actual.any():
        return None
    single = [first_step_record(case, pair.ranks)]
    first = part_gradients(case, pair.ranks, single, (1.0,))
    first_length = 0.0
    if first is not None:
        first_length = first.expected.norm().item()
    limit = gradient_limit(case, pair)
    names = {name for _, name in vectors.sizes}
    return gradient_difference(
        case, vectors.actual, vectors.expected, limit, first_length,
        "gradients of hand-sharded parameters",
        where=first_part(case, vectors, limit),
        whose=f": {case.named(names)}")


def part_gradients(case: Comparison, records: StepRecords,
                   single: StepRecords, weights: Sequence[float]
                   ) -> PartVectors | None:
    """Return the gradients of hand-sharded parameters.

    One of a parameter that was not used is 0.

    Args:
        records: of each rank, its step.
        single: the steps of one process.
        weights: of each of these steps.
    """
    def gradients(record: StepRecord) -> dict[str, torch.Tensor]:
        recorded = record["recorded"]
        return {name: torch.zeros_like(weight) for name, weight
                in whole_here(recorded["now"]).items()
                } | whole_here(recorded["gradients"])

    each = [gradients(record) for record in single]
    mixed = {name: mix(weights, [one[name] for one in each])
             for name in each[0]}
    return case.put_parts_beside(map(gradients, records), mixed)


def first_part(case: Comparison, vectors: PartVectors, limit: float) -> str:
    """Say on which rank a part differs first, and which one does."""
    differing = find_differing(vectors.sizes, vectors.actual,
                               vectors.expected, limit)
    if not differing:
        return ""
    first_rank, _ = differing[0]
    names = [name for rank, name in differing if rank == first_rank]
    return f", first on rank {first_rank} in {case.named(names)}"


def part_weight_error(case: Comparison, pair: StepPair,
                      weights: Sequence[float]) -> RelativeError | None:
    """Measure by how much of the way hand-sharded parameters are off.

    None where `weight_error` is.
    """
    records, single = pair.ranks, pair.single_process[0]
    if case.frozen_run or not all(
            "weights" in record for record in (*records, single)) or (
            single["optimizer"] != records[0]["optimizer"]):
        return None
    own = [whole_here(record["recorded"]["weights"]) for record in records]
    after = whole_here(single["recorded"]["weights"])
    before = whole_here(
        first_step_record(case, records)["recorded"]["before"])
    ends = case.put_parts_beside(own, after)
    begins = case.put_parts_beside(own, before)
    if ends is None or begins is None or ends.sizes != begins.sizes:
        return None
    way = PartVectors(ends.actual - begins.expected,
                      ends.expected - begins.expected, ends.sizes)
    return update_difference(
        case, way.actual, way.expected,
        "weight update of hand-sharded parameters",
        first_part(case, way, weight_limit(case)))


# What each error is of, in the order in which they are measured
MEASURED: dict[Measure, Quantity] = {
    loss_error: Quantity("losses", "losses"),
    gradient_error: Quantity("gradients", "gradients"),
    weight_error: Quantity("weights", "weight updates"),
    part_gradient_error: Quantity(
        "part-gradients", "gradients of hand-sharded parameters"),
    part_weight_error: Quantity(
        "part-weights", "weight updates of hand-sharded parameters")}


def first_step_record(case: Comparison, records: StepRecords) -> StepRecord:
    """Return one process's first step by the same optimizer."""
    return next(record for record in case.single_steps
                if record["optimizer"] == records[0]["optimizer"])


def explain_small_error(case: Comparison) -> Explanation | None:
    """Say why the ranks differ by a few per cent though nothing is wrong."""
    if any(record.batchnorm for record in case.multi_process_run.all_records):
        return Explanation(
            "BatchNorm normalizes by the samples of one process",
            "use nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, "
            "which normalizes by all")
    records = case.multi_process_run.all_records
    if any(record.draws_random for record in records):
        return Explanation(
            "the model draws random numbers, different ones on each rank",
            "switch that off by a flag, if there is one, to compare the rest; "
            "fine if it is meant")
    if case.frozen_run and normalizes_over_ranks(case):
        return Explanation(
            "BatchNorm normalizes by the samples of all ranks, more than with "
            "1 process", "keep the global batch size, to compare")
    if case.frozen_run and any(step["mixed"] for step in case.steps[0]):
        return Explanation(
            "ranks gather something before backward()", "keep the global "
            "batch size, to compare: a loss that depends on the samples of "
            f"all ranks is not the mean of those of {case.size} minibatches")
    return None


def normalizes_over_ranks(case: Comparison) -> bool:
    """Return whether a BatchNorm that reduces sums is the first to differ.

    One of the script's own is known by its name, for other modules reduce in
    their forward passes, too. Where none does, a BatchNorm that differs is
    wrong.
    """
    if not any(step["summed"] for step in case.steps[0]):
        return False
    first = case.outputs.first
    return first is not None and "BatchNorm" in case.outputs.kinds[first]
