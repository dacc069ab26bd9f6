"""Questions about what else the ranks leave: copies of the model, files."""

from __future__ import annotations

from pathlib import Path

from rankcheck.engine.exits import in_brackets
from rankcheck.engine.findings import Finding, Line, fail, ok, percent, warn
from rankcheck.record.tensors import assemble, whole_here
from rankcheck.verification.comparison import (
    QUESTIONS,
    UPDATE,
    Comparison,
    first_weights,
    flat,
    off,
    question,
)
from rankcheck.verification.questions.single import weight_error

REMEDIES = {
    "hydra": "hydra.run.dir=... with the rank in it, or "
             "hydra.output_subdir=null on the others",
    "tensorboard": "make the SummaryWriter on rank 0 alone",
    "wandb": 'wandb.init(mode="disabled") on the other ranks'}


@question("copies of the model are equal on all ranks")
def copies(case):
    each = [seen["copies"] for seen in case.together.seen]
    # with weights that are split by hand, a part may look like a copy
    if case.split or len({len(one) for one in each}) > 1:
        return []
    apart = set().union(*(assemble(states).apart for states
                          in zip(*each, strict=True)))
    return [warn("a copy of the model differs between the ranks: "
                 + ", ".join(sorted(apart)[:3]), "all ranks copy it once DDP "
                 "has made the weights equal, and update it (EMA) after each "
                 "step; right if only rank 0 uses it")] if apart else []


@question("averages of the weights are those of one process")
def averages(case: Comparison) -> list[Finding]:
    """Answer whether copies of the model follow it as with one process.

    Relative to how far one process's copy has moved: a copy that stays, as a
    reference model does, has to stay.
    """
    if not case.alone or case.apart or case.later or case.still or case.split:
        return []
    made = min(len(case.updates), len(case.single))
    last = made and weight_error(case, case.updates[made - 1],
                                 [case.single[made - 1]], made - 1, (1,))
    if last and not last[0] <= last[1]:
        return []  # the copies follow weights that differ, as by BatchNorm
    begin = {}
    for name, tensor in first_weights(case.alone.seen[0]):
        begin[name.partition(":")[2]] = tensor
    compared = 0
    for mine, good in zip(case.together.seen[0]["copies"],
                          case.alone.seen[0]["copies"], strict=False):
        mine, good = whole_here(mine), whole_here(good)
        keys = [key for key in good if key in mine and key in begin
                and mine[key].shape == good[key].shape == begin[key].shape]
        if not keys:
            continue
        first, mine, good = (flat(tensors, keys)
                             for tensors in (begin, mine, good))
        if mine.equal(first) and good.equal(first):
            continue
        compared += 1
        error = off(mine - first, good - first)
        if not error <= UPDATE * case.loosely:
            return [fail(
                f"a copy of the model is off by {percent(error)} of the way "
                "that one process's has gone", "an average of the weights "
                "(EMA) has to follow each optimizer step, by the same decay: "
                "does it follow each microbatch, or depend on the number of "
                "processes?",
                numbers={"off": error, "limit": UPDATE * case.loosely})]
    return [ok("averages of the weights agree with a single process")
            ] if compared else []


@QUESTIONS.add("one rank alone writes and prints")
def files(case):
    writers = {}  # file -> who opens it, on each rank that does
    for seen in case.together.seen:
        for path, who in seen["written"].items():
            writers.setdefault(path, []).append(who)
    openers = {}  # who -> the names of files
    for path, (who, *others) in writers.items():
        if others:
            openers.setdefault(who, []).append(Path(path).name)
    for who, names in openers.items():
        names = ", ".join(sorted(names)[:3])
        yield warn(f"{who} writes {names} on several ranks", REMEDIES.get(
            who, "by its settings: rank 0 alone, or another folder on each "
            "rank")) if isinstance(who, str) else fail(
            [f"several ranks write {names}", *in_brackets(
                [Line(who)] * bool(who))], "only one should: if rank == 0:")
    lines = [set(rank.out.splitlines()) - {""} for rank in case.together.ranks]
    if any(lines[0] & other for other in lines[1:]):
        yield warn("several ranks print the same lines",
                   "rank 0 is enough: if rank == 0:")
