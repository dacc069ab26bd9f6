"""The questions that a trial is asked, causes before their effects.

A question is a function of the trial and of the single device's. It states
what it is asked about with `question(...)`. Its place in the order is its
place in the files, which are asked in the order of the imports here.
"""

# isort: off
from workshop.check.questions.question import QUESTIONS
from workshop.check.questions import process
from workshop.check.questions import model
from workshop.check.questions import report
# isort: on
from rankcheck.engine.findings import STRANGE, fail, ok

__all__ = ["QUESTIONS", "ask", "model", "process", "report"]


def ask(trial, reference, kind="whole"):
    """[(question, finding)] about a trial, in the order of the questions.

    If the script did not finish, the other questions are skipped.
    """
    findings = []
    for one in QUESTIONS:
        if kind not in one.kinds or not (
                one.early or all(trial.seen)) or not one.where(trial):
            continue
        try:
            finding = one.answer(trial, reference) or ok(one.title)
        except RecursionError:
            continue  # an expression that is nested too deeply to look at
        except STRANGE as error:
            error = f"{type(error).__name__}: {error}"
            finding = fail(f"the check cannot tell whether {one.title}: "
                           + error, "what the script leaves there is not "
                           "what the course's stages leave", error)
        findings.append((one, finding))
        if one.early and finding.verdict == "FAIL":
            break
    return findings
