"""Simulate GPUs on the CPU, for scripts that need one.

What such a script sends to a GPU stays where it is. There are as many GPUs as
processes, with nothing in their memory. autocast("cuda") changes nothing on a
CPU: all is computed as precisely as the weights are.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.data
from torch import distributed as dist
from torch.distributed import fsdp
from torch.jit import _builtins
from torch.utils import _device

from rankcheck.record.cpu_backend import take
from rankcheck.record.recorder import Log, assign, replace

OF_GPUS = ("pin_memory", "backend", "device_id")  # names of arguments
MEMORY = 80 * 2**30
GPU = SimpleNamespace(
    name="a CPU in the place of a GPU", total_memory=MEMORY, major=8, minor=0,
    multi_processor_count=1)


class Nothing(nullcontext[Any]):
    """A stream, an event, a range of a profile: a CPU waits for none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def elapsed_time(self, end: Any) -> float:
        """Return a time in milliseconds that is not 0."""
        return 1.0


class Generator(torch.Generator):
    """A generator of the CPU, on whatever device a script asks for."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        make: Callable[..., Generator] = super().__new__
        return make(cls, "cpu")


def on_cpu(value: Any, numbered: bool = False) -> Any:
    """Return the same, but the CPU in the place of a GPU.

    Args:
        value: any argument of a function.
        numbered: whether a number is that of a GPU.
    """
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if re.fullmatch(r"cuda(:\d+)?", value) else value
    if numbered and type(value) is int:
        return torch.device("cpu")
    return value


def is_gpu(value: Any, numbered: bool = False) -> bool:
    """Whether a value names a GPU; see `on_cpu`."""
    return on_cpu(value, numbered) is not value


def keep_here(log: Log, place: Any, *names: str) -> None:
    """Give functions or methods no GPU, and nothing that belongs to one.

    Args:
        log: where the numbers of GPUs are noted.
        place: the module or class that has the functions.
        names: of the functions.
    """
    known = [
        _builtins._find_builtin(getattr(place, name))  # type: ignore[no-untyped-call]  # torch's
        for name in names]

    @replace(place, *names)
    def visible(function: Callable[..., Any], *args: Any,
                **kwargs: Any) -> Any:
        numbered = function.__name__ == "to"
        for value in args:
            if is_gpu(value, numbered):
                take(log, value)
        if is_gpu(kwargs.get("device"), numbered=True):
            take(log, kwargs["device"])
        return function(
            *(on_cpu(arg, numbered) for arg in args),
            **{key: on_cpu(arg, key == "device") for key, arg in kwargs.items()
               if key not in OF_GPUS})

    for name, op in zip(names, known, strict=True):
        if op:  # torch.jit.script knows functions of C++ by their address
            _builtins._register_builtin(getattr(place, name), op)


def simulate_gpus(log: Log) -> None:
    """Make this process see simulated GPUs from now on."""
    for function in _device._device_constructors():
        name: str = function.__name__
        if getattr(torch, name, None) is function:
            keep_here(log, torch, name)
    for place, names in (
            (torch.Tensor, ("to", "new_empty", "new_full", "new_ones",
                            "new_tensor", "new_zeros")),
            (torch.nn.Module, ("to", "to_empty")),
            (_device.DeviceContext, ("__init__",)),
            (torch.amp.GradScaler, ("__init__",)),
            (torch.utils.data.DataLoader, ("__init__",)),
            (fsdp.FullyShardedDataParallel, ("__init__",)),
            (dist, ("init_device_mesh", "new_group")),
            (dist.device_mesh, ("init_device_mesh",)),
            (dist.device_mesh.DeviceMesh, ("__init__",))):
        keep_here(log, place, *names)

    def cuda(tensor: torch.Tensor, device: Any = None, *args: Any,
             **kwargs: Any) -> torch.Tensor:
        take(log, device)
        return tensor

    def pin_memory(tensor: torch.Tensor, *args: Any,
                   **kwargs: Any) -> torch.Tensor:
        return tensor

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        return None

    assign(torch.Tensor, cuda=cuda, pin_memory=pin_memory,
           record_stream=record_stream)
    assign(torch, Generator=Generator)
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @replace(dist.Work, "get_future")
    def get_future(get_future: Callable[..., torch.futures.Future[Any]],
                   work: dist.Work) -> torch.futures.Future[Any]:
        try:
            return get_future(work)
        except RuntimeError:  # gloo has none for some collectives
            work.wait()
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result([])
            return done

    @replace(torch, "load")
    def load(load: Callable[..., Any], f: Any, map_location: Any = None,
             *args: Any, **kwargs: Any) -> Any:
        return load(f, "cpu", *args, **kwargs)

    rank = int(os.environ.get("LOCAL_RANK", 0))
    answers = {
        "is_available": True, "is_initialized": True,
        "is_bf16_supported": True, "device_count": count,
        "current_device": rank, "current_device_index": rank,
        "current_accelerator": torch.device("cuda"), "get_arch_list": [],
        "get_device_name": GPU.name, "get_device_properties": GPU,
        "get_device_capability": (GPU.major, GPU.minor),
        "mem_get_info": (MEMORY, MEMORY), "memory_summary": "",
        "memory_stats": Counter(), "get_rng_state": torch.get_rng_state(),
        "get_rng_state_all": [torch.get_rng_state()] * count}
    for place in (torch.cuda, torch.accelerator):
        for name in place.__all__:
            thing = getattr(place, name)
            if name.endswith("Tensor"):
                setattr(place, name, getattr(torch, name))
            elif name in ("Event", "Stream", "StreamContext", "current_stream",
                          "default_stream", "device", "device_of",
                          "device_index", "stream"):
                setattr(place, name, Nothing)
            elif inspect.isfunction(thing):
                answer = answers.get(name, 0)
                setattr(place, name,
                        lambda *args, answer=answer, **kwargs: answer)
    def set_device(device: Any) -> None:
        take(log, device)

    nothing = Nothing()
    assign(torch.cuda, set_device=set_device, nvtx=nothing, profiler=nothing)
    assign(torch.accelerator, set_device_index=set_device)


PROBES = [simulate_gpus]
