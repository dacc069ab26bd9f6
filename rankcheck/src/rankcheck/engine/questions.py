"""Questions about what was recorded, and the loop that asks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rankcheck.engine.findings import Finding
from rankcheck.system.errors import describe_error

Subject = TypeVar("Subject")  # what is asked about: runs, and what is known


def always(subject: object) -> bool:
    """Return true: a question applies to every subject."""
    return True


@dataclass(frozen=True)
class Question(Generic[Subject]):
    """A property that must hold, and the function that checks it.

    Attributes:
        title: what is right where the answer is "ok".
        find: returns findings; it starts nothing and changes nothing.
        applies: whether the question is asked about a subject.
        ends: whether a failure ends the questions: after a script that did
            not come to its end, the others have nothing to look at. So does
            an exception: then it is not known whether they have.
    """

    title: str
    find: Callable[[Subject], Iterable[Finding]]
    applies: Callable[[Subject], bool] = always
    ends: bool = False

    def ask(self, subject: Subject) -> list[Finding]:
        """Return the findings, each with this question's title."""
        if not self.applies(subject):
            return []
        findings = [*self.find(subject)]
        for finding in findings:
            finding.question = self.title
        return findings


@dataclass(frozen=True)
class QuestionResults(Generic[Subject]):
    """The findings of questions.

    Attributes:
        subject: with all that was learned of it.
        findings: in the order of the questions, causes before their effects.
        internal_errors: a line for each question that raised an exception:
            an error of ours, or of a torch that we do not know.
    """

    subject: Subject
    findings: list[Finding]
    internal_errors: list[str]


def learn_nothing(subject: Subject, finding: Finding) -> Subject:
    """Learn nothing from a finding."""
    return subject


def ask_all(questions: Iterable[Question[Subject]], subject: Subject,
            learn: Callable[[Subject, Finding], Subject] = learn_nothing
            ) -> QuestionResults[Subject]:
    """Ask all questions that apply, one after the other.

    Args:
        questions: causes before their effects.
        subject: what they are asked about.
        learn: adds to the subject what a finding tells later questions.
    """
    findings: list[Finding] = []
    errors: list[str] = []
    for question in questions:
        try:
            found = question.ask(subject)
        except Exception as error:
            errors.append(f"{question.title}: {describe_error(error)}")
            if question.ends:
                break
            continue
        findings += found
        for finding in found:
            subject = learn(subject, finding)
        failed = any(finding.verdict == "FAIL" for finding in found)
        if failed and question.ends:
            break
    return QuestionResults(subject, findings, errors)
