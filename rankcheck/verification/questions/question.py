"""Verify's questions, of which each answers with several findings."""

from functools import partial

from rankcheck.findings import Questions

QUESTIONS = Questions()
# Ask the decorated function about a `Comparison`. FSDP 1's tensors cannot be
# seen: of it only those with `where=always` ask.
question = partial(QUESTIONS.add, where=lambda case: not case.asked("FSDP1"))


def always(case):
    return True
