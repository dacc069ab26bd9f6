"""What a process sends to others, as PyTorch's operators and MPI show it."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def messages(log):
    def say(name, elements, group=None):
        log.say(call=name, elements=elements, lines=log.place()[:6],
                update=log.updates)

    def note(name, tensors, function, args):
        say(name, sum(tensor.numel() for tensor in tensors))
        log.tell("message", name, tensors)

    Collectives(note).__enter__()
    mpi = sys.modules.get("workshop.sleeping_mpi")
    if mpi:  # `Launch` lets its ranks sleep
        mpi.SleepingComm.on_call = staticmethod(say)


class Collectives(TorchDispatchMode):
    """Calls note(name, tensors, function, args) for each collective.

    tensors: what goes in. PyTorch's own reducer comes by here as well: a
    communication hook in Python, which would see the same, makes some scripts
    hang at their end.
    """

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.split("::")[1].strip("_")
            if name not in ("wait_tensor", "wrap_tensor_autograd"):
                base = name.endswith("_base")  # (output, input, ...)
                self.note(name, list(tensors_in(args[int(base)])), function,
                          args)
        return function(*args, **(kwargs or {}))


def tensors_in(value):
    """The tensors in lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
