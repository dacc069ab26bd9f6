"""Decides which runs of a script are compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rankcheck.engine.findings import Finding, ok, warn
from rankcheck.engine.run_record import RunRecord
from rankcheck.verification.comparison import (
    Comparison,
    compare_batches,
    find_skips,
    find_split,
    rows,
)
from rankcheck.verification.runs import Runs, compare_step_counts, reduces

UNSEEDED = ("the single-process run reads different samples each time: "
            "set a seed")


@dataclass(frozen=True)
class Choice:
    """What is compared, and what was found on the way there.

    Attributes:
        comparison: of the runs; None if no questions can be asked.
        findings: about the runs themselves.
        reason: why no questions can be asked, or "".
    """

    comparison: Comparison | None
    findings: list[Finding]
    reason: str = ""


def choose(runs: Runs) -> Choice:
    """Make the runs of one and of several processes, and compare them.

    What one process cannot do is left out; a CPU stands in for GPUs where the
    script does not run without them, or each process trains alone.
    """
    note = "the script does not run without a GPU"
    alone, refused = runs.of_first("alone")
    if refused and (alone.gave_up or alone.killed):
        return Choice(None, [refused],
                      "the script must train with 1 process first")
    if refused:  # by an assertion that there are several, perhaps
        together, ended = runs.of_first("together")
    else:
        together, ended = runs("together")
    if refused and ended:
        return Choice(None, [refused, ended], "the script trains "
                      "neither with 1 process nor with several")
    if not (refused or ended or runs.gpus or reduces(together)
            or runs.device == "gpu"):
        runs.gpus = True
        one, fails = runs("alone")
        several, fails_too = runs("together")
        runs.gpus = not fails and not fails_too and reduces(several)
        if runs.gpus:
            alone, together = one, several
            note = "without a GPU each process trains by itself"
    if ended and together.killed:
        return Choice(None, [ended], "not all ranks finished")
    stepped = all(record and record.steps for record in together.records)
    skips = find_skips(together)
    uneven = skips or compare_step_counts(together)
    if skips and any(record and together.asked("left", rank)
                     for rank, record in enumerate(together.records)):
        ended = None  # it follows: a rank was done, and others waited for it
    if skips and stepped:
        uneven = []  # asked later, beside all else
    if uneven or (ended and not stepped):
        if ended:
            uneven = [*uneven, ended]
        return Choice(None, uneven, "the ranks did not make the same number "
                      "of steps")
    findings = []
    if runs.gpus:
        findings.append(ok(f"{note}: GPUs are simulated on the CPU, where "
                           'autocast("cuda") has no effect',
                           kind="cpu-stand-in"))
    if refused:
        findings.append(warn(refused.text, "make it run with 1 process: "
                             "only what needs no such run was checked",
                             kind="single-process-failed"))
    if ended:
        findings.append(ended)
    comparison = Comparison(runs, None if refused else alone, together)
    if not refused and not comparison.asked("FSDP1"):
        comparison = replace(comparison, split=find_split(
            alone, together, ended))
    return compare(comparison, findings)


def compare(comparison: Comparison, findings: list[Finding]) -> Choice:
    """Choose the run of one process by the samples that each step has."""
    batches = compare_batches(comparison)
    columns = replace(comparison, columns=True)
    if batches.factor is None or batches.steps is not None:
        by_columns = compare_batches(columns)
        if by_columns.factor and by_columns.steps is None:
            comparison, batches = columns, by_columns
    if batches.factor == comparison.size:
        still, ended = comparison.runs("still")
        if ended:
            comparison = replace(
                comparison, apart="the run with frozen weights failed")
        else:
            comparison = replace(comparison, still=still)
        return Choice(comparison, findings)
    reason = batches.reason
    if reason and any(rows(comparison.single)):
        repetition = reads_again(comparison)
        reason = repetition.reason or reason
        findings = findings + repetition.findings
    if batches.factor is None:
        return Choice(replace(comparison, apart=reason), findings)
    return Choice(replace(comparison, compared=batches.steps, later=reason),
                  findings)


@dataclass(frozen=True)
class Repetition:
    """Whether one process reads the same samples when it is started again.

    Attributes:
        reason: why it cannot be compared with, or "".
    """

    reason: str = ""
    findings: list[Finding] = field(default_factory=list)


def reads_again(comparison: Comparison) -> Repetition:
    """Find whether what one process reads depends on Python's hashes.

    Those of strings: each rank has its own, and so has each start.
    """
    def samples(run: RunRecord) -> list[list[str]]:
        return [record["samples"] for record in comparison.view(run)[0]]

    def reads_the_same(name: str) -> bool | None:
        """Return None if that was not seen."""
        run, ended = comparison.runs(name)
        if ended:
            return None
        return samples(run) == [
            record["samples"] for record in comparison.single]

    if reads_the_same("hashes") is not False:
        return Repetition()
    again = reads_the_same("again")
    if again is None:
        return Repetition()
    if not again:
        return Repetition(UNSEEDED)
    return Repetition(findings=[warn(
        "the model's input depends on Python's string hashes, which differ "
        "between ranks and between runs",
        "sort sets before their order matters: sorted(set(words))",
        kind="string-hashes")])
