"""Checkpoints: the whole state of a run in one file, in every stage.

A checkpoint is a dictionary: `format`, `stage`, `step` (completed updates),
`model` and `optimizer` (whole tensors, by parameter name), `config` and
`hyperparameters`.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from backstage.errors import UserError, explain, require, warn
from backstage.files import (
    Damaged,
    StrPath,
    reading,
    reason,
    write_atomically,
)
from backstage.interfaces import ModelConfig
from backstage.world import call_on_rank_0, get_rank_and_size, on_every_rank

# each save would say that a tensor in parts of parts is gathered twice
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
    logging.ERROR)

TIED = "transformer.wte.weight", "lm_head.weight"  # one matrix
NAMES = f"step_{8 * '[0-9]'}.pt"  # of checkpoints, as a pattern
KEYS = {  # of other programs' checkpoints
    "pytorch-lightning_version": "Lightning's own", "iter_num": "nanoGPT's",
    "fixed": "the starter's"}
FORMAT = 2  # 1 had c_attn's rows in another order, and numbers, not names
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's, of each weight
State = dict[str, Any]  # a checkpoint's dictionary, or one inside it
Outline = dict[tuple[str, str], str]  # (name, what): a tensor's description


def gather_state(model: nn.Module,
                 optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """The whole state of both, on rank 0; elsewhere empty dictionaries.

    The parameters have the names of the plain model. All ranks call this if
    the model is sharded; if not, rank 0 is enough. A device never holds more
    of the others' parts than one tensor.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):  # evaluation may leave it gathered
            module.reshard()
    firsts, (rank, _) = first_ranks(model), get_rank_and_size()

    def gather(part: torch.Tensor) -> torch.Tensor | None:
        if isinstance(part, DTensor):
            part = part.full_tensor()  # from all ranks of the pipeline stage
        return part.cpu() if rank in firsts else None

    weights, optim_state = state = tree_map_only(torch.Tensor, gather, (
        state_dict.get_model_state_dict(model),
        state_dict.get_optimizer_state_dict(model, optimizer)))
    cpus = join_first_ranks(tuple(firsts)) if len(firsts) > 1 else None
    for other in firsts[1:]:
        if rank == other:
            dist.send_object_list([state], dst=0, group=cpus)
        elif rank == 0:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=other, group=cpus)
            more_weights, more = received[0]
            weights |= more_weights
            optim_state["state"] |= more["state"]
            for group, added in zip(optim_state["param_groups"],
                                    more["param_groups"], strict=True):
                group["params"] += added["params"]
    if rank > 0:
        return {}, {}
    names = dict(model.named_parameters())  # a tied one once
    if TIED[0] in weights and (len(firsts) > 1 or TIED[1] not in names):
        weights[TIED[1]] = weights[TIED[0]]
        optim_state["state"].pop(TIED[1], None)
        for group in optim_state["param_groups"]:
            group["params"] = [
                name for name in group["params"] if name != TIED[1]]
    return weights, optim_state


def first_ranks(model: nn.Module) -> list[int]:
    """The first rank of each pipeline stage: [0] without a pipeline."""
    if not is_sharded(model):
        return [0]
    firsts: dict[tuple[str, ...], int] = {}
    for rank, names in enumerate(on_every_rank(tuple(model.state_dict()))):
        firsts.setdefault(names, rank)
    return list(firsts.values())


