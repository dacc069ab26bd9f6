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
    mine, good = trial.state, reference.state
    prefix = {name.removesuffix(plain) for name in mine["model"]
              for plain in good["model"] if name.endswith("." + plain)}
    inside = len(prefix) == 1 and len(mine["model"]) == len(good["model"])
    strip = (lambda name: name.removeprefix(min(prefix))) if inside else (
        lambda name: name)
    model = {strip(name): weight for name, weight in mine["model"].items()}
    if model.keys() != good["model"].keys():
        odd = sorted(model.keys() ^ good["model"].keys())[0]
        return fail(f"the checkpoint has other names ({odd})",
                    "save the raw model, not its wrapper")
    if inside and any(wrapper in min(prefix)
                      for wrapper in ("module.", "_orig_mod.")):
        return fail(f"the checkpoint has other names ({min(mine['model'])})",
                    "save the raw model, not its wrapper")
    if mine["step"] != STEPS:
        return fail(f"the last checkpoint is of step {mine['step']}",
                    "save after the last step as well")
    if trial.saved != reference.saved:
        return fail(f"the checkpoints are of steps "
                    f"{' and '.join(trial.saved)}, not "
                    f"{' and '.join(reference.saved)}", "save every "
                    "--checkpoint-every steps, where a stop is requested, and "
                    "after the last step")
    off = max((model[name].float() - weight.float()).abs().max().item()
              for name, weight in good["model"].items())
    if not off <= 0.02 * LEARNING_RATE:
        return fail(f"the checkpoint's weights are off by up to {off:.1e}",
                    "save the model that is trained, after its update")
    moments = state_of(mine)
    if not moments:
        return fail("the checkpoint has no state of the optimizer",
                    "a resumed run needs it: run.save(step + 1, raw_model, "
                    "optimizer), with the optimizer that makes the updates")
    for name in state_of(good):
        name = next((key for key in moments if strip(key) == name), name)
        if name not in moments:
            return fail(f"the checkpoint has no state of the optimizer for "
                        f"{name}", "save the optimizer that makes the "
                        "updates, with all its parameters")
    off = moments_off(state_of(good), {
        strip(name): entry for name, entry in moments.items()})
    if off > 0.01:
        return fail(f"the checkpoint's state of the optimizer is off by "
                    f"{percent(off)}", "save the optimizer that makes the "
                    "updates: run.save(step + 1, raw_model, optimizer)")
    if inside:
        return warn(f"the checkpoint's names begin with {min(prefix)}",
                    "other stages do not go on from it: save the model "
                    "inside")
    return ok("its checkpoints are the single device's")


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
