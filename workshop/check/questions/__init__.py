"""The questions that a run is asked, causes before their effects.

A question is a function of the run and of the single device's. It states
what it is asked about with `check_question(...)`. Its place in the order is
its place in the files, which are asked in the order of the imports here.
"""

from rankcheck.engine.questions import QuestionResults, ask_all
from workshop.check.stage_runs import StageRun

# isort: off
from workshop.check.questions.question import QUESTIONS, Examined
from workshop.check.questions import process
from workshop.check.questions import model
from workshop.check.questions import report
# isort: on

__all__ = ["QUESTIONS", "ask_questions", "model", "process", "report"]


def ask_about_run(run: StageRun, reference: StageRun, kind: str = "whole"
                  ) -> QuestionResults[Examined]:
    """Ask all questions about a run, in their order.

    Args:
        run: of the attendee's script.
        reference: of the single-device stage.
        kind: of the run: see `Examined`.
    """
    return ask_all(QUESTIONS, Examined(run, reference, kind))
