"""Verify's questions, of which each answers with several findings."""

from rankcheck.findings import Questions

QUESTIONS = Questions()


def question(title, where=lambda case: not case.asked("FSDP1")):
    """Ask the decorated function about a `Comparison`.

    FSDP 1's tensors cannot be seen: of it only those with `where=always` ask.
    """
    return QUESTIONS.add(title, where=where)


def always(case):
    return True
