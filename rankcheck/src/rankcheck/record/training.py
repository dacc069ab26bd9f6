"""Watches any training script: its models, their samples and steps.

steps     of each call of an optimizer's step: see rows.py
shapes    of the parameters by name, in the order of the optimizers. A name
          begins with the class of the model that it is in, and a colon
batchnorm whether statistics of a microbatch enter the loss
low       whether it computes in bf16 or fp16
draws     whether the model draws random numbers, dropout apart
saved     how many steps were recorded when it had saved something
copies    of the model: what `parts.describe` says of each at the end
model     the same of all that train, in an optimizer or not
tied      {another name of a parameter: its name}, within a module
skipped   how many steps a GradScaler has left out, and before which others
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import rankcheck.record.tensors as parts
from rankcheck.record.collectives import messages
from rankcheck.record.cpu_backend import on_gpu, process
from rankcheck.record.files import opened
from rankcheck.record.outputs import Outputs, type_of
from rankcheck.record.rank_record import RankRecord
from rankcheck.record.recorder import Log, OptimizerSteps, Probe, replace
from rankcheck.record.rows import (
    Notes,
    Rows,
    StepRow,
    random_states,
    storage,
    take_pending,
)
from rankcheck.record.tensors import Hashes, is_low, thin, unwrap

# What torch.autograd.backward computes gradients of
Target: TypeAlias = torch.Tensor | GradientEdge

NO_OUTPUT = ("/dev/", "/proc/", "/.cache/", "__pycache__", ".lock")


def probes(folder: str | os.PathLike[str], size: int, steps: int,
           kind: str = "", on_gpus: bool = False, device: str = "cpu",
           outputs: int = 0) -> list[Probe]:
    """Return verify's probes.

    Args:
        folder: the log's, in that of all runs.
        size: of `Rows`, as are steps and kind.
        steps: see there.
        kind: see there.
        on_gpus: whether a CPU stands in for GPUs.
        device: "gpu" for GPUs themselves.
        outputs: in how many steps those of modules are recorded.
    """
    beside = os.path.dirname(folder)
    without = (str(folder), f"{beside}/guard/", f"{beside}/tmp/", *NO_OUTPUT)
    found: list[Probe] = [
        partial(Rows, size=size, steps=steps, kind=kind), Modules(),
        Outputs(outputs), partial(use, module="torch_api"), OptimizerSteps(),
        process if device == "cpu" else on_gpu, messages]
    if on_gpus:
        found.append(partial(use, module="fake_cuda"))
    found.append(partial(opened, without=without))
    return found


def use(log: Log, module: str) -> None:
    """Use the probes of a module whose import takes seconds.

    verify itself does without.
    """
    for probe in importlib.import_module(f"rankcheck.record.{module}").PROBES:
        probe(log)


class Modules:
    """Those that train, and what goes into the outermost of them."""

    log: Log
    record: RankRecord  # the log's
    count = 1  # of targets of a backward pass
    direct_forward: DirectForward | None = None  # the last that was seen

    def __init__(self) -> None:
        # of those with parameters of their own, by the name of their class
        self.classes: Counter[str] = Counter()

    def __call__(self, log: Log) -> None:
        self.log, self.record = log, log.record
        log.on("unnamed", self.meet_owners)
        log.on("end", self.find_copies)

        @replace(nn.Module, "__call__")  # hooks get no keyword arguments
        def call(call: Callable[..., Any], module: nn.Module, *args: Any,
                 **kwargs: Any) -> Any:
            if isinstance(module, DistributedDataParallel):
                # Lightning's may be in eval(), around a module that is not
                log.row.wrapped += torch.is_grad_enabled()
                if not module.require_backward_grad_sync:
                    log.note_fact("forward in no_sync", None)
            if log.inside:
                output = call(module, *args, **kwargs)
                log.tell("output", module, output)
                return output
            if not self.trains(module):
                return call(module, *args, **kwargs)
            if hands_on(module):
                self.meet(module)
                return call(module, *args, **kwargs)
            forward = find_direct_forward(module)
            if forward is None:
                self.meet(module)
                self.on_root(module, (args, kwargs))
            else:
                self.on_direct_forward(forward)
                self.meet(module)
            log.inside = True
            states = random_states()
            try:
                output = call(module, *args, **kwargs)
            finally:
                log.inside = False
                self.record.draws_random |= random_states() != states
            log.tell("output", module, output)
            return output

        @replace(torch.autograd, "backward")  # Tensor.backward calls it, too
        def backward(backward: Callable[..., None],
                     tensors: Target | Iterable[Target],
                     *args: Any, **kwargs: Any) -> None:
            if isinstance(tensors, (torch.Tensor, GradientEdge)):
                tensors = [tensors]
            targets = tuple(tensors)  # a generator can be read once
            # within a backward pass, checkpointing has begun this one
            if targets and torch._C._current_graph_task_id() == -1:
                given = kwargs.get("grad_tensors", args[0] if args else None)
                self.on_backward(targets, given)
            return backward(targets, *args, **kwargs)

    def trains(self, module: nn.Module) -> bool:
        """Whether a call of this module leads to a step."""
        return (self.log.is_own_process and torch.is_grad_enabled()
                and module.training
                and torch._C._current_graph_task_id() == -1
                and any(one.requires_grad for one in module.parameters()))

    def meet(self, module: nn.Module) -> None:
        """Name a module's parameters, and watch their gradients."""
        log = self.log
        # torch.func puts others in the place of parameters: transforms do, and
        # functional_call, by which they may be computed from those
        if id(module) in log.modules or (
                torch._C._functorch.peek_interpreter_stack()) or any(
                not weight.is_leaf for weight in module.parameters()):
            return
        log.modules[id(module)] = module  # kept: so is its id
        owner = find_trainers(module)
        if owner:
            self.meet(owner)
        new = [(name, weight) for name, weight in module.named_parameters()
               if id(weight) not in log.parameters]
        model = class_of(module)
        self.classes[model] += bool(new)
        if self.classes[model] > 1:
            model += f" {self.classes[model]}"
        for name, weight in new:
            full_name = f"{model}:{parts.plain_name(name)}"
            log.names[id(weight)] = full_name
            self.record.model[full_name] = tuple(weight.shape)
            self.watch(weight)
        names = {id(weight): log.names[id(weight)]
                 for _, weight in module.named_parameters()}
        for name, weight in module.named_parameters(remove_duplicate=False):
            known = names.get(id(weight))
            alias = f"{model}:{parts.plain_name(name)}"
            if new and known and known != alias:
                self.record.tied_names[alias] = known

    def watch(self, weight: torch.Tensor) -> None:
        """Watch the gradients of a parameter."""
        from torch.distributed.tensor import DTensor

        self.log.parameters[id(weight)] = weight
        if weight.requires_grad and not isinstance(weight, DTensor):
            weight.register_hook(  # type: ignore[no-untyped-call]  # torch's
                partial(self.on_part, id(weight)))
            hooks = weight._backward_hooks or {}  # which now has ours
            for key in [*hooks][:-1]:
                hooks[key] = hooks.pop(key)  # the script's: may reduce
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                self.on_gradient)

    def meet_owners(self, weights: Sequence[torch.Tensor]) -> None:
        """Meet the modules of parameters that no call of them has shown."""
        self.meet_modules_of(weights)
        for weight in weights:  # those that are in no module
            if id(weight) not in self.log.parameters and weight.is_leaf:
                self.watch(weight)

    def meet_modules_of(self, weights: Iterable[torch.Tensor]) -> None:
        """Meet the outermost modules that have any of these parameters."""
        modules = find_modules()
        inner = {id(child) for module in modules
                 for child in module.children()}
        unnamed = {id(weight) for weight in weights} - self.log.names.keys()
        for module in modules:
            if id(module) not in inner and any(
                    id(weight) in unnamed for weight in module.parameters()):
                self.meet(module)

    def on_part(self, key: int, gradient: torch.Tensor) -> None:
        """Add up what backward passes compute: the script may do so elsewhere.

        Args:
            key: the id of a parameter.
            gradient: a backward pass's part of its gradient.
        """
        log = self.log
        part = thin(gradient) / log.scale
        log.sums[key] = log.sums.get(key, 0) + part
        log.weighed[key] = log.weighed.get(key, 0) + self.count * part

    def on_gradient(self, weight: torch.Tensor) -> None:
        """Keep what this rank has computed, before it is reduced."""
        if weight.grad is not None:  # a hook may have used it up already
            self.log.local[id(weight)] = thin(weight.grad) / self.log.scale

    def on_root(self, module: nn.Module, arguments: Any) -> None:
        """Note what the outermost module of a forward pass is given.

        The samples of a step are what the first of these is given: rows
        of all tensors as long as the first, as far as they are data; or their
        columns, where the batch is the second dimension.
        """
        notes: Notes = self.log.notes
        self.record.low_precision |= any(
            is_low(weight) or torch.is_autocast_enabled(weight.device.type)
            for weight in module.parameters())
        notes.stream = notes.stream or id(module)
        received = set(map(storage, notes.received))
        with torch._C._DisableFuncTorch():
            given = [one for one in map(unwrap, tree_leaves(arguments))
                     if isinstance(one, torch.Tensor) and one.dim()
                     and not isinstance(one, nn.Parameter)
                     and (one.is_leaf or not one.requires_grad)]
            tensors = [getattr(one, "_local_tensor", one).detach().cpu()
                       for one in given if storage(one) not in received]
            hashes: Hashes | None = None
            if given and not tensors and notes.stream == id(module):
                notes.pending = []  # by a pipeline's stage, to learn of shapes
            elif tensors and notes.stream == id(module):
                hashes = [hash_each(tensors, axis) for axis in (0, 1)]
                notes.pending.append(hashes)
        self.log.tell("root", module, hashes)

    def on_backward(self, targets: Sequence[Target], gradients: Any) -> None:
        """Note the loss of a backward pass, and how many samples it is of.

        Args:
            targets: what the pass computes gradients of. A scalar is a loss,
                several count as their sum.
            gradients: that it is given for the targets; None if for none. Of
                several targets, one with a gradient is no loss, but what a
                pipeline's stage has sent on.
        """
        log = self.log
        row: StepRow = log.row
        notes: Notes = log.notes
        self.direct_forward = None  # it keeps what is computed in it
        log.scale = getattr(targets[0], "visible_scale", 1.0) or 1.0
        if gradients is None or len(targets) == 1:
            gradients = [None] * len(targets)
        losses = [target.item() for target, gradient
                  in zip(targets, gradients, strict=False)
                  if isinstance(target, torch.Tensor) and target.numel() == 1
                  and gradient is None]
        if losses:
            row.losses.append(sum(losses) / log.scale)
        self.count = notes.targets or sum(
            len(rows) for rows, _ in notes.pending) or 1
        row.counts.append(self.count)
        row.targets |= notes.targets > 0
        notes.targets = 0
        take_pending(log)

    def on_direct_forward(self, forward: DirectForward) -> None:
        """Note what a module is given by whom calls its `forward` directly.

        The first module in it that is called tells of it, as do those after.
        """
        last = self.direct_forward
        if last is not None and last.frame is forward.frame:
            return
        self.direct_forward = forward
        self.meet(forward.module)
        self.on_root(forward.module, forward.arguments())

    def find_copies(self) -> None:
        """Record modules like one that trains, with weights that do not.

        They are averages of those.
        """
        def form(module: nn.Module) -> list[tuple[str, torch.Size]]:
            return [(parts.plain_name(name), weight.shape)
                    for name, weight in module.named_parameters()]

        with contextlib.suppress(Exception):  # of half a module
            forms = [form(module) for module in self.log.modules.values()]
            averages = [
                module for module in find_modules()
                if not self.has_parameter(module) and form(module) in forms]
            self.record.copies = [
                parts.describe_tensors((name, thin(weight)) for name, weight
                                       in module.named_parameters())
                for module in averages]

    def has_parameter(self, module: nn.Module) -> bool:
        """Whether any parameter of a module is watched."""
        return any(id(weight) in self.log.parameters
                   for weight in module.parameters())


