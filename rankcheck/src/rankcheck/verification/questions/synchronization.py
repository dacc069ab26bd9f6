"""Questions about what the ranks do together, without another run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from rankcheck.engine.findings import (
    Finding,
    Proof,
    count_of,
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
    samples_of,
)
from rankcheck.verification.questions.records import StepRecords, flatten
from rankcheck.verification.questions.vectors import add_up

REDUCED = frozenset({Proof.REDUCED})
EQUAL = frozenset({Proof.EQUAL})
SUMMED = ("divide them by the number of processes after all_reduce, or call "
          "the DDP wrapper, which does so")

# Relative error of all weights as one vector, up to which they are the mean of
# the ranks' weights. The script adds them up in an order of its own. A choice,
# not a measurement.
SAME_MEAN = 1e-5

# Share of a step's elements, or of the steps, from which gradients count
# as reduced, or as clipped. Some parameters may get no gradient. A choice, not
# a measurement.
MOST_ELEMENTS = 0.5

# Reductions of each element in a step, from which on gradients are reduced
# more than once. A choice between 1 and 2, not a measurement. One script
# reduced the gradients of two optimizers before the step of the first: 3.9
# times the elements of that one. So `Turn` adds up the elements of both.
SEVERAL = 1.6

# If no step has this many times the reductions of another, their number is
# reported for all steps. A choice, not a measurement.
MORE_OFTEN = 1.1

# Relative difference below which the mean loss of the first step is that of
# one process, and below which the learning rate, times the number of ranks, is
# that of one process: it makes up for a sum. A choice, not a measurement.
CLOSE_FACTOR = 0.2


@question("each rank draws its own random numbers")
def verify_random_numbers(case: Comparison) -> list[Finding]:
    """Answer whether all ranks' generators are alike in each step.

    Only of generators that are used between steps. Whether the model or the
    data draw from them is not known: they may be alike on purpose.
    """
    drawn = [[record["random"] for record in records]
             for records in case.steps if records[0]["optimizer"] == 0]
    names = []
    for name in drawn[0][0]:
        states = [[states_of_rank[name] for states_of_rank in ranks]
                  for ranks in drawn]
        changes = len(drawn) == len({ranks[0] for ranks in states}) > 1
        if changes and all(len(set(ranks)) == 1 for ranks in states):
            names.append(name)
    if not names or case.splits_matrices:
        return []
    return [warn(f"{' and '.join(names)} RNG state is the same on all ranks "
                 "in each step", "after the model is created, seed each rank "
                 "differently, so that dropout, noise and augmentation "
                 "differ; fine if all ranks must draw the same",
                 kind="same-random-numbers")]


@question("the ranks synchronize at every step")
def verify_weight_averaging(case: Comparison) -> list[Finding]:
    """Answer whether the weights, and not the gradients, are made equal.

    They are if all ranks begin a step with the same weights, which no rank
    had when it ended the step before, and the ranks differed by then. An
    outer optimizer may make of them what it likes, but not their sum.
    """
    of_one = [records for records in case.steps
              if records[0]["optimizer"] == 0 and "weights" in records[0]]
    equalized = []  # the steps before which that happens
    are_means = are_sums = True
    for i, (last, records) in enumerate(itertools.pairwise(of_one), 1):
        ended = [record["weights"]["flat"] for record in last]
        begun = [record["now"]["flat"] for record in records]
        if not (are_equal_vectors(begun) and not are_equal_vectors(ended)
                and not any(weights.equal(begun[0]) for weights in ended)):
            continue
        equalized.append(i)
        total = add_up(ended)
        are_means &= off(begun[0], total / case.size) < SAME_MEAN
        are_sums &= off(begun[0], total) < SAME_MEAN
    if not equalized:
        return []
    if are_sums and not are_means:  # else all are 0
        text = (f"before step {equalized[0]} the weights become the sum "
                "over all ranks, not the mean")
        return [fail(text, "divide the weights by the number of processes "
                     "after all_reduce", numbers={"step": equalized[0]},
                     learned={"skip_reason": text, "averaged": text},
                     kind="summed-weights")]
    done = "synchronized"
    if are_means:
        done = "averaged"
    text = f"weights are {done} {how_often_equal(equalized)}"
    return [warn(text, "check that this is intended, as in local SGD: in "
                 "between, each rank trains by itself",
                 learned={"skip_reason": text, "averaged": text},
                 kind="averaged-weights")]


def are_equal_vectors(vectors: list[torch.Tensor]) -> bool:
    """Return whether all vectors are the same, bit for bit."""
    return all(vector.equal(vectors[0]) for vector in vectors)


def how_often_equal(steps: list[int]) -> str:
    """Return in words at which steps weights are made equal."""
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    if not gaps:
        return f"before step {steps[0]}"  # after others, perhaps
    if min(gaps) > 1:
        return f"every {min(gaps)} steps"
    return "every step"


@question("buffers are equal on all ranks")
def verify_buffers(case: Comparison) -> list[Finding]:
    """Answer whether the buffers of a checkpoint are equal after steps."""
    seen = False  # in the last step
    for step, records in enumerate(case.steps):
        whole = put_together(records, "buffers")
        seen = bool(whole.tensors)
        if not whole.unequal:
            continue
        names = sorted({key.partition(".")[2] for key in whole.unequal})
        subject = "buffers"
        if any("running_" in name for name in names):
            subject = "BatchNorm's running statistics"
        return [warn(
            f"{subject} differ between ranks after step {step}: "
            f"{', '.join(names[:3])}", "use SyncBatchNorm, or average them "
            "before evaluating and saving", numbers={"step": step},
            kind="unequal-buffers")]
    if not seen:
        return []
    return [ok("buffers are equal on all ranks", kind="equal-buffers")]


def clips_first(case: Comparison) -> bool:
    """Return whether most gradients of a step are reduced after a clip."""
    return any(records[0]["late"] > MOST_ELEMENTS * records[0]["elements"]
               for records in case.steps)


@question("gradients are reduced once, then clipped")
def verify_reductions(case: Comparison) -> list[Finding]:
    """Answer how often gradients are reduced, and when they are clipped.

    By what was sent of them, and by what the optimizers got: where nothing
    that was sent is a gradient, but the optimizers got the same ones for
    different samples, the script has reduced them in a way of its own.
    """
    if case.splits_matrices or case.averaged:
        return []  # activations are reduced, too; or weights
    of_rank_0 = [records[0] for records in case.steps]
    elements = [max(case.elements(records), 1) for records in case.steps]
    times = [record["reduced"] / count
             for record, count in zip(of_rank_0, elements, strict=True)]
    few = sum(times) < MOST_ELEMENTS * len(times)
    if few and case.reduces_in_step:
        return [ok("gradients are reduced by the optimizer in its step()",
                   proves=REDUCED, kind="reduced-by-optimizer")]
    equal = not any(put_together(records, "gradients").unequal
                    for records in case.steps)
    for step, records in enumerate(case.steps):
        if times[step] >= MOST_ELEMENTS:
            continue
        if few and have_shared(records, "gradients"):
            break  # in another way
        if few or put_together(records, "gradients").unequal:
            return [not_reduced(case, step, elements[step])]
    findings = []
    if equal:
        findings += how_often(case, elements, few)
    if case.facts("clipped"):
        findings.append(warn(
            "gradients are clipped before scaler.unscale_(optimizer)", "call "
            "scaler.unscale_(optimizer) first: the limit is for unscaled "
            "gradients",
            kind="clipped-while-scaled"))
    if clips_first(case):
        findings.append(fail("gradients are clipped before they are reduced",
                             "reduce first, then clip the mean",
                             kind="clipped-before-reduction"))
    return findings


@dataclass
class Turn:
    """The steps of all optimizers, each once; before the first, all gradients
    may be reduced.

    Attributes:
        step: the number of its first step among those of all optimizers.
        reduced: how many elements of gradients were reduced before them.
        elements: how many elements the optimizers' parameters have.
    """

    step: int
    reduced: float = 0
    elements: int = 0

    @property
    def times(self) -> float:
        """How often each element is reduced."""
        return self.reduced / max(self.elements, 1)


def how_often(case: Comparison, elements: list[int], otherwise: bool
              ) -> list[Finding]:
    """Answer how often gradients are reduced in a step.

    Args:
        elements: of the parameters of each step, on all ranks.
        otherwise: whether they are equal without a reduction that was seen.
    """
    if otherwise:
        return [reduced_otherwise(case)]
    of_rank_0 = [records[0] for records in case.steps]
    turns = find_turns(case, elements)
    most = max(turns, key=lambda turn: turn.times)
    size = sum(record["bytes"] for record in of_rank_0) / len(of_rank_0)
    calls = max(record["calls"] for record in of_rank_0)
    sent = f"({count_of(calls, 'collective')}, {size / 1e6:.3g} MB per step)"
    if most.times < SEVERAL:
        return [ok(f"gradients are reduced once per step {sent}",
                   proves=REDUCED, numbers={"times": 1}, kind="reduced")]
    where = f"in step {most.step}"
    if most.times < MORE_OFTEN * min(turn.times for turn in turns):
        where = "per step"
    times = f"{most.times:.2g} times {where}"
    if round(most.times) != round(most.times, 1):
        times += " on average"
    text = f"gradients are reduced {times} {sent}"
    if case.facts("fully_shard"):  # it costs memory to do otherwise
        return [ok(text, proves=REDUCED, numbers={"times": most.times},
                   kind="reduced")]
    fix = ("reduce once: all_reduce nothing that DDP averages; run all "
           "microbatches but the last under model.no_sync(), including their "
           "forward pass; check whether backward() is called several "
           "times for one loss")
    kind = "reduced-repeatedly"
    if case.facts("no_sync") and not case.facts("forward in no_sync"):
        kind = "no-sync-outside-forward"
        fix = ("call the model inside model.no_sync(), for all "
               "microbatches but the last: it takes effect in the forward "
               "pass")
    return [warn(text, fix, proves=REDUCED, numbers={"times": most.times},
                 kind=kind)]


def reduced_otherwise(case: Comparison) -> Finding:
    """Say that gradients are equal without a reduction that was seen."""
    if case.facts("fully_shard") and not any(
            record["gradients"]["plain"] for record in flatten(case.steps)):
        # a sharded parameter has no gradient before that
        return ok("gradients are reduced by fully_shard; how often was not "
                  "seen", proves=REDUCED, kind="reduced-by-fsdp")
    return ok("gradients are synchronized by the script's own code",
              proves=REDUCED, kind="reduced-by-script")


def find_turns(case: Comparison, elements: list[int]) -> list[Turn]:
    """Return the turns of the optimizers, with what rank 0 has reduced.

    Args:
        elements: of the parameters of each step, on all ranks.
    """
    turns: list[Turn] = []
    last = -1  # optimizer
    for step, records in enumerate(case.steps):
        number = records[0]["optimizer"]
        if not turns or number <= last:
            turns.append(Turn(step))
        turns[-1].reduced += records[0]["reduced"]
        turns[-1].elements += elements[step]
        last = number
    return turns


def have_shared(records: StepRecords, key: str) -> bool:
    """Return whether the ranks have the same gradients of different samples.

    What the ranks have computed by themselves tells that of samples and losses
    where nothing is known of it, as of copies of the weights.

    Args:
        key: of a step: which gradients.
    """
    sums = put_together(records, "sums")
    if sums.tensors:
        different = bool(sums.unequal)
    else:
        different = len({(*record["samples"], *record["losses"])
                         for record in records}) > 1
    whole = put_together(records, key)
    return different and bool(whole.tensors) and not whole.unequal


def not_reduced(case: Comparison, step: int, elements: int) -> Finding:
    """Say that the gradients of a step are not reduced."""
    reduced = case.steps[step][0]["reduced"]
    text = (f"gradients are not reduced: {reduced:.0f} of {elements:.0f} "
            "elements per step are reduced")
    if step:
        text = f"in step {step} {text}"
    return fail(text, how_to_reduce(case), kind="not-reduced", numbers={
        "step": step, "reduced": reduced, "elements": elements})


def how_to_reduce(case: Comparison) -> str:
    """Say what a script does wrong that does not reduce gradients."""
    if case.facts("fully_shard"):
        switched = case.facts("gradient sync")
        if switched and not any(switched):
            return ("call set_requires_gradient_sync(True) before the last "
                    "microbatch: it was only called with False")
        return ("call fully_shard with every module that trains, and "
                "set_requires_gradient_sync(True) before the last microbatch")
    if not case.facts("DistributedDataParallel"):
        return ("wrap the model in DistributedDataParallel and call the "
                "wrapper, or all_reduce every gradient before "
                "optimizer.step()")
    if any(records[0]["wrapped"] for records in case.steps):
        return ("call the DDP wrapper for the last microbatch, outside "
                "no_sync(); DDP reduces only parameters that it wraps and "
                "that required a gradient when the wrapper was created")
    return ("call the DDP wrapper, model(...), not model.module(...) or the "
            "model inside")


@question("every parameter gets a gradient")
def verify_unused_parameters(case: Comparison) -> list[Finding]:
    """Answer whether a parameter that an optimizer has gets no gradient."""
    keys: set[str] = set()
    for record in flatten(case.steps):
        keys.update(record["without"])
    keys -= case.hand_sharded
    if not keys:
        return []
    switched = case.facts("gradient sync")
    if switched and not any(switched):
        return []  # FSDP2 has them elsewhere until it reduces them
    text = f"{counted(keys, 'parameter')} got no gradient in "
    if not has_gradients(case):
        fix = "check that backward() reaches them"
        if all(key.startswith("parameter ") for key in keys):
            fix = "give the optimizer the parameters of the model that trains"
            if case.facts("fully_shard"):
                fix = ("create the optimizer after fully_shard, which "
                       "replaces the parameters")
        return [fail(f"{text}any step: {case.named(keys)}", fix,
                     numbers={"parameters": len(keys)},
                     kind="no-gradients")]
    text += f"some step: {case.named(keys)}"
    if any(case.facts("DistributedDataParallel")):
        return [ok(f"{text}, as declared to DDP", kind="unused-parameters")]
    return [warn(text, "remove parameters that are never used, or set "
                 "find_unused_parameters=True in DDP",
                 kind="unused-parameters")]


def has_gradients(case: Comparison) -> bool:
    """Return whether an optimizer got a gradient in any step."""
    gradients = [record["gradients"] for record in flatten(case.steps)]
    return any(state["plain"] or state["sharded"] for state in gradients)


@question("gradients and weights are equal on all ranks")
def verify_equal_ranks(case: Comparison) -> list[Finding]:
    """Answer whether all ranks have the same gradients, and then weights."""
    if case.averaged:
        return []
    findings = []
    if not clips_first(case) and not case.reduces_in_step:
        # else they are seen before that
        findings.append(compare_ranks(
            case, "gradients", "in", "reduce all gradients on all ranks, "
            "after the last backward()", proves=EQUAL))
    shows: frozenset[Proof] = frozenset()
    if case.reduces_in_step:  # the weights tell of the gradients
        shows = EQUAL
    findings.append(compare_ranks(
        case, "weights", "after", "apply the same update to the same weights "
        "on all ranks", proves=shows))
    return [finding for finding in findings if finding]


def compare_ranks(case: Comparison, key: str, when: str, fix: str,
                  proves: frozenset[Proof]) -> Finding | None:
    """Say whether the ranks have the same tensors in all steps.

    Args:
        key: of a step: which tensors.
        when: "in" a step, or "after" it.
        fix: what to do if they differ.
        proves: what it shows if they do not.

    Returns:
        None if in a step no rank has any.
    """
    for step, records in enumerate(case.steps):
        whole = put_together(records, key)
        if not whole.tensors:
            return None
        if whole.unequal:
            return fail(
                f"{when} step {step} the {key} of rank "
                f"{min(whole.differing)} differ from rank 0's: "
                f"{case.named(whole.unequal)}", fix,
                ranks=sorted(whole.differing), numbers={"step": step},
                kind=f"unequal-{key}")
    return ok(f"{key} are equal on all ranks, in "
              f"{counted(case.steps, 'step')}", proves=proves,
              numbers={"steps": len(case.steps)}, kind=f"equal-{key}")


@dataclass(frozen=True)
class ReducedGradients:
    """The gradients that the optimizers got, and what they come from.

    Attributes:
        applied: the gradients, in one vector.
        own: what each rank has computed of them.
        elements: of each parameter in the vector, by its name.
    """

    applied: torch.Tensor
    own: list[torch.Tensor]
    elements: dict[str, int]

    @cached_property
    def mean(self) -> torch.Tensor:
        """The mean of what the ranks have computed."""
        return add_up(self.own) / len(self.own)


@question("gradients are the mean over the ranks")
def verify_mean_of_ranks(case: Comparison) -> list[Finding]:
    """Answer whether the gradients are the mean, or a sum, or have a factor.

    Whether the script has scaled its losses for that is not known, so that a
    factor is a warning.
    """
    limit = GRADIENT * case.tolerance_factor
    errors = []  # of the mean, in direction
    differ = False  # whether the ranks' own do, so that it is no mean of one
    sums = []  # where a sum is right
    scaled: Finding | None = None  # the first with a factor
    for step, records in enumerate(case.steps):
        found = find_reduced(records)
        if found is None:
            return []
        applied, expected = found.applied, found.mean
        if not expected.any():
            continue
        if any(off(own, expected) > limit for own in found.own):
            differ = True
        if off(applied, expected) < limit:
            errors.append(off(applied, expected))
            continue
        if off(applied, case.size * expected) < limit:
            finding = summed(case, step)
            if finding.verdict != "ok":
                return [finding]
            sums.append(finding)
            continue
        owner = find_owner(found, limit)
        if owner is not None:
            return [fail(f"in step {step} all ranks have the gradients "
                         f"of rank {owner}", "use all_reduce in place of "
                         "broadcast, then divide by the number of processes",
                         ranks=[owner], numbers={"step": step},
                         kind="gradients-of-one-rank")]
        factor = (applied @ expected / (expected @ expected)).item()
        error = off(applied, factor * expected)
        if not error <= limit:
            return [not_the_mean(case, step, found)]
        errors.append(error)
        scaled = scaled or multiplied(step, factor)
    if scaled:
        return [scaled]
    if sums:
        return sums[:1]
    if not errors or not differ:  # equal gradients are their own mean
        return []
    return [ok("gradients are the mean over the ranks "
               f"(relative error {max(errors):.0e})", proves=REDUCED,
               kind="mean-of-ranks")]


def find_reduced(records: StepRecords) -> ReducedGradients | None:
    """Return the gradients of a step, with what they are likely a mean of.

    That is what a rank has at the end of its backward pass, or the sum of what
    its passes have computed, whichever has the mean closest to the gradients.
    The script's hooks may have changed the first, or reduced them: it is left
    out if it is the same on ranks that have computed different ones.

    Returns:
        None if nothing is known of one of them.
    """
    kinds = ["local", "sums"]
    if have_shared(records, "local"):
        kinds = ["sums"]
    found = []
    for kind in kinds:
        applied, own, elements = gradients_of(records, records, kind)
        if applied is None:
            return None
        found.append(ReducedGradients(applied, own, elements))
    return min(found, key=lambda one: off(one.applied, one.mean))


def find_owner(found: ReducedGradients, limit: float) -> int | None:
    """Return the first rank whose own gradients all ranks have, if any."""
    for rank, own in enumerate(found.own):
        if off(found.applied, own) < limit:
            return rank
    return None


def multiplied(step: int, factor: float) -> Finding:
    """Say that the gradients are the mean times a factor."""
    return warn(f"in step {step} the gradients are {factor:.4g} times the "
                "mean over the ranks", "check that each factor, such as 1 / "
                "number of processes, is applied only once; fine if the "
                "script rescales gradients on purpose, for the number of "
                "microbatches or to clip them",
                numbers={"step": step, "factor": factor},
                kind="scaled-gradients")


def not_the_mean(case: Comparison, step: int, found: ReducedGradients
                 ) -> Finding:
    """Say that the gradients are no multiple of the mean."""
    names = find_sums(case, found)
    if names:
        return some_summed(case, step, names)
    fix = "check whether the script changes gradients elsewhere"
    if case.facts("register_comm_hook"):
        fix = "check that DDP's communication hook changes them on purpose"
    return warn(f"in step {step} the gradients differ from the mean over the "
                "ranks by a relative error of "
                f"{percent(off(found.applied, found.mean))}", fix,
                numbers={"step": step}, kind="not-the-mean")


def find_sums(case: Comparison, found: ReducedGradients) -> set[str]:
    """Return the parameters whose gradients are the sum over the ranks.

    None of them if the gradients of another parameter are not the mean.
    """
    limit = GRADIENT * case.tolerance_factor
    sizes = [*found.elements.values()]
    parts = zip(found.elements, torch.split(found.applied, sizes),
                torch.split(found.mean, sizes), strict=True)
    sums = set()
    for name, part, mean_part in parts:
        if part.equal(mean_part) or off(part, mean_part) < limit:
            continue
        if not off(part, case.size * mean_part) < limit:
            return set()
        sums.add(name)
    return sums


def some_summed(case: Comparison, step: int, sums: set[str]) -> Finding:
    """Say that the gradients of some parameters are the sum over the ranks.
    """
    return warn(
        f"in step {step} the gradients of {case.named(sums)} are the sum "
        "over all ranks; the others are the mean", "divide them by the number "
        "of processes after all_reduce, as DDP does; fine if each rank's "
        "loss is one part of a sum",
        numbers={"step": step}, kind="partly-summed-gradients")


def is_single_process_gradient(case: Comparison, step: int) -> bool:
    """Return whether a step has the gradients of one process, for the same
    samples: then a sum over the ranks is what it has to be.
    """
    if (case.skip_reason or case.frozen_run
            or step >= len(case.single_steps)):
        return False
    if case.compared_steps is not None and step >= case.compared_steps:
        return False
    single = case.single_steps[step]
    read = samples_of(case.steps[step])
    if not single["samples"] or sorted(read) != sorted(single["samples"]):
        return False
    applied, expected, _ = gradients_of(case.steps[step], [single])
    return applied is not None and bool(expected[0].any()) and (
        off(applied, expected[0]) < GRADIENT * case.tolerance_factor)


def summed(case: Comparison, step: int) -> Finding:
    """Say that the gradients are the sum over all ranks.

    That is wrong unless each rank divides its loss by their number. It does
    not if the mean loss of the first step is that of one process: then it is
    a failure, unless the learning rate makes up for it. A loss that hardly
    depends on the samples, as with one class, tells nothing of that.
    """
    text = f"in step {step} the gradients are the sum over all ranks"
    if is_single_process_gradient(case, step):
        return ok(f"{text}, and match the single-process run",
                  numbers={"step": step}, kind="summed-gradients")
    fix = SUMMED
    if case.facts("register_comm_hook"):
        fix = ("divide by the number of processes in the communication "
               "hook, which replaces DDP's average")
    loss = mean_loss(case.steps[0])
    single_loss = mean_loss(case.single_steps[:1])
    if single_loss and abs(loss / single_loss - 1) < CLOSE_FACTOR < abs(
            case.size * case.rate - 1):
        return fail(f"{text}, not the mean: {case.size} times as large",
                    fix,
                    numbers={"step": step}, kind="summed-gradients")
    return warn(text, f"{fix}; fine if each rank divides its summed loss "
                "by the global batch size, or with SGD, if the learning rate "
                "is divided by the number of ranks", numbers={"step": step},
                kind="summed-gradients")


def mean_loss(records: StepRecords) -> float:
    """Return the mean of the losses of several steps, 0 of none."""
    losses = [sum(record["losses"]) for record in records]
    return sum(losses) / max(len(losses), 1)
