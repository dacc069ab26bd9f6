"""Questions about the processes: how they end, and what they ask for."""

import ast

import torch

from workshop.check import endings
from workshop.check.causes import (
    asks_the_launcher,
    fixed_device,
    thinks_it_is_rank_0,
    undefined_name,
    wrong_device,
)
from workshop.check.findings import fail, ok, warn
from workshop.check.parts import names
from workshop.check.questions.question import question, several
from workshop.check.trial import STEPS, UNEVEN, B
from workshop.stages import STAGES


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
    finding = (other_loop(trial, shows) or other_flags(trial, shows)
               or (trial.shards and whole_model(trial, shows)))
    if finding:
        return finding
    name = (trial.state or {}).get("stage")
    if name not in (None, trial.stage):
        return fail(f"the run calls itself {name}, not {trial.stage}",
                    f'give its stage to the run: "{trial.stage}"')
    return ok("it is the stage's script")


def other_loop(trial, shows):
    """A `Finding` where the steps are not made as the stage makes them."""
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
    return None


def other_flags(trial, shows):
    script = ast.unparse(trial.tree())
    for flag in trial.flags:
        if flag.strip("-").replace("-", "_") not in script:
            return fail(f"it has no {flag}: it is still another stage's "
                        "script", f"{shows} to change")
    return None


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


@question("each process asks for its own device")
def devices(trial, reference):
    """What it would take on a machine with accelerators."""
    per_node = trial.mesh.size // trial.mesh.nodes
    fixed = fixed_device(trial)
    if fixed:
        return fixed
    if {None, "auto"} & set(trial.asked("accelerator")):
        return fail("the Trainer chooses the device itself: --device has no "
                    "say", "accelerator=device.type")
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
    if not all(trial.seen):  # it did not come to its end: another question
        return None
    used = {seen["compiled"] for seen in trial.seen}
    if "--compile" not in trial.more:
        if used == {None}:
            return ok("--no-compile compiles nothing")
        return fail("with --no-compile it is compiled all the same",
                    "compile_model(...) if hp.compile else raw_model")
    if None in used:
        return fail("with --compile the model that trains is not compiled",
                    "train what compile_model(raw_model, device) returns")
    start = trial.seen[0]["start"]
    if start and start["sharded"] and "model" in used:
        return fail("with --compile the model is compiled as a whole",
                    "between its blocks FSDP gathers weights, where the "
                    "compiler gives up: each_block=True")
    return ok("--compile trains a compiled model")


@question("--recompute keeps few activations", ("stopped",))
def recomputed(trial, reference):
    if not all(trial.seen):
        return None
    if all(seen["recomputed"] for seen in trial.seen):
        return ok("--recompute keeps few activations")
    return fail("--recompute changes nothing", "a large model needs its "
                "memory: the model takes hp.recompute")