@dataclass(frozen=True)
class DirectForward:
    """A call of a module's `forward` that did not go by way of `__call__`.

    Attributes:
        module: whose.
        frame: the call's.
    """

    module: nn.Module
    frame: FrameType

    def arguments(self) -> list[Any]:
        """Return what it was given, unless it has assigned its arguments anew.
        """
        given = inspect.getargvalues(self.frame)
        names = [*given.args[1:], given.varargs, given.keywords]
        return [given.locals[name] for name in names if name in given.locals]


def find_direct_forward(module: nn.Module) -> DirectForward | None:
    """Return the outermost direct call of a `forward` that this module is
    called in, None if there is none.

    It is that of a module which has this one as a part.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if (isinstance(owner, nn.Module) and not hands_on(owner)
                    and any(part is module for part in owner.modules())):
                found = DirectForward(owner, frame)
        frame = frame.f_back
    return found


def hands_on(module: nn.Module) -> bool:
    """Whether a module gives what it is given to the one that it wraps."""
    return (isinstance(module, DistributedDataParallel)
            or is_trainers(module) or hasattr(module, "_orig_mod"))


def find_modules() -> list[nn.Module]:
    """Return all modules of this process."""
    return [thing for thing in gc.get_objects()
            if issubclass(type(thing), nn.Module)]


def is_trainers(module: nn.Module) -> bool:
    """Whether this is the module of a Lightning Trainer."""
    return any(base.__name__ == "LightningModule"
               for base in type(module).__mro__)


def find_trainers(module: nn.Module) -> nn.Module | None:
    """Return the module of a Lightning Trainer that this one is in, or None.

    The Trainer calls it only if it is wrapped, so in one process not at all.
    """
    if is_trainers(module) or not sys.modules.keys() & {
            "lightning", "pytorch_lightning"}:
        return None
    for one in find_modules():
        if is_trainers(one) and any(part is module for part in one.modules()):
            return one
    return None


def class_of(module: nn.Module) -> str:
    """Return the name of a module's class, or of that inside of a wrapper's.
    """
    children = [*module.named_children()]
    if len(children) == 1:
        name, child = children[0]
        if f"{name}." in parts.WRAPPERS:
            return class_of(child)
    return type_of(module)


def hash_each(tensors: Sequence[torch.Tensor], axis: int) -> list[str]:
    """Return a hash of each sample: a row or a column of the first tensor, and
    those of others with as many.

    With tokens, of integers alone: a state that a model is given, which it
    has computed, differs by rounding.

    Args:
        tensors: what a model is given.
        axis: 0 for rows, 1 for columns.
    """
    tokens = tensors[0].dim() > 1 and not tensors[0].is_floating_point()
    samples = [tensor.movedim(axis, 0) for tensor in tensors
               if tensor.dim() > axis
               and not (tokens and tensor.is_floating_point())]
    count = len(samples[0]) if tensors[0].dim() > axis else 0
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(count)]
    for tensor in samples:
        if len(tensor) != count:
            continue
        flat = tensor.reshape(count, -1).clone(
            memory_format=torch.contiguous_format)  # its strides, too
        for digest, data in zip(hashes, flat.view(torch.uint8), strict=True):
            digest.update(ctypes.string_at(data.data_ptr(), len(data)))
    return [digest.hexdigest() for digest in hashes]
