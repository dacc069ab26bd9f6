"""The questions that a trial is asked, causes before their effects.

A question is a function of the trial and of the single device's, and answers
with a `Finding`, or with None where it has nothing to say. It states what it
is asked about with `question(...)`. Its place in the order is its place in
the files, which are asked in the order of the imports here.
"""

# isort: off
from workshop.check.questions.question import QUESTIONS
from workshop.check.questions import process
from workshop.check.questions import data
from workshop.check.questions import model
from workshop.check.questions import report
from workshop.check.questions import state
# isort: on
from workshop.check.findings import fail

__all__ = ["QUESTIONS", "ask", "data", "model", "process", "report", "state"]


def ask(trial, reference, kind="whole"):
    """The findings about a trial, in the order of the questions.

    Where it did not come to its end, nothing else is asked.
    """
    findings = []
    for one in QUESTIONS:
        if kind not in one.kinds or not one.meshes(trial.mesh):
            continue
        try:
            finding = one.answer(trial, reference)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError,
                TypeError, ValueError) as error:
            finding = fail(f"the check cannot tell whether {one.title}: "
                           f"{type(error).__name__}: {error}",
                           "what the script leaves there is not what the "
                           "course's stages leave")
        if finding is None:
            continue
        findings.append((one, finding))
        if one.answer is process.how_it_ends and finding.verdict == "FAIL":
            return early_causes(trial, reference) + findings
    return findings


def early_causes(trial, reference):
    """What was wrong before it failed, as far as the record says."""
    early = []
    if trial.mesh.pp * trial.mesh.tp > 1 and all(
            seen and seen["start"] for seen in trial.seen):
        early += [process.stage, *([model.tied] if trial.mesh.pp == 1 else [])]
    if all(seen and seen["optimizers"] for seen in trial.seen):
        early.append(model.optimizer)
    answers = [(one, one.answer(trial, reference)) for one in QUESTIONS
               if one.answer in early]
    return [(one, finding) for one, finding in answers
            if finding and finding.verdict == "FAIL"]
