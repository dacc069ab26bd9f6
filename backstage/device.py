"""The device of a process: which one it is, and what it can do."""

import torch

from backstage.errors import require, warn


def find_device(name="auto"):
    """The kind of device that a process here computes on: `torch.device`.

    name: "auto" (an accelerator if there is one), "cpu", "cuda", "xpu",
    "mps". Raises `UserError` if this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    here = ["cpu", *([accelerator.type] if accelerator else [])]
    require(name in ("auto", *here), f"--device {name} is not on this "
            f"machine: choose from {', '.join(here)}")
    return accelerator


def use_device(name="auto", local_rank=0):
    """The device of this process, which from now on is torch's current one.

    name: as for `find_device`. The local rank says which of the node's devices
    it is. Raises `UserError` if none is left for this process.
    """
    device = find_device(name)
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count()
    require(local_rank < count, f"process {local_rank} of this node has no "
            f"{device.type} device: start no more than {count} per node")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


def cpu_has_bf16():
    """Whether the CPU has bf16 arithmetic; emulating it is slow."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def compile_model(model, device):
    """`torch.compile(model)`, or the model itself and a line of warning.

    A machine may lack the compiler that torch.compile needs. That shows only
    at the first call, so it is tried on a small function first.
    """
    def trial(x):
        return (x.sin() * x).sum()

    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(trial)(x).backward()
    except Exception as error:  # a compiler can fail in many ways
        reason = str(error).strip().splitlines()[0]
        warn("torch.compile does not work here, going on without it: "
             f"{reason}")
        return model
    return torch.compile(model)


def device_name(device):
    """The vendor's name for the device."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    return device.type
