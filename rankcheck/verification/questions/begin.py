"""Questions about how a run begins: its files, weights and ranks."""

import re
from pathlib import Path

from rankcheck.findings import counted, fail, ok, warn
from rankcheck.tensors import assemble, elements, pieces, put_together
from rankcheck.verification.comparison import AGAIN, question


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
            learned={"apart": "parameters are split by hand"})]
    mine, alone = assemble(firsts[0]), put_together(case.single[:1], "before")
    alike = all(mine.tensors[name].shape == tensor.shape for name, tensor
                in alone.tensors.items() if name in mine.tensors)
    if alike and not mine.error(alone) <= 1e-6:  # nan is not
        learned = {"apart": case.apart or "the first weights are not"}
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
