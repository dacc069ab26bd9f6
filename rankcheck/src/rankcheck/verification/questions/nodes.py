"""A question about several nodes, answered by a run as two nodes.

All processes are on this machine. The environment says otherwise: of N ranks,
each half has the local ranks from 0 on, as torchrun gives them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rankcheck.engine.exits import in_brackets
from rankcheck.engine.findings import (
    Finding,
    Line,
    counted,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.engine.trial import Trial
from rankcheck.record.tensors import put_together
from rankcheck.verification.comparison import (
    GRADIENT,
    QUESTIONS,
    Comparison,
    flat,
    off,
    question,
    rows,
)
from rankcheck.verification.questions.optimizers import (
    by_parameter,
    close,
    differences,
    show,
)
from rankcheck.verification.questions.single import parallel, ratio_of
from rankcheck.verification.runs import count_updates

NOT_YET = "they were not tried"
STEPS = 2  # updates of this run
CHANCE = 0.05  # of the samples of an update, which several ranks may read
LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/", "/local/", "/scratch/local/")
RANKS = ("RANK is a rank among all nodes, LOCAL_RANK one in its node, and "
         "WORLD_SIZE and LOCAL_WORLD_SIZE count likewise")


def why_not(case: Comparison) -> str:
    """Why nothing is known of the script on two nodes, "" if it is."""
    if case.nodes is not None:
        return case.nodes
    if case.size % 2:
        return (f"they were not tried, as {case.size} processes are no two "
                "nodes of as many each: -n 2 or another even number")
    if case.runs.device == "gpu":
        return "they are tried on the CPU alone, without --device gpu"
    if case.failed:
        return "they are tried once nothing is wrong on one"
    if case.asked("join"):
        return "they were not tried, as ranks end at different times"
    if not case.updates:
        return "they were not tried, as no update was made by all ranks"
    return NOT_YET


@dataclass(frozen=True)
class TwoNodes:
    """The same ranks on one node and as two."""

    case: Comparison  # with the run on one
    trial: Trial  # as two

    def __post_init__(self) -> None:
        view = self.case.view(self.trial)
        object.__setattr__(self, "updates", list(zip(*view, strict=False)))

    @property
    def pairs(self) -> list[tuple]:
        """(what the ranks recorded as two nodes, and on one) by update."""
        return list(zip(self.updates, self.case.updates, strict=False))

    def node(self, rank: int) -> int:
        return rank * 2 // self.case.size


@question("each rank of a node takes a GPU of its own")
def own_device(case: Comparison) -> list[Finding]:
    """Where the script names them by number, as in "cuda:0"."""
    each = [seen["devices"] for seen in case.together.seen]
    if all_on_the_first(case):
        return []
    taken: dict[int, int] = {}
    for rank, numbers in enumerate(each):
        if len(numbers) != 1:
            continue
        other = taken.setdefault(numbers[0], rank)
        if other != rank:
            return [fail(f"ranks {other} and {rank} take the same GPU, number "
                         f"{numbers[0]}", "choose it by LOCAL_RANK: "
                         "torch.cuda.set_device(local_rank)",
                         ranks=[other, rank])]
    return []


def all_on_the_first(case: Comparison) -> bool:
    """Whether all take GPU 0: each may see one alone, as srun can have it."""
    return all(seen["devices"] == [0] for seen in case.together.seen)


@QUESTIONS.add("as two nodes the ranks train as on one",
               where=lambda case: why_not(case) == NOT_YET)
def as_two_nodes(case: Comparison) -> Iterator[Finding]:
    trial, ended = case.runs("nodes", fewer=max(0, case.runs.steps - STEPS))
    if ended and trial.gave_up == "waits":
        yield ended
        return
    if ended and refuses(ended, case.together.script):
        yield ok("the script is for one node: " + ended.text,
                 learned={"nodes": "the script refuses them"})
        return
    uneven = [] if ended else count_updates(trial)
    if ended or uneven:
        finding = ended or uneven[0]
        if uneven:
            finding.sentence.insert(0, "as two nodes ")
        if not finding.advice:
            finding.hint = [f"on one node it does not: {RANKS}"]
        finding.learned = {"nodes": ""}
        yield finding
        return
    both = TwoNodes(case, trial)
    found = [*samples(both), *samplers(both), *weights(both), *told(both)]
    found = found or gradients(both)
    if not found:
        found = [ok("as two nodes the ranks' weights and gradients are as "
                    "equal as on one node, and no more samples are read twice,"
                    f" in {counted(both.pairs, 'update')}")]
    found[0].learned = {"nodes": ""}
    yield from (*found, *files(both), *caches(both), *devices(both))


def refuses(ended: Finding, script: Path) -> bool:
    """Whether the script itself says that it is for one node.

    By the words of its error, or as it asserts the number of nodes.
    """
    words = ended.text.removeprefix("as two nodes ")
    if "AssertionError" in words:
        lines = script.read_text(errors="replace").splitlines()
        words += " ".join(lines[line - 1] for line in ended.lines
                          if line <= len(lines))
    return bool(re.search(
        r"\b(single|one|multi(ple)?|several|two|1|2)[ -]?nodes?\b|"
        r"\bn_?nodes\b|\bGROUP_(WORLD_SIZE|RANK)\b", words, re.IGNORECASE))


def samples(both: TwoNodes) -> list[Finding]:
    """Whether more of them are read by several ranks, or others at all."""
    for step, pair in enumerate(both.pairs):
        two, one = (rows(updates) for updates in pair)
        if not two or not one:
            continue
        twice = len(two) - len(set(two))
        before = (len(one) - len(set(one))) / len(one)
        if twice / len(two) > before + CHANCE:
            return [fail(
                f"as two nodes, in update {step} {twice} of {len(two)} samples"
                " are read by several ranks, on one node "
                f"{len(one) - len(set(one))}", "the data is divided by a "
                f"local number: {RANKS}")]
        if abs(len(two) / len(one) - 1) > 0.1:
            return [warn(
                f"as two nodes an update has {len(two)} samples, with as many "
                f"ranks on one node {len(one)}", "does the batch size or the "
                f"accumulation follow LOCAL_WORLD_SIZE? {RANKS}")]
    return []


def samplers(both: TwoNodes) -> list[Finding]:
    """Whether they have other seeds, or take parts of other data."""
    for i, kind in (1, "seeds"), (2, "subsets of the data"):
        each = [{asked[i] for asked in trial.asked("sampler", rank)[:1]}
                for trial in (both.case.together, both.trial)
                for rank in range(both.case.size)]
        one = set().union(*each[:both.case.size])
        two = set().union(*each[both.case.size:])
        if len(two) > 1 >= len(one):
            return [fail(
                f"as two nodes the ranks' DistributedSamplers have different "
                f"{kind}: together they do not read each sample once",
                f"does that follow the number of the node? {RANKS}")]
    return []


def weights(both: TwoNodes) -> list[Finding]:
    """Whether the ranks have different ones, or different gradients."""
    for what, when in (("before", "before"), ("gradients", "in"),
                       ("weights", "after")):
        for step, (two, one) in enumerate(both.pairs):
            if not all(what in update and update[what] for update in two):
                continue
            whole = put_together(two, what)
            known = [update for update in one if update.get(what)]
            if whole.apart and not put_together(known, what).apart:
                name = "gradients" if what == "gradients" else "weights"
                rank = min(whole.differing)
                return [fail(
                    f"as two nodes, {when} update {step} the {name} of rank "
                    f"{rank} are not rank 0's: {both.case.named(whole.apart)}",
                    f"is something done on a local rank alone? {RANKS}",
                    ranks=sorted(whole.differing))]
    return []


def told(both: TwoNodes) -> list[Finding]:
    """Whether the optimizers are told something else."""
    for step, (two, one) in enumerate(both.pairs):
        for mine, good in zip(two, one, strict=True):
            pair = mine["rates"][:1], good["rates"][:1]
            if all(pair) and not close(pair[0][0], pair[1][0]):
                return [warn(
                    f"as two nodes the learning rate is {pair[0][0]:.3g} in "
                    f"update {step}, with as many ranks on one node "
                    f"{pair[1][0]:.3g}", "does it follow LOCAL_WORLD_SIZE? "
                    f"{RANKS}")]
    found = differences(*(by_parameter(trial.seen[0]) for trial in (
        both.trial, both.case.together)))
    for difference, names in found.items():
        return [warn(
            f"as two nodes the {difference.setting} of "
            f"{both.case.named(names)} is {show(difference.mine)}, on one node"
            f" {show(difference.other)}", f"the same ranks train: {RANKS}")]
    return []


def gradients(both: TwoNodes) -> list[Finding]:
    """Whether they are the same for the same weights and samples.

    Only where a single process and the ranks on one node agree: so nothing
    else is drawn at random.
    """
    case = both.case
    if case.apart or case.split or any(
            seen["draws"] for seen in both.trial.seen):
        return []
    for step, (two, one) in enumerate(both.pairs[:case.compared]):
        if sorted(rows(two)) != sorted(rows(one)) or not rows(two):
            return []
        if step == 0 and not same_tensors(two, one, "before"):
            return []
        mine, good = (put_together(updates, "gradients").tensors
                      for updates in (two, one))
        keys = [key for key in good if key in mine
                and mine[key].shape == good[key].shape]
        if not keys:
            return []
        ours, theirs = flat(mine, keys), flat(good, keys)
        bound = GRADIENT * case.loosely * (10 if step else 1)
        error = off(ours, theirs)
        if not error <= bound:
            words = f"differ by {percent(error)} from those on one node"
            if parallel(ours, theirs, bound):
                words = (f"are {ratio_of(ours, theirs):.3g} times those on "
                         "one node")
            return [fail(
                f"as two nodes, in update {step} the gradients {words}, of the"
                " same samples", "does a factor, or a group of ranks that "
                f"reduces them, follow LOCAL_WORLD_SIZE? {RANKS}")]
    pairs = both.pairs[:case.compared]
    return [ok("as two nodes the ranks compute the gradients of as many ranks "
               f"on one node, in {counted(pairs, 'update')}")]


def same_tensors(two: tuple, one: tuple, what: str) -> bool:
    mine, good = (put_together([update for update in updates
                                if update.get(what)], what)
                  for updates in (two, one))
    return torch.isfinite(torch.tensor(mine.error(good))).item() and (
        mine.error(good) <= 1e-6)


def files(both: TwoNodes) -> Iterator[Finding]:
    """Files of which each node has a writer, and on one node there is one."""
    known = {who for who, ranks in writers(both.case.together)
             if len(ranks) > 1}
    openers: dict = {}
    for (who, path), ranks in writers_of_paths(both.trial).items():
        nodes = {both.node(rank) for rank in ranks}
        if len(nodes) > 1 and who not in known and not is_local(
                path, both.trial):
            openers.setdefault(who, []).append((Path(path).name, ranks))
    for who, found in openers.items():
        names = ", ".join(sorted({name for name, _ in found})[:3])
        ranks = " and ".join(map(str, found[0][1][:4]))
        hint = ("on a file system that the nodes share, one rank among all "
                "writes it: if RANK is 0, not LOCAL_RANK; right if the folder "
                "is each node's own")
        place = [Line(who)] if isinstance(who, int) and who else []
        sentence = [f"as two nodes, ranks {ranks} write the same {names}",
                    *in_brackets(place)]
        if isinstance(who, str):
            sentence[0] = f"{who}: {sentence[0]}"
        finding = warn("", hint)
        finding.sentence = sentence
        yield finding


def writers_of_paths(trial: Trial) -> dict[tuple, list[int]]:
    """(who opens it, the file) -> the ranks that do."""
    found: dict = {}
    for rank, seen in enumerate(trial.seen):
        for path, who in seen["written"].items():
            found.setdefault((who, path), []).append(rank)
    return found


def writers(trial: Trial) -> list[tuple]:
    """Pairs of who opens a file, and the ranks on which it does."""
    return [(who, ranks) for (who, _), ranks
            in writers_of_paths(trial).items()]


def is_local(path: str, trial: Trial) -> bool:
    """Whether a file is where each node usually has its own."""
    if path.startswith(f"{trial.copy}/"):
        return False
    temporary = f"{Path(trial.copy).parent}/tmp-nodes/"
    return path.startswith((*LOCAL, temporary))


def caches(both: TwoNodes) -> list[Finding]:
    """Files in a folder of each node that the other node reads."""
    trial = both.trial
    owners: dict[str, set[int]] = {}
    lines: dict[str, object] = {}
    for (who, path), ranks in writers_of_paths(trial).items():
        if isinstance(who, int) and is_local(path, trial):
            owners.setdefault(path, set()).update(map(both.node, ranks))
            lines[path] = who
    for rank, seen in enumerate(trial.seen):
        for path in seen["read"]:
            nodes = owners.get(path, {both.node(rank)})
            if both.node(rank) not in nodes:
                place = Path(path)
                where = place.parent
                if str(where).startswith(f"{Path(trial.copy).parent}/"):
                    where = "the folder for temporary files"
                finding = warn("", "each node has its own: there, on each of "
                               "them one rank has to write it, if LOCAL_RANK "
                               "is 0; or put it where all nodes can read it")
                finding.sentence = [
                    f"as two nodes, rank {rank} reads {place.name} in {where},"
                    " which only the other node has written",
                    *in_brackets([Line(lines[path])] * bool(lines[path]))]
                return [finding]
    return []


def devices(both: TwoNodes) -> list[Finding]:
    """Numbers of GPUs that a node has not, where a CPU stands in for them."""
    count = both.case.size // 2
    for rank, seen in enumerate(both.trial.seen):
        beyond = [number for number in seen["devices"] if number >= count]
        if beyond:
            return [fail(
                f"as two nodes, rank {rank} takes GPU {beyond[0]} of a node "
                f"that has {counted(range(count), 'GPU')}",
                "choose a GPU by LOCAL_RANK, not by RANK", ranks=[rank])]
    return []
