"""The device of a process: which one it is, and what it can do."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from backstage import world
from backstage.errors import require, warn
from backstage.process import GPUS, SIMULATED

# of each batch, by the run that reads it
CHECKS: list[Callable[[torch.Tensor], None]] = []


def find_device(name: str = "auto") -> torch.device:
    """The kind of device that a process here computes on: `torch.device`.

    name: "auto" (an accelerator if there is one), "cpu", "cuda", "xpu",
    "mps". Raises `UserError` if this machine has no such device, and for
    "auto" if it has a GPU that torch cannot use.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto" and accelerator is None:
        name, gpu = "cpu", find_gpu()
        require(not gpu, f"{gpu}, but PyTorch {torch.__version__} finds no "
                "usable GPU; fix: install a build of PyTorch that fits the "
                "driver, or train on the CPU with --device cpu")
    here = ["cpu", *([accelerator.type] if accelerator else [])]
    require(name in ("auto", *here), f"--device {name} is not available on "
            f"this machine; fix: choose from {', '.join(here)}")
    if name == "cpu" or accelerator is None:
        return torch.device("cpu")
    return accelerator


def find_gpu(environment: Mapping[str, str] = os.environ,
             root: Path = Path("/")) -> str:
    """Return a sentence with the evidence that there is a GPU, or "".

    If torch does not fit the driver, a job on a GPU would train on the CPU,
    and nobody would see why it is slow. root: where /dev is found.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return ""
    if environment.get(GPUS) == SIMULATED:
        return ""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS",
                 "CUDA_VISIBLE_DEVICES"):
        # the first says how many, the others which ones: 0 is the first GPU
        value = environment.get(name)
        if value and (name, value) != ("SLURM_GPUS_ON_NODE", "0"):
            return f"this process has GPUs ({name}={value})"
    for node in sorted((root / "dev").glob("nvidia[0-9]*")):
        if os.access(node, os.R_OK | os.W_OK):  # not if SLURM locks it
            return f"this machine has a GPU ({node})"
    return ""


def use_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """Make this process's device torch's current one, and return it.

    name, errors: as for `find_device`. The local rank says which one it is.
    """
    device = find_device(name)
    if device.type == "cpu":
        return device
    if device.type == "cuda" and "MIG" in device_name(device):  # a slice
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        require(alone or world.THE_GROUP, "NCCL does not connect slices of "
                "GPUs (MIG), and this process has one, "
                f"{device_name(device)}; fix: start a single process, request "
                "whole GPUs, or train with MPI")
        local_rank = 0  # no process sees more than one slice
    check_local_rank(device, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


def check_local_rank(device: torch.device, local_rank: int) -> None:
    """Raise a `UserError` if no device is left for this local rank."""
    count = torch.accelerator.device_count()
    message = (f"local rank {local_rank} has no {device.type} device; fix: "
               f"start at most {count} per node")
    if count == 1:
        message += (
            ", or let each process see all devices of its node: if SLURM's "
            "--gpus-per-task or --gpu-bind gave each process one, request "
            "--gpus-per-node instead; if you set CUDA_VISIBLE_DEVICES, unset "
            "it")
    require(local_rank < count, message)


def memory_size(device: torch.device) -> int:
    """The device's memory in bytes; 0 if it is unknown."""
    if device.type in ("cuda", "xpu"):
        backend = getattr(torch, device.type)
        return backend.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return 0


def peak_memory(device: torch.device) -> tuple[int, int | None]:
    """Return this process's peak memory in bytes: (used, reserved).

    On an accelerator, what its tensors took, and what PyTorch reserved for
    them; elsewhere, the memory of the whole process, and None.
    """
    if device.type in ("cuda", "xpu"):
        backend = getattr(torch, device.type)
        return (backend.max_memory_allocated(device),
                backend.max_memory_reserved(device))
    if device.type == "mps":  # which only knows how many there are now
        return (torch.mps.current_allocated_memory(),
                torch.mps.driver_allocated_memory())
    return resident_memory(), None


def resident_memory(status: Path = Path("/proc/self/status")) -> int:
    """Return the peak resident memory of this process in bytes."""
    try:
        fields = status.read_text().split()
        return 1024 * int(fields[fields.index("VmHWM:") + 1])
    except (OSError, ValueError):  # not Linux; macOS counts bytes
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


def describe_memory(used: int, device: torch.device) -> str:
    """For example "15.5 GiB (39%)", where the device's memory is known."""
    size = memory_size(device)
    return f"{used / 2**30:.1f} GiB" + (
        f" ({100 * used / size:.0f}%)" if size else "")


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Check a batch, and pin it for the copy to a GPU if one is used."""
    for check in CHECKS:
        check(tensor)
    if torch.cuda.is_initialized() or torch.xpu.is_initialized():
        return tensor.pin_memory()
    return tensor


def has_bf16(device: torch.device) -> bool:
    """Whether the device has bf16 arithmetic.

    Older GPUs, such as T4 and RTX 20, emulate it: PyTorch calls that
    supported, too, and it is slower than fp32.
    """
    if device.type == "cpu":
        able: dict[str, bool] = getattr(
            torch.cpu, "get_capabilities", dict)()
        return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def compile_model(model: Any, device: torch.device,
                  each_block: bool = False) -> Any:
    """`torch.compile(model)`, or the model itself and a line of warning.

    each_block: compile each block and the head with the loss by themselves,
    in their places: FSDP gathers weights between the blocks, where the
    compiler gives up, and says nothing. Texts are written without it: they
    grow, and all would be compiled again for each length.
    """
    if not can_compile(device):
        return model
    if not each_block:
        return torch.compile(model)
    for block in model.transformer.h.children():
        block.compile()
    model.head = torch.compile(model.head)
    eager = torch.compiler.set_stance("force_eager")
    model.generate = eager(model.generate)
    return model


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here; if not, it prints a warning."""
    try:  # that a machine lacks a compiler shows at the first call
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda x: (x.sin() * x).sum())(x).backward()
    except Exception as error:  # a compiler can fail in many ways
        warn("torch.compile fails here, continuing without it: "
             + str(error).strip().splitlines()[0])
        return False
    return True


def device_name(device: torch.device) -> str:
    """The vendor's name for the device."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    return device.type
