"""Questions about what is saved, and when."""

import torch

from workshop.check import endings
from workshop.check.findings import fail, ok, percent, warn
from workshop.check.questions.question import question
from workshop.check.trial import LEARNING_RATE, STEPS


@question("its checkpoints are the single device's")
def checkpoint(trial, reference):
    """The whole state by name: weights, and the optimizer's moments."""
    if trial.state is None:
        return fail("there is no checkpoint", "rank 0 saves every "
                    "--checkpoint-every steps and after the last one: "
                    "run.save(step + 1, raw_model, optimizer)")
    mine, good = trial.state["model"], reference.state["model"]
    prefix = prefix_of(mine, good)
    model, moments = ({name.removeprefix(prefix): value for name, value
                       in part.items()} for part in (
                           mine, state_of(trial.state)))
    odd = sorted(model.keys() ^ good.keys())
    if odd or "module." in prefix or "_orig_mod." in prefix:
        return fail("the checkpoint has other names "
                    f"({odd[0] if odd else min(mine)})",
                    "save the raw model, not its wrapper")
    wrong = (off_in_time(trial, reference) or off_in_weights(model, good)
             or off_in_moments(moments, state_of(reference.state)))
    if wrong:
        return wrong
    if prefix:
        return warn(f"the checkpoint's names begin with {prefix}",
                    "other stages do not go on from it: save the model "
                    "inside")
    return ok("its checkpoints are the single device's")


def prefix_of(mine, good):
    """What all names have before the single device's, "" if not one thing."""
    found = {name.removesuffix(plain) for name in mine for plain in good
             if name.endswith("." + plain)}
    return min(found) if len(found) == 1 and len(mine) == len(good) else ""


def off_in_time(trial, reference):
    if trial.state["step"] != STEPS:
        return fail(f"the last checkpoint is of step {trial.state['step']}",
                    "save after the last step as well")
    if trial.saved != reference.saved:
        return fail(f"the checkpoints are of steps "
                    f"{' and '.join(trial.saved)}, not "
                    f"{' and '.join(reference.saved)}", "save every "
                    "--checkpoint-every steps, where a stop is requested, and "
                    "after the last step")
    return None


def off_in_weights(mine, good):
    off = max((mine[name].float() - weight.float()).abs().max().item()
              for name, weight in good.items())
    if off <= 0.02 * LEARNING_RATE:
        return None
    return fail(f"the checkpoint's weights are off by up to {off:.1e}",
                "save the model that is trained, after its update")


def off_in_moments(mine, good):
    if not mine:
        return fail("the checkpoint has no state of the optimizer",
                    "a resumed run needs it: run.save(step + 1, raw_model, "
                    "optimizer), with the optimizer that makes the updates")
    for name in good:
        if name not in mine:
            return fail(f"the checkpoint has no state of the optimizer for "
                        f"{name}", "save the optimizer that makes the "
                        "updates, with all its parameters")
    off = moments_off(good, mine)
    if off <= 0.01:
        return None
    return fail(f"the checkpoint's state of the optimizer is off by "
                f"{percent(off)}", "save the optimizer that makes the "
                "updates: run.save(step + 1, raw_model, optimizer)")


def moments_off(good, mine):
    """How far the running means of gradients are off, relatively."""
    off = size = 0.0
    for name, moments in good.items():
        mean = moments["exp_avg"]
        other = mine[name].get("exp_avg", torch.zeros_like(mean))
        off += (other - mean).square().sum().item()
        size += mean.square().sum().item()
    return (off / size) ** 0.5


def state_of(checkpoint):
    state = checkpoint.get("optimizer") or {}
    return state.get("state", {}) if isinstance(state, dict) else {}


@question("a signal to one rank ends all of them, after a checkpoint",
          ("stopped",))
def stopping(trial, reference):
    """Whether a signal to rank 0 alone ends all of them, losing nothing."""
    steps = len(trial.rows)
    same = ("all ranks have to stop at the same step: add up "
            "run.stop_requested over the ranks, and act on the sum")
    ended = endings.explain(trial)
    if ended and "ended with an error" in ended.text and not (
            endings.is_effect(ended.text)):
        return fail(f"with {' '.join(map(str, trial.more))} {ended.text}",
                    ended.hint)
    if ended:
        return fail(f"a signal to rank 0 does not end them all: {ended.text}",
                    same)
    if steps == STEPS:
        return fail("a signal to rank 0 does not end it", same)
    if trial.state is None or trial.state["step"] != steps:
        return fail("a signal ends it without a checkpoint",
                    "save before the loop ends where a stop is requested")
    return ok("a signal to one rank ends all of them, after a checkpoint")
