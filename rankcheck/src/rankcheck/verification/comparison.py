"""The runs of a script that is verified, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from rankcheck.engine.exits import explain
from rankcheck.engine.findings import Finding, Questions, fail
from rankcheck.engine.trial import Trial
from rankcheck.record.tensors import names, put_together, whole_here, without
from rankcheck.verification.locate import compare_outputs

LOSS, GRADIENT, UPDATE = 1e-4, 1e-3, 0.05  # relative
LOW = 30  # times that in bf16 or fp16
AGAIN = ("verify runs it several times: {run} in a flag is another name each "
         "time, as in --run-dir /tmp/run-{run}")
HINTS = (  # words of the error with which the script has ended
    ("finished reduction in the prior iteration", "some parameters get no "
     "gradient, for which DDP waits: remove them, or "
     "find_unused_parameters=True"),
    ("FileExistsError", AGAIN),
    ("attempted relative import", "it is a module of a package: rankcheck "
     "verify -- -m package.module, from the folder of the package"))
SPAWNS = ("verify starts the processes, as torchrun does: read RANK and "
          "WORLD_SIZE of the environment, without mp.spawn")
QUESTIONS = Questions()
# Ask the decorated function about a `Comparison`: it gives several findings.
# Of FSDP 1, whose tensors cannot be seen, only those of `QUESTIONS.add` ask.
question = partial(QUESTIONS.add, where=lambda case: not case.asked("FSDP1"))


@dataclass(frozen=True)
class Comparison:
    """A script's runs, and what the questions have learned of them."""

    runs: object  # a `Runs`, for others
    alone: object  # as one process; None where it does not train as one
    together: object  # as several
    still: object = None  # as one that updates nothing, if that is compared
    columns: bool = False  # whether the batch is the second dimension
    apart: str = ""  # why it is compared with neither of the others, or ""
    compared: int | None = None  # only so many updates, for that reason:
    later: str = ""
    rate: float = 1.0  # the learning rate, by that of one process
    averaged: str = ""  # how often weights are, if gradients are not
    split: frozenset = frozenset()  # parameters of which ranks hold parts
    settings: str = ""  # which of the optimizer's are not one process's
    failed: bool = False  # whether a question has found a FAIL
    # "" once it has run as two nodes, a text if it refuses that
    nodes: str | None = None

    @property
    def size(self):
        return len(self.together.seen)

    @cached_property
    def single(self):
        """What one process has recorded of its updates, [] if it has none."""
        return self.view(self.alone)[0] if self.alone else []

    @cached_property
    def longest(self):
        """The same of as many updates as have the same samples."""
        return self.view(self.still)[0] if self.still else self.single

    @cached_property
    def updates(self):
        """Of each update that all ranks have made, what each recorded."""
        return list(zip(*self.view(self.together), strict=False))

    @cached_property
    def outputs(self):
        """The modules' in the first update, an `OutputComparison`."""
        return compare_outputs(
            self.together.seen, (self.still or self.alone).seen[0],
            "columns" if self.columns else "rows", self.split, self.loosely)

    def view(self, trial):
        """What each rank has recorded, with its samples, but no tensors that
        are split by hand: nothing says which part of one a rank has.
        """
        return [[update | {
            "samples": update["columns" if self.columns else "rows"]} | {
            name: without(state, self.split) for name, state in update.items()
            if self.split and isinstance(state, dict) and "plain" in state}
            for update in seen["updates"]] for seen in trial.seen]

    @property
    def loosely(self):
        """How much larger an error may be in low precision."""
        return LOW if any(seen["low"] for seen in self.together.seen) else 1

    def elements(self, updates) -> int:
        """How many elements the parameters of an update have, on all ranks.

        With ZeRO-1 each rank's optimizer has some of them.
        """
        owned = [names(update["now"]) for update in updates]
        if all(one == owned[0] for one in owned):
            return updates[0]["elements"]
        shapes = {}
        for seen in self.together.seen:
            shapes |= seen["shapes"]
        return sum(torch.Size(shapes[name]).numel()
                   for name in set.union(*owned))

    @property
    def by_step(self):
        """Whether the optimizer reduces the gradients, when it is called."""
        return all(update.get("within", 0) > 0.5 * update["elements"]
                   for updates in self.updates for update in updates)

    @property
    def splits_matrices(self):
        """Whether parameters are sharded, and not by fully_shard alone."""
        sharded = self.updates[0][0]["gradients"]["sharded"].values()
        return bool(self.split) or any(
            sum("Shard" in kind for kind, _ in entry["placements"]) > 1
            or not self.asked("fully_shard") for entry in sharded)

    def asked(self, what):
        return [value for rank in range(self.size)
                for value in self.together.asked(what, rank)]

    def named(self, names):
        """Parameters in words, in the optimizer's order."""
        order = [name for seen in (*self.together.seen, *(
            self.alone.seen if self.alone else ()))
            for name in (*seen["shapes"], *seen["model"])]
        models = {name.partition(":")[0] for name in order}
        words = [name.replace(":", ".") if len(models) > 1 else
                 name.partition(":")[2] or name
                 for name in sorted(names, key=order.index)]
        return ", ".join(words[:3]) + (
            f" and {len(words) - 3} more" if len(words) > 3 else "")


