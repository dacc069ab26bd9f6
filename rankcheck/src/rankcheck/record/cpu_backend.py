"""Runs GPU code on the CPU with gloo."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map, tree_map_only

from rankcheck.record.recorder import Log, assign, note, replace


def process(log: Log) -> None:
    """Hide accelerators, use gloo for groups, and compile nothing."""
    torch.compiler.set_stance("force_eager")
    note_groups(log)
    premultiply()
    kept: list[dist.ProcessGroup] = []

    @replace(dist, "init_process_group")
    @replace(c10d, "init_process_group")
    def initialise(initialise: Callable[..., None], backend: Any = None,
                   *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)  # gloo has none
        if isinstance(backend, str) and "gloo" not in backend:
            backend = "gloo"  # what is no name PyTorch refuses
        return initialise(backend, *args, **kwargs)

    @replace(dist, "destroy_process_group")
    @replace(c10d, "destroy_process_group")
    def destroy(destroy: Callable[..., None],
                group: dist.ProcessGroup | None = None) -> None:
        # The end of a gloo group joins its thread with the interpreter's
        # lock in hand, which that thread may wait for: it never ends.
        kept.extend(c10d._world.pg_map)
        return destroy(group)

    @replace(DistributedDataParallel, "__init__")
    def wrap(wrap: Callable[..., None], ddp: DistributedDataParallel,
             module: torch.nn.Module, device_ids: Sequence[Any] | None = None,
             output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        for device in device_ids or ():
            take(log, device)
        wrap(ddp, module, None, None, *args, **kwargs)  # a CPU has no number

    def current_accelerator(check_available: bool = False) -> None:
        return None

    def set_device(device: Any) -> None:
        take(log, device)

    assign(torch.accelerator, current_accelerator=current_accelerator,
           set_device_index=set_device)
    assign(torch.cuda, set_device=set_device)


def take(log: Log, device: Any) -> None:
    """Record the number of the GPU that the script selects, if it names one.

    With CUDA_VISIBLE_DEVICES a script, or what starts it, gives each rank one
    by itself.
    """
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            device = torch.device(device)
    number = getattr(device, "index", None)
    if type(device) is int:
        number = device
    if (isinstance(number, int) and number not in log.record.devices
            and not os.environ.get("CUDA_VISIBLE_DEVICES")):
        log.record.devices.append(number)


def premultiply() -> None:
    """Emulate ReduceOp.PREMUL_SUM, which gloo lacks: scale, then sum.

    FSDP2 asks for it after `set_gradient_divide_factor`.
    """
    for place in dist, c10d:
        functions = {name: getattr(place, name, None) for name in c10d.__all__}
        names = [name for name, function in functions.items()
                 if type(function) is FunctionType
                 and "op" in inspect.signature(function).parameters]

        @replace(place, *names)
        def reduce(function: Callable[..., Any], *args: Any,
                   **kwargs: Any) -> Any:
            given = inspect.signature(function).bind(*args, **kwargs)
            given.apply_defaults()
            operation = given.arguments["op"]
            if not operation == dist.ReduceOp.PREMUL_SUM:  # it has no !=
                return function(*args, **kwargs)
            _, factor = operation.__getstate__()
            given.arguments["op"] = dist.ReduceOp.SUM
            inputs = [name for name in given.arguments
                      if name.startswith("input")]
            for name in inputs:
                given.arguments[name] = tree_map(
                    lambda tensor: tensor * factor, given.arguments[name])
            if not inputs:  # its tensors get the sum as well
                given.arguments.update(tree_map_only(
                    torch.Tensor, lambda tensor: tensor.mul_(factor),
                    dict(given.arguments)))
            return function(*given.args, **given.kwargs)


def on_gpu(log: Log) -> None:
    """Notes the same; the process keeps its GPU and NCCL."""
    torch.compiler.set_stance("force_eager")
    torch.backends.cudnn.allow_tf32 = False  # as precise as the rest
    note_groups(log)


def note_groups(log: Log) -> None:
    """Note that it makes a process group or processes, or wraps a model in
    DDP.
    """
    note(log, dist, "init_process_group")
    note(log, c10d, "init_process_group")
    note(log, torch.multiprocessing, "spawn")

    @replace(DistributedDataParallel, "__init__")
    def make(make: Callable[..., None], ddp: DistributedDataParallel,
             *args: Any, **kwargs: Any) -> None:
        make(ddp, *args, **kwargs)
        log.note_fact("DistributedDataParallel",  # may parameters be unused?
                      ddp.find_unused_parameters or ddp.static_graph)
