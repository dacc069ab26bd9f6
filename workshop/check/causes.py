"""Why an answer is not what it should be: the hints of the questions."""

import ast
import re

from workshop.check.findings import (
    fail,
    norm_of,
    relative,
    values,
)
from workshop.check.trial import STEPS, B
from workshop.lesson import documents
from workshop.stages import STAGES, find

RESUMED = ("each rank loads the optimizer's state too: "
           "run.restore(raw_model, optimizer) on all ranks")


def asks_the_launcher(trial):
    """Whether the script looks anywhere for the rank of its process."""
    return any(
        (isinstance(node, ast.Constant) and node.value == "RANK")
        or getattr(node, "attr", getattr(node, "id", "")) == "get_world"
        for node in ast.walk(trial.tree()))


def takes_itself_for_rank_0(trial):
    """Of the unchanged script: the lesson's change that it lacks first."""
    change = launcher_change(trial.stage)
    return fail("every process takes itself for rank 0: "
                f"{change} is missing, or the file is not saved",
                f"save it (Ctrl+S, Cmd+S); `python -m workshop diff "
                f"{trial.stage}` shows what is left to change")


def launcher_change(stage):
    """The change that asks the launcher for the rank, in words.

    It is in the lesson of this stage, or of one that it starts from.
    """
    name = stage
    while find(name).after:
        for number, change in enumerate(documents.load(name), 1):
            if any(re.search('"RANK"|get_world', anchor)
                   for anchor in change.anchors):
                where = "" if name == stage else f" of the lesson {name}"
                return f"change {number}{where} ({change.title})"
        name = STAGES[name].after
    return "the change that asks the launcher"


def wrong_device(rank, local, asked):
    if asked == 0:
        cause = "pass the local rank: use_device(hp.device, local_rank)"
    elif asked == rank:
        cause = ("a rank counts through all nodes, a node's devices begin "
                 "at 0: pass local_rank")
    else:
        cause = "pass local_rank, from LOCAL_RANK"
    return fail(f"rank {rank} takes device {asked}, but it has local rank "
                f"{local}: processes would share a device", cause)


def fixed_device(trial):
    """Where a device or a backend stands in the script as a word."""
    for node in ast.walk(trial.tree()):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else (
            getattr(node.func, "id", ""))
        words = {key.arg: key.value.value for key in node.keywords
                 if isinstance(key.value, ast.Constant)}
        first = (node.args[0].value if node.args
                 and isinstance(node.args[0], ast.Constant) else None)
        where = f"(line {node.lineno})"
        if name == "Trainer" and words.get("accelerator") == "cpu":
            return fail(f'the Trainer always takes the CPU {where}',
                        "accelerator=device.type takes what --device asks "
                        "for, \"auto\" an accelerator if there is one")
        backend = words.get("backend", first)
        if name == "init_process_group" and backend in ("gloo", "mpi"):
            return fail(
                f'the backend is always "{backend}" {where}',
                "dist.get_default_backend_for_device(device) is the device's "
                "own: GPUs would send everything through the CPU")
        if (name == "device" and first == "cpu") or (
                name == "to" and first == "cpu" and not trial.asked("fit")
                and "raw_model" in ast.unparse(node.func)):
            return fail(f'the device is always "cpu" {where}',
                        "use_device(hp.device, local_rank) takes what "
                        "--device asks for")
    return None


