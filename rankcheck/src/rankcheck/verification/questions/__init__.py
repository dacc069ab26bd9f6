"""The questions about a script, causes before effects.

A question is a function of a `Comparison`; it gives findings, with what later
questions have to know. It knows nothing of the script but what
rankcheck/src/rankcheck/record/training.py has recorded. Its place in the
order is its place in the files, which are asked in the order of the imports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankcheck.engine.findings import SAME_SAMPLES, Finding, Proof
from rankcheck.engine.questions import ask_all
from rankcheck.verification.choice import UNSEEDED, choose_runs
from rankcheck.verification.comparison import QUESTIONS, Comparison

from rankcheck.verification.questions import (  # isort: skip
    initial_state, samples, optimizers, synchronization, single_process,
    side_effects, nodes, resume)
from rankcheck.verification.questions.step_pairs import find_comparable
from rankcheck.verification.runs import Runs

__all__ = ["QUESTIONS", "ask_questions", "initial_state", "nodes",
           "optimizers", "resume", "samples", "side_effects",
           "single_process", "synchronization"]


# What has to be shown for status 0, and what is said where it was not.
REQUIRED = {
    Proof.REDUCED: "gradients were not seen to be reduced",
    Proof.EQUAL: "gradients were not seen to be equal on all ranks",
    Proof.SINGLE: "nothing was compared with a single process"}


@dataclass(frozen=True)
class Verification:
    """What is known of a script once all questions have been asked.

    Attributes:
        findings: in the order of the questions, causes before effects.
        not_checked: sentences; what they say nothing about.
        uncompared: sentences; which of `REQUIRED` was not shown.
        internal_errors: a line for each question that raised an exception.
        comparable_by: see `Report`.
    """

    findings: list[Finding]
    not_checked: list[str]
    uncompared: list[str]
    internal_errors: list[str]
    comparable_by: str


def ask_questions(runs: Runs) -> Verification:
    """Make the runs that have to be compared, and ask all questions."""
    choice = choose_runs(runs)
    comparison, findings = choice.comparison, choice.findings
    if comparison is None:
        return Verification(findings, [f"everything else: {choice.reason}"],
                            [choice.reason], [], SAME_SAMPLES)
    for finding in findings:
        comparison = learn(comparison, finding)
    results = ask_all(QUESTIONS, comparison, learn)
    findings = findings + results.findings
    return Verification(sort_by_step(findings), not_seen(results.subject),
                        missing(findings, results.subject),
                        results.internal_errors,
                        find_remedy(findings, results.subject))


def learn(comparison: Comparison, finding: Finding) -> Comparison:
    """Return the comparison with what a finding tells later questions."""
    failed = comparison.failed or finding.verdict == "FAIL"
    return replace(comparison, failed=failed, **finding.learned)


def missing(findings: list[Finding], case: Comparison) -> list[str]:
    """Say what status 0 requires and no finding shows."""
    shown: set[Proof] = set()
    for finding in findings:
        shown |= finding.proves
    lacks = [requirement for proof, requirement in REQUIRED.items()
             if proof not in shown]
    if lacks and Proof.SINGLE not in shown and case.skip_reason:
        lacks[-1] += f" ({case.skip_reason})"
    return lacks


def find_remedy(findings: list[Finding], case: Comparison) -> str:
    """Return what would let more be compared; "" if nothing is known."""
    if any(Proof.SINGLE in finding.proves for finding in findings):
        return ""
    if case.hand_sharded:
        return ("let the ranks begin with parts of the single-process "
                "weights, so that their losses can be compared")
    return SAME_SAMPLES


def sort_by_step(findings: list[Finding]) -> list[Finding]:
    """Return the same, those that name a step in the order of the steps.

    All others keep their places.
    """
    named = sorted((finding for finding in findings
                    if "step" in finding.numbers),
                   key=lambda finding: finding.numbers["step"])
    following = iter(named)
    ordered = []
    for finding in findings:
        if "step" in finding.numbers:
            ordered.append(next(following))
        else:
            ordered.append(finding)
    return ordered


def may_be(case: Comparison) -> str:
    """Say which fault the reason why nothing is compared may be."""
    if case.skip_reason != UNSEEDED:
        return ""
    return ("; if each rank shuffles one list with such a generator and takes "
            "its part, samples are read twice or never")


def not_seen(case: Comparison) -> list[str]:
    """Say what the answers say nothing about."""
    return [after_last_step(case), about_devices(case),
            "whether targets belong to their samples: only the model's "
            "inputs are compared",
            *unseen_of_ranks(case), *unseen_of_single(case)]


def after_last_step(case: Comparison) -> str:
    """Say which step was the last that was watched, and what comes then."""
    made = sum(records[0]["optimizer"] == 0 for records in case.steps)
    text = f"anything after step {made - 1}"
    if made < case.runs.steps:
        who = "the script"
        if case.facts("join"):
            who = "a rank"
        return f"{text}, when {who} ended"
    text += ": the end of an epoch, validation"
    if case.runs.resume_flags is None:
        text += ", checkpoints, resuming"
    return text


def about_devices(case: Comparison) -> str:
    """Say which devices and which compilers were left out."""
    if case.runs.device == "cpu":
        return ("GPUs, NCCL and torch.compile: everything ran on the CPU, "
                "with gloo, uncompiled")
    return "torch.compile: everything ran uncompiled"


def unseen_of_ranks(case: Comparison) -> list[str]:
    """Say what was not seen of the ranks themselves."""
    texts = []
    why_not = nodes.why_not(case)
    if why_not:
        texts.append(f"several nodes: {why_not}")
    if case.splits_matrices and not has_compared_parts(case):
        texts.append("whether gradients are reduced: with tensor "
                     "parallelism, activations are reduced as well")
    if nodes.all_on_the_first(case):
        texts.append("whether each rank has its own GPU: all use GPU 0, which "
                     "is right if each rank sees only one")
    if case.reduces_in_step:
        texts.append("gradients that the optimizer reduces: only the "
                     "resulting weights are seen")
    if case.facts("FSDP1"):
        texts.append("gradients and weights: FullyShardedDataParallel hides "
                     "them (fully_shard does not)")
    return texts


def has_compared_parts(case: Comparison) -> bool:
    """Return whether all hand-sharded parameters are compared."""
    comparable = find_comparable(case)
    return bool(comparable and not case.averaged and not
                single_process.find_uncompared_parts(case, comparable))


def unseen_of_parts(case: Comparison) -> list[str]:
    """Say which hand-sharded parameters are not compared."""
    names = single_process.find_uncompared_parts(case, find_comparable(case))
    if not names:
        return []
    return ["whether the gradients and weights of hand-sharded parameters "
            f"match the single-process run: {case.named(names)}"]


def unseen_of_single(case: Comparison) -> list[str]:
    """Say what was not compared with one process, and with each rank."""
    texts = []
    of_one = ("whether losses, gradients and weights match the "
              "single-process run")
    has_copies = any(record.copies
                     for record in case.multi_process_run.all_records)
    if (case.frozen_run or case.skip_reason or case.later_reason
            or not has_copies):
        texts.append("averaged weights (EMA): they are compared only if they "
                     "are in a module of the model's structure, and the "
                     "global batch size equals the single-process run's")
    if any(record.dropout for record in case.multi_process_run.all_records):
        texts.append("dropout: switched off for the comparison")
    if case.skip_reason:
        text = f"{of_one}: {case.skip_reason}{may_be(case)}"
        if find_comparable(case):
            texts += unseen_of_parts(case)
        else:
            texts.append(text)
    if case.later_reason:
        texts.append(f"{of_one}: {case.later_reason}")
    if case.frozen_run and not case.skip_reason:
        texts.append("whether weights match the single-process run: the "
                     "global batch size differs; gradients and losses were "
                     f"compared with the mean of {case.size} minibatches")
    first = case.steps[0]
    if first[0]["local"]["flat"].numel() == 0:
        texts.append("each rank's own gradients")
    if not any(step["losses"] for step in first):
        texts.append("losses: loss.backward() was not seen")
    return texts
