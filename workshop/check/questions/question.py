"""What a question is, and on which trials and meshes it is asked."""

from dataclasses import dataclass

import numpy as np

from workshop.check.findings import number, relative
from workshop.check.trial import STEPS

QUESTIONS = []  # causes before their effects


@dataclass(frozen=True)
class Question:
    """What is asked about a trial."""

    title: str  # what is right where the answer is "ok"
    answer: object  # function of (trial, reference)
    kinds: tuple  # of trials: "whole", "uneven", "resumed", "stopped", ...
    meshes: object  # function of a mesh: whether it is asked there


def question(title, kinds=("whole",), meshes=lambda mesh: True):
    """Ask the decorated function of trials of these kinds and meshes."""
    def add(answer):
        QUESTIONS.append(Question(title, answer, kinds, meshes))
        return answer

    return add


def several(mesh):
    return mesh.size > 1


def shares_data(mesh):
    return mesh.dp > 1


def has_pipeline(mesh):
    return mesh.pp > 1


def first_difference(trial, reference, column, tolerance):
    """The first step at which a column differs, and the largest difference.
    """
    first, largest = None, 0.0
    rows = {int(number(row, "step")): row for row in trial.rows
            if not np.isnan(number(row, "step"))}
    for step in range(STEPS):
        good = number(reference.rows[step], column)
        value = number(rows.get(step), column)
        if np.isnan(good) and np.isnan(value):
            continue
        error = relative(value, good) if good == good else float("inf")
        largest = max(largest, error)
        if not error <= tolerance and first is None:
            first = step
    return first, largest