def why_samples(trial, reference, step, read):
    expected = reference.seen[0]["samples"][step]
    together = [i for part in read for i in part]
    distributed = "DistributedSampler" in "".join(
        str(value) for value in trial.asked("Trainer"))
    injected = trial.asked("Trainer") and not any(
        value.get("use_distributed_sampler") is False
        for value in trial.asked("Trainer"))
    if trial.first_step:
        begin = reference.seen[0]["samples"][0]
        if sorted(together)[:4] == sorted(begin)[:4]:
            return ("a resumed run goes on in the data where it stopped: "
                    "train_data.seek(first_step * S)")
        return ("seek takes the number of the sample, counted over all "
                "ranks: train_data.seek(first_step * S)")
    if len(together) > len(expected) * 1.5:
        if trial.asked("Trainer"):
            return ("more samples than a minibatch: give the Trainer "
                    "accumulate_grad_batches=accumulation_steps, which is "
                    "minibatch / (microbatch * world_size)")
        return ("more samples than a minibatch: accumulation_steps has to "
                "be divided by the world size")
    if len(together) < len(expected):
        if trial.asked("Trainer"):
            return ("fewer samples than a minibatch: is "
                    "accumulate_grad_batches given to the Trainer?")
        return ("fewer samples than a minibatch: is accumulation_steps "
                "divided by the world size twice?")
    if len(read) > 1 and all(part == read[0] for part in read):
        return ("all ranks read the same samples: pass this process's rank "
                "and the world size to DataIterator")
    if injected and trial.mesh.dp > 1 and distributed:
        return ("Lightning deals the samples out with a sampler of its own: "
                "use_distributed_sampler=False")
    if len(set(together)) < len(together):
        if trial.mesh.dp == 1 and has_workers(trial):
            return ("some are read twice: each worker of a DataLoader reads "
                    "all of them; leave num_workers at 0")
        if trial.mesh.dp > 1:
            return ("the ranks' samples overlap: rank r starts at r * B and "
                    "goes on world_size * B further")
    if trial.mesh.dp == 1 or trial.by_trainer:
        return ("they come in another order: no sampler, shuffle or worker "
                "may deal them out again")
    return ("these are another step's samples: look where each rank starts, "
            "and how far it goes on")


def has_workers(trial):
    """Whether a loader of the script is given workers."""
    return any(isinstance(node, ast.keyword) and node.arg == "num_workers"
               for node in ast.walk(trial.tree()))


def wrong_setting(name, key, value, good):
    if key == "weight_decay":
        return fail(
            f"{name} has a weight decay of {value}, not {good}",
            "matrices are decayed, biases and LayerNorms are not: look at "
            "the groups in configure_optimizers")
    return fail(f"the optimizer's {key} are {value}, not {good}",
                "give AdamW what the single device gives it: "
                f"{key}={good}")


def why_rate(trial):
    if not trial.by_trainer:
        return ("it changes once a step, by get_lr(step, max_steps, hp), "
                "whatever the world size")
    asked = trial.asked("Trainer")[-1:] or [{}]
    if asked[0].get("max_steps") not in (None, STEPS):
        return ("max_steps of the Trainer counts updates, not microbatches: "
                "max_steps=max_steps")
    return ('the schedule moves on once a step: "interval": "step", and '
            "get_lr as a factor of the maximum")


def why_apart(trial):
    """Why ranks have other gradients: their reduction is missing."""
    synced = [flags for flags in trial.seen[0]["synced"][1:] if flags]
    if trial.by_mpi:
        return why_apart_by_mpi(trial)
    if not trial.asked("DistributedDataParallel"):
        return ("nothing reduces the gradients: wrap the model, "
                "DistributedDataParallel(raw_model)")
    if not synced:
        return ("gradients are never reduced: call the DDP wrapper "
                "(`model`), not the raw model, for the loss")
    if not any(any(flags) for flags in synced):
        return ("gradients are never reduced: every microbatch is under "
                "no_sync(), the last one has to be outside")
    if not all(flags[-1] for flags in synced):
        if all(all(flags[:-1]) for flags in synced):
            return ("no_sync() the wrong way round: the last microbatch has "
                    "to be outside it, the others under it")
        return ("gradients are reduced too early: the last microbatch has to "
                "be outside no_sync()")
    return ("gradients are changed after they were reduced: each rank has to "
            "do the same with them")


