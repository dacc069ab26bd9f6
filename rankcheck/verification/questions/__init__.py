"""What is asked about a script, causes before effects.

A question is a function of a `Case`; it gives findings. It knows nothing of
the script but what rankcheck/probes/training.py has recorded. Its place in the
order is its place in the files, which are asked in the order of the imports.
"""

import functools

from rankcheck.findings import STRANGE, fail, ok, warn
from rankcheck.verification.comparison import (
    Case,
    find_split,
    how_it_ends,
    killed,
    minibatch,
    rows,
    splits_matrices,
    stopped,
    take,
)

# isort: off
from rankcheck.verification.questions.question import QUESTIONS
from rankcheck.verification.questions import begin
from rankcheck.verification.questions import samples
from rankcheck.verification.questions import together
from rankcheck.verification.questions import single
from rankcheck.verification.questions import left
# isort: on

__all__ = ["QUESTIONS", "begin", "left", "samples", "single", "together",
           "verify"]

STOOD_IN = ("a CPU stood in for GPUs here, as it does not run without them: "
            "is it the same on GPUs?")


def verify(try_out, size, steps, more=(), device="cpu"):
    """Findings, and what was not seen: a list of texts.

    try_out(size, steps, kind, more flags) runs the script: a `Trial`.
    more: questions about a resume. device: on which it runs; a CPU may stand
    in for GPUs.
    """
    alone, refused, on_cpu = starts(try_out, 1, steps, device)
    together, ended, note = None, refused, "it does not run without a GPU"
    if not refused:
        together = try_out(size, steps, gpus=on_cpu)
        ended = how_it_ends(together, size)
        if device == "cpu" and not (  # on GPUs perhaps
                ended or on_cpu or reduces(together)):
            others = [try_out(count, steps, gpus=True) for count in (1, size)]
            if reduces(others[1]) and not any(
                    map(how_it_ends, others, (1, size))):
                alone, together, on_cpu = *others, True
                note = "without a GPU each process trains alone"
        try_out = functools.partial(try_out, gpus=on_cpu)
    elif not stopped(alone):  # as with an assertion that there are several
        together, ended, on_cpu = starts(try_out, size, steps, device)
        try_out = functools.partial(try_out, gpus=on_cpu)
    if refused and ended:
        return [refused], ["all else: it has to train as one process first"]
    case = Case(None if refused else alone, together, size, try_out=try_out,
                start=functools.cache(lambda kind: try_out(1, steps, kind)))
    if killed(together):
        return [ended], ["all else: not all ranks came to their end"]
    findings = counts(case)
    if findings or (ended and not all(
            seen and seen["updates"] for seen in case.together.seen)):
        return findings or [ended], ["all else: the ranks have not made the "
                                     "same number of updates"]
    findings = [ended] if ended else []
    if refused:
        findings = [warn(refused.text, "only what needs no run as one process "
                         "was looked at")]
    if on_cpu:
        findings.insert(0, ok(f"{note}: a CPU stands in for GPUs, on which "
                              'autocast("cuda") changes nothing'))
    find_split(case)
    kept, columns = minibatch(case), minibatch(case, "columns")
    kind = "rows"
    if isinstance(kept, str) and isinstance(columns, int):
        kept, kind = columns, "columns"
    take(kind, *filter(None, (case.alone, case.together)))
    if kept == size:
        case.still = try_out(1, size * steps, "still")
        if how_it_ends(case.still, ""):
            case.still, kept = None, "the third run failed"
        else:
            take(kind, case.still)
    case.apart = kept if isinstance(kept, str) else ""
    if case.apart and any(rows(case.single)):
        findings += other_starts(case, kind)
    for one in (*QUESTIONS, *more):
        findings += ask(one, case)
    return findings, not_seen(case, steps, more, device)


def ask(question, case):
    try:
        findings = question.answer(case) if question.where(case) else []
    except STRANGE as error:
        findings = [warn(f"verify cannot tell whether {question.title}: "
                         f"{type(error).__name__}: {error}", "the script does "
                         "this in a way that verify does not know")]
    for finding in findings:
        finding.question = question.title
    return findings


def starts(try_out, size, steps, device):
    """Run it as it is and, where it fails so, with a CPU in a GPU's place.

    (The trial, how it ends, whether it ran so on a CPU.)
    """
    trial = try_out(size, steps)
    ended = how_it_ends(trial, size)
    if not ended or stopped(trial) or device == "gpu":
        return trial, ended, False
    other = try_out(size, steps, gpus=True)
    fails = how_it_ends(other, size)
    if not fails:
        return other, None, True
    if fails.text != ended.text:  # it came farther
        trial, ended = other, fails
        ended.hint = [ended.advice + " " * bool(ended.advice) + STOOD_IN]
    return trial, ended, False


def reduces(trial):
    """Whether a rank sends others anything of which they take a mean."""
    return any(update["reduced"] or update.get("within")
               for seen in filter(None, trial.seen)
               for update in seen["updates"])


def counts(case):
    made = [case.together.updates(rank) for rank in range(case.size)]
    for rank, count in enumerate(made):
        if abs(count - made[0]) > 1 or min(made[0], count) == 0 < max(made):
            return [fail(f"rank {rank} makes {count} updates, and rank 0 "
                         f"{made[0]}", "every rank calls optimizer.step() "
                         "after every minibatch", ranks=[rank])]
    return []


def other_starts(case, kind):
    """Does what one process reads depend on Python's hashes of strings?

    Each rank has its own, and so has each start.
    """
    def reads_the_same(name):
        trial = case.start(name)
        if how_it_ends(trial, ""):
            return None
        take(kind, trial)
        return [update["samples"] for update in trial.seen[0]["updates"]] == [
            update["samples"] for update in case.single]

    if reads_the_same("hashes") is not False:
        return []
    again = reads_the_same("again")
    if again is False:
        case.apart = ("one process reads other samples each time that it is "
                      "started: a seed makes them the same")
    return [warn("what the model is given depends on Python's hashes of "
                 "strings, which differ from rank to rank and from start to "
                 "start", "a set has another order each time: "
                 "sorted(set(words))")] if again else []


def not_seen(case, steps, resumes, device):
    seen = case.together.seen
    texts = [f"anything after update {steps - 1}: the end of an epoch, "
             "validation" + ", checkpoints, resuming" * (not resumes),
             "GPUs and NCCL; compiled code: all was run on the CPU, with gloo "
             "and without torch.compile" if device == "cpu" else
             "compiled code: all was run without torch.compile",
             "whether the targets belong to the samples: a sample is a row of "
             "what the model is given"]
    if splits_matrices(case):
        texts.append("whether gradients are reduced: with tensor parallelism, "
                     "so are activations")
    if case.by_step:
        texts.append("the gradients that the optimizer has reduced, only the "
                     "weights that it makes of them")
    if case.asked("FSDP1"):
        texts.append("gradients and weights: FullyShardedDataParallel keeps "
                     "them in its own way; of fully_shard they are seen")
    if any(one["dropout"] for one in seen):
        texts.append("dropout: it was switched off, to compare")
    if case.apart:
        texts.append("whether losses, gradients and weights are those of one "
                     f"process: {case.apart}")
    elif case.still:
        texts.append("whether the weights are those of one process: the "
                     "minibatch is not; gradients and losses were compared "
                     f"with the mean of {case.size} minibatches")
    if case.updates[0][0]["local"]["flat"].numel() == 0:
        texts.append("what each rank alone has computed of the gradients")
    if not any(update["losses"] for update in case.updates[0]):
        texts.append("losses: there was no loss.backward()")
    return texts
