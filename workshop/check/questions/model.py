"""Questions about the data, and the model: its weights, gradients, updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rankcheck.engine.findings import (
    Finding,
    Fragment,
    Line,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.record.tensors import describe_tensors, length, names
from workshop.check.plan import LEARNING_RATE, MINIBATCH, STEPS, B
from workshop.check.questions.question import (
    LAST_PARAMETERS,
    TIED_WEIGHTS,
    assemble_tied,
    check_column,
    check_question,
    data_alone,
    largest_difference,
    no_pipeline,
)
from workshop.check.stage_runs import StageRun

GRADIENT_TOLERANCE = 1e-3  # relative


@check_question("each step reads its minibatch, each sample once",
                ("whole", "resumed"))
def check_samples(run: StageRun, reference: StageRun) -> Finding | None:
    """Distinct over data-parallel ranks, equal over tensor-parallel ones."""
    dp, tp = run.mesh.dp, run.mesh.tp
    size = MINIBATCH // dp if run.about.split == "layers" else B
    for step in range(run.first_step, STEPS):
        expected = reference.record_of(0).samples[step]
        read = [tuple(record.samples[step - run.first_step])
                for record in run.all_records]
        parts = set(read) if tp > 1 else read
        if sorted(i for part in parts for i in part) == sorted(expected):
            continue
        for rank, actual in enumerate(read):
            # what a rank of the course's stages reads of the minibatch
            own = tuple(i for k, i in enumerate(expected)
                        if k // size % dp == rank // tp % dp)
            if actual and len(actual) != len(own):
                return fail(f"samples of step {step}: rank {rank} reads "
                            f"{len(actual)} of them, not {len(own)}",
                            ranks=[rank], numbers={
                                "step": step, "samples": len(actual),
                                "single": len(own)}, kind="batch-size")
            if actual and actual != own:
                return fail(f"samples of step {step}: rank {rank} reads "
                            f"{join_numbers(actual)}, not {join_numbers(own)}",
                            ranks=[rank], numbers={"step": step},
                            kind="other-samples")
        return fail(f"samples of step {step} are not "
                    f"{join_numbers(expected)}, each "
                    "once", numbers={"step": step}, kind="other-samples")
    return None


def join_numbers(numbers: Sequence[int]) -> str:
    """Return some numbers of samples, in words."""
    if len(numbers) > 2:
        begin, end = numbers[0], numbers[-1]
        if [*numbers] == [*range(begin, end + 1)]:
            return f"{begin} to {end}"
    text = ", ".join(map(str, numbers[:8]))
    if len(numbers) > 8:
        text += ", ..."
    return text


@check_question("the optimizer matches the single device's")
def check_optimizer(run: StageRun, reference: StageRun) -> Finding | None:
    """What it updates, and how: groups of parameters by name."""
    expected = by_name(reference.record_of(0).optimizers or [])
    updated: set[str] = set()
    for record in run.all_records:
        actual = by_name(record.optimizers or [])
        updated |= actual.keys()
        for name in sorted(expected.keys() & actual.keys()):
            for key in ("weight_decay", "betas", "eps", "lr"):
                value = actual[name].get(key, expected[name][key])
                if not np.allclose(value, expected[name][key], 1e-6, 0):
                    return fail(f"the optimizer has {key}={value} for {name},"
                                f" not {expected[name][key]}",
                                kind="optimizer-setting")
    missing = expected.keys() - updated
    if missing and run.mesh.pp == 1:  # else see what they start from
        return fail(f"the optimizer does not update {min(missing)}",
                    kind="not-optimized")
    return None


def by_name(groups: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of each parameter."""
    return {name: group for group in groups for name in group["names"]
            if name != "?"}


@check_question("every rank starts from the same weights",
                ("whole", "resumed"))
def check_first_weights(run: StageRun, reference: StageRun) -> Finding | None:
    """Those of the single device, or of the checkpoint that is resumed."""
    expected = assemble_tied([
        reference.record_of(0).first_weights if run.resumed is None else
        describe_tensors(run.resumed["model"].items())])
    if not all(record.start for record in run.all_records):
        return fail("the model is never called to train", kind="not-called")
    actual = assemble_tied([record.first_weights for record
                            in run.all_records])
    missing = actual.holes + sorted(
        expected.tensors.keys() - actual.tensors.keys())
    if missing and run.resumed is None:
        return fail(f"{missing[0]} is missing or incomplete on all ranks",
                    kind="missing-weights")
    if actual.differing:
        return fail(f"rank {min(actual.differing)} starts with different "
                    "weights than rank 0", ranks=sorted(actual.differing),
                    kind="unequal-initial-weights")
    if not largest_difference(actual, expected) <= 0:
        owner = "the checkpoint"
        if not run.first_step:
            owner = "the single device"
        return fail(f"it starts with different weights than {owner}",
                    kind="other-initial-weights")
    return None


