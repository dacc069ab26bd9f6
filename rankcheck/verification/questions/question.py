"""Verify's questions, of which each answers with several findings."""

from rankcheck.findings import Questions

QUESTIONS = Questions()


def question(title, where=lambda case: not case.asked("FSDP1")):
    """Ask the decorated function about a `Comparison`, but of FSDP 1 only
    where its `where` is `always`: what that keeps is seen by nobody.
    """
    return QUESTIONS.add(title, where=where)


def always(case):
    return True
