"""Why an answer is not what it should be: the hints of the questions."""

import ast
import re
from itertools import pairwise

from pyflakes.checker import Checker
from pyflakes.messages import UndefinedName

from workshop.check.findings import fail, shorten
from workshop.check.observe import SAMPLES
from workshop.check.trial import MINIBATCH, B
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
    if isinstance(asked, str):
        cause = "it has to be a number: int(os.environ[...])"
    elif asked == 0:
        cause = "pass the local rank: use_device(hp.device, local_rank)"
    else:
        cause = ("ranks count on over the nodes, but a node's devices begin "
                 "at 0: pass local_rank")
    return fail(f"rank {rank} takes device {asked!r}, but it has local rank "
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
            return (f"rank {rank} begins at sample "
                    f"{(start + offset) % SAMPLES}, not at sample "
                    f"{(start + own) % SAMPLES}", hint)
    for rank, stride in strides.items():
        if stride != right:
            begin = start + offsets[rank]
            here, there, wanted = ((begin + moved) % SAMPLES
                                   for moved in (0, stride, right))
            return (f"rank {rank} moves on from sample {here} to {there}, "
                    f"not to {wanted}", hint)
    return None


def miscounted(trial, count):
    """The same where a step has not `count` samples of a rank."""
    if count == MINIBATCH // trial.mesh.dp or trial.pipelined:
        return None
    world = "dp_size" if trial.flags else "world_size"
    return (f"a rank reads {count} of them, not "
            f"{MINIBATCH // trial.mesh.dp}",
            "give the Trainer accumulate_grad_batches=accumulation_steps, "
            "which is S // (B * world_size)" if trial.by_trainer else
            f"the ranks share a minibatch: accumulation_steps is S // (B * "
            f"{world})")


def wrong_setting(name, key, value, good):
    if key == "weight_decay":
        return fail(
            f"{name} has a weight decay of {value}, not {good}",
            "matrices are decayed, biases and LayerNorms are not: look at "
            "the groups in configure_optimizers")
    return fail(f"the optimizer's {key} are {value}, not {good}",
                "give AdamW what the single device gives it: "
                f"{key}={good}")


def undefined_name(tree):
    """(name, line) of the first name that nothing defines, or None."""
    for message in Checker(tree).messages:
        if isinstance(message, UndefinedName):
            return message.message_args[0], message.lineno
    return None
