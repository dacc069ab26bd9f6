"""What is asked about a script, causes before effects.

A question is a function of a `Comparison`; it gives findings, with what later
questions have to know. It knows nothing of the script but what
rankcheck/probes/training.py has recorded. Its place in the
order is its place in the files, which are asked in the order of the imports.
"""

from dataclasses import replace

from rankcheck.findings import STRANGE, warn
from rankcheck.verification.comparison import QUESTIONS

from rankcheck.verification.questions import (  # isort: skip
    begin, samples, together, single, left, resume)
from rankcheck.verification.runs import choose

__all__ = ["QUESTIONS", "begin", "left", "resume", "samples", "single",
           "together", "verify"]


def verify(runs):
    """Findings, and what was not seen: a list of texts. runs: a `Runs`."""
    comparison, findings, why = choose(runs)
    if why:
        return findings, [f"all else: {why}"]
    for question in QUESTIONS:
        for finding in ask(question, comparison):
            findings.append(finding)
            comparison = replace(comparison, **finding.learned)
    return by_update(findings), not_seen(comparison)


def by_update(findings):
    """The same, those that name an update in the order of the updates."""
    named = iter(sorted(
        (finding for finding in findings if "update" in finding.numbers),
        key=lambda finding: finding.numbers["update"]))
    return [next(named) if "update" in finding.numbers else finding
            for finding in findings]


def ask(question, case):
    try:
        findings = [*question.answer(case)] if question.where(case) else []
    except STRANGE as error:
        findings = [warn(f"verify cannot tell whether {question.title}: "
                         f"{type(error).__name__}: {error}", "the script does "
                         "this in a way that verify does not know")]
    for finding in findings:
        finding.question = question.title
    return findings


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
        (case.splits_matrices, "whether gradients are reduced: with tensor "
         "parallelism, so are activations"),
        (case.by_step, "the gradients that the optimizer has reduced, only "
         "the weights that it makes of them"),
        (case.asked("FSDP1"), "gradients and weights: "
         "FullyShardedDataParallel keeps them in its own way; of fully_shard "
         "they are seen"),
        (any(seen["dropout"] for seen in case.together.seen),
         "dropout: it was switched off, to compare"),
        (case.apart, "whether losses, gradients and weights are those of one "
         f"process: {case.apart}"),
        (case.still and not case.apart, "whether the weights are those of one "
         "process: the minibatch is not; gradients and losses were compared "
         f"with the mean of {case.size} minibatches"),
        (first[0]["local"]["flat"].numel() == 0,
         "what each rank alone has computed of the gradients"),
        (not any(update["losses"] for update in first),
         "losses: there was no loss.backward()")) if unseen]
