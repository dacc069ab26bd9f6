"""What is asked about a script, causes before effects.

A question is a function of a `Comparison`; it gives findings, with what later
questions have to know. It knows nothing of the script but what
rankcheck/src/rankcheck/record/training.py has recorded. Its place in the
order is its place in the files, which are asked in the order of the imports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankcheck.engine.findings import Finding, Proof, Question
from rankcheck.system.errors import describe_error
from rankcheck.verification.choice import choose
from rankcheck.verification.comparison import QUESTIONS, Ask, Comparison

from rankcheck.verification.questions import (  # isort: skip
    begin, samples, optimizers, together, single, left, nodes, resume)
from rankcheck.verification.runs import Runs

__all__ = ["QUESTIONS", "begin", "left", "nodes", "optimizers", "resume",
           "samples", "single", "together", "verify"]


# What has to be shown for status 0, and what is said where it was not.
REQUIRED = {
    Proof.REDUCED: "gradients were not seen to be reduced",
    Proof.EQUAL: "gradients were not seen to be equal on all ranks",
    Proof.SINGLE: "nothing was compared with a single process"}


@dataclass(frozen=True)
class Answers:
    """What the questions have found.

    Attributes:
        findings: in the order of the questions, causes before effects.
        not_checked: sentences; what they say nothing about.
        uncompared: sentences; which of `REQUIRED` was not shown.
        internal_errors: a line for each question that raised an exception.
    """

    findings: list[Finding]
    not_checked: list[str]
    uncompared: list[str]
    internal_errors: list[str]


def verify(runs: Runs) -> Answers:
    """Ask all questions about a script's runs."""
    choice = choose(runs)
    comparison, findings = choice.comparison, choice.findings
    if comparison is None:
        return Answers(findings, [f"all else: {choice.reason}"],
                       [choice.reason], [])
    errors: list[str] = []
    for question in QUESTIONS:
        comparison = replace(comparison, failed=any(
            finding.verdict == "FAIL" for finding in findings))
        try:
            answers = ask(question, comparison)
        except Exception as error:  # of ours, or of a torch we do not know
            errors.append(f"{question.title}: {describe_error(error)}")
            continue
        for finding in answers:
            findings.append(finding)
            comparison = replace(comparison, **finding.learned)
    return Answers(by_update(findings), not_seen(comparison),
                   missing(findings, comparison), errors)


def missing(findings: list[Finding], case: Comparison) -> list[str]:
    """Say what status 0 requires and no finding shows."""
    shown = set().union(*(finding.proves for finding in findings))
    lacks = [words for proof, words in REQUIRED.items() if proof not in shown]
    if lacks and Proof.SINGLE not in shown and case.apart:
        lacks[-1] += f" ({case.apart})"
    return lacks


def by_update(findings):
    """The same, those that name an update in the order of the updates."""
    named = iter(sorted(
        (finding for finding in findings if "update" in finding.numbers),
        key=lambda finding: finding.numbers["update"]))
    return [next(named) if "update" in finding.numbers else finding
            for finding in findings]


def ask(question: Question[Comparison, Ask], case: Comparison
        ) -> list[Finding]:
    """Return a question's findings, each with the question's title."""
    if not question.where(case):
        return []
    findings = [*question.answer(case)]
    for finding in findings:
        finding.question = question.title
    return findings


def may_be(case: Comparison) -> str:
    """Say which fault the reason why nothing is compared may be."""
    if not case.apart.startswith("one process reads other samples each"):
        return ""
    return ("; if each rank shuffles one list by such a generator and takes "
            "its part, samples are read twice or never")


def not_seen(case):
    made = sum(updates[0]["optimizer"] == 0 for updates in case.updates)
    first = case.updates[0]
    texts = [f"anything after update {made - 1}" + (
        f", with which {'a rank' if case.asked('join') else 'the script'} "
        "ended" if made < case.runs.steps else
        ": the end of an epoch, validation"
        + ", checkpoints, resuming" * (case.runs.resume_flags is None)),
             "GPUs and NCCL; compiled code: all was run on the CPU, with gloo "
             "and without torch.compile" if case.runs.device == "cpu" else
             "compiled code: all was run without torch.compile",
             "whether the targets belong to the samples: a sample is a row of "
             "what the model is given"]
    return texts + [text for unseen, text in (
        (nodes.why_not(case), f"several nodes: {nodes.why_not(case)}"),
        (case.splits_matrices, "whether gradients are reduced: with tensor "
         "parallelism, so are activations"),
        (nodes.all_on_the_first(case), "whether each rank has a GPU of its "
         "own: all take number 0, which is right if each sees one alone"),
        (case.by_step, "the gradients that the optimizer has reduced, only "
         "the weights that it makes of them"),
        (case.asked("FSDP1"), "gradients and weights: "
         "FullyShardedDataParallel keeps them in its own way; of fully_shard "
         "they are seen"),
        (case.still or case.apart or case.later or not any(
            seen["copies"] for seen in case.together.seen),
         "averages of the weights (EMA), unless they are modules like the "
         "model, and the minibatch is that of one process"),
        (any(seen["dropout"] for seen in case.together.seen),
         "dropout: it was switched off, to compare"),
        (case.apart, "whether losses, gradients and weights are those of one "
         f"process: {case.apart}{may_be(case)}"),
        (case.later, "whether losses, gradients and weights are those of one "
         f"process: {case.later}"),
        (case.still and not case.apart, "whether the weights are those of one "
         "process: the minibatch is not; gradients and losses were compared "
         f"with the mean of {case.size} minibatches"),
        (first[0]["local"]["flat"].numel() == 0,
         "what each rank alone has computed of the gradients"),
        (not any(update["losses"] for update in first),
         "losses: there was no loss.backward()")) if unseen]
