"""Questions about the processes: how they end, and what they ask for.

Before them, of a script with kernels: what each operation computes, alone.
"""

from __future__ import annotations

import ast
import json
import re

import torch
from pyflakes.checker import Checker
from pyflakes.messages import UndefinedName

from rankcheck.engine import exits
from rankcheck.engine.findings import Finding, Line, counted, fail, ok, warn
from rankcheck.record.tensors import names
from workshop.check.plan import STEPS, UNEVEN, B
from workshop.check.questions.question import check_question, several
from workshop.check.stage_runs import StageRun


@check_question("each operation computes what PyTorch's does", ("operations",),
                early=True)
def check_operations(run: StageRun, reference: StageRun) -> Finding | None:
    """What workshop.check.operations says of them."""
    finding = exits.explain_failure(run)
    if finding:
        return finding
    for name, wrong in json.loads(run.ranks[0].out.splitlines()[-1]).items():
        if wrong is None:
            return fail(f"it has no function {name}", kind="no-kernel")
        if wrong:
            text, line, error = wrong
            sentence = [f"{name}: {text}",
                        *exits.in_brackets(map(Line, line))]
            if error:  # no result that a mask or a sum could explain
                return fail(sentence, error=text, kind="kernel")
            return fail(sentence, "check shapes that leave the last tile half "
                        "empty: masks, what is summed over tiles, who writes "
                        "where, and whether an exponential may overflow",
                        kind="kernel")
    return None


@check_question("the script trains with its own kernels",
                where=lambda run: run.about.kernels)
def check_own_kernels(run: StageRun, reference: StageRun) -> Finding | None:
    for name in run.facts("pytorch"):
        return fail(f"it trains with PyTorch's {name}, not with a kernel of "
                    "its own", kind="no-kernel")
    return None