def how_it_ends(trial, words=""):
    """A finding where it has failed or made no update, else None."""
    finding = explain(trial)
    if finding:
        finding.sentence.insert(0, words)
        finding.hint = next(([hint] for word, hint in HINTS
                             if word in finding.error), finding.hint)
        if any(seen and trial.asked("spawn", rank)
               for rank, seen in enumerate(trial.seen)):
            finding.hint = [SPAWNS]
        return finding
    if not all(seen and seen["updates"] for seen in trial.seen):
        last = [line for line in trial.ranks[0].out.splitlines()
                if line.strip()][-1:]
        return fail(f"{words}it makes no update by an optimizer of PyTorch"
                    + "".join(f'; its last line: "{line[:200]}"'
                              for line in last),
                    "does it train with these flags, and without starting "
                    "processes of its own?")
    return None


def rows(updates):
    """All samples of several updates, as often as they are read."""
    return [row for update in updates for row in update["samples"]]


@dataclass(frozen=True)
class BatchComparison:
    """How the samples of an update relate to those of one process.

    Attributes:
        factor: 1, or the number of processes, if an update has the samples of
            one update of one process, or of that many; None if it has others.
        updates: in how many updates from the first on; None: in all.
        reason: why the others cannot be compared, "" if all can.
    """

    factor: int | None
    updates: int | None = None
    reason: str = ""


def compare_batches(case: Comparison) -> BatchComparison:
    """Compare the samples of each update of the first optimizer."""
    alone = [set(update["samples"]) for update
             in case.single if update["optimizer"] == 0]
    together = [set(rows(updates)) for updates in case.updates
                if updates[0]["optimizer"] == 0]
    if not case.alone:
        return BatchComparison(None, reason="it does not train as one")
    if not any(alone) or not any(together):
        return BatchComparison(None, reason="no samples were seen, nor "
                               "whether each rank reads its own")
    if all(mine == good for mine, good in zip(together, alone, strict=False)):
        return BatchComparison(1)
    first = set.union(*alone[:case.size])
    if alone[0] != together[0] == first and len(alone) >= case.size:
        return BatchComparison(case.size)
    same = next(i for i, (mine, good) in enumerate(zip(
        together, alone, strict=False)) if mine != good)
    reason = ("the samples are not those of one process: others, or the same "
              "padded or computed otherwise")
    if left_out(case.alone.seen[0]) != left_out(case.together.seen[0]):
        reason = "it leaves out other updates than with one process"
    if same == 0 or not together[0]:
        return BatchComparison(None, reason=reason)
    # the updates of all optimizers before the first of other samples
    numbers = [i for i, updates in enumerate(case.updates)
               if updates[0]["optimizer"] == 0]
    return BatchComparison(1, numbers[same],
                           f"from update {numbers[same]} on {reason}")


def left_out(seen: dict) -> list[int]:
    """Return how many updates came before each that a rank has left out.

    A GradScaler leaves one out, or the script throws its gradients away.
    """
    return sorted([*seen["skipped"], *seen["discarded"]])


def decisions(seen: dict) -> list[str]:
    """Return what a rank did with its gradients, time after time.

    "makes" for an update, else how it was left out.
    """
    made: list[str] = []
    for update in range(len(seen["updates"]) + 1):
        made += ["its GradScaler skips it"] * seen["skipped"].count(update)
        made += ["its gradients are thrown away"] * seen["discarded"].count(
            update)
        if update < len(seen["updates"]):
            made.append("makes")
    return made