@check_question("the embedding and lm_head are one matrix", where=no_pipeline)
def check_tied_weights(run: StageRun, reference: StageRun) -> Finding | None:
    """A plan makes two parameters of what has two names."""
    first_weights = names(run.record_of(0).first_weights)
    if {LAST_PARAMETERS, TIED_WEIGHTS} <= first_weights:
        return fail("wte.weight and lm_head.weight are two parameters",
                    kind="untied-weights")
    return None


@check_question("the model trains in the requested precision",
                ("whole", "bf16"))
def check_precision(run: StageRun, reference: StageRun) -> Finding | None:
    wanted = "bf16" if "bf16" in run.more else "fp32"
    known = [record.precision for record in run.all_records
             if record.precision]
    used = known[0] if known else None
    if used != wanted:
        return fail(f"with --precision {wanted} it trains in {used}",
                    kind="precision")
    return None


@check_question("--strategy fsdp2 leaves each rank a part", ("fsdp2",))
def check_sharding(run: StageRun, reference: StageRun) -> Finding | None:
    if not all(record.start and record.start["sharded"]
               for record in run.all_records):
        return fail("with --strategy fsdp2 every rank keeps the whole model",
                    kind="not-sharded")
    return None


check_column("lr", "learning rates agree", "learning rate", 1e-6)


@check_question("gradients match the single device's", ("whole", "resumed"))
def check_gradients(run: StageRun, reference: StageRun) -> Finding | None:
    """Equal on all ranks that hold the same, and right, at every step."""
    for step in range(run.first_step, STEPS):
        expected = assemble_tied([reference.record_of(0).gradients[step]])
        actual = assemble_tied([record.gradients[step - run.first_step]
                                for record in run.all_records])
        unequal = [rank for rank, off in actual.differing.items()
                   if off > 1e-6 * max(1.0, length(expected.tensors))]
        if unequal:
            name = min(actual.unequal,
                       key=lambda name: ("ln_" not in name, name))
            return fail(f"gradients of step {step} differ between rank 0 and "
                        f"rank {min(unequal)}, for example the gradient of "
                        f"{name}",
                        ranks=unequal, numbers={"step": step},
                        kind="unequal-gradients")
        error = actual.error(expected)
        if not error <= GRADIENT_TOLERANCE:
            return fail(f"gradients of step {step} have a relative error "
                        f"of {percent(error)}",
                        numbers={"step": step, "error": error},
                        kind="gradients-differ")
    return None


@check_question("gradients are reduced at most once a step", where=data_alone)
def check_reductions(run: StageRun, reference: StageRun) -> Finding | None:
    """How often each gradient is all-reduced in a step.

    Not at all, where they agree all the same: another way was found.
    """
    count = max(sum(call["elements"] for call in run.calls(rank)
                    if "reduce" in call["call"] and call["step"] > 0)
                for rank in range(run.mesh.size))
    count /= len(reference.record_of(0).first_weights["flat"]) * (STEPS - 1)
    if count < 1.5:
        return ok(f"gradients are reduced {count:.1f} times a step",
                  numbers={"times": count}, kind="reduced")
    fix: list[Fragment] = ["reduce once, after the last microbatch"]
    kind = "reduced-repeatedly"
    entered = run.facts("no_sync")  # the lines
    if entered and not run.facts("forward in no_sync"):
        kind = "no-sync-outside-forward"
        fix = ["call the model inside no_sync() (", Line(entered[0]),
               "), too: it takes effect in the forward pass"]
    return warn(
        f"gradients are reduced {count:.1f} times a step: {count:.0f} times "
        "the communication", fix, numbers={"times": count}, kind=kind)


@check_question("weights are gathered block by block",
                where=lambda run: data_alone(run) and run.about.shards)
def check_gathers(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether one gather brings the whole model to every rank."""
    largest = max((call["elements"] for call in run.calls(0)
                   if call["call"] == "allgather_base" and call["step"]),
                  default=0)
    whole = 0.9 * len(reference.record_of(0).first_weights["flat"])
    if largest * run.mesh.dp >= whole:
        return warn("all weights are gathered at once: every rank needs "
                    "room for the whole model", "shard each block before the "
                    "model: fully_shard(block, mesh=mesh)",
                    kind="gathered-at-once")
    return None


@check_question("final weights match the single device's",
                ("whole", "resumed"))
def check_final_weights(run: StageRun, reference: StageRun) -> Finding | None:
    expected = assemble_tied([reference.record_of(0).last_weights])
    actual = assemble_tied([record.last_weights for record in run.all_records])
    if actual.differing:
        return fail(f"the final weights of rank {min(actual.differing)} are "
                    "not rank 0's", kind="unequal-weights")
    error = largest_difference(actual, expected)
    if not error <= 0.02 * LEARNING_RATE:
        return fail(f"the final weights differ by up to {error:.1e}",
                    kind="weights-differ")
    return None
