"""Questions about the model: its weights, gradients and updates."""

import torch

from workshop.check.causes import LOADS_STATE, wrong_setting
from workshop.check.findings import (
    differs,
    fail,
    ok,
    percent,
    relative,
    values,
    warn,
)
from workshop.check.parts import LAST, TIED, assemble, names, plain_name
from workshop.check.questions.question import (
    first_difference,
    question,
    shares_data,
)
from workshop.check.trial import LEARNING_RATE, STEPS

NORM = 1e-4  # relative
GRADIENT = 1e-3  # relative
RATE = ("it changes once a step, by get_lr(step, max_steps, hp), whatever the "
        "world size")


@question("the optimizer is the single device's")
def optimizer(trial, reference):
    """What it updates, and how: groups of parameters by name."""
    good, updated = by_name(reference.seen[0]["optimizers"]), set()
    for rank, seen in enumerate(trial.seen):
        mine = by_name(seen["optimizers"] or [])
        updated |= mine.keys()
        if not set(mine) & set(good):
            return fail(
                f"rank {rank}'s optimizer updates another model than the one "
                "that is trained", "wrap and optimize the same model: no "
                "copy of it, and no optimizer made before it is sharded")
        for name in sorted(good.keys() & mine.keys()):
            for key in ("weight_decay", "betas", "eps"):
                if key in mine[name] and mine[name][key] != good[name][key]:
                    return wrong_setting(
                        name, key, mine[name][key], good[name][key])
    if trial.mesh.pp > 1:  # is a block missing? See what they start from
        return ok("the optimizer is the single device's")
    if good.keys() - updated:
        name = sorted(good.keys() - updated)[0]
        return fail(f"the optimizer does not update {name}",
                    "give it all parameters of the model")
    return ok("the optimizer is the single device's")


def by_name(groups):
    return {name: group for group in groups for name in group["names"]
            if name != "?"}


@question("every rank starts from the same weights", ("whole", "resumed"))
def first_weights(trial, reference):
    if trial.first_step:
        return resumed_weights(trial)
    good = assemble([reference.seen[0]["start"]])
    started = all(seen["start"] for seen in trial.seen)
    mine = assemble([seen["start"] for seen in trial.seen] if started else [])
    if not mine.tensors:
        return fail("the model is never called to train",
                    "the loss comes from a call: model(x, y)")
    missing = good.tensors.keys() - mine.tensors.keys()
    if missing or mine.holes:
        name = sorted(missing or mine.holes)[0]
        if trial.mesh.pp > 1:
            return fail(f"no pipeline stage has {name}",
                        "cut() leaves each block in one pipeline stage")
        return fail(f"no rank has {name}", "each weight of the single "
                    "device has to be on some rank, whole")
    twice = held_twice(trial)
    if twice:
        return fail(f"two pipeline stages have {twice}",
                    "cut() leaves each block in one pipeline stage")
    if mine.differing:
        rank = min(mine.differing)
        return fail(f"rank {rank} starts from other weights than rank 0",
                    "the ranks have to start from the same weights: the same "
                    "seed on every rank" + ("" if trial.shards else
                                            ", and DDP's broadcast left on"))
    if mine.distance(good) > 0:
        return fail("it starts from other weights than the single device",
                    "set the seed, torch.manual_seed(hp.seed), right before "
                    "the model is made, the same on every rank")
    return ok("every rank starts from the same weights")


def held_twice(trial):
    """A weight that several pipeline stages have, "" if none is.

    The tied matrix has another name in the last one than in the first.
    """
    stages = {frozenset(names(seen["start"])) for seen in trial.seen}
    found = [name for held in stages for name in held]
    return min((name for name in found if found.count(name) > 1), default="")


@question("the embedding and lm_head are one matrix",
          meshes=lambda mesh: mesh.pp == 1)
def tied(trial, reference):
    """A plan makes two parameters of what has two names."""
    if {LAST, TIED} <= names(trial.seen[0]["start"]):
        return fail("wte.weight and lm_head.weight are two parameters",
                    "the plan makes two of the tied one: after it, "
                    "model.lm_head.weight = model.transformer.wte.weight")
    return None


def resumed_weights(trial):
    """Those of the checkpoint that was resumed."""
    saved = {plain_name(name): weight for name, weight
             in trial.resumed["model"].items()}
    mine = assemble([seen["start"] for seen in trial.seen])
    other = [name for name, weight in mine.tensors.items()
             if name in saved and weight.shape == saved[name].shape
             and not torch.equal(weight, saved[name].float())]
    if mine.differing or other:
        rank = 0 if other else min(mine.differing)
        return fail(f"rank {rank} does not go on from the checkpoint's "
                    "weights", "all ranks load it, before the model is "
                    "wrapped: run.restore(raw_model, optimizer)")
    return ok("every rank goes on from the checkpoint")


@question("it trains in the precision that is asked for")
def precision(trial, reference):
    used = next(filter(None, (seen["precision"] for seen in trial.seen)), None)
    if used == "fp32":
        return ok("--precision fp32 trains in fp32")
    return fail(f"with --precision fp32 it trains in {used}",
                "autocast only where --precision is bf16" if "weights" not in
                used else "without autocast, and without a policy for the "
                "weights' dtype: they stay in fp32")


@question("--strategy fsdp2 leaves each rank a part", ("fsdp2",))
def sharding(trial, reference):
    """What configure_model is for."""
    if all(seen["start"] and seen["start"]["sharded"] for seen in trial.seen):
        return ok("--strategy fsdp2 leaves each rank a part")
    return fail("with --strategy fsdp2 every rank keeps the whole model",
                "configure_model: fully_shard() of each block, and of self")


