"""Questions about how a run begins: its files, weights and ranks."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from rankcheck.engine.findings import (
    Finding,
    Learned,
    counted,
    fail,
    ok,
    warn,
)
from rankcheck.engine.questions import always
from rankcheck.record.tensors import elements, pieces, put_together
from rankcheck.verification.comparison import (
    Comparison,
    as_bytes,
    find_extra,
    find_skips,
    initial_weights,
    question,
)
from rankcheck.verification.questions.records import StepRecords, flatten
from rankcheck.verification.runs import NAME_RUNS

# Relative error of all first weights as one vector, up to which they are
# equal. The same seed gives the same bits, so only rounding is left; one step
# of fp32 is 1.2e-7. A choice, not a measurement.
SAME_START = 1e-6


@question("no run starts from files of an earlier run")
def verify_leftover_files(case: Comparison) -> list[Finding]:
    """Answer whether a run has read a file that an earlier one has written.
    """
    results: set[str] = set()
    reused: set[str] = set()
    for run in (case.single_process_run, case.multi_process_run,
                case.frozen_run):
        if run is None:
            continue
        for record in run.all_records:
            reused |= results.intersection(record.files_read)
        for record in run.all_records:
            results.update(record.files_written)
    if not reused:
        return []
    names = ", ".join(sorted({Path(path).name for path in reused})[:3])
    return [fail(f"this run loads {names}, which an earlier run of verify "
                 "saved", NAME_RUNS, kind="reused-files")]


@question("weights and losses are finite, and gradients are not all 0")
def verify_finite(case: Comparison) -> list[Finding]:
    """Answer whether weights and losses are finite, and a gradient is not 0.
    """
    for step, records in enumerate(case.steps):
        names = find_nonfinite(records)
        if names:
            return [fail("initial weights contain NaN or inf: "
                         f"{case.named(names)}", "initialize every parameter: "
                         "to_empty() leaves memory uninitialized",
                         kind="nonfinite-weights")]
        if has_nan_loss(records):
            text = f"in step {step} the loss is NaN"
            if has_nan_loss(case.single_steps):
                text += ", with 1 process as well"
            return [fail(text, "remove the NaN first: with it, nothing "
                         "else can be compared",
                         numbers={"step": step}, kind="nonfinite-loss")]
    parts = flatten(map(gradient_parts, case.steps))
    if parts and not any(part.any() for part in parts):
        return [warn("all gradients are 0", "check that the loss depends on "
                     "the weights: the model cannot learn, and nothing could "
                     "be compared",
                     kind="zero-gradients")]
    return []


def find_nonfinite(records: StepRecords) -> set[str]:
    """Return the parameters that a rank begins with nan or infinity in."""
    found: set[str] = set()
    for rank, record in enumerate(records):
        if not record["before"]:
            continue
        for name, _, part, _ in pieces(record["before"], rank):
            if not part.isfinite().all():
                found.add(name)
    return found


def has_nan_loss(records: StepRecords) -> bool:
    """Return whether a loss of one of the steps is nan."""
    losses: list[float] = flatten(record["losses"] for record in records)
    return any(loss != loss for loss in losses)


def gradient_parts(records: StepRecords) -> list[torch.Tensor]:
    """Return what the ranks have of the gradients of a step."""
    parts = []
    for rank, record in enumerate(records):
        parts += [part for _, _, part, _ in pieces(record["gradients"], rank)]
    return parts


@question("all ranks join one process group")
def verify_process_group(case: Comparison) -> list[Finding]:
    """Answer whether a rank joins a process group, or reduces anything."""
    if (case.facts("init_process_group")
            or any(record.joined
                   for record in case.multi_process_run.all_records)
            or any(step["reduced"] for step in flatten(case.steps))):
        return []
    script = case.multi_process_run.script.read_text(errors="replace")
    flag = re.search(r"--local[_-]rank", script)
    fix = "call torch.distributed.init_process_group()"
    if flag:
        fix = f"tell the script its rank: add {flag[0]} {{rank}} to its flags"
    return [fail("no rank joins a process group: each trains by itself", fix,
                 kind="no-process-group")]


@question("all ranks skip the same steps", always)
def verify_skipped_steps(case: Comparison) -> list[Finding]:
    """Answer whether a rank makes a step that another leaves out."""
    return find_skips(case.multi_process_run)


@question("all processes train the same parameters")
def verify_parameters(case: Comparison) -> list[Finding]:
    """Answer whether each rank has parameters that one process lacks."""
    if not case.single_process_run:
        return []
    extra = find_extra(case.single_process_run, case.multi_process_run)
    if not extra:
        return []
    tied = case.single_process_run.record_of(0).tied_names
    for name in sorted(extra & tied.keys()):
        return [fail(
            f"{case.named([name])} and {case.named([tied[name]])} share one "
            f"tensor with 1 process, but not with {case.size}",
            "tie them again after to_empty(), or after loading: "
            "model.head.weight = model.embedding.weight",
            learned={"skip_reason": "tied parameters are not tied"},
            kind="untied-weights")]
    return [warn(
        f"{counted(extra, 'parameter')} {verb_of(extra)} trained on each "
        f"rank, but not with 1 process: {case.named(extra)}", "check whether "
        "the model is meant to depend on the number of processes",
        learned={"skip_reason": "the models differ"},
        kind="extra-parameters")]


def verb_of(names: Collection[str]) -> str:
    """Return "is" for one name, "are" for any other number."""
    if len(names) == 1:
        return "is"
    return "are"


@question("ranks hold different parts of hand-sharded parameters")
def verify_hand_sharded_parts(case: Comparison) -> list[Finding]:
    """Answer whether as many parts differ as make up the whole tensor.

    It assumes that a parameter was drawn at random: one of equal numbers, as
    zeros or ones, tells nothing and is left out. A script that copies a part
    to several ranks on purpose is not told from one with a common seed, if
    the copies are fewer than the parts.
    """
    if not case.single_process_run:
        return []
    whole = case.single_process_run.record_of(0).shapes
    values: dict[str, set[bytes]] = {}
    for record in case.multi_process_run.all_records:
        for name, tensor in initial_weights(record):
            numbers = tensor.flatten()  # one number may be a parameter
            is_constant = bool((numbers == numbers[:1]).all())
            if name in case.hand_sharded and not is_constant:
                values.setdefault(name, set()).add(as_bytes(tensor))
    shapes = case.multi_process_run.record_of(0).shapes
    twins = []
    for name, different in values.items():
        if name not in shapes or name not in whole:
            continue
        count = torch.Size(whole[name]).numel() // torch.Size(
            shapes[name]).numel()
        if len(different) < min(case.size, count):
            twins.append(name)
    if not twins:
        return []
    return [fail(
        f"ranks hold identical values where their parts of "
        f"{case.named(twins)} should differ", "initialize the whole tensor "
        "on each rank and keep the rank's part, or initialize each part with "
        "its own seed: all ranks used the same seed", learned={
            "skip_reason": "parts that should differ are equal"},
        kind="equal-shards")]


@question("initial weights are those of the single-process run")
def verify_initial_weights(case: Comparison) -> list[Finding]:
    """Answer whether all ranks, and one process, begin with equal weights."""
    firsts = [records for records in case.steps if records[0]["before"]]
    for records in firsts:
        whole = put_together(records, "before")
        if whole.unequal:
            rank = min(whole.differing)
            return [fail(f"rank {rank} starts with different weights than "
                         f"rank 0: {case.named(whole.unequal)}",
                         "set the same "
                         "seed on all ranks before the model is created, or "
                         "wrap it in DDP, which broadcasts rank 0's weights; "
                         "load checkpoints on all ranks",
                         ranks=sorted(whole.differing),
                         kind="unequal-initial-weights")]
    if case.hand_sharded:
        parameters = counted(case.hand_sharded, "parameter")
        learned: Learned = {"skip_reason": case.skip_reason
                   or "parameters are hand-sharded"}
        numbers = {"parameters": len(case.hand_sharded)}
        if case.parts.make_up:
            return [ok(
                f"{parameters} {verb_of(case.hand_sharded)} hand-sharded, and "
                "the ranks start with parts of the single-process weights: "
                f"{case.named(case.hand_sharded)}",
                learned=learned, numbers=numbers,
                kind="hand-sharded-parameters")]
        return [warn(
            f"{parameters} {verb_of(case.hand_sharded)} smaller"
            " than with 1 process, different, or not in every rank's "
            f"optimizer: {case.named(case.hand_sharded)}",
            "check that the script shards them by hand: if so, they are left "
            "out of the comparison",
            learned=learned, numbers=numbers,
            kind="hand-sharded-parameters")]
    if not begin_as_single(firsts[0], case.single_steps[:1]):
        return [other_start(case, firsts[0])]
    states = [records[0]["before"] for records in firsts]  # rank 0's
    count = sum(len(state["plain"]) + len(state["sharded"])
                for state in states)
    return [ok(f"all ranks start with the same weights ({count} parameters)",
               numbers={"parameters": count}, kind="equal-initial-weights")]


def begin_as_single(records: StepRecords, single: StepRecords) -> bool:
    """Return whether the first weights are those of one process.

    Weights of other shapes are not compared: they count as the same.

    Args:
        records: the first of each rank.
        single: the first of one process, if there is one.
    """
    ranks = put_together(records, "before")
    expected = put_together(single, "before")
    for name, tensor in expected.tensors.items():
        if name in ranks.tensors and ranks.tensors[name].shape != tensor.shape:
            return True
    return ranks.error(expected) <= SAME_START  # nan is not


def other_start(case: Comparison, records: StepRecords) -> Finding:
    """Say why the first weights may be others than those of one process.

    One process is started once more, to see whether it begins alike each time.

    Args:
        records: the first of each rank.
    """
    learned: Learned = {"skip_reason": case.skip_reason
                        or "initial weights differ"}
    again, ended = case.runs("repeated")
    if ended:
        return warn("initial weights differ from the single-process run; "
                    "whether that run is seeded could not be tested: when it "
                    f"was started again, {ended.text}",
                    ended.fix_text, learned=learned,
                    kind="initial-weights-not-compared")
    repeated = put_together(again.record_of(0).steps[:1], "before")
    expected = put_together(case.single_steps[:1], "before")
    if not repeated.error(expected) <= SAME_START:
        return warn("the single-process run starts with different weights "
                    "each time", "set a seed, so that runs can be compared",
                    learned=learned, kind="unseeded-weights")
    twins = drawn_twice(records)
    if twins:
        return warn("all ranks have the same values in their parts of "
                    f"{case.named(twins)}", "check this on GPUs: on a CPU, "
                    "each rank fills its part of a sharded tensor alike",
                    learned=learned, kind="equal-initial-shards")
    text = "initial weights differ from the single-process run"
    fix = "set the same seed on all ranks right before the model is created"
    if records[0]["before"]["sharded"]:
        return fail(text, fix, learned=learned, kind="other-initial-weights")
    return warn(text, fix, learned=learned, kind="other-initial-weights")


def drawn_twice(records: StepRecords) -> set[str]:
    """Return the sharded parameters of which two ranks have equal numbers.

    It compares the first half of the smaller part, as parts may be unequal:
    with one seed, a generator gives both the same numbers from the first on.
    A part of less than four elements is too small to tell, and one of equal
    numbers was not drawn. Parts of one rank are not compared with each other,
    nor is a part of a later rank with any but the first rank's.

    Args:
        records: the first of each rank.
    """
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    twins: set[str] = set()
    for rank, record in enumerate(records):
        for name, entry in record["before"]["sharded"].items():
            part = entry["part"].flatten()
            indices = elements(entry, rank)
            first_part, first_indices = parts.setdefault(name, (part, indices))
            count = min(len(part), len(first_part)) // 2
            if count <= 1 or (part == part[0]).all():
                continue
            same_numbers = part[:count].equal(first_part[:count])
            same_place = indices[:count].equal(first_indices[:count])
            if same_numbers and not same_place:
                twins.add(name)
    return twins