@cache
def join_first_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that sends between CPUs: NCCL would use the GPUs. All ranks."""
    return dist.new_group(ranks, backend="gloo")


def spread_state(state: State, model: nn.Module,
                 optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a checkpoint's state: each rank loads its part. All ranks.

    The optimizer's options, such as betas, are its own and not the file's.
    """
    options = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_model_state_dict(
        model, {name: state["model"][name] for name in model.state_dict()},
        options=options)
    if optimizer is not None:
        current = state_dict.get_optimizer_state_dict(model, optimizer)
        moments = state["optimizer"]["state"]
        names: list[str] = [*current["state"]]
        current["state"] = {
            name: moments[name if name in moments else TIED[0]]
            for name in names}  # a pipeline's last stage has TIED[1]
        state_dict.set_optimizer_state_dict(
            model, optimizer, current, options=options)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds only a part, which FSDP may have gathered now."""
    return (any(isinstance(part, FSDPModule) for part in model.modules())
            or any(isinstance(part, DTensor) for part in model.parameters()))


def write_checkpoint(folder: Path, state: State) -> None:
    """Write folder/step_<step>.pt atomically; keep it and the one before it.

    Raises `UserError` if it cannot be written; older checkpoints stay.
    """
    file = folder / f"step_{state['step']:08d}.pt"
    earlier = [one for one in list_checkpoints(folder) if one < file]
    advice = "; fix: solve this, then start again at step 0 with --resume: "
    advice += "there is no earlier checkpoint"
    if earlier:
        advice = "; fix: solve this, then resume with --resume from the "
        advice += f"checkpoint before it, {earlier[0].name}"
    write_atomically(
        file, lambda part: torch.save({"format": FORMAT, **state}, part),
        advice)
    remove_old(earlier[1:])


def remove_old(checkpoints: list[Path]) -> None:
    """Remove a run's checkpoints; warn if one cannot be removed."""
    failures = []
    for file in filter(is_ours, checkpoints):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:  # the new one is there, and training goes on
            failures.append(f"{file} could not be removed ({reason(error)})")
    if failures:
        count = len(failures)
        more = f", nor could {count - 1} more" if count > 1 else ""
        warn(f"{failures[0]}{more}; fix: remove these old checkpoints, which "
             "still use disk space")


def list_checkpoints(folder: StrPath) -> list[Path]:
    """The checkpoints that a run has written in a folder, the newest first."""
    # glob would find none in a folder that may not be read
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [Path(folder, name)
            for name in sorted(matching(names, NAMES), reverse=True)]


def is_ours(file: StrPath) -> bool:
    """Return whether a file is a checkpoint of the step in its name."""
    try:
        step = load_checkpoint(file, verify=False)["step"]
        return f"step_{step:08d}.pt" == Path(file).name
    except (UserError, OSError, LookupError, TypeError, ValueError):
        return False


def load_first(
        files: Sequence[StrPath], flag: str, config: ModelConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        ) -> tuple[StrPath, State]:
    """Return the name and state of the first file that the model can resume.

    All ranks; rank 0 looks, and warns of damaged ones. flag: what named them.
    """
    wanted, now = outline(model, optimizer), asdict(config)

    def find() -> StrPath:
        for file in files:
            try:
                state = load_checkpoint(file)
                with reading(file):
                    other = [f"{name} {state['config'][name]}, not {value}"
                             for name, value in now.items()
                             if state["config"][name] != value]
                require(not other, f"{file} is of a different model "
                        f"({'; '.join(other)}); fix: check --preset, --data "
                        "and the flags of the model's shape")
                check_fit(file, state, wanted)
                return file
            except (Damaged, FileNotFoundError) as error:  # of a link
                problem = explain(error)
                require(file != files[-1],
                        f"{problem}; fix: choose another {flag}")
                warn(f"{problem}; resuming from the previous checkpoint")
        raise AssertionError  # the last file is returned, or an error

    file = call_on_rank_0(find)
    return file, load_checkpoint(file, verify=False)


def load_checkpoint(file: StrPath, verify: bool = True) -> State:
    """A checkpoint's dictionary, on the CPU; `check_fit` looks inside.

    Each tensor is read from the file where it is used. It may be changed; the
    file stays as it is. verify: read it all, to compare the checksums, which
    torch.load does not. Raises `Damaged` if it is not a checkpoint,
    `UserError` if it is an older one.
    """
    with reading(file), open(file, "rb") as opened:
        head, packed = opened.read(10), {zipfile.ZIP_STORED}
        state: State = {}
        kind = ("safetensors" if head[8:] == b'{"' else "a pickle" if
                head[:1] == b"\x80" else
                "corrupt, or written by another program")
        if head[:2] == b"PK":
            with zipfile.ZipFile(file) as archive:
                names = " ".join(archive.namelist())
                packed = {entry.compress_type for entry in archive.infolist()}
                broken = archive.testzip() if verify else None
            require(not broken, f"checksum mismatch in {broken}")
            kind = ""
            if "constants.pkl" in names:
                kind = "TorchScript"
            elif "data.pkl" not in names:
                kind = "a zip archive"
            if not packed <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                kind = "compressed in a way that torch cannot read"
        try:
            if not kind:
                state = {**load_tensors(
                    file, stored=packed <= {zipfile.ZIP_STORED})}
                kind = name_program(state)
        except (pickle.UnpicklingError, TypeError) as error:
            kind = reason(error)  # classes, or no dictionary
        if kind:
            raise Damaged(f"{file} is not a checkpoint of the course ({kind})"
                          ", which a run names checkpoints/step_*.pt")
        found = int(state["format"])
    require(found == FORMAT, f"{file} has checkpoint format {found}, but "
            f"this version of the course reads only format {FORMAT}; fix: "
            "train again, or use the version that wrote it")
    with reading(file):
        return plain_names(state)