@question("--precision bf16 trains in bf16", ("bf16",))
def precision_bf16(trial, reference):
    used = trial.seen[0]["precision"]
    if used == "bf16":
        return ok("--precision bf16 trains in bf16")
    return fail(f"with --precision bf16 it trains in {used}",
                'tell the Trainer: precision="bf16-mixed" is autocast, the '
                "default is fp32")


@question("learning rates agree")
def rates(trial, reference):
    """What the optimizer has, and what is logged."""
    for step in range(STEPS):
        good = reference.seen[0]["rates"][step]
        value = trial.seen[0]["rates"][step]
        if relative(value, good) > 1e-6:
            return fail(f"the learning rate of step {step} is {value:.3e}, "
                        f"not {good:.3e}", RATE)
    step, _ = first_difference(trial, reference, "lr", 1e-6)
    if step is None:
        return ok("learning rates agree")
    value, good = values(trial, reference, "lr", step)
    return fail(f"the logged learning rate of step {step} is {value:.3e}, "
                f"not {good:.3e}", RATE)


@question("gradients are the single device's", ("whole", "resumed"))
def gradients(trial, reference):
    """Equal on all ranks that hold the same, and right, at every step."""
    for step in range(trial.first_step, STEPS):
        good = assemble([reference.seen[0]["gradients"][step]])
        length = sum(g.square().sum().item()
                     for g in good.tensors.values()) ** 0.5
        mine = assemble([seen["gradients"][step - trial.first_step]
                         for seen in trial.seen])
        apart = {rank: off for rank, off in mine.differing.items()
                 if off > 1e-6 * max(1.0, length)}
        if apart:
            rank = min(apart)
            name = min(mine.apart, key=lambda name: ("ln_" not in name, name))
            return fail(f"gradients of step {step} differ between rank 0 and "
                        f"rank {rank}, such as that of {name}",
                        LOADS_STATE if trial.first_step else "all ranks need "
                        "the sum of all ranks' gradients: who adds them up, "
                        "and after which microbatch?")
        error = mine.error(good)
        if not error <= GRADIENT:
            return fail(f"gradients of step {step} are off by "
                        f"{percent(error)}",
                        LOADS_STATE if step > trial.first_step > 0 else
                        "they are the mean over the minibatch and all ranks, "
                        "zeroed after each update, and clipped at 1.0 once "
                        "they are reduced")
    return ok("gradients are the single device's, on every rank")


@question("gradient norms agree", ("whole", "fsdp2"))
def norms(trial, reference):
    step, largest = first_difference(trial, reference, "norm", NORM)
    if step is None:
        return ok(f"gradient norms agree (to {largest:.0e})")
    value, good = values(trial, reference, "norm", step)
    return differs(f"the gradient norm of step {step}", value, good,
                   "it is the norm of the reduced gradient, over all "
                   "parameters of all ranks, each once, before clipping",
                   digits=4)


@question("gradients are reduced once a step", meshes=shares_data)
def reductions(trial, reference):
    """How often each gradient is all-reduced in a step."""
    parameters = len(reference.seen[0]["start"]["flat"])
    count = max(sum(call["elements"] for call in trial.calls(rank)
                    if "reduce" in call["call"] and call["update"] > 0)
                for rank in range(trial.mesh.size))
    count /= parameters * (STEPS - 1)
    if count < 0.5:  # they agree all the same: another way was found
        return None
    if count < 1.5 or trial.mesh.tp * trial.mesh.pp > 1:
        return ok(f"gradients are reduced {count:.1f} times a step")
    return warn(
        f"gradients are reduced {count:.1f} times a step: right, but "
        f"{count:.0f} times the communication", "once is enough: " + (
            "raw_model.set_requires_gradient_sync(is_last_microbatch) before "
            "each of them" if trial.shards else
            "average them after the last microbatch" if trial.by_mpi else
            "all microbatches but the last under `model.no_sync()`"))


@question("weights are gathered block by block", meshes=shares_data)
def gathers(trial, reference):
    """Whether one gather brings the whole model to every rank."""
    parameters = len(reference.seen[0]["start"]["flat"])
    largest = max((call["elements"] for call in trial.calls(0)
                   if call["call"] == "allgather_base" and call["update"]),
                  default=0)
    if not trial.shards or trial.mesh.tp * trial.mesh.pp > 1 or not largest:
        return None
    if largest * trial.mesh.dp < 0.9 * parameters:
        return ok("weights are gathered block by block")
    return warn("all weights are gathered at once: right, but every rank "
                "needs room for the whole model", "shard each block before "
                "the model: fully_shard(block, mesh=mesh)")


@question("final weights are the single device's", ("whole", "resumed"))
def weights(trial, reference):
    good = assemble([reference.seen[0]["weights"]])
    mine = assemble([seen["weights"] for seen in trial.seen])
    bound = 0.02 * LEARNING_RATE
    if mine.differing:
        return fail(f"the final weights of rank {min(mine.differing)} are "
                    "not rank 0's", LOADS_STATE if trial.first_step else
                    "every rank has to make the same updates")
    error = mine.distance(good)
    if not error <= bound:
        return fail(f"the final weights are off by up to {error:.1e} "
                    f"({bound:.0e} is allowed)",
                    LOADS_STATE if trial.first_step else
                    "some update was not the single device's")
    return ok("final weights are the single device's, on every rank")
