"""The questions that a trial is asked, causes before their effects.

A question is a function of the trial and of the single device's. It states
what it is asked about with `question(...)`. Its place in the order is its
place in the files, which are asked in the order of the imports here.
"""

from rankcheck.engine.questions import Answers, ask_all
from workshop.check.trials import StageTrial

# isort: off
from workshop.check.questions.question import QUESTIONS, Examined
from workshop.check.questions import process
from workshop.check.questions import model
from workshop.check.questions import report
# isort: on

__all__ = ["QUESTIONS", "ask", "model", "process", "report"]


def ask(trial: StageTrial, reference: StageTrial, kind: str = "whole"
        ) -> Answers[Examined]:
    """Ask all questions about a trial, in their order.

    Args:
        trial: of the attendee's script.
        reference: of the single-device stage.
        kind: of the trial: see `Examined`.
    """
    return ask_all(QUESTIONS, Examined(trial, reference, kind))
