"""Decides which runs of a script are compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rankcheck.engine.findings import Finding, ok, warn
from rankcheck.engine.run_record import RunRecord
from rankcheck.verification.comparison import (
    Comparison,
    compare_batches,
    find_hand_sharded,
    find_skips,
    samples_of,
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


def choose_runs(runs: Runs) -> Choice:
    """Make the runs of one and of several processes, and compare them.

    What one process cannot do is left out; a CPU stands in for GPUs where the
    script does not run without them, or each process trains alone.
    """
    note = "the script does not run without a GPU"
    single_run, refused = runs.of_first("single")
    if refused and (single_run.gave_up or single_run.killed):
        return Choice(None, [refused],
                      "the script must train with 1 process first")
    if refused:  # by an assertion that there are several, perhaps
        multi_run, ended = runs.of_first("multi")
    else:
        multi_run, ended = runs("multi")
    if refused and ended:
        return Choice(None, [refused, ended], "the script trains "
                      "neither with 1 process nor with several")
    if not (refused or ended or runs.gpus or reduces(multi_run)
            or runs.device == "gpu"):
        runs.gpus = True
        one, fails = runs("single")
        several, fails_too = runs("multi")
        runs.gpus = not fails and not fails_too and reduces(several)
        if runs.gpus:
            single_run, multi_run = one, several
            note = "without a GPU each process trains by itself"
    if ended and multi_run.killed:
        return Choice(None, [ended], "not all ranks finished")
    stepped = all(record and record.steps for record in multi_run.records)
    skips = find_skips(multi_run)
    uneven = skips or compare_step_counts(multi_run)
    if skips and any(record and multi_run.facts("left", rank)
                     for rank, record in enumerate(multi_run.records)):
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
    comparison = Comparison(
        runs, None if refused else single_run, multi_run)
    if not refused and not comparison.facts("FSDP1"):
        comparison = replace(comparison, hand_sharded=find_hand_sharded(
            single_run, multi_run, ended))
    return choose_single_run(comparison, findings)


def choose_single_run(comparison: Comparison,
                      findings: list[Finding]) -> Choice:
    """Choose the run of one process by the samples that each step has."""
    batches = compare_batches(comparison)
    columns = replace(comparison, columns=True)
    if batches.factor is None or batches.steps is not None:
        by_columns = compare_batches(columns)
        if by_columns.factor and by_columns.steps is None:
            comparison, batches = columns, by_columns
    if batches.factor == comparison.size:
        frozen_run, ended = comparison.runs("frozen")
        if ended:
            comparison = replace(
                comparison, skip_reason="the run with frozen weights failed")
        else:
            comparison = replace(comparison, frozen_run=frozen_run)
        return Choice(comparison, findings)
    reason = batches.reason
    if reason and any(samples_of(comparison.single_steps)):
        repetition = reads_again(comparison)
        reason = repetition.reason or reason
        findings = findings + repetition.findings
    if batches.factor is None:
        return Choice(replace(comparison, skip_reason=reason), findings)
    comparison = replace(comparison, compared_steps=batches.steps,
                         later_reason=reason)
    return Choice(comparison, findings)


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
            record["samples"] for record in comparison.single_steps]

    if reads_the_same("hashes") is not False:
        return Repetition()
    again = reads_the_same("repeated")
    if again is None:
        return Repetition()
    if not again:
        return Repetition(UNSEEDED)
    return Repetition(findings=[warn(
        "the model's input depends on Python's string hashes, which differ "
        "between ranks and between runs",
        "sort sets before their order matters: sorted(set(words))",
        kind="string-hashes")])
