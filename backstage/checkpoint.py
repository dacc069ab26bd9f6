"""Checkpoints: the whole state of a run in one file, in every stage.

A checkpoint is a dictionary: `format`, `stage`, `step` (completed updates),
`model` and `optimizer` (whole tensors on the CPU, by parameter name), `config`
and `hyperparameters`.
"""

import logging
import pickle
import zipfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from backstage.errors import UserError, explain, require
from backstage.files import write_atomically
from backstage.world import on_every_rank

# each save would say that a tensor in parts of parts is gathered twice
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
    logging.ERROR)

TIED = "transformer.wte.weight", "lm_head.weight"  # one matrix
FORMAT = 2  # 1 had c_attn's rows in another order, and numbers, not names


def gather_state(model, optimizer):
    """The whole state of both, on rank 0; elsewhere empty dictionaries.

    However the model is wrapped or sharded, the parameters have the same
    names as in the plain model. If the model is sharded, all ranks that hold
    a part of it call this; if every rank holds all of it, rank 0 is enough.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):  # evaluation may leave it gathered
            module.reshard()
    firsts = first_ranks(model)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    options = whole if len(firsts) == 1 else StateDictOptions()
    weights = get_model_state_dict(model, options=options)
    optim_state = get_optimizer_state_dict(model, optimizer, options=options)
    if len(firsts) > 1:
        weights, optim_state = join_pipeline(weights, optim_state, firsts)
    for group in optim_state.get("param_groups", ()):
        for name in group.keys() - {"params", *optimizer.defaults}:
            del group[name]  # a scheduler's, which other stages do not have
    return weights, optim_state


def first_ranks(model):
    """The first rank of each pipeline stage: [0] without a pipeline."""
    if not is_sharded(model):
        return [0]
    firsts = {}
    for rank, names in enumerate(on_every_rank(tuple(model.state_dict()))):
        firsts.setdefault(names, rank)
    return list(firsts.values())


def join_pipeline(weights, optim_state, firsts):
    """What `gather_state` returns, from the pipeline stages' states."""
    keep = dist.get_rank() in firsts

    def gather(part):
        whole = part.full_tensor()  # from all ranks of this pipeline stage
        return whole.cpu() if keep else None

    mine = tree_map_only(DTensor, gather, (weights, optim_state))
    states = [None] * dist.get_world_size()
    dist.gather_object(mine if keep else None,
                       states if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return {}, {}
    weights, optim_state = states[0]
    for rank in firsts[1:]:
        more_weights, more = states[rank]
        weights |= more_weights
        more["state"].pop(TIED[1], None)  # the first pipeline stage has it
        optim_state["state"] |= more["state"]
        for group, added in zip(optim_state["param_groups"],
                                more["param_groups"], strict=True):
            group["params"] += [name for name in added["params"]
                                if name != TIED[1]]
    return weights, optim_state


def spread_state(state, model, optimizer=None):
    """Load a checkpoint's state: each rank loads its part. All ranks."""
    options = StateDictOptions(full_state_dict=True)
    if len(first_ranks(model)) > 1:
        state = cut_state(state, model.state_dict())
    set_model_state_dict(model, state["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(
            model, optimizer, state["optimizer"], options=options)


def cut_state(state, names):
    """The part of a checkpoint's state that a pipeline stage has."""
    optim_state = state["optimizer"]
    if TIED[0] not in names:  # the last pipeline stage has its other name
        optim_state["state"][TIED[1]] = optim_state["state"].pop(TIED[0])
        for group in optim_state["param_groups"]:
            group["params"] = [TIED[1] if name == TIED[0] else name
                               for name in group["params"]]
    optim_state["state"] = {name: values for name, values
                        in optim_state["state"].items() if name in names}
    for group in optim_state["param_groups"]:
        group["params"] = [name for name in group["params"] if name in names]
    model = {name: state["model"][name] for name in names}
    return state | {"model": model, "optimizer": optim_state}


def is_sharded(model):
    """Whether a rank holds only a part of the model.

    After an evaluation FSDP may have left all of it gathered.
    """
    return (any(isinstance(part, FSDPModule) for part in model.modules())
            or any(isinstance(part, DTensor) for part in model.parameters()))


def write_checkpoint(state, folder, step):
    """Write `state` to folder/step_<step>.pt atomically; keep the newest two.

    Raises `UserError` if it cannot be written; older checkpoints stay.
    """
    try:
        write_atomically(folder / f"step_{step:08d}.pt",
                         lambda file: torch.save(state, file))
    except UserError as error:
        raise UserError(f"{error}. The earlier checkpoints are complete: make "
                        "room, and go on with --resume") from error
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def load_checkpoint(file):
    """A checkpoint's dictionary, on the CPU; `UserError` if it is not one."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        found = state["format"]
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError,
            pickle.UnpicklingError) as error:
        reason = (explain(error) or str(error)).strip().splitlines()[0]
        raise UserError(f"{file}: not a checkpoint ({reason})") from error
    require(found == FORMAT, f"{file}: a checkpoint of format {found}, but "
            f"this version of the course reads only format {FORMAT}: train "
            "again, or go back to the version that wrote it")
    return state


def is_whole(file):
    """Whether a checkpoint's archive is complete and its checksums hold."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
