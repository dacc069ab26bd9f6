"""What a process sends to others, as PyTorch's operators and MPI show it."""

import contextlib
import functools
import threading

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

from rankcheck.record.recorder import pass_on

NO_MESSAGES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan",
               "monitored_barrier")  # a BackendSelect kernel is there


def messages(log):
    def say(name, elements, group=None):
        log.say(call=name, elements=elements, lines=log.place()[:6],
                update=log.updates, group=group)

    def note(name, tensors, function, args):
        group = group_of(args)
        say(name, sum(tensor.numel() for tensor in tensors), group)
        log.tell("message", name, tensors, group)

    Collectives(note).__enter__()
    log.on("call", say)


def group_of(args):
    """(name, ranks) of the group among a collective's arguments, or None."""
    find = dist.distributed_c10d._resolve_process_group
    for arg in args:
        with contextlib.suppress(TypeError, RuntimeError, ValueError):
            # a name, of a functional collective, or the group itself
            group = find(arg) if isinstance(arg, str) else (
                dist.ProcessGroup.unbox(arg))
            return group.group_name, dist.get_process_group_ranks(group)
    return None


class Collectives:
    """Calls note(name, tensors, function, args) for each collective.

    tensors: what goes in. Also for those that PyTorch's reducer and DTensors
    call, in any thread. It stands before the operators' kernels alone: with a
    TorchDispatchMode all others would take twice their time, and with DDP's
    communication hook some scripts hang at their end.
    """

    notes, libraries = [], []  # of all; an operator has one such kernel
    inside = threading.local()

    def __init__(self, note):
        self.note = note

    def __enter__(self):
        self.libraries[:] = self.libraries or map(
            stand_before, ("c10d", "_c10d_functional"))
        self.notes.append(self.note)
        return self

    def __exit__(self, *_):
        self.notes.remove(self.note)


def stand_before(space):
    """Have `call` called in the place of these operators: their library."""
    library = torch.library.Library(space, "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix(f"{space}::")
        if name != full and name.strip("_") not in NO_MESSAGES:
            function = getattr(getattr(torch.ops, space), name).default
            library.impl(name, functools.partial(call, function),
                         "BackendSelect", with_keyset=True)
    return library


def call(function, keys, *args, **kwargs):
    keys = keys.remove(torch._C.DispatchKey.BackendSelect)
    inside = Collectives.inside
    if getattr(inside, "another", False):
        return pass_on(function.redispatch, keys, *args, **kwargs)
    name = function._schema.name.split("::")[1].strip("_")
    base = name.endswith("_base")  # (output, input, ...)
    tensors = [one for one in tree_leaves(args[int(base)])
               if isinstance(one, torch.Tensor)]
    inside.another = True
    try:
        if not any(tensor.is_meta for tensor in tensors):  # asks for shapes
            for note in Collectives.notes:
                note(name, tensors, function, args)
        return pass_on(function.redispatch, keys, *args, **kwargs)
    finally:
        inside.another = False
