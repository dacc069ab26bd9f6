"""The loop that asks questions: what ends it, and errors of its own."""

import pytest

from rankcheck.engine.findings import fail, ok
from rankcheck.engine.questions import Question, ask_all


def raises(_):
    raise OSError("no such thing")


ANSWERS = {"right": lambda _: [ok("fine")], "wrong": lambda _: [fail("odd")],
           "broken": raises}


@pytest.mark.parametrize(("kind", "ends", "asked", "errors"), [
    ("right", True, 2, 0), ("right", False, 2, 0),
    ("wrong", True, 1, 0), ("wrong", False, 2, 0),
    # whether the others have anything to look at is not known
    ("broken", True, 0, 1), ("broken", False, 1, 1)])
def test_what_ends_the_questions(kind, ends, asked, errors):
    found = ask_all([Question("it ends", ANSWERS[kind], ends=ends),
                     Question("it trains", ANSWERS["right"])], None)
    assert len(found.findings) == asked
    assert len(found.internal_errors) == errors
    for error in found.internal_errors:
        assert error.startswith("it ends: OSError: no such thing")


def test_a_question_that_does_not_apply_is_not_asked():
    """Where it is found out whether it does, there may be an error, too."""
    found = ask_all([
        Question("it hangs", raises, applies=lambda subject: subject > 1),
        Question("it fails", ANSWERS["right"], applies=raises)], 1)
    assert not found.findings
    error, = found.internal_errors
    assert error.startswith("it fails: OSError")


def test_what_a_finding_tells_later_questions():
    def learn(subject, finding):
        return [*subject, finding.question]

    found = ask_all([
        Question("first", ANSWERS["right"]),
        Question("second", lambda subject: [ok(" ".join(subject))])],
        [], learn)
    assert [finding.text for finding in found.findings] == ["fine", "first"]
    assert found.subject == ["first", "second"]
