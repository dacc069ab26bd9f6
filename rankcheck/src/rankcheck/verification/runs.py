"""The runs that verify makes of a script, and which of them it compares."""

from __future__ import annotations

from dataclasses import replace

from rankcheck.engine.exits import ON_CPU
from rankcheck.engine.findings import Finding, fail, ok, warn
from rankcheck.system.errors import NotCompared
from rankcheck.verification.comparison import (
    Comparison,
    compare_batches,
    find_skips,
    find_split,
    how_it_ends,
    rows,
)

STOOD_IN = ("a CPU stood in for GPUs here, as it does not run without them: "
            "is it the same on GPUs?")

# Whether it is of several processes, and how a sentence about its end begins
RUNS = {
    "alone": (False, "as one process "),
    "together": (True, "as {size} processes "),
    # with frozen weights, and with as many updates as read the same samples:
    # where several processes read that many minibatches of one
    "still": (False, ""),
    # with other hashes of strings, or as it was: where one process reads other
    # samples, or begins with other weights
    "hashes": (False, ""), "again": (False, ""),
    # on two nodes, as far as the environment says it: where all else is right
    "nodes": (True, "as two nodes "),
    # where the script is resumed
    "saved": (True, "the run to be resumed: "),
    "resumed": (True, "resumed, "),
}


class Runs:
    """The runs of a script, each made when it is first asked for.

    start(size, steps, kind, flags, gpus): starts the script, a `Trial`;
    flags: further ones; gpus: whether a CPU stands in for them. device: "gpu"
    where there are GPUs. resume_flags: those that resume a run, if that is
    asked for, or None. waited: the `NotCompared` of a run without which the
    others were compared, or None.
    """

    def __init__(self, start, size, steps, device="cpu", resume_flags=None):
        self.start, self.size, self.steps = start, size, steps
        self.device, self.gpus, self.made = device, False, {}
        self.resume_flags, self.waited = resume_flags, None

    def __call__(self, name, flags=(), fewer=0):
        """(a `Trial`, the `Finding` of its end or None). fewer: of updates."""
        (several, words), key = RUNS[name], (name, self.gpus)
        if key not in self.made:
            size = self.size if several else 1
            steps = self.steps * (self.size if name == "still" else 1) - fewer
            kind = "" if name in ("alone", "together") else name
            try:
                trial = self.start(size, steps, kind, flags, self.gpus)
                ended = how_it_ends(trial, words.format(size=size))
            except NotCompared as error:
                if not kind and (name, False) not in self.made:
                    raise  # nothing is compared without it
                self.waited = error
                trial, ended = None, warn(str(error), "")
            self.made[key] = trial, ended
        return self.made[key]

    def of_first(self, name):
        """The same of the first run of a script, as it is or else with a CPU
        in a GPU's place, where it fails only as it is.
        """
        trial, ended = self(name)
        if (not ended or trial.gave_up or trial.killed
                or self.device == "gpu"):
            return trial, ended
        self.gpus = True
        other, fails = self(name)
        self.gpus = not fails
        if not fails:
            return other, None
        if not other or fails.text.replace("-gpus", "") == ended.text:
            return trial, ended  # it came no farther; {run} is another name
        advice = fails.advice.replace(ON_CPU, "")
        fails.hint = [advice + ";" * (advice[-1:] not in ("", "?"))
                      + " " * bool(advice) + STOOD_IN]
        return other, fails


