"""Record what a process sends, as PyTorch's operators and MPI show it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

from rankcheck.record.recorder import Log, pass_on

NO_MESSAGES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan",
               "monitored_barrier")  # a BackendSelect kernel is there

Group = tuple[str, list[int]]  # the name of a process group, its ranks
# note(name, tensors, function, args): see `Collectives`
Note = Callable[
    [str, list[torch.Tensor], Callable[..., Any], Sequence[Any]], object]


def messages(log: Log) -> None:
    """Record each collective, and what MPI sends."""
    def say(name: str, elements: int, group: Group | None = None) -> None:
        log.say(call=name, elements=elements, lines=log.place()[:6],
                step=log.step, group=group)

    def note(name: str, tensors: list[torch.Tensor],
             function: Callable[..., Any], args: Sequence[Any]) -> None:
        group = group_of(args)
        say(name, sum(tensor.numel() for tensor in tensors), group)
        log.tell("message", name, tensors, group)

    Collectives(note).__enter__()
    log.on("call", say)


def group_of(args: Sequence[Any]) -> Group | None:
    """Return the group among a collective's arguments, if there is one."""
    find: Any = (
        dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]  # private
    )
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

    # of all; an operator has one such kernel
    notes: ClassVar[list[Note]] = []
    libraries: ClassVar[list[torch.library.Library]] = []
    inside = threading.local()

    def __init__(self, note: Note) -> None:
        self.note = note

    def __enter__(self) -> Collectives:
        if not self.libraries:
            self.libraries.extend(
                map(stand_before, ("c10d", "_c10d_functional")))
        self.notes.append(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.notes.remove(self.note)


def stand_before(space: str) -> torch.library.Library:
    """Replace these operators by `call`.

    Args:
        space: the namespace of the operators.

    Returns:
        The library that does it, for as long as it is kept.
    """
    library = torch.library.Library(  # type: ignore[no-untyped-call]  # torch's
        space, "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix(f"{space}::")
        if name != full and name.strip("_") not in NO_MESSAGES:
            function = getattr(getattr(torch.ops, space), name).default
            library.impl(  # type: ignore[no-untyped-call]  # torch's
                name, functools.partial(call, function), "BackendSelect",
                with_keyset=True)
    return library


def call(function: torch._ops.OpOverload, keys: torch._C.DispatchKeySet,
         *args: Any, **kwargs: Any) -> Any:
    """Note a collective, and call it."""
    keys = keys.remove(torch._C.DispatchKey.BackendSelect)
    inside = Collectives.inside
    if getattr(inside, "another", False):
        return pass_on(function.redispatch, keys, *args, **kwargs)
    name = function._schema.name.split("::")[1].strip("_")
    is_base = name.endswith("_base")  # (output, input, ...)
    given = args[1] if is_base else args[0]
    tensors = [one for one in tree_leaves(given)
               if isinstance(one, torch.Tensor)]
    inside.another = True
    try:
        if not any(tensor.is_meta for tensor in tensors):  # asks for shapes
            for note in Collectives.notes:
                note(name, tensors, function, args)
        return pass_on(function.redispatch, keys, *args, **kwargs)
    finally:
        inside.another = False
