"""Checkpoints: the whole state of a run in one file, in every stage.

A checkpoint is a dictionary: `format`, `stage`, `step` (completed updates),
`model` and `optimizer` (whole tensors on the CPU, by parameter name), `config`
and `hyperparameters`.
"""

import logging
import math
import re
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

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

from backstage import ROOT
from backstage.errors import UserError, require, warn
from backstage.files import Damaged, is_count, reading, write_atomically
from backstage.flops import num_parameters
from backstage.record import CONFIG
from backstage.world import call_on_rank_0, on_every_rank

# each save would say that a tensor in parts of parts is gathered twice
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
    logging.ERROR)

TIED = "transformer.wte.weight", "lm_head.weight"  # one matrix
MOST = 100  # times the weights that a file has, if a model shares them
FORMAT = 2  # 1 had c_attn's rows in another order, and numbers, not names
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's, of each weight


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
    """What `gather_state` returns, from the pipeline stages' states.

    A device never holds more of the others' parts than one tensor: the first
    rank of each pipeline stage sends its state from memory to memory.
    """
    keep = dist.get_rank() in firsts
    cpus = join_first_ranks(tuple(firsts))

    def gather(part):
        if isinstance(part, DTensor):
            part = part.full_tensor()  # from all ranks of the pipeline stage
        return part.cpu() if keep else None

    mine = tree_map_only(torch.Tensor, gather, (weights, optim_state))
    if dist.get_rank() > 0:
        if keep:
            dist.send_object_list([mine], dst=0, group=cpus)
        return {}, {}
    weights, optim_state = mine
    for rank in firsts[1:]:
        received = [None]
        dist.recv_object_list(received, src=rank, group=cpus)
        more_weights, more = received[0]
        weights |= more_weights
        more["state"].pop(TIED[1], None)  # the first pipeline stage has it
        optim_state["state"] |= more["state"]
        for group, added in zip(optim_state["param_groups"],
                                more["param_groups"], strict=True):
            group["params"] += [name for name in added["params"]
                                if name != TIED[1]]
    return weights, optim_state


@cache
def join_first_ranks(ranks):
    """A group of these ranks that sends between CPUs. All ranks.

    NCCL would copy objects to the GPUs first. The group is made once.
    """
    return dist.new_group(ranks, backend="gloo")


def spread_state(state, model, optimizer=None):
    """Load a checkpoint's state: each rank loads its part. All ranks."""
    options = StateDictOptions(full_state_dict=True)
    weights, optim_state = state["model"], state["optimizer"]
    if len(first_ranks(model)) > 1:
        weights = {name: weights[name] for name in model.state_dict()}
        if optimizer is not None:
            optim_state = cut_state(optim_state, weights)
    set_model_state_dict(model, weights, options=options)
    if optimizer is not None:
        set_optimizer_state_dict(
            model, optimizer, optim_state, options=options)


def cut_state(optim_state, names):
    """The part of an optimizer's state that a pipeline stage has."""
    if TIED[0] not in names:  # the last pipeline stage has its other name
        optim_state["state"][TIED[1]] = optim_state["state"].pop(TIED[0])
        for group in optim_state["param_groups"]:
            group["params"] = [TIED[1] if name == TIED[0] else name
                               for name in group["params"]]
    optim_state["state"] = {name: values for name, values
                        in optim_state["state"].items() if name in names}
    for group in optim_state["param_groups"]:
        group["params"] = [name for name in group["params"] if name in names]
    return optim_state


def is_sharded(model):
    """Whether a rank holds only a part of the model.

    After an evaluation FSDP may have left all of it gathered.
    """
    return (any(isinstance(part, FSDPModule) for part in model.modules())
            or any(isinstance(part, DTensor) for part in model.parameters()))


def write_checkpoint(folder, stage, step, weights, optim_state, config,
                     hyperparameters):
    """Write folder/step_<step>.pt atomically; keep the newest two.

    Raises `UserError` if it cannot be written; older checkpoints stay.
    """
    state = {"format": FORMAT, "stage": stage, "step": step, "model": weights,
             "optimizer": optim_state, "config": config,
             "hyperparameters": hyperparameters}
    try:
        write_atomically(folder / f"step_{step:08d}.pt",
                         lambda file: torch.save(state, file))
    except UserError as error:
        raise UserError(f"{error}. Mend that, and go on with --resume from an "
                        "earlier checkpoint") from error
    for old in list_checkpoints(folder)[2:]:
        if is_ours(old):
            old.unlink()


def list_checkpoints(folder):
    """The checkpoints that a run has written in a folder, the newest first."""
    return sorted((file for file in Path(folder).glob("step_*.pt")
                   if re.fullmatch(r"step_\d{8}\.pt", file.name)),
                  reverse=True)


def is_ours(file):
    """Whether a file is what its name says: a checkpoint after that step."""
    try:
        state = torch.load(
            file, map_location="cpu", weights_only=True, mmap=True)
        return (state["format"] == FORMAT
                and f"step_{state['step']:08d}.pt" == Path(file).name)
    except Exception:  # zipfile, torch and pickle raise any of them
        return False


def find_checkpoint(run):
    """The newest checkpoint in a run's folder, or of the newest run for "".

    A file is its own.
    """
    if Path(run).is_file():
        return Path(run)
    folder = Path(run) if run else ROOT / "runs"
    require(folder.is_dir(), f"{folder}: there is no such run")
    files = (file for place in folder.glob("**/checkpoints")
             for file in list_checkpoints(place))
    newest = max(files, default=None,
                 key=lambda file: (file.stat().st_mtime_ns, file.name))
    require(newest, f"{folder}: no checkpoint is there: train first")
    return newest


