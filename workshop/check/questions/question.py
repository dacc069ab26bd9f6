"""The check's questions, and about which runs they are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from rankcheck.engine.findings import Finding, fail, ok, warn
from rankcheck.engine.questions import Question, always
from rankcheck.record.tensors import Whole, assemble, subtract
from workshop.check.plan import STEPS
from workshop.check.stage_runs import StageRun

# Two names of one matrix: each end of a pipeline has a copy of it.
LAST_PARAMETERS, TIED_WEIGHTS = "lm_head.weight", "transformer.wte.weight"
assemble_tied = partial(assemble, same={LAST_PARAMETERS: TIED_WEIGHTS})

# Errors that a comparison may raise on what a script has left: a checkpoint,
# for example, may hold anything.
STRANGE = (ArithmeticError, AttributeError, LookupError, RuntimeError,
           TypeError, ValueError)


@dataclass(frozen=True)
class Examined:
    """A run, beside the one that it is compared with.

    Attributes:
        run: of the attendee's script.
        reference: of the single-device stage.
        kind: what the run is made for: "whole", "uneven", "resumed",
            "stopped", "operations", "bf16" or "fsdp2".
    """

    run: StageRun
    reference: StageRun
    kind: str


# None where the title of the question says it all
Compare: TypeAlias = Callable[[StageRun, StageRun], "Finding | None"]
# In the order in which they are asked: causes before their effects
QUESTIONS: list[Question[Examined]] = []


def check_question(title: str, kinds: tuple[str, ...] = ("whole",),
                   where: Callable[[StageRun], bool] = always,
                   early: bool = False) -> Callable[[Compare], Compare]:
    """Ask the decorated function about runs.

    Args:
        title: what is right where the answer is "ok".
        kinds: of runs.
        where: whether it is asked about a run of such a kind.
        early: also about a run that has not come to its end; a failure
            then leaves nothing to ask.
    """
    def add(compare: Compare) -> Compare:
        def applies(examined: Examined) -> bool:
            run = examined.run
            has_ended = early or all(run.records)
            return examined.kind in kinds and has_ended and where(run)

        def find(examined: Examined) -> list[Finding]:
            return [answer_question(title, compare, examined)]

        QUESTIONS.append(Question(title, find, applies, ends=early))
        return compare

    return add


def answer_question(title: str, compare: Compare,
                    examined: Examined) -> Finding:
    """Return a comparison's finding, or a failure where it cannot be found."""
    try:
        found = compare(examined.run, examined.reference)
    except RecursionError:
        return warn(f"it was not checked whether {title}",
                    "simplify the script: an expression is nested too deeply",
                    kind="not-answered")
    except STRANGE as error:
        problem = f"{type(error).__name__}: {error}"
        return fail(f"the check cannot tell whether {title}: {problem}",
                    "check what the script leaves: the course's stages leave "
                    "something else", problem, kind="not-answered")
    return found or ok(title)


def several(run: StageRun) -> bool:
    return run.mesh.size > 1


def no_pipeline(run: StageRun) -> bool:
    return run.mesh.pp == 1


def data_alone(run: StageRun) -> bool:
    """Return whether several ranks share the data, and nothing else."""
    return run.mesh.is_data_parallel and several(run)


def largest_difference(actual: Whole, expected: Whole) -> float:
    """Return the largest difference of an element, in the names of both.

    It is nan if one of the elements is.
    """
    off = [subtract(actual.tensors[name], tensor).abs().max().item()
           for name, tensor in expected.tensors.items()
           if name in actual.tensors]
    return float(np.max(off)) if off else float("nan")


def read_number(row: dict[str, str], column: str) -> float:
    """Return a value of metrics.csv; nan if it is no number."""
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return float("nan")


def check_column(column: str, title: str, name: str, tolerance: float,
                 *kinds: str) -> None:
    """Ask whether a column of the log is the single device's.

    Args:
        column: in metrics.csv.
        title: of the question.
        name: of the column, in a sentence.
        tolerance: relative.
        kinds: of runs, beside "whole".
    """
    @check_question(title, ("whole", *kinds))
    def compare(run: StageRun, reference: StageRun) -> Finding | None:
        rows = {read_number(row, "step"): row for row in run.rows}
        for step in range(STEPS):
            value = read_number(rows.get(step, {}), column)
            expected = read_number(reference.rows[step], column)
            if np.isnan(value) and np.isnan(expected):
                continue
            if np.isnan(value):
                return fail(f"there is no {name} of step {step}",
                            numbers={"step": step}, kind="log")
            if np.isnan(expected):
                return fail(f"there is a {name} of step {step}, and with the "
                            "single device there is none",
                            numbers={"step": step}, kind="log")
            if not abs(value - expected) <= tolerance * abs(expected):
                text = f"the {name} of step {step} is {value:.6g}, not "
                text += f"{expected:.6g}"
                times = value / expected
                if not 0.6 < times < 1.6:
                    text += f" ({times:.3g} times as large)"
                return fail(text, numbers={"step": step}, kind="log")
        return ok(f"{title} (to {tolerance:.0e})")