@check_question("the optimizer updates the model that is trained", early=True)
def check_updated_model(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether any of its weights are the model's: asked first, since it may
    be the checkpoint that fails.
    """
    for rank, record in enumerate(run.records):
        groups = record.optimizers if record else None
        if groups and all(set(group["names"]) <= {"?"} for group in groups):
            return fail(f"rank {rank}'s optimizer updates another model than "
                        "the one that is trained", kind="other-model")
    return None


@check_question("the script runs to the end",
                ("whole", "resumed", "bf16", "fsdp2"), early=True)
def check_end(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether every rank finishes, after all steps."""
    finding = exits.explain_failure(run)
    if finding:
        return finding
    if len(run.rows) < STEPS:
        return fail(f"it ended after {len(run.rows)} of {STEPS} steps "
                    "without an error", kind="ends-early")
    for rank, record in enumerate(run.records):
        if not record:
            return fail(f"rank {rank} ended before the end of main()",
                        kind="leaves-early")
        if len(record.samples) < STEPS - run.first_step:
            return fail(f"rank {rank} makes "
                        f"{counted(record.samples, 'optimizer step')}, not "
                        f"{STEPS - run.first_step}", ranks=[rank],
                        numbers={"steps": len(record.samples)},
                        kind="uneven-steps")
    return ok(f"the script runs to the end ({run.seconds:.1f} s)", kind="runs")


@check_question("each rank holds its part of the model",
                where=lambda run: run.about.shards)
def check_parts(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether a sharded stage shards, and how."""
    starts = [record.start for record in run.all_records
              if record.start is not None]
    if len(starts) < run.mesh.size:
        return None
    for rank, start in enumerate(starts):
        if start["plain"]:
            return fail(f"rank {rank} holds all of {start['plain'][0][0]}",
                        ranks=[rank], kind="not-sharded")
        if not any(".h." in name for name in names(start)):
            return fail(f"rank {rank} has none of the blocks", kind="no-block")
    blocks = {name: entry for name, entry in starts[0]["sharded"].items()
              if ".h." in name and len(entry["shape"]) > 1}
    # as large as FSDP alone leaves it
    whole = [name for name, entry in blocks.items() if run.mesh.tp > 1
             and entry["part"].numel() * run.mesh.dp * run.mesh.tp
             >= 1.5 * torch.Size(entry["shape"]).numel()]
    if whole and len(whole) == len(blocks):
        return fail("no matrix of a block is split: all ranks of a TP group "
                    "compute the same", kind="not-split")
    if whole:
        return warn(f"{whole[0]} is not split: all ranks of a TP group "
                    "compute the same with it", "add a line for it to the "
                    "plan",
                    kind="not-split")
    if any(run.facts("to")):
        return warn("every device has the whole model before it is sharded",
                    "leave the model on the CPU, as it may not fit: "
                    "fully_shard moves its parts", kind="sharded-late")
    return None


def uses_trainer(run: StageRun) -> bool:
    return run.about.trainer or bool(run.facts("fit"))


@check_question("the script trains with Lightning", where=uses_trainer)
def check_trainer(run: StageRun, reference: StageRun) -> Finding | None:
    if not run.about.trainer:
        return fail(f"trainer.fit() is called: it is not stage {run.stage}",
                    kind="lightning")
    if not run.facts("fit"):
        return fail("trainer.fit() is never called", kind="no-lightning")
    writers = [one for found in run.facts("writers") for one in found]
    if writers:
        return fail(f"the Trainer also writes: {', '.join(writers)}",
                    kind="second-writer")
    if not any(run.facts("plugins")):
        return warn("Lightning guesses which launcher is used",
                    "pass plugins=[lit.get_launcher()]: else it takes the "
                    "shell of a SLURM job for a task that waits for others",
                    kind="no-launcher")
    return None


@check_question("the process group is destroyed at the end", where=several)
def check_destroyed_group(run: StageRun,
                          reference: StageRun) -> Finding | None:
    if any(record.joined for record in run.all_records):
        return warn("the process group is never destroyed",
                    "call dist.destroy_process_group() after the last "
                    "collective: with NCCL the end may hang otherwise",
                    kind="no-destroy")
    return None


@check_question("each process asks for its own device")
def check_devices(run: StageRun, reference: StageRun) -> Finding | None:
    """Which device it would use on a machine with accelerators."""
    calls = [node for node in ast.walk(run.tree())
             if isinstance(node, ast.Call) and re.search(
                 r"(Trainer|init_process_group|device|model\.to)$",
                 ast.unparse(node.func))]
    for call in calls:
        for arg in (*call.args, *(key.value for key in call.keywords)):
            name = getattr(arg, "value", "")
            if name in ("cpu", "gloo", "mpi"):
                return fail(["the device or its backend is always "
                             f"{name!r} (", Line(call.lineno),
                             "): --device is ignored"], kind="fixed-device")
    if set(run.facts("device")) - {"auto"} or (
            {None, "auto"} & set(run.facts("accelerator"))):
        return fail("the device does not follow from --device",
                    kind="fixed-device")
    for rank in range(run.mesh.size):
        local = rank % (run.mesh.size // run.mesh.nodes)
        for what in ("local_rank", "set_device", "device_ids"):
            for asked in run.facts(what, rank):
                if asked is not None and asked != local:
                    return fail(f"rank {rank} uses device {asked!r}, but its "
                                f"local rank is {local}", ranks=[rank],
                                kind="wrong-device")
    return None


@check_question("all names that the script uses are defined")
def check_definitions(run: StageRun, reference: StageRun) -> Finding | None:
    """Also in code that the check does not run, as under --compile."""
    for message in Checker(run.tree()).messages:
        if isinstance(message, UndefinedName):
            return fail([f"{message.message_args[0]} is not defined (",
                         Line(message.lineno), ")"], kind="undefined-name")
    return None


@check_question("a minibatch that cannot be shared is refused", ("uneven",),
                early=True)
def check_uneven(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether all ranks end together if the samples do not divide evenly."""
    prefix = (f"with a minibatch of {UNEVEN} samples, which 2 ranks with "
              f"microbatches of {B} cannot share, ")
    if any(map(run.count_steps, range(run.mesh.size))):
        return fail(prefix + "it trains anyway", kind="uneven-minibatch")
    if any(rank.status in (None, 0) for rank in run.ranks):
        return fail(prefix + "not every rank ends with an error",
                    kind="uneven-minibatch")
    return None


@check_question("the model is compiled if requested",
                ("whole", "stopped", "fsdp2"))
def check_compiled(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether what torch.compile returns is what is called."""
    used = {record.compiled for record in run.all_records}
    start = run.record_of(0).start
    if "--compile" not in run.more:
        return None if used == {None} else fail(
            "with --no-compile it is compiled anyway", kind="compiled")
    if None in used:
        return fail("with --compile the model that trains is not compiled",
                    kind="not-compiled")
    if start and start["sharded"] and "model" in used:
        return fail("with --compile the model is compiled as a whole: the "
                    "compiler gives up where FSDP gathers weights",
                    kind="compiled-as-a-whole")
    return None


@check_question("--recompute keeps few activations", ("stopped",))
def check_recomputed(run: StageRun, reference: StageRun) -> Finding | None:
    if not all(record.recomputed for record in run.all_records):
        return fail("--recompute has no effect", kind="no-recompute")
    return None
