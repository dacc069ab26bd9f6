"""Questions about model copies, and about files that ranks write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankcheck.engine.exits import in_brackets
from rankcheck.engine.findings import Finding, fail, ok, percent, warn
from rankcheck.engine.questions import always
from rankcheck.record.tensors import assemble, whole_here
from rankcheck.verification.comparison import (
    WEIGHT_UPDATE,
    Comparison,
    flat,
    initial_weights,
    off,
    question,
)
from rankcheck.verification.questions.records import Opener, places_of
from rankcheck.verification.questions.single_process import weight_error
from rankcheck.verification.questions.step_pairs import StepPair

LIBRARY_FIXES = {  # by the library that writes the file
    "hydra": "set hydra.run.dir=... with the rank in it, or "
             "hydra.output_subdir=null on the other ranks",
    "tensorboard": "create the SummaryWriter on rank 0 only",
    "wandb": 'call wandb.init(mode="disabled") on the other ranks'}


@question("copies of the model are equal on all ranks")
def verify_copies(case: Comparison) -> list[Finding]:
    """Answer whether the ranks end with different copies of the model.

    A copy is a module with the parameters of one that trains, none of which
    has trained. It is known by its place among the copies, so that nothing is
    said if the ranks have other numbers of them.
    """
    copies_of_ranks = [record.copies
                       for record in case.multi_process_run.all_records]
    counts = {len(found) for found in copies_of_ranks}
    # with weights that are split by hand, a part may look like a copy
    if case.hand_sharded or len(counts) > 1:
        return []
    differing: set[str] = set()
    for states in zip(*copies_of_ranks, strict=True):
        differing |= assemble(states).unequal
    if not differing:
        return []
    names = ", ".join(sorted(differing)[:3])
    return [warn(f"a copy of the model differs between ranks: {names}",
                 "copy the model on all ranks after DDP has made the weights "
                 "equal, and update the copy (EMA) after each step; fine if "
                 "only rank 0 uses it", kind="unequal-copies")]


@question("averaged weights (EMA) match the single-process run")
def verify_averaged_weights(case: Comparison) -> list[Finding]:
    """Answer whether copies of the model follow it as with one process.

    Relative to how far one process's copy has moved: a copy that stays, as a
    reference model does, has to stay.
    """
    if (not case.single_process_run or case.skip_reason or case.later_reason
            or case.frozen_run or case.hand_sharded):
        return []
    if follow_other_weights(case):
        return []
    first = {}
    for name, tensor in initial_weights(case.single_process_run.record_of(0)):
        first[name.partition(":")[2]] = tensor
    limit = WEIGHT_UPDATE * case.tolerance_factor
    compared = 0
    for state, single_state in zip(case.multi_process_run.record_of(0).copies,
                                   case.single_process_run.record_of(0).copies,
                                   strict=False):
        copied, expected = whole_here(state), whole_here(single_state)
        keys = [key for key in expected if key in copied and key in first
                and (copied[key].shape == expected[key].shape
                     == first[key].shape)]
        if not keys:
            continue
        begin = flat(first, keys)
        last, expected_last = flat(copied, keys), flat(expected, keys)
        if last.equal(begin) and expected_last.equal(begin):
            continue
        compared += 1
        error = off(last - begin, expected_last - begin)
        if not error <= limit:
            return [fail(
                "the change of the averaged weights (EMA) has a relative "
                f"error of {percent(error)} against 1 process",
                "update them once per optimizer step, not once per "
                "microbatch, with a decay that does not depend on the number "
                "of processes",
                numbers={"error": error, "limit": limit},
                kind="averaged-weights-differ")]
    if not compared:
        return []
    return [ok("averaged weights (EMA) match the single-process run",
               kind="averaged-weights-match")]


def follow_other_weights(case: Comparison) -> bool:
    """Return whether the last weights, as by BatchNorm, differ by themselves.

    Then copies that follow them differ as well.
    """
    made = min(len(case.steps), len(case.single_steps))
    if not made:
        return False
    last = StepPair(made - 1, case.steps[made - 1],
                    [case.single_steps[made - 1]])
    error = weight_error(case, last, (1.0,))
    return error is not None and not error.is_small


@question("only one rank writes files and prints", always)
def verify_written_files(case: Comparison) -> Iterator[Finding]:
    """Answer whether several ranks write a file, or print the same lines."""
    for opener, names in find_shared_files(case).items():
        yield several_write(opener, ", ".join(sorted(names)[:3]))
    lines = [set(rank.out.splitlines()) - {""}
             for rank in case.multi_process_run.ranks]
    if any(lines[0] & other for other in lines[1:]):
        yield warn("several ranks print the same lines",
                   "print on one rank only: if rank == 0:",
                   kind="repeated-output")


def find_shared_files(case: Comparison) -> dict[Opener, list[str]]:
    """Return the names of files that several ranks write, by their opener.

    The opener is that of the first of these ranks.
    """
    openers: dict[str, list[Opener]] = {}  # of each file, by its path
    for record in case.multi_process_run.all_records:
        for path, opener in record.writers.items():
            openers.setdefault(path, []).append(opener)
    shared: dict[Opener, list[str]] = {}
    for path, found in openers.items():
        if len(found) > 1:
            shared.setdefault(found[0], []).append(Path(path).name)
    return shared


def several_write(opener: Opener, names: str) -> Finding:
    """Say that several ranks write these files."""
    if isinstance(opener, str):
        return warn(f"{opener} writes {names} on several ranks",
                    LIBRARY_FIXES.get(
            opener, "set it to write on rank 0 only, or to another folder on "
            "each rank"), kind="shared-files")
    return fail([f"several ranks write the same file: {names}",
                 *in_brackets(places_of(opener))],
                "write on one rank only: if rank == 0:", kind="shared-files")