def find_skips(trial: Trial) -> list[Finding]:
    """Return a failure where a rank makes an update that another leaves out.

    Where both have come to their last update, one of them has thrown more
    gradients away: it may have computed those for itself, as in a profile.
    """
    each = [decisions(seen) for seen in trial.seen if seen]
    ended = [bool(trial.asked("left", rank))
             for rank, seen in enumerate(trial.seen) if seen]
    for rank, mine in enumerate(each):
        if len(mine) != len(each[0]) and ended[rank] and ended[0]:
            continue
        for at, pair in enumerate(zip(each[0], mine, strict=False)):
            skips = [words != "makes" for words in pair]
            if skips[0] == skips[1]:
                continue
            who, other = (rank, 0) if skips[1] else (0, rank)
            update = mine[:at].count("makes")
            return [fail(
                f"rank {who} leaves out a step before its update {update} "
                f"({pair[skips[1]]}), and rank {other} makes it",
                "let all ranks decide alike: all_reduce what the decision is "
                "made from (a loss, a norm, found_inf)", ranks=[who],
                numbers={"update": update},
                learned={"apart": "the ranks leave out different updates"})]
    return []


def find_split(alone, together, ended):
    """The parameters that are others, or smaller, than with one process.

    A script that shards by hand has them. With them, those of which the ranks
    have other numbers: each may own a table of its own. A parameter that is
    whole in each rank's model is not sharded, whichever optimizer has it
    (ZeRO-1), nor if one process has no such parameter (`find_extra`). ended:
    whether the ranks have failed, perhaps before an optimizer that no rank
    came to.
    """
    good = all_shapes(alone.seen[0])
    known = set().union(*(seen["shapes"] for seen in together.seen),
                        () if ended else alone.seen[0]["shapes"])
    extra = find_extra(alone, together)
    split = {name for seen in together.seen for name in known - extra
             if all_shapes(seen).get(name) != good.get(name)}
    kinds = ["before"] if split else ["before", "gradients"] if any(
        "alltoall" in call["call"].replace("_", "")
        for call in together.calls(0)) else []  # an expert is of one rank
    for updates in zip(*(seen["updates"] for seen in together.seen),
                       strict=False):
        if kinds and all(update["before"] for update in updates):
            split |= set.intersection(*(put_together(updates, kind).apart
                                        for kind in kinds))
    return frozenset(split)


def all_shapes(seen: dict) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a rank's parameters, in an optimizer or not."""
    return {**seen["model"], **seen["shapes"]}


def find_extra(alone: Trial, together: Trial) -> set[str]:
    """Return the parameters that each rank has whole, and one process has not.

    Their ranks have all of one process's parameters beside them, and begin
    with the same values in them: else they may be parts of those.
    """
    shapes = [all_shapes(seen) for seen in together.seen]
    good = all_shapes(alone.seen[0])
    if any(own.get(name) != shape for own in shapes
           for name, shape in good.items()):
        return set()
    extra = {name for name in set.intersection(*map(set, shapes))
             if name not in good
             and len({own[name] for own in shapes}) == 1}
    firsts = zip(*(seen["updates"][:1] for seen in together.seen), strict=True)
    differing = {name for updates in firsts
                 for name in put_together(updates, "before").apart}
    return extra - differing


def makes_up(case):
    """Whether the ranks begin with one process's tensors or chunks of them."""
    known = set()
    counts = [count for count in range(1, case.size + 1)
              if case.size % count == 0]
    for name, tensor in first_weights(case.alone.seen[0]):
        shape = case.alone.seen[0]["shapes"][name]
        if tensor.numel() != torch.Size(shape).numel():
            return False  # it is too large to be kept whole
        for dim in range(len(shape)):
            for count in counts:
                known |= {as_bytes(part) for part in tensor.view(
                    shape).chunk(count, dim)}
    return all(as_bytes(tensor) in known for seen in case.together.seen
               for name, tensor in first_weights(seen) if name in case.split)


def first_weights(seen):
    """Pairs of a name and a whole tensor, as a rank has begun."""
    for update in seen["updates"]:
        if update["before"]:
            yield from whole_here(update["before"]).items()


def as_bytes(tensor):
    return tensor.contiguous().numpy(force=True).tobytes()


def gradients_of(updates, alone, what="gradients"):
    """(the ranks' together, a list of what each of `alone` has, their names).

    Both are vectors of all that they share, None and [] if that is nothing;
    the names come with their number of elements.
    """
    mine = put_together(updates, "gradients")
    each = [put_together([update], what).tensors for update in alone]
    keys = {key: tensor.numel() for key, tensor in mine.tensors.items()
            if all(key in one and tensor.shape == one[key].shape
                   for one in each)}
    if mine.apart or not keys:
        return None, [], keys
    return flat(mine.tensors, keys), [flat(one, keys) for one in each], keys


def flat(tensors, keys):
    return torch.cat([tensors[key].flatten() for key in keys])


def off(value, good):
    return ((value - good).norm() / good.norm().clamp(min=1e-30)).item()