def choose(runs):
    """(the `Comparison`, or None; findings; why all else is not seen, or "").

    What one process cannot do is left out; a CPU stands in for GPUs where the
    script does not run without them, or each process trains alone.
    """
    note = "it does not run without a GPU"
    alone, refused = runs.of_first("alone")
    if refused and (alone.gave_up or alone.killed):
        return None, [refused], "it has to train as one process first"
    # it may be refused by an assertion that there are several
    together, ended = (runs.of_first if refused else runs)("together")
    if refused and ended:
        return None, [refused, ended], (
            "it trains neither as one process nor as several")
    if not (refused or ended or runs.gpus or reduces(together)
            or runs.device == "gpu"):
        runs.gpus = True
        (one, fails), (several, fails_too) = runs("alone"), runs("together")
        runs.gpus = not fails and not fails_too and reduces(several)
        if runs.gpus:
            alone, together = one, several
            note = "without a GPU each process trains alone"
    if together.killed:
        return None, [ended], "not all ranks came to their end"
    skips = find_skips(together)
    uneven = skips or count_updates(together)
    if skips and any(seen and together.asked("left", rank)
                     for rank, seen in enumerate(together.seen)):
        ended = None  # it follows: a rank was done, and others waited for it
    if skips and all(seen and seen["updates"] for seen in together.seen):
        uneven = []  # asked later, beside all else
    if uneven or (ended and not all(
            seen and seen["updates"] for seen in together.seen)):
        return None, uneven + [ended] * bool(ended), (
            "the ranks have not made the same number of updates")
    findings = [ok(f"{note}: a CPU stands in for GPUs, on which "
                   'autocast("cuda") changes nothing')] * runs.gpus
    if refused:
        findings.append(warn(refused.text, "only what needs no run as one "
                             "process was looked at"))
    findings += [ended] * bool(ended)
    comparison = Comparison(runs, None if refused else alone, together)
    if not refused and not comparison.asked("FSDP1"):
        comparison = replace(comparison, split=find_split(
            alone, together, ended))
    return *compare(comparison, findings), ""


def compare(comparison: Comparison, findings: list[Finding]
            ) -> tuple[Comparison, list[Finding]]:
    """(the same with the run that it is compared with, findings)."""
    batches = compare_batches(comparison)
    columns = replace(comparison, columns=True)
    if batches.factor is None or batches.updates is not None:
        by_columns = compare_batches(columns)
        if by_columns.factor and by_columns.updates is None:
            comparison, batches = columns, by_columns
    if batches.factor == comparison.size:
        still, ended = comparison.runs("still")
        more = {"apart": "the third run failed"} if ended else {"still": still}
        return replace(comparison, **more), findings
    reason = batches.reason
    if reason and any(rows(comparison.single)):
        again, more = reads_again(comparison)
        reason, findings = again or reason, findings + more
    if batches.factor is None:
        return replace(comparison, apart=reason), findings
    return replace(comparison, compared=batches.updates,
                   later=reason), findings


def reads_again(comparison):
    """(why one process cannot be compared with, or ""; findings).

    Does what it reads depend on Python's hashes of strings? Each rank has its
    own, and so has each start.
    """
    def reads_the_same(name):
        trial, ended = comparison.runs(name)
        return None if ended else [
            update["samples"] for update in comparison.view(trial)[0]] == [
            update["samples"] for update in comparison.single]

    if reads_the_same("hashes") is not False:
        return "", []
    again = reads_the_same("again")
    if again is False:
        return ("one process reads other samples each time that it is "
                "started: a seed makes them the same"), []
    return "", [warn(
        "what the model is given depends on Python's hashes of strings, which "
        "differ from rank to rank and from start to start", "a set has "
        "another order each time: sorted(set(words))")] * bool(again)


def reduces(trial):
    """Whether a rank sends others anything of which they take a mean."""
    return any(one["reduced"] or one.get("within") for seen in filter(
        None, trial.seen) for one in seen["updates"])


def count_updates(trial):
    """A finding in a list if the ranks have not made as many updates."""
    if any(seen and trial.asked("join", rank)
           for rank, seen in enumerate(trial.seen)):
        return []  # they need not
    made = [trial.updates(rank) for rank in range(len(trial.seen))]
    for rank, count in enumerate(made):
        if abs(count - made[0]) > 1 or min(made[0], count) == 0 < max(made):
            return [fail(f"rank {rank} makes {count} updates, and rank 0 "
                         f"{made[0]}", "every rank calls optimizer.step() "
                         "after every minibatch", ranks=[rank])]
    return []
