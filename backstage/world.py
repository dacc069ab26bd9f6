"""The other processes: how many there are, and how to exchange values."""

import torch.distributed as dist

from backstage.errors import UserError, explain, require

GROUPS = []  # torch's process group, kept alive: see keep_group()
THE_GROUP = []  # mpi4py's COMM_WORLD, if it is used: it comes before torch's


def is_joined():
    """Whether this process belongs to a process group of torch."""
    return dist.is_available() and dist.is_initialized()


def get_backend():
    """What sends messages between the processes: MPI, or torch's backend."""
    if THE_GROUP:
        return "MPI"
    return dist.get_backend() if is_joined() else "no backend"


def get_rank_and_size():
    """This process's rank and the world size; 0 and 1 without a group."""
    if THE_GROUP:
        return THE_GROUP[0].rank, THE_GROUP[0].size
    return (dist.get_rank(), dist.get_world_size()) if is_joined() else (0, 1)


def keep_group():
    """Let torch's process group live as long as this process. All ranks.

    If it ended with DDP's reducer, PyTorch 2.13 would hold the interpreter's
    lock while it waits for gloo's thread, which may be waiting for that lock:
    one run in ten hung (pytorch issue 56297).
    """
    if is_joined():
        GROUPS.append(dist.group.WORLD)


def call_on_rank_0(function):
    """Call `function` on rank 0; all ranks get its result or error."""
    result, problem = None, None
    if get_rank_and_size()[0] == 0:
        try:
            result = function()
        except (UserError, OSError) as error:
            problem = explain(error) or str(error)
    result, problem = on_every_rank((result, problem))[0]
    require(problem is None, problem)
    return result


def on_every_rank(value):
    """The values that all ranks pass to this, as a list in rank order."""
    if THE_GROUP:
        return THE_GROUP[0].allgather(value)
    values = [value]
    if is_joined():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
