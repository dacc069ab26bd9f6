"""Questions about what else the ranks leave: buffers, copies, files."""

from collections import Counter
from itertools import chain
from pathlib import Path

from rankcheck.findings import fail, ok, warn
from rankcheck.tensors import assemble
from rankcheck.verification.questions.question import always, question


@question("buffers are equal on all ranks")
def buffers(case):
    last = [updates for updates in case.updates if "buffers" in updates[0]]
    whole = assemble([update["buffers"] for update in last[-1]]) if last else (
        None)
    if not whole or not whole.tensors:
        return []
    if not whole.apart:
        return [ok("buffers are equal on all ranks")]
    names = sorted({key.partition(".")[2] for key in whole.apart})
    words = ("BatchNorm's running statistics" if any(
        "running_" in name for name in names) else "buffers")
    return [warn(f"{words} differ between the ranks: {', '.join(names[:3])}",
                 "each rank has those of its own samples, and rank 0's are "
                 "saved: SyncBatchNorm, or average them before you evaluate")]


@question("copies of the model are equal on all ranks")
def copies(case):
    each = [seen["copies"] for seen in case.together.seen]
    if len({len(one) for one in each}) > 1:
        return []
    apart = set().union(*(assemble(states).apart for states
                          in zip(*each, strict=True)))
    return [warn("a copy of the model differs between the ranks: "
                 + ", ".join(sorted(apart)[:3]), "all ranks copy it once DDP "
                 "has made the weights equal, and update it (EMA) after each "
                 "step; right if only rank 0 uses it")] if apart else []


@question("one rank alone writes and prints", where=always)
def files(case):
    findings, seen = [], case.together.seen
    written = Counter(chain.from_iterable(one["written"] for one in seen))
    both = sorted(Path(path).name for path, times in written.items()
                  if times > 1)
    if both:
        findings.append(fail(f"several ranks write {', '.join(both[:3])}",
                             "only one should: if rank == 0:"))
    lines = [set(rank.out.splitlines()) - {""} for rank in case.together.ranks]
    if any(lines[0] & other for other in lines[1:]):
        findings.append(warn("several ranks print the same lines",
                             "rank 0 is enough: if rank == 0:"))
    return findings
