"""Questions about how a run begins: its files, weights and ranks."""

from __future__ import annotations

import re
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
from rankcheck.record.tensors import assemble, elements, pieces, put_together
from rankcheck.verification.comparison import (
    QUESTIONS,
    Comparison,
    as_bytes,
    find_extra,
    find_skips,
    first_weights,
    question,
)
from rankcheck.verification.runs import AGAIN


@question("no run begins with what the one before has saved")
def leftovers(case):
    results, used = set(), set()
    for trial in filter(None, (case.alone, case.together, case.still)):
        for seen in trial.seen:
            used |= results.intersection(seen["read"])
        for seen in trial.seen:
            results.update(seen["results"])
    names = ", ".join(sorted({Path(path).name for path in used})[:3])
    return [fail(f"it begins with {names}, which verify's run before has "
                 "saved", AGAIN)] if used else []


@question("weights and losses are numbers, and not all gradients 0")
def numbers(case):
    for step, updates in enumerate(case.updates):
        odd = {key for rank, update in enumerate(updates) if update["before"]
               for key, _, part, _ in pieces(update["before"], rank)
               if not part.isfinite().all()}
        if odd:
            return [fail("the first weights are not finite numbers: "
                         f"{case.named(odd)}", "to_empty() leaves what was "
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


@question("the ranks know of each other")
def joined(case):
    if case.asked("init_process_group") or any(
            seen["joined"] for seen in case.together.seen) or any(
            update["reduced"] for updates in case.updates
            for update in updates):
        return []
    flag = re.search(r"--local[_-]rank", case.together.script.read_text(
        errors="replace"))
    return [fail(
        "no rank joins a process group: each trains alone", "is it to be told "
        f"its rank? {flag[0]} {{rank}} among its flags" if flag else
        "torch.distributed.init_process_group()")]


@QUESTIONS.add("all ranks leave out the same updates")
def skipped(case: Comparison) -> list[Finding]:
    """Answer whether a rank makes an update that another leaves out."""
    return find_skips(case.together)


@question("all processes train the same parameters")
def parameters(case: Comparison) -> list[Finding]:
    """Answer whether each rank has parameters that one process lacks."""
    if not case.alone:
        return []
    extra = find_extra(case.alone, case.together)
    if not extra:
        return []
    tied = case.alone.seen[0]["tied"]
    for name in sorted(extra & tied.keys()):
        return [fail(
            f"{case.named([name])} and {case.named([tied[name]])} are one "
            f"tensor with one process, and two with {case.size}",
            "tie them again after to_empty(), or after loading: "
            "model.head.weight = model.embedding.weight",
            learned={"apart": "tied parameters are not tied"})]
    are = "is" if len(extra) == 1 else "are"
    return [warn(
        f"{counted(extra, 'parameter')} {are} trained on each rank, and not "
        f"with one process: {case.named(extra)}", "right if the model depends "
        "on the number of processes",
        learned={"apart": "the model is another one"})]


@question("the ranks hold different parts of what is sharded by hand")
def parts(case: Comparison) -> list[Finding]:
    """Answer whether as many parts differ as make up the whole tensor."""
    if not case.alone:
        return []
    whole = case.alone.seen[0]["shapes"]
    values: dict[str, set[bytes]] = {}
    for seen in case.together.seen:
        for name, tensor in first_weights(seen):
            numbers = tensor.flatten()  # one number may be a parameter
            if name in case.split and not (numbers == numbers[:1]).all():
                values.setdefault(name, set()).add(as_bytes(tensor))
    shapes = case.together.seen[0]["shapes"]
    twins = [name for name, different in values.items()
             if name in shapes and name in whole
             and len(different) < min(case.size, torch.Size(
                 whole[name]).numel() // torch.Size(shapes[name]).numel())]
    if not twins:
        return []
    return [fail(
        f"ranks hold the same numbers in what should be different parts of "
        f"{case.named(twins)}", "each rank draws its part with the same seed: "
        "draw the whole tensor and take the rank's part, or draw each part "
        "with a seed of its own", learned={
            "apart": "parts that should differ are equal"})]


@question("the ranks begin with the weights of one process")
def start(case):
    firsts = [[update["before"] for update in updates]
              for updates in case.updates if updates[0]["before"]]
    for states in firsts:
        whole = assemble(states)
        if whole.apart:
            rank = min(whole.differing)
            return [fail(f"rank {rank} begins with other weights than rank "
                         f"0: {case.named(whole.apart)}", "the same seed on "
                         "all ranks before the model is made, or wrap it in "
                         "DDP, which sends rank 0's; what is loaded after "
                         "that, all ranks have to load",
                         ranks=sorted(whole.differing))]
    if case.split:
        return [warn(
            f"{counted(case.split, 'parameter')} "
            f"{'is' if len(case.split) == 1 else 'are'} smaller than with one "
            "process, others, or not in each rank's optimizer: "
            f"{case.named(case.split)}",
            "right if the script shards them by hand: they are left out of "
            "what is compared",
            learned={"apart": case.apart or "parameters are split by hand"
                     })]
    mine, alone = assemble(firsts[0]), put_together(case.single[:1], "before")
    alike = all(mine.tensors[name].shape == tensor.shape for name, tensor
                in alone.tensors.items() if name in mine.tensors)
    if alike and not mine.error(alone) <= 1e-6:  # nan is not
        learned: Learned = {"apart": case.apart or "the first weights differ"}
        again, ended = case.runs("again")
        if ended:
            return [warn("the first weights are not those of one process; "
                         "whether that begins alike each time was not "
                         f"compared: started again, {ended.text}",
                         ended.advice, learned=learned)]
        if not put_together(again.seen[0]["updates"][:1], "before").error(
                alone) <= 1e-6:
            return [warn("one process begins with other weights each time "
                         "that it is started", "set a seed, to compare",
                         learned=learned)]
        twins = drawn_twice(firsts[0])
        if twins:
            return [warn("all ranks have the same numbers in their parts of "
                         f"{case.named(twins)}", "on a CPU a sharded tensor "
                         "is filled so at random; GPUs draw others for each "
                         "part", learned=learned)]
        return [(fail if firsts[0][0]["sharded"] else warn)(
            "the first weights are not those of one process", "the same seed "
            "on all ranks right before the model is made", learned=learned)]
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