def why_apart_by_mpi(trial):
    """The same, where the script itself sends them."""
    calls = [call for call in trial.calls(0) if call["elements"] > 2
             and call["lines"] and call["update"] < STEPS]
    names = {call["call"] for call in calls}
    rooted = next((call for call in calls if call["call"] == "reduce"), None)
    if rooted:
        return (f"Reduce (line {rooted['lines'][0][0]}) leaves the sum on "
                "rank 0 alone: Allreduce gives it to every rank")
    if not names:
        return ("nothing reduces the gradients: comm.Allreduce(MPI.IN_PLACE, "
                "gradient) for each, then divide by comm.size")
    if not any("reduce" in name for name in names):
        return ("they are sent, but not added up: comm.Allreduce gives every "
                "rank the sum")
    return ("the sum does not get back into weight.grad on every rank: copy "
            "it there, divided by comm.size, on all of them")


def why_off(trial, reference, step, good, mine):
    """Why the gradients are off, but the same on all ranks."""
    first = trial.seen[0]["clips"][step - trial.first_step]
    total = sum(len(part["samples"][step - trial.first_step])
                for part in trial.seen) or 1
    microbatches = max(total // (B * trial.mesh.dp), 1)
    synced = trial.seen[0]["synced"][step - trial.first_step]
    length = norm_of(mine)
    if trial.first_step and step > trial.first_step:
        return RESUMED
    if trial.shards and synced and not synced[-1]:
        return ("the last microbatch is not reduced: "
                "raw_model.set_requires_gradient_sync(reduce), where reduce "
                "is true for the last one, before the forward pass")
    scaled = why_scaled(trial, reference, step)
    if scaled:
        return scaled
    if trial.shards and trial.mesh.dp > 1 and not first:
        return ("each rank clips by the norm of its own part: "
                "clip_grad_norm_(raw_model.parameters(), 1.0) takes the norm "
                "of all parts")
    if not first:
        later = trial.seen[0]["clips"][step + 1 - trial.first_step:]
        if any(done == 0 for clips in later for done, _, _ in clips):
            return ("they are clipped after the update: clip them before "
                    "optimizer.step()")
        if length > 1.01:
            return ("they are not clipped: clip_grad_norm_(parameters, 1.0) "
                    "after the last backward(), before optimizer.step()")
        return ("gradients have to be the mean over the minibatch: look at "
                "when they are reduced, clipped and zeroed")
    done, limit, reduced = first[-1]
    if limit != 1.0:
        return f"they are clipped at {limit:g}, not at 1.0"
    if len(first) > 1 and not trial.by_trainer:
        return ("they are clipped at every microbatch: once a step, after "
                "the last one")
    if done < microbatches:
        return ("they are clipped before the last microbatch: once a step, "
                "after it")
    if trial.mesh.dp > 1 and length > 0 and not reduced and not synced:
        return ("they are clipped before they are reduced: clip the mean of "
                "all ranks")
    if step:
        return ("the first step is right, this is not: gradients are zeroed "
                "after each update, optimizer.zero_grad()")
    if trial.mesh.dp > 1:
        return ("gradients have to be the mean over the minibatch: is the "
                "last microbatch the one that is reduced, and before they "
                "are clipped?")
    return ("gradients have to be the mean over the minibatch: look at what "
            "the loss is divided by, and when they are zeroed")


def why_scaled(trial, reference, step=0):
    """A hint where the norm is too large or small by one whole factor."""
    value, good = values(trial, reference, "norm", step)
    ratio = value / good
    A, W = trial.accumulation, trial.mesh.dp
    causes = {  # of equal factors the last counts
        1 / (A * W): "the loss is divided by accumulation_steps and by the "
                     "world size once too often",
        1 / A: "the loss is divided by accumulation_steps twice: Lightning "
               "does it itself" if trial.by_trainer else
               "the loss is divided by accumulation_steps twice",
        A: "the loss is not divided by accumulation_steps",
        1 / W: "they are divided by the world size twice" if trial.by_mpi
               else "the loss is divided by the world size, though "
               f"{'FSDP' if trial.shards else 'DDP'} takes the mean over "
               "ranks itself",
        W: "gradients are summed over ranks: they have to be averaged",
    }
    for factor, cause in causes.items():
        if factor != 1 and relative(ratio, factor) < 0.01:
            return f"{cause} (the norm is {ratio:.3g} times what it should be)"
    return ""
