"""The check's questions, and of which trials they are asked."""

from functools import partial

import numpy as np

from rankcheck.engine.findings import Questions, fail, ok
from rankcheck.record.tensors import assemble, difference
from workshop.check.plan import STEPS

# Two names of one matrix: each end of a pipeline has a copy of it.
LAST, TIED = "lm_head.weight", "transformer.wte.weight"
put_together = partial(assemble, same={LAST: TIED})
QUESTIONS = Questions()
# They answer with a `Finding`, or with None where the title says it all.
question = QUESTIONS.add


def several(trial):
    return trial.mesh.size > 1


def no_pipeline(trial):
    return trial.mesh.pp == 1


def data_alone(trial):
    """Whether the ranks share the data, and nothing else of the work."""
    return trial.mesh.dp == trial.mesh.size > 1


def distance(mine, good):
    """The largest difference of an element of two `Whole`s, in the names of
    both. It is nan if one of them is.
    """
    off = [difference(mine.tensors[name], tensor).abs().max().item()
           for name, tensor in good.tensors.items() if name in mine.tensors]
    return np.max(off).item() if off else float("nan")


def number(row, column):
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return float("nan")


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
