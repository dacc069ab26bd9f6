"""The runs of a script that is verified, and what is read out of them."""

import signal
from dataclasses import dataclass

import torch

from rankcheck.exits import explain
from rankcheck.findings import fail
from rankcheck.tensors import assemble, whole_here, without

LOSS, GRADIENT, UPDATE = 1e-4, 1e-3, 0.05  # relative
LOW = 30  # times that in bf16 or fp16
AGAIN = ("verify runs it several times: {run} in a flag is another name each "
         "time, as in --run-dir /tmp/run-{run}")
HINTS = (
    ("finished reduction in the prior iteration", "some parameters get no "
     "gradient, for which DDP waits: remove them, or "
     "find_unused_parameters=True"),
    ("exists", AGAIN),
    ("multiprocessing.spawn", "verify starts the processes, as torchrun does: "
     "read RANK and WORLD_SIZE of the environment, without mp.spawn"),
)


@dataclass
class Case:
    """The script's runs. alone: as one process, or None where it does not
    train as one; together: as `size`.

    still: as one process that updates nothing, if that is what `together`
    has to be compared with. apart: why it is compared with neither, or "".
    """

    alone: object
    together: object
    size: int
    still: object = None
    apart: str = ""
    other_weights: bool = False  # than one process has before its updates
    try_out: object = None  # runs the script: see `verify`
    start: object = None  # function of a kind: one process once more
    averaged: str = ""  # how often weights are, if gradients are not
    weights: tuple = ()  # of the minibatches that `still` has read
    parts: tuple = ()  # how unequal parts are weighed, a text and a hint
    split: frozenset = frozenset()  # parameters of which ranks hold parts

    @property
    def single(self):
        """What one process has recorded of its updates, [] if it has none."""
        return self.alone.seen[0]["updates"] if self.alone else []

    @property
    def longest(self):
        """The same of as many updates as have the same samples."""
        return self.still.seen[0]["updates"] if self.still else self.single

    @property
    def updates(self):
        """Of each update that all ranks have made, what each recorded."""
        return list(zip(*(seen["updates"] for seen in self.together.seen),
                        strict=False))

    @property
    def loosely(self):
        """How much larger an error may be in low precision."""
        return LOW if any(seen["low"] for seen in self.together.seen) else 1

    @property
    def by_step(self):
        """Whether the optimizer reduces the gradients, when it is called."""
        return all(update.get("within", 0) > 0.5 * update["elements"]
                   for updates in self.updates for update in updates)

    def name(self, key):
        return self.together.seen[0]["names"].get(key, key)

    def asked(self, what):
        return [value for rank in range(self.size)
                for value in self.together.asked(what, rank)]


def stopped(trial):
    """Whether not all ranks came to an end of their own."""
    return trial.gave_up or killed(trial)


def killed(trial):
    return any(rank.status == -signal.SIGKILL for rank in trial.ranks)


def how_it_ends(trial, size):
    """A finding where it has failed or made no update, else None.

    size: of how many processes it speaks, or in words.
    """
    words = {1: "as one process "}.get(size, f"as {size} processes " if (
        isinstance(size, int)) else size)
    finding = explain(trial)
    if finding:
        finding.sentence.insert(0, words)
        said = "".join(rank.err for rank in trial.ranks)
        finding.hint = next(([hint] for word, hint in HINTS if word in said),
                            finding.hint)
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


def read(updates, kind="samples"):
    """The distinct samples that each rank has read for an update."""
    return [set(update[kind]) for update in updates]


def take(kind, *trials):
    """Take rows for samples, or columns if the batch is the second dimension.
    """
    for update in (update for trial in trials for seen in trial.seen
                   for update in seen["updates"]):
        update["samples"] = update[kind]


def minibatch(case, kind="rows"):
    """How many times as many samples an update has as with one process.

    1 and the number of processes only where these are the samples that one
    process reads, in one or that many updates; else a text, why not.
    """
    alone = [set(update[kind]) for update
             in case.single if update["optimizer"] == 0]
    together = [set.union(*read(updates, kind)) for updates in case.updates
                if updates[0]["optimizer"] == 0]
    if not case.alone:
        return "it does not train as one"
    if not any(alone) or not any(together):
        return "no samples were seen, nor whether each rank reads its own"
    if all(mine == good for mine, good in zip(together, alone, strict=False)):
        return 1
    first = set.union(*alone[:case.size])
    if together[0] == first and len(alone) >= case.size:
        return case.size
    return "after the first update " * (together[0] == alone[0]) + (
        "one process reads other samples, or pads them to another length")


def find_split(case):
    """The parameters that are others, or smaller, than with one process.

    A script that shards by hand has them. They are left out of all states:
    nothing says which part of a tensor a rank has.
    """
    if not case.alone or case.asked("FSDP1"):
        return
    alone = case.alone.seen[0]
    case.split = frozenset(
        key for seen in case.together.seen
        if list(seen["shapes"].values()) != list(alone["shapes"].values())
        for key in seen["shapes"].keys() | alone["shapes"].keys()
        if any(seen[what].get(key) != alone[what].get(key)
               for what in ("shapes", "names")))
    for trial in (case.alone, case.together) if case.split else ():
        for update in (update for seen in trial.seen
                       for update in seen["updates"]):
            for what, state in update.items():
                if isinstance(state, dict) and "plain" in state:
                    update[what] = without(state, case.split)


def splits_matrices(case):
    """Whether parameters are sharded, and not by fully_shard alone."""
    if case.split:
        return True
    sharded = case.updates[0][0]["gradients"]["sharded"].values()
    return any(sum("Shard" in kind for kind, _ in entry["placements"]) > 1
               or not case.asked("fully_shard") for entry in sharded)


def named(case, keys):
    """Parameters in words, in the optimizer's order."""
    keys = sorted(keys, key=lambda key: [int(n) for n in key.split(".")])
    return ", ".join(case.name(key) for key in keys[:3]) + (
        f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def gradients_of(updates, alone, what="gradients"):
    """(the ranks' together, a list of what each of `alone` has, their names).

    Both are vectors of all that they share, None and [] if that is nothing;
    the names come with their number of elements.
    """
    mine = assemble([update["gradients"] for update in updates])
    each = [assemble([update[what]]).tensors if what == "gradients" else
            whole_here(update[what]) for update in alone]
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
