"""What a question is, and of which trials it is asked."""

from dataclasses import dataclass

import numpy as np

from workshop.check.trial import STEPS
from workshop.findings import fail, number, ok

QUESTIONS = []  # causes before their effects


@dataclass(frozen=True)
class Question:
    """What is asked about a trial."""

    title: str  # what is right where the answer is "ok"
    answer: object  # function of (trial, reference)
    kinds: tuple  # of trials: "whole", "uneven", "resumed", "stopped", ...
    where: object  # function of a trial: whether it is asked there
    early: bool  # also of a trial that has not come to its end


def question(title, kinds=("whole",), where=lambda trial: True, early=False):
    """Ask the decorated function of trials of these kinds.

    It answers with a `Finding`, or with None where the title says it all.
    """
    def add(answer):
        QUESTIONS.append(Question(title, answer, kinds, where, early))
        return answer

    return add


def several(trial):
    return trial.mesh.size > 1


def no_pipeline(trial):
    return trial.mesh.pp == 1


def data_alone(trial):
    """Whether the ranks share the data, and nothing else of the work."""
    return trial.mesh.dp == trial.mesh.size > 1


def ask_about(column, title, name, tolerance, *kinds):
    """Ask whether a column of the log is the single device's.

    name: of the column in a sentence. tolerance: relative.
    """
    @question(title, ("whole", *kinds))
    def answer(trial, reference):
        rows = {number(row, "step"): row for row in trial.rows}
        for step in range(STEPS):
            value, good = (number(row, column) for row in (
                rows.get(step), reference.rows[step]))
            if np.isnan(value) and np.isnan(good):
                continue
            if np.isnan(value):
                return fail(f"there is no {name} of step {step}")
            if np.isnan(good):
                return fail(f"there is a {name} of step {step}, and with the "
                            "single device there is none")
            if not abs(value - good) <= tolerance * abs(good):
                times = value / good
                return fail(
                    f"the {name} of step {step} is {value:.6g}, not "
                    f"{good:.6g}" + f" ({times:.3g} times as much)" * (
                        not 0.6 < times < 1.6))
        return ok(f"{title} (to {tolerance:.0e})")