def load_first(files, flag, config, model, optimizer=None):
    """The first of the files that a model can go on from: its name and state.

    All ranks; rank 0 looks for it, and warns of others. flag: what named them.
    """
    shapes, now, states = get_shapes(model), asdict(config), {}

    def find():
        for file in files:
            try:
                state = load_checkpoint(file)
                require(state["config"] == now, f"{file} holds another model "
                        f"({state['config']}, not {now}): check --preset and "
                        "--data")
                check_fit(file, state, shapes, optimizer)
                states[file] = state
                return file
            except Damaged as error:
                require(file != files[-1], f"{error}: name another "
                        f"{flag}")
                warn(f"{error}: going on from the one before it")

    file = call_on_rank_0(find)
    return file, states.get(file) or load_checkpoint(file, verify=False)


def load_checkpoint(file, verify=True):
    """A checkpoint's dictionary, on the CPU.

    The tensors are read from the file where they are used: a rank that holds
    a part of the model does not read the others' parts. They may be changed;
    the file stays as it is.

    verify: read it all, to compare the checksums, which torch.load does not,
    and to find nan. Raises `Damaged` if it is not a checkpoint, `UserError` if
    it is an older one.
    """
    with reading(file):
        with zipfile.ZipFile(file) as archive:
            broken = verify and archive.testzip()
        require(not broken, f"the checksum of {broken} is wrong")
        state = torch.load(
            file, map_location="cpu", weights_only=True, mmap=True)
        require(isinstance(state, dict), "not a checkpoint")
        found = int(state["format"])
    require(found == FORMAT, f"{file}: a checkpoint of format {found}, but "
            f"this version of the course reads only format {FORMAT}: train "
            "again, or go back to the version that wrote it")
    with reading(file):
        check_state(state, verify)
    return state


def check_state(state, verify):
    """Raise an exception unless all parts of a checkpoint are there.

    `check_fit` compares the tensors with those of a model.
    """
    optimizer, config = state["optimizer"], state["config"]
    tensors = state["model"] | {
        f"{what} of {name}": tensor for name, moments
        in optimizer["state"].items() for what, tensor in moments.items()}
    texts = [state["stage"], state["hyperparameters"]["data"], *tensors, *(
        name for group in optimizer["param_groups"]
        for name in group["params"])]
    require(all(isinstance(text, str) for text in texts),
            "what should be a text is none")
    require(type(state["step"]) is int and 0 <= state["step"] < 2**31,
            "its step is no number of steps")
    require(config.keys() == {*CONFIG} and all(
        map(is_count, config.values())), "its config is no model's")
    require(config["n_embd"] % config["n_head"] == 0,
            "n_head does not divide n_embd")
    for name, tensor in tensors.items():
        require(isinstance(tensor, torch.Tensor) and not tensor.is_meta
                and tensor.layout == torch.strided,
                f"{name} is not a whole tensor")
        require(not tensor.is_complex() and not (
            verify and tensor.isnan().any()),
            f"{name} has nan or complex numbers")
    wanted = num_parameters(config)
    found = sum(tensor.numel() for tensor in tensors.values())
    require(wanted <= MOST * found, f"a model of {wanted:.2g} weights, of "
            f"which the file has {found:.2g}")  # making it takes for ever


def get_shapes(model):
    """The whole model's shapes, by name, as a checkpoint has them.

    Those of its buffers are lists: no optimizer has anything to say of them.
    All ranks that hold a part of it call this.
    """
    buffers = {name.replace("_orig_mod.", "")
               for name, _ in model.named_buffers()}
    mine = {name: (list if name in buffers else tuple)(weight.shape)
            for name, weight in get_model_state_dict(model).items()}
    every = on_every_rank(mine) if is_sharded(model) else [mine]
    return {name: shape for shapes in every for name, shape in shapes.items()}


def check_fit(file, state, shapes, optimizer=None):
    """Raise `Damaged` unless a model of these shapes can go on from `state`.

    optimizer: None if only the weights are wanted. PyTorch would leave the
    weight as it is where one is missing, and ends the process where moments
    have another shape than their weight.
    """
    own = {name: shape for name, shape in shapes.items()
           if not name.endswith(TIED[1]) and isinstance(shape, tuple)}
    wanted = {(name, "weight"): tuple(shape)
              for name, shape in shapes.items()}
    found = {(name, "weight"): tuple(weight.shape)
             if weight.is_floating_point() or name not in own
             else weight.dtype for name, weight in state["model"].items()}
    if isinstance(optimizer, torch.optim.AdamW):
        wanted |= {(name, "step"): () for name in own}
        wanted |= {(name, moment): shape for name, shape in own.items()
                   for moment in MOMENTS}
        found |= {(name, what): tuple(tensor.shape) for name, tensors
                  in state["optimizer"]["state"].items()
                  for what, tensor in tensors.items()}
    groups = state["optimizer"]["param_groups"]
    with reading(file):
        for name, what in wanted.keys() | found.keys():
            here, there = (outline.get((name, what), "missing")
                           for outline in (wanted, found))
            require(here == there,
                    f"{name}: its {what} is {there}, not {here}")
        if optimizer is None:
            return
        require(sorted(own) == sorted(
            name for group in groups for name in group["params"]),
            "the optimizer has other weights")
        require(len(groups) == len(optimizer.param_groups),
                "the optimizer has other groups")
        for key, value in optimizer.defaults.items():
            for found in (group[key] for group in groups):
                numbers = found if isinstance(value, tuple) else [found]
                require(not isinstance(value, (float, tuple)) or all(
                    map(math.isfinite, numbers)), f"its {key} is {found}")