def name_program(state: State) -> str:
    """Return which other program wrote it; "" if it may be ours."""
    for key in state:
        if key in KEYS:
            return KEYS[key]
    if "format" in state:
        return ""
    return f"it holds {', '.join(map(str, state))[:60]}"


def plain_names(state: State) -> State:
    """Return the state with the names of an unwrapped model.

    A model that is saved compiled or wrapped has a prefix in each name.
    """
    model, optimizer = state.get("model"), state.get("optimizer")
    wrapped = re.compile(r"(_orig_mod\.|module\.)+")
    if not (model and isinstance(model, dict)
            and all(wrapped.match(str(name)) for name in model)):
        return state

    def plain(named: dict[str, Any]) -> dict[str, Any]:
        return {wrapped.sub("", name, count=1): value
                for name, value in named.items()}

    state = state | {"model": plain(model)}
    if optimizer and optimizer["state"]:
        state["optimizer"] = optimizer | {"state": plain(optimizer["state"])}
    return state


def load_tensors(file: StrPath, stored: bool = True) -> State:
    """Load what torch.save wrote, memory-mapped where that is possible.

    stored: whether the tensors' bytes are in the file as they are: who packs
    it again may compress them, and torch would map what is compressed.
    """
    if stored:
        try:
            return torch.load(
                file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "unable to mmap" not in str(error):
                raise
    return torch.load(file, map_location="cpu", weights_only=True)


def outline(model: nn.Module,
            optimizer: torch.optim.Optimizer | None = None) -> Outline:
    """The tensors that a checkpoint of both has: {(name, what): description}.

    All ranks that hold a part of the model call this. The moments of another
    optimizer than AdamW are left to PyTorch.
    """
    tensors: State = state_dict.get_model_state_dict(model)
    described = {(name, "weight"): dtype_and_shape(weight)
                 for name, weight in tensors.items()}
    if isinstance(optimizer, torch.optim.AdamW):
        weights = dict(model.named_parameters())
        if TIED[0] not in weights:  # a pipeline's last stage
            weights.pop(TIED[1], None)
        for name, weight in weights.items():
            described[name, "step"] = "float ()"
            described |= {
                (name, what): dtype_and_shape(weight) for what in MOMENTS}
    every = (on_every_rank(described) if is_sharded(model)
             else [described])
    return {key: text for part in every for key, text in part.items()}


def dtype_and_shape(tensor: torch.Tensor) -> str:
    """For example "float (768, 768)"."""
    kind = "float" if tensor.is_floating_point() else tensor.dtype
    return f"{kind} {tuple(tensor.shape)}"


def check_fit(file: StrPath, state: State, wanted: Outline) -> None:
    """Raise `Damaged` unless `state` has the tensors of an `outline`.

    PyTorch would leave a weight as it is where one is missing, and ends the
    process where moments have another shape than their weight.
    """
    with reading(file):
        require(type(state["step"]) is int and 0 <= state["step"] < 2**31,
                "its step is not a step count")
        found = {(name, "weight"): tensor
                 for name, tensor in state["model"].items()}
        if any(what != "weight" for _, what in wanted):
            found |= {(name, what): tensor for name, moments
                      in state["optimizer"]["state"].items()
                      for what, tensor in moments.items()}
        for key, tensor in found.items():
            name = " of ".join(reversed(key))
            require(isinstance(tensor, torch.Tensor) and not tensor.is_meta
                    and tensor.layout == torch.strided,
                    f"the {name} is not a dense tensor")
            require(not tensor.isnan().any(), f"the {name} contains NaN")
        for key in [*wanted, *found]:
            here = wanted.get(key, "missing")
            there = dtype_and_shape(found[key]) if key in found else "missing"
            require(here == there,
                    f"{key[0]}: its {key[1]} is {there}, not {here}")
