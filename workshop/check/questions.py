"""The questions that a trial is asked, causes before their effects.

A question is a function of the trial and of the single device's, and answers
with a `Finding`, or with None where it has nothing to say. It states what it
is asked about with `question(...)`.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workshop.check import endings
from workshop.check.causes import (
    LOADS_STATE,
    asks_the_launcher,
    fixed_device,
    miscounted,
    misread,
    thinks_it_is_rank_0,
    undefined_name,
    wrong_device,
    wrong_setting,
)
from workshop.check.findings import (
    fail,
    number,
    ok,
    percent,
    relative,
    shorten,
    times,
    values,
    warn,
)
from workshop.check.parts import LAST, TIED, assemble, names, plain_name
from workshop.check.trial import (
    EVALUATED,
    LEARNING_RATE,
    MINIBATCH,
    RESUMED,
    STEPS,
    UNEVEN,
    B,
)
from workshop.stages import STAGES

LOSS, NORM, GRADIENT = 1e-5, 1e-4, 1e-3  # relative
RATE = ("it changes once a step, by get_lr(step, max_steps, hp), whatever the "
        "world size")
PROMPT = "> Hello, I'm a language model,"


@dataclass(frozen=True)
class Question:
    """What is asked about a trial."""

    title: str  # what is right where the answer is "ok"
    answer: object  # function of (trial, reference)
    kinds: tuple  # of trials: "whole", "uneven", "resumed", "stopped", ...
    meshes: object  # function of a mesh: whether it is asked there


QUESTIONS = []


def question(title, kinds=("whole",), meshes=lambda mesh: True):
    """Ask the decorated function of trials of these kinds and meshes."""
    def add(answer):
        QUESTIONS.append(Question(title, answer, kinds, meshes))
        return answer

    return add


def ask(trial, reference, kind="whole"):
    """The findings about a trial, in the order of the questions.

    Where it did not come to its end, nothing else is asked.
    """
    findings = []
    for one in QUESTIONS:
        if kind not in one.kinds or not one.meshes(trial.mesh):
            continue
        try:
            finding = one.answer(trial, reference)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError,
                TypeError, ValueError) as error:
            finding = fail(f"the check cannot tell whether {one.title}: "
                           f"{type(error).__name__}: {error}",
                           "what the script leaves there is not what the "
                           "course's stages leave")
        if finding is None:
            continue
        findings.append((one, finding))
        if one.answer is how_it_ends and finding.verdict == "FAIL":
            return early_causes(trial, reference) + findings
    return findings


def early_causes(trial, reference):
    """What was wrong before it failed, as far as the record says."""
    early = []
    if trial.mesh.pp * trial.mesh.tp > 1 and all(
            seen and seen["start"] for seen in trial.seen):
        early += [stage, *([tied] if trial.mesh.pp == 1 else [])]
    if all(seen and seen["optimizers"] for seen in trial.seen):
        early.append(optimizer)
    answers = [(one, one.answer(trial, reference)) for one in QUESTIONS
               if one.answer in early]
    return [(one, finding) for one, finding in answers
            if finding and finding.verdict == "FAIL"]


def several(mesh):
    return mesh.size > 1


def shares_data(mesh):
    return mesh.dp > 1


def has_pipeline(mesh):
    return mesh.pp > 1


# ------------------------------------------------------- how it comes to end


@question("it runs to its end", ("whole", "resumed", "bf16", "fsdp2"))
def how_it_ends(trial, reference):
    """Whether every rank comes to its end, after all steps."""
    finding = endings.explain(trial)
    if finding:
        return finding
    if len(trial.rows) < STEPS:
        return fail(f"it ended after {len(trial.rows)} of {STEPS} steps "
                    "without an error", endings.why_early(trial))
    if any(seen is None for seen in trial.seen):
        rank = trial.seen.index(None)
        return fail(f"rank {rank} left without a trace",
                    "let it come to the end of main(): something ends the "
                    "process before")
    missing = [r for r, seen in enumerate(trial.seen)
               if len(seen["samples"]) < STEPS - trial.first_step]
    if missing:
        return fail(f"rank {missing[0]} makes "
                    f"{len(trial.seen[missing[0]]['samples'])} updates in "
                    f"{STEPS} steps", "every rank makes the same updates, "
                    "one in each step")
    return ok(f"it runs to its end ({trial.seconds:.1f} s)")


@question("it is the stage's script")
def stage(trial, reference):
    """Whether it does at all what the stage is about."""
    shows = f"`python -m workshop diff {trial.stage}` shows what is left"
    if trial.by_trainer:
        if not trial.asked("fit"):
            return fail("it does not train with Lightning: trainer.fit() is "
                        "never called", f"{shows} to change")
        writers = [one for found in trial.asked("writers") for one in found]
        if writers:
            return fail(f"the Trainer writes, too: {', '.join(writers)}",
                        "LitRun logs and saves: logger=False and "
                        "enable_checkpointing=False")
        if not any(trial.asked("plugins")):
            return warn("Lightning guesses who has started the processes",
                        "right here, but it would take the shell of a SLURM "
                        "job for a task that waits for others: "
                        "plugins=[lit.get_launcher()]")
    elif trial.asked("fit"):
        return fail(f"it trains with Lightning: it is not stage "
                    f"{trial.stage}", "`python -m workshop check lit` "
                    "checks it")
    elif STAGES[trial.stage].launcher == "torchrun":
        if not trial.asked("init_process_group"):
            if not asks_the_launcher(trial):
                return thinks_it_is_rank_0(trial)
            return fail("it never joins a process group: it is still the "
                        "single-device script", f"{shows} to change")
    elif trial.by_mpi and not any(call["lines"] for call in trial.calls(0)):
        return fail("it sends nothing by MPI: it is still the single-device "
                    "script", f"{shows} to change")
    script = ast.unparse(trial.tree())
    for flag in trial.flags:
        if flag.strip("-").replace("-", "_") not in script:
            return fail(f"it has no {flag}: it is still another stage's "
                        "script", f"{shows} to change")
    if trial.shards:
        finding = whole_model(trial, shows)
        if finding:
            return finding
    name = (trial.state or {}).get("stage")
    if name not in (None, trial.stage):
        return warn(f"the run calls itself {name}, not {trial.stage}",
                    f'give its stage to the run: "{trial.stage}"')
    return ok("it is the stage's script")


def whole_model(trial, shows):
    """A `Finding` where the ranks keep the whole model, or once had it."""
    if trial.asked("DistributedDataParallel"):
        return fail("the model is wrapped in DDP: every rank keeps all of it",
                    f"{shows} to change")
    state = trial.seen[0]["start"] or {}
    if trial.mesh.pp > 1 and same_blocks(trial):
        return fail("every pipeline stage keeps the whole model",
                    "each drops what belongs to the others: "
                    'cut(raw_model, mesh["pp"])')
    empty = [rank for rank, seen in enumerate(trial.seen) if seen["start"]
             and not any(".h." in name for name in names(seen["start"]))]
    if trial.mesh.pp > 1 and empty:
        return fail(f"rank {empty[0]} has none of the blocks", "cut() gives "
                    "each pipeline stage as many of the blocks as any other")
    if state and not state["sharded"]:
        return fail("every rank keeps the whole model",
                    "fully_shard(module, mesh=mesh) for each block and for "
                    "the model, before the optimizer is made")
    plain = [name for name, _ in state.get("plain", ())]
    if plain:
        return fail(f"every rank keeps all of {plain[0]}",
                    "after its blocks shard the model itself: "
                    "fully_shard(raw_model, mesh=mesh)")
    if trial.mesh.tp > 1 and state and not is_split(trial, state):
        return fail("no matrix is split: all ranks of a TP group compute "
                    "the same",
                    'parallelize(raw_model, mesh["tp"]) splits them, before '
                    "the model is sharded")
    if any(trial.asked("to")):
        return warn("every device has the whole model before it is sharded",
                    "right, as long as it fits: make_shapes(GPT, ...), and "
                    "draw_weights(raw_model, module) before each module is "
                    "sharded")
    return None


def same_blocks(trial):
    return all(seen["start"] and names(seen["start"])
               == names(trial.seen[0]["start"]) for seen in trial.seen)


def is_split(trial, state):
    """Whether a rank has a smaller part of something than FSDP leaves it.
    """
    return any(entry["part"].numel() * trial.mesh.dp * trial.mesh.tp
               < 1.5 * torch.Size(entry["shape"]).numel()
               for entry in state["sharded"].values())


@question("its processes leave their group at the end", meshes=several)
def parting(trial, reference):
    """Whether the group is left, where the script has joined one."""
    if any(seen["joined"] for seen in trial.seen):
        return warn("the process group is never left",
                    "with NCCL the end may hang: dist.destroy_process_group() "
                    "after the last collective")
    return ok("its processes leave their group at the end")


# ------------------------------------------------------------------ devices


@question("each process asks for its own device")
def devices(trial, reference):
    """What it would take on a machine with accelerators."""
    per_node = trial.mesh.size // trial.mesh.nodes
    fixed = fixed_device(trial)
    if fixed:
        return fixed
    for rank in range(trial.mesh.size):
        local = rank % per_node
        for name, asked in trial.asked("use_device", rank):
            if name != "auto":
                return fail(
                    f'the device is always "{name}"',
                    "use_device(hp.device, local_rank) takes what --device "
                    "asks for, an accelerator if there is one")
            if asked != local:
                return wrong_device(rank, local, asked)
        for what in ("set_device", "device_ids"):
            for asked in trial.asked(what, rank):
                if asked is not None and asked != local:
                    return wrong_device(rank, local, asked)
    return ok("each process asks for its own device")


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


# --------------------------------------------------------------------- data


def first_of_each(trial):
    """What each data-parallel rank read: [(rank, its samples a step)].

    Ranks that read the same because they share a sample are one; those that
    get no samples, as later pipeline stages, are none.
    """
    lists = [(rank, seen["samples"]) for rank, seen in enumerate(trial.seen)
             if any(seen["samples"])]
    if trial.mesh.tp == 1:
        return lists
    groups = {}
    for rank, one in lists:
        groups.setdefault(repr(one), (rank, one))
    return list(groups.values())


@question("all pipeline stages read the same samples",
          ("whole", "resumed"), has_pipeline)
def targets(trial, reference):
    """Whether the last stage has the targets of what the first one reads.
    """
    for step in range(trial.first_step, STEPS):
        read, aimed = (
            {i for seen in trial.seen for i in seen[name][
                step - trial.first_step]} for name in ("samples", "targets"))
        if aimed and read != aimed:
            return fail(
                f"in step {step} the first pipeline stage reads samples "
                f"{shorten(sorted(read))}, but the last one has the targets "
                f"of {shorten(sorted(aimed))}", "the ranks of a pipeline "
                "have the same dp_rank: pass dp_rank and dp_size to "
                "DataIterator")
    return ok("all pipeline stages read the same samples")


@question("each step reads its minibatch, each sample once",
          ("whole", "resumed"))
def samples(trial, reference):
    """Distinct over data-parallel ranks, equal over tensor-parallel ones."""
    ranks = first_of_each(trial)
    for step in range(trial.first_step, STEPS):
        expected = reference.seen[0]["samples"][step]
        read = [one[step - trial.first_step] for _, one in ranks]
        together = sorted(i for part in read for i in part)
        if together == sorted(expected):
            continue
        lists = [seen["samples"][step - trial.first_step]
                 for seen in trial.seen]
        said = (misread(trial, lists, step * MINIBATCH)
                or miscounted(trial, max(map(len, lists))))
        if said:
            text, hint = said
            return fail(f"samples of step {step}: {text}", hint)
        said = "; ".join(f"rank {rank}: {shorten(part)}" for (rank, _), part
                         in zip(ranks, read, strict=True))
        return fail(f"samples of step {step} are not {shorten(expected)}, "
                    f"each once ({said})", "they come in another order: no "
                    "sampler, shuffle or worker may deal them out again")
    return ok("each step reads its minibatch, each sample once")


# ------------------------------------------------------- model and optimizer


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


def by_name(groups):
    return {name: group for group in groups for name in group["names"]
            if name != "?"}


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


# ---------------------------------------------------------------- gradients


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
    return fail(f"the gradient norm of step {step} is {value:.4f}, not "
                f"{good:.4f}{times(value, good)}", "it is the norm of the "
                "reduced gradient, over all parameters of all ranks, each "
                "once, before clipping")


@question("gradients are reduced once a step", meshes=shares_data)
def reductions(trial, reference):
    """How often each gradient is all-reduced in a step."""
    parameters = len(reference.seen[0]["start"]["flat"])
    times = max(sum(call["elements"] for call in trial.calls(rank)
                    if "reduce" in call["call"] and call["update"] > 0)
                for rank in range(trial.mesh.size))
    times /= parameters * (STEPS - 1)
    if times < 0.5:  # they agree all the same: another way was found
        return None
    if times < 1.5 or trial.mesh.tp * trial.mesh.pp > 1:
        return ok(f"gradients are reduced {times:.1f} times a step")
    return warn(
        f"gradients are reduced {times:.1f} times a step: right, but "
        f"{times:.0f} times the communication", "once is enough: " + (
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


# ------------------------------------------------------ what is told of them


@question("losses agree at every step", ("whole", "resumed", "fsdp2"))
def losses(trial, reference):
    step, largest = first_difference(trial, reference, "loss", LOSS)
    if step is None:
        return ok(f"losses agree at every step (to {largest:.0e})")
    value, good = values(trial, reference, "loss", step)
    return fail(f"the logged loss of step {step} is {value:.6f}, not "
                f"{good:.6f}{times(value, good)}", "it is the mean over the "
                "whole minibatch and all ranks, before the update")


@question("validation losses agree")
def validation(trial, reference):
    step, largest = first_difference(trial, reference, "val_loss", LOSS)
    if step is None:
        good, mine = (sum(seen["evaluated"] for seen in one.seen)
                      // one.mesh.tp for one in (reference, trial))
        if mine > good:
            return warn(f"{mine} samples are evaluated in all, where the "
                        f"single device evaluates {good}",
                        "right, but slower: every --eval-every steps, and "
                        "after the last one")
        return ok(f"validation losses agree (to {largest:.0e})")
    value, good = values(trial, reference, "val_loss", step)
    if np.isnan(value):
        return fail(f"there is no validation loss at step {step}",
                    "it is evaluated every --eval-every steps and after the "
                    "last one, and logged")
    if np.isnan(good):
        return fail(f"step {step} has a validation loss, which the single "
                    "device has not", "it is evaluated every --eval-every "
                    "steps and after the last one")
    count = EVALUATED * MINIBATCH // trial.mesh.dp
    said = step == RESUMED - 1 and misread(
        trial, [seen["validated"][:count] for seen in trial.seen], 0)
    if said:
        return fail(f"validation after step {step}: {said[0]}", said[1])
    return fail(f"the validation loss of step {step} is {value:.6f}, not "
                f"{good:.6f}{times(value, good)}", "it is the mean over all "
                "ranks, and over the first --eval-minibatches minibatches of "
                "the validation split")


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


# -------------------------------------------------------------- what is left


@question("rank 0 alone logs and saves", meshes=several)
def writers(trial, reference):
    alone = "rank 0 alone logs and saves: `if rank == 0:`"
    for r, seen in enumerate(trial.seen):
        for path in seen["written"]:
            others = [q for q in range(trial.mesh.size)
                      if q != r and path in trial.seen[q]["written"]]
            if others:
                rank = max(r, *others)
                return fail(f"rank {rank} writes {Path(path).name} too",
                            alone)
    for r in range(1, trial.mesh.size):
        if "| step" in trial.ranks[r].out:
            return fail(f"rank {r} prints the log line too", alone)
    return ok("rank 0 alone logs and saves")


@question("every rank writes texts of its own")
def texts(trial, reference):
    for r in range(1, trial.mesh.size):
        if PROMPT in trial.ranks[r].out:
            return fail(f"rank {r} prints its texts itself",
                        "gather them, and print them on rank 0: they would "
                        "end up between one another's lines")
    written = trial.ranks[0].out.split(PROMPT)[1:]
    mesh = trial.mesh
    if not written and mesh.pp == 1 and PROMPT in reference.ranks[0].out:
        return fail("no text is printed", "rank 0 prints them every "
                    "--generate-every steps and after the last one")
    if mesh.tp > 1 and written:
        for rank, seen in enumerate(trial.seen):
            first = rank - rank % mesh.tp
            if seen["continued"] != trial.seen[first]["continued"]:
                return fail(f"ranks {first} and {rank} of a TP group write "
                            "different texts", "a TP group writes one text "
                            "together: its ranks need the same seed, with "
                            "dp_rank in it and not rank")
        if len(written) == 4 * mesh.size:
            return warn(f"each text is printed {mesh.tp} times", "all ranks "
                        "of a TP group have written the same: print "
                        "texts[::tp_size]")
    lines = trial.ranks[0].out.count(f"\n{PROMPT}")
    if written and lines != 4 * mesh.dp:
        return warn(f"{lines} texts are printed, not {4 * mesh.dp}",
                    "rank 0 prints four of each rank, each on a line of its "
                    'own: print(*texts, sep="\\n")')
    if mesh.dp == 1:
        return None
    count = len({text[:20] for text in written})
    if count == len(written):
        return ok("every rank writes texts of its own")
    return warn(f"{'all' if count <= 4 else 'some'} ranks write the same "
                "texts",
                "add the rank to the seed of the generation")


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


@question("a minibatch that cannot be shared is refused", ("uneven",))
def uneven(trial, reference):
    """Whether all ranks end at once where the samples do not go round."""
    said = (f"with a minibatch of {UNEVEN} samples, which 2 ranks with "
            f"microbatches of {B} cannot share, ")
    if any(trial.updates(rank) for rank in range(trial.mesh.size)):
        return fail(said + "it trains all the same", "what is left over is "
                    "lost: require(S % round_size == 0, ...), where a round "
                    "is a microbatch of every rank")
    if any(rank.status in (None, 0) for rank in trial.ranks):
        return fail(said + "not every rank ends with an error",
                    "require(S % round_size == 0, ...) on all ranks")
    return ok("a minibatch that cannot be shared is refused")


@question("it is compiled if that is asked for",
          ("whole", "stopped", "fsdp2"))
def compiled(trial, reference):
    """Whether what torch.compile returns is what is called."""
    used = {seen and seen["compiled"] for seen in trial.seen}
    if "--compile" not in trial.more:
        if used == {None}:
            return ok("--no-compile compiles nothing")
        return warn("with --no-compile it is compiled all the same",
                    "right, but slow to begin: compile_model(...) if "
                    "hp.compile else raw_model")
    start = trial.seen[0] and trial.seen[0]["start"]
    part = "block" if start and start["sharded"] else "model"
    if used == {part}:
        return ok("--compile trains a compiled model")
    if part == "model" or None in used:
        return warn("with --compile the model that trains is not compiled",
                    "right, but slower: train what compile_model(raw_model, "
                    "device) returns")
    return warn("with --compile the model is compiled as a whole",
                "right, but slower: between its blocks FSDP gathers weights, "
                "where the compiler gives up: each_block=True")


@question("--recompute keeps few activations", ("stopped",))
def recomputed(trial, reference):
    if all(seen and seen["recomputed"] for seen in trial.seen):
        return ok("--recompute keeps few activations")
    return warn("--recompute changes nothing", "right, but a large model "
                "needs its memory: the model takes hp.recompute")


@question("every name that it uses is defined")
def definitions(trial, reference):
    """Also where the check does not come by, as under --compile."""
    missing = undefined_name(trial.tree())
    if missing:
        name, line = missing
        return fail(f"{name} is not defined (line {line})",
                    "is an import or another change missing? `python -m "
                    f"workshop diff {trial.stage}` shows what is left")
    return ok("every name that it uses is defined")
