"""The other processes: how many there are, and how to exchange values."""

import torch.distributed as dist

from backstage.errors import UserError, explain, require

GROUPS = []  # that are kept


def is_joined():
    """Whether this process belongs to a group of processes."""
    return dist.is_available() and dist.is_initialized()


def get_rank_and_size():
    """This process's rank and the world size; 0 and 1 without a group."""
    return (dist.get_rank(), dist.get_world_size()) if is_joined() else (0, 1)


def keep_group():
    """Let the process group live as long as this process does. All ranks.

    If DDP's reducer were its last owner, the group would end as main()
    returns: there PyTorch 2.13 holds the interpreter's lock while it waits
    for gloo's thread, which may be waiting for that lock: one run in ten
    hung (pytorch issue 56297).
    """
    if is_joined():
        GROUPS.append(dist.group.WORLD)


def on_rank_0(function):
    """Call `function` on rank 0; all ranks get its result or error."""
    if not is_joined():
        return function()
    message = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = function()
        except (UserError, OSError) as error:
            message[1] = explain(error) or str(error)
    dist.broadcast_object_list(message, src=0)
    require(message[1] is None, message[1])
    return message[0]


def on_every_rank(value):
    """The values that all ranks pass to this, as a list in rank order."""
    if not is_joined():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wait_for_all():
    """Wait until every rank has arrived here. All ranks."""
    if is_joined():
        dist.barrier()
