"""The other processes: how many there are, and how to exchange values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from backstage.errors import UserError, explain

Value = TypeVar("Value")
# torch's process group, kept alive: see keep_group()
GROUPS: list[dist.ProcessGroup | None] = []
# mpi4py's COMM_WORLD, if it is used: it comes before torch's
THE_GROUP: list[Any] = []


def is_joined() -> bool:
    """Whether this process belongs to a process group of torch."""
    return dist.is_available() and dist.is_initialized()


def get_backend() -> str:
    """Return what connects the processes: MPI, or torch's backend."""
    if THE_GROUP:
        return "MPI"
    return dist.get_backend() if is_joined() else "no backend"


def get_rank_and_size() -> tuple[int, int]:
    """This process's rank and the world size; 0 and 1 without a group."""
    if THE_GROUP:
        return THE_GROUP[0].rank, THE_GROUP[0].size
    if is_joined():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def keep_group() -> None:
    """Let torch's process group live as long as this process. All ranks.

    If it ended with DDP's reducer, PyTorch 2.13 would hold the interpreter's
    lock while it waits for gloo's thread, which may be waiting for that lock:
    one run in ten hung (pytorch issue 56297).
    """
    if is_joined():
        GROUPS.append(dist.group.WORLD)


def call_on_rank_0(function: Callable[[], Value]) -> Value:
    """Call `function` on rank 0; all ranks get its result or error."""
    result: Value | None = None
    problem: str | None = None
    if get_rank_and_size()[0] == 0:
        try:
            result = function()
        except (UserError, OSError) as error:
            problem = explain(error) or str(error)
    result, problem = on_every_rank((result, problem))[0]
    if problem is not None:
        raise UserError(problem)
    return cast(Value, result)  # rank 0's


def on_every_rank(value: Value) -> list[Value]:
    """Return the values that all ranks pass, as a list in rank order."""
    if THE_GROUP:
        return THE_GROUP[0].allgather(value)
    values = [value]
    if is_joined():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
