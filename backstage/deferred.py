"""A model of which a process makes only the part that it keeps.

`make_shapes` makes a model without memory: its weights have shapes alone.
What belongs to other processes is dropped or split then, and `draw_weights`
fills what is left with the numbers that the whole model would have got.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

RECORDS = WeakKeyDictionary()  # model -> name of a weight -> what fills it


class Record(TorchDispatchMode):
    """Notes what would fill each tensor that has no memory.

    A random number depends on how many were drawn before it. So those of
    every tensor are drawn, and forgotten again.
    """

    def __init__(self):
        super().__init__()
        self.fills = {}  # id of a tensor -> [(operation, its other arguments)]
        self.filled = []  # the tensors, so that no id is used twice

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not (torch.Tag.inplace in operation.tags and args[0].is_meta):
            return operation(*args, **(kwargs or {}))
        fill = (operation, args[1:], kwargs or {}, torch.get_rng_state())
        self.filled.append(args[0])
        self.fills.setdefault(id(args[0]), []).append(fill)
        if torch.Tag.nondeterministic_seeded in operation.tags:
            with _disable_current_modes():
                replay([fill], torch.empty_like(args[0], device="cpu"))
        return args[0]


def replay(fills, tensor):
    """Fill the tensor, on the CPU, as was noted."""
    for operation, args, options, random_state in fills:
        torch.set_rng_state(random_state)
        operation(tensor, *args, **options)
    return tensor


def make_shapes(Model, *args):
    """`Model(*args)` on the device "meta".

    It draws as many random numbers as the same call on the CPU would.
    """
    with Record() as record, torch.device("meta"):
        model = Model(*args)
    RECORDS[model] = {
        name: record.fills[id(weight)] for name, weight
        in model.named_parameters(remove_duplicate=False)}
    return model


@torch.no_grad()
def draw_weights(model, part):
    """Give a part of the model of `make_shapes` its weights. All ranks.

    part: a module of the model, or all of it; weights that are there already
    stay. A DTensor gets this rank's part, on its mesh's device; the others
    are made on the CPU. A weight under two names stays one.
    """
    random_state, made = torch.get_rng_state(), {}
    places = {module: name for name, module in model.named_modules()}
    for name, shape in [*part.named_parameters(remove_duplicate=False)]:
        if not shape.is_meta:
            continue
        if shape not in made:
            fills = RECORDS[model][f"{places[part]}.{name}".lstrip(".")]
            weight = replay(fills, torch.empty(
                shape.shape, dtype=shape.dtype))
            if isinstance(shape, DTensor):
                weight = distribute_tensor(
                    weight, shape.device_mesh, shape.placements,
                    src_data_rank=None)  # every rank has drawn all of it
            made[shape] = nn.Parameter(weight)
        module, _, last = name.rpartition(".")
        setattr(part.get_submodule(module), last, made[shape])
    torch.set_rng_state(random_state)
