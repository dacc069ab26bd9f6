"""Why an answer is not what it should be: the hints of the questions."""

import ast
import math
import re
from itertools import combinations, pairwise

from pyflakes.checker import Checker
from pyflakes.messages import UndefinedName

from workshop.check.findings import (
    fail,
    norm_of,
    relative,
    shorten,
    values,
)
from workshop.check.observe import SAMPLES, T
from workshop.check.parts import TIED, assemble, local_square
from workshop.check.trial import MINIBATCH, STEPS, B
from workshop.lesson import documents
from workshop.stages import STAGES, find

LOADS_STATE = ("each rank loads the optimizer's state too: "
               "run.restore(raw_model, optimizer) on all ranks")


def asks_the_launcher(trial):
    """Whether the script looks anywhere for the rank of its process."""
    return any(
        (isinstance(node, ast.Constant) and node.value == "RANK")
        or getattr(node, "attr", getattr(node, "id", "")) == "get_world"
        for node in ast.walk(trial.tree()))


def thinks_it_is_rank_0(trial):
    """Of the unchanged script: the lesson's change that it lacks first."""
    change = launcher_change(trial.stage)
    return fail("every process thinks it is rank 0: "
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
    else:
        cause = ("a rank counts through all nodes, a node's devices begin "
                 "at 0: pass local_rank")
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


def misread(trial, lists, start):
    """How ranks read other samples than theirs: (text, hint), or None.

    lists: the samples of each rank, in the order in which it read them;
    start: the first sample of all ranks. A rank begins at its offset from
    there, and moves on by a stride from each microbatch to the next.
    """
    mesh, offsets, strides = trial.mesh, {}, {}
    size = MINIBATCH // mesh.dp if trial.pipelined else B
    for rank, numbers in enumerate(lists):
        begins = numbers[::size]
        moves = {(b - a) % SAMPLES for a, b in pairwise(begins)}
        if len(moves) > 1 or numbers != [
                (begin + i) % SAMPLES for begin in begins
                for i in range(size)][:len(numbers)]:
            return None  # they come in no such order
        if numbers:  # not in a later pipeline stage
            offsets[rank] = (begins[0] - start) % SAMPLES
            strides[rank] = min(moves, default=mesh.dp * size)
    name, world = (("dp_rank", "dp_size") if trial.flags else
                   ("rank", "world_size"))
    hint = ("seek() takes a sample's number, counted over all ranks: "
            "train_data.seek(first_step * S)" if trial.first_step else
            f"the ranks take turns: DataIterator(shards, B, T, {name}, "
            f"{world}), with self.offset, self.stride = rank * B, "
            "world_size * B")
    right = mesh.dp * size
    if mesh.dp > 1 and len(set(map(tuple, filter(None, lists)))) == 1 and (
            strides[0] != right):
        return (f"every rank reads samples {shorten(lists[0])}: the data is "
                "not sharded", hint)
    if all((offsets[rank], strides[rank]) == (right, rank * size)
           for rank in offsets) and mesh.tp * mesh.pp == 1:
        return "rank and world_size are swapped", hint
    for rank, offset in offsets.items():
        own = rank // mesh.tp % mesh.dp * size
        if offset != own:
            known = spell(trial, offsets) if start == 0 else ""
            return (f"rank {rank} begins at sample "
                    f"{(start + offset) % SAMPLES}, not at sample "
                    f"{(start + own) % SAMPLES}" + (
                        f": its offset is {known}, not {name} * B"
                        if known else ""), hint)
    for rank, stride in strides.items():
        if stride != right:
            begin = start + offsets[rank]
            here, there, wanted = ((begin + moved) % SAMPLES
                                   for moved in (0, stride, right))
            known = spell(trial, strides)
            return (f"rank {rank} moves on from sample {here} to {there}, "
                    f"not to {wanted}" + (
                        f": its stride is {known}, not {world} * B"
                        if known else ""), hint)
    return None


def miscounted(trial, count):
    """The same where a step has not `count` samples of a rank."""
    if count == MINIBATCH // trial.mesh.dp or trial.pipelined:
        return None
    world = "dp_size" if trial.flags else "world_size"
    known = spell(trial, {0: MINIBATCH * B // count}, math.inf)
    if known:
        known = (": accumulation_steps is S // "
                 f"{f'({known})' if ' ' in known else known}, not "
                 f"S // ({world} * B)")
    return (f"a rank reads {count} of them, not "
            f"{MINIBATCH // trial.mesh.dp}{known}",
            "give the Trainer accumulate_grad_batches=accumulation_steps, "
            "which is S // (B * world_size)" if trial.by_trainer else
            f"the ranks share a minibatch: accumulation_steps is S // (B * "
            f"{world})")


def spell(trial, values, period=SAMPLES):
    """What has these values, as the script says it, "" if nothing has.

    values: rank -> a number of samples, modulo the period.
    """
    mesh = trial.mesh
    if not any(values.values()):
        return "0"
    names = ["B", "T", "rank", "world_size"]
    names += ["dp_rank", "dp_size"] if trial.flags else []
    for count in (1, 2, 3):
        for chosen in combinations(names, count):
            if all(value == math.prod({
                    "B": B, "T": T, "rank": rank, "world_size": mesh.size,
                    "dp_rank": rank // mesh.tp % mesh.dp, "dp_size": mesh.dp,
                    }[name] for name in chosen) % period
                   for rank, value in values.items()):
                return " * ".join(sorted(chosen, key=str.isupper))
    return ""


def why_samples(trial, together):
    """A hint where samples come in no order that `misread` knows."""
    if (trial.mesh.dp == 1 and len(set(together)) < len(together)
            and has_workers(trial)):
        return ("some are read twice: each worker of a DataLoader reads all "
                "of them; leave num_workers at 0")
    return ("they come in another order: no sampler, shuffle or worker may "
            "deal them out again")


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
    return ('the schedule moves on once a step: "interval": "step", and '
            "get_lr as a factor of the maximum")


def why_apart(trial, step, mine):
    """Why ranks have other gradients: their reduction is missing."""
    if trial.shards:
        return why_copies_apart(trial, step, mine)
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


def why_copies_apart(trial, step, mine):
    """Why ranks that have a copy of a weight have different gradients."""
    if trial.mesh.size > 1 and clips_by_parts(trial, step):
        return CLIPS_BY_PARTS
    name = min(mine.apart, key=lambda name: ("ln_" not in name, name))
    if trial.mesh.tp == 1:
        return f"{name} is on several ranks, and each uses its own gradient"
    return (f"each rank of a TP group has a part of the gradient of {name}: "
            "what a matrix that is split by columns takes is the same on all "
            "of them, and its gradient is the sum over the group "
            "(ColwiseParallel sees to both)")


CLIPS_BY_PARTS = ("each rank clips by the norm of its own part: add up the "
                  "squares of all ranks, as clip_grad_norm does")


def clips_by_parts(trial, step):
    """Whether the gradients of each rank alone are as long as the limit."""
    squares = [local_square(seen["gradients"][step - trial.first_step])
               for seen in trial.seen]
    return all(relative(square, 1.0) < 1e-3 for square in squares)


def why_off(trial, reference, step, good, mine):
    """Why the gradients are off, but the same on all ranks."""
    first = trial.seen[0]["clips"][step - trial.first_step]
    synced = trial.seen[0]["synced"][step - trial.first_step]
    length = norm_of(mine)
    if trial.first_step and step > trial.first_step:
        return LOADS_STATE
    if trial.seen[0]["late"][step - trial.first_step]:
        return ("they are clipped before they are reduced: clip what has "
                "been added up over ranks")
    if swaps_heads(trial):
        return ("c_attn's output is ordered by heads, each with its query, "
                "key and value: .view(B, T, -1, 3, self.head_size), and no "
                "chunk or split in three")
    if trial.pipelined:
        return why_pipeline_off(trial, reference, step, good, mine)
    if trial.shards and synced and not synced[-1]:
        return ("the last microbatch is not reduced: "
                "raw_model.set_requires_gradient_sync(is_last_microbatch), "
                "before the forward pass")
    if trial.mesh.size > 1 and trial.mesh.tp > 1:
        scaled = why_wrong_norm(trial, reference, step, good, mine)
        if scaled:
            return scaled
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
    limit = first[-1][1]
    if limit != 1.0:
        return f"they are clipped at {limit:g}, not at 1.0"
    if len(first) > 1 and not trial.by_trainer:
        return ("they are clipped at every microbatch: once a step, after "
                "the last one")
    if step:
        return ("the first step is right, this is not: gradients are zeroed "
                "after each update, optimizer.zero_grad()")
    if trial.mesh.dp > 1:
        return ("gradients have to be the mean over the minibatch: is the "
                "last microbatch the one that is reduced, and before they "
                "are clipped?")
    return ("gradients have to be the mean over the minibatch: look at what "
            "the loss is divided by, and when they are zeroed")


def why_pipeline_off(trial, reference, step, good, mine):
    """The same where a pipeline's schedule computes the gradients."""
    scaled = (why_wrong_norm(trial, reference, step, good, mine)
              or why_scaled(trial, reference, step))
    if scaled:
        return scaled
    limits = {limit for seen in trial.seen
              for _, limit, _ in seen["clips"][step - trial.first_step]}
    if limits != {1.0}:
        return ("clip them before optimizer.step(): clip_grad_norm(raw_model"
                ", 1.0, world_size // pp_size)")
    if trial.mesh.pp > 1:
        ratio = share(mine, good, {TIED}) / share(
            mine, good, good.tensors.keys() - {TIED})
        if relative(ratio, 0.5) < 0.05:
            return ("the tied matrix's gradient is the sum over the first "
                    "and the last pipeline stage, not their mean: all_reduce "
                    "adds up")
    if step:
        return ("the first step is right, this is not: gradients are zeroed "
                "after each update, optimizer.zero_grad()")
    return ("gradients have to be the mean over the minibatch: look at what "
            "the schedule gets, and at what cut() leaves")


def share(mine, good, names):
    """How much of the right gradient there is in these names."""
    both = [(mine.tensors[name], good.tensors[name]) for name in names
            if name in mine.tensors]
    return (sum((a * b).sum().item() for a, b in both)
            / max(sum((b * b).sum().item() for _, b in both), 1e-60))


def why_wrong_norm(trial, reference, step, good, mine):
    """Why all gradients are off by one factor: they were clipped by it."""
    if trial.mesh.size > 1 and clips_by_parts(trial, step):
        return CLIPS_BY_PARTS
    factor = share(mine, good, good.tensors.keys())
    off = sum((mine.tensors[name] - factor * tensor).square().sum().item()
              for name, tensor in good.tensors.items()
              if name in mine.tensors)
    if off > 1e-6 * norm_of(mine) ** 2 or relative(factor, 1.0) < 1e-3:
        return ""
    value, right = values(trial, reference, "norm", step)
    return why_norm(trial, step, value / right)


def why_norm(trial, step, ratio):
    """A hint where a norm is off by what a wrong sum of squares makes."""
    mesh = trial.mesh
    states = [seen["gradients"][step - trial.first_step]
              for seen in trial.seen]
    if not trial.shards or mesh.size == 1:
        return ""
    mine = assemble(states)
    whole, parts = norm_of(mine) ** 2, list(map(local_square, states))
    tied = mine.tensors[TIED].square().sum().item() if mesh.pp > 1 else 0.0
    ranks = "world_size" + " // pp_size" * trial.pipelined
    causes = (
        (parts[0] / whole, "it is the norm of rank 0's part alone: "
         + ("clip_grad_norm adds up all ranks'" if mesh.tp * mesh.pp > 1 else
            "clip_grad_norm_(...).full_tensor() adds up all ranks'")),
        ((whole + tied) / whole, "the tied matrix counts twice, once at each "
         "end: model.transformer.parameters() has it once"),
        (mesh.tp, "each part counts as often as a TP group has ranks: "
         f"clip_grad_norm(raw_model, 1.0, {ranks})"),
        (1 / mesh.pp, "it is divided by the number of pipeline stages: "
         f"clip_grad_norm takes the ranks of one of them, {ranks}"),
        *((square / whole, "what all ranks of a TP group have, LayerNorms "
           "and some biases, counts once for each of them: divide the "
           "squares by the number of copies, as clip_grad_norm does")
          for square in (sum(parts), sum(parts) - tied)),
    )
    for square, cause in causes:
        if relative(square, 1.0) > 1e-3 and relative(
                ratio, square ** 0.5) < 1e-3:
            return cause
    return ""


def why_scaled(trial, reference, step=0):
    """A hint where the norm is too large or small by one whole factor."""
    value, good = values(trial, reference, "norm", step)
    ratio = value / good
    A, W = trial.accumulation, trial.mesh.dp
    if trial.pipelined and relative(ratio, A) < 0.01 and A > 1:
        return ("the schedule divides gradients by the number of "
                "microbatches, unless it is told scale_grads=False (the norm "
                f"is {ratio:.3g} times what it should be)")
    if trial.pipelined and relative(ratio, 1 / A) < 0.01 and A > 1:
        return ("the schedule divides gradients by the number of "
                "microbatches itself: leave the loss as it is")
    causes = {  # of equal factors the last counts
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


def by_mesh(mesh):
    """By how much a logged loss is off, and why: pairs, for `relative`."""
    return (
        (1 / mesh.pp, "only the last pipeline stage has a loss, the others "
                      "add 0: all_reduce it in Pipeline.forward, and over "
                      "all ranks in main()"),
        (mesh.tp, "all ranks of a TP group have the same loss: divide the "
                  "sum by the number of ranks, and not of TP groups"),
        (1 / mesh.size, "it is divided by the number of ranks, but not "
                        "summed over them: all_reduce it"),
    )


def swaps_heads(trial):
    """Whether c_attn's output is cut in three, as if not by heads."""
    for node in ast.walk(trial.tree()):
        if isinstance(node, ast.Call) and "c_attn" in ast.unparse(node) and (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("chunk", "split", "tensor_split")):
            return True
    return False


def undefined_name(tree):
    """(name, line) of the first name that nothing defines, or None."""
    for message in Checker(tree).messages:
        if isinstance(message, UndefinedName):
            return message.message_args[0], message.lineno
    return None
