"""Questions about what is saved, and when."""

from rankcheck import exits
from rankcheck.findings import fail, percent, warn
from rankcheck.tensors import describe
from workshop.check.plan import LEARNING_RATE, STEPS
from workshop.check.questions.question import (
    distance,
    put_together,
    question,
)


@question("its checkpoints are the single device's")
def checkpoint(trial, reference):
    """The whole state by name: weights, and the optimizer's moments."""
    if trial.state is None:
        return fail("there is no checkpoint")
    if trial.saved != reference.saved:
        return fail(f"the checkpoints are of steps "
                    f"{' and '.join(trial.saved)}, not "
                    f"{' and '.join(reference.saved)}")
    name = trial.state.get("stage", trial.stage)
    if name != trial.stage:
        return fail(f"the run calls itself {name}, not {trial.stage}")
    if trial.state["step"] != STEPS:
        return fail(f"the last checkpoint is of step {trial.state['step']}")
    mine, good = trial.state["model"], reference.state["model"]
    prefix = prefix_of(mine, good)
    odd = sorted({name.removeprefix(prefix) for name in mine} ^ good.keys())
    if odd or "module." in prefix or "_orig_mod." in prefix:
        return fail(f"the checkpoint has other names ({[*odd, *mine][0]})")
    off = distance(whole(mine, prefix), whole(good))
    if not off <= 0.02 * LEARNING_RATE:
        return fail(f"the checkpoint's weights are off by up to {off:.1e}")
    off = whole(moments(trial.state), prefix).error(
        whole(moments(reference.state)))
    if not off <= 0.01:
        return fail("the checkpoint's state of the optimizer is off by "
                    f"{percent(off)}")
    if prefix:
        return warn(f"the checkpoint's names begin with {prefix}",
                    "other stages do not go on from it: save the model "
                    "inside")
    return None


def prefix_of(mine, good):
    """What all names have before the single device's, "" if not one thing."""
    found = {name.removesuffix(plain) for name in mine for plain in good
             if name.endswith("." + plain)}
    return min(found) if len(found) == 1 and len(mine) == len(good) else ""


def whole(tensors, prefix=""):
    return put_together([describe((name.removeprefix(prefix), tensor)
                                  for name, tensor in tensors.items())])


def moments(state):
    """The optimizer's running means of the gradients, by name."""
    return {name: kept.get("exp_avg") for name, kept
            in ((state.get("optimizer") or {}).get("state") or {}).items()}


@question("a signal to one rank ends all of them, after a checkpoint",
          ("stopped",), early=True)
def stopping(trial, reference):
    """Whether a signal to rank 0 alone ends all of them, losing nothing."""
    ended = exits.explain(trial)
    if ended:
        return fail([f"with {' '.join(map(str, trial.more))} and a signal to "
                     "rank 0: ", *ended.sentence], ended.hint, ended.error)
    if len(trial.rows) == STEPS:
        return fail("a signal to rank 0 does not end it")
    if trial.state is None or trial.state["step"] != len(trial.rows):
        return fail("a signal ends it without a checkpoint")
    return None
