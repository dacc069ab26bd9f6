"""Watches any training script: its models, their samples and updates.

updates   of each call of an optimizer's step: see `Rows.record`
names     of the parameters: "optimizer.index" -> name; and their shapes
batchnorm whether statistics of a microbatch enter the loss
low       whether it computes in bf16 or fp16
draws     whether the model draws random numbers, dropout apart
saved     how many updates were recorded when it had saved something
copies    of the model: what `parts.describe` says of each at the end
"""

import contextlib
import ctypes
import gc
import hashlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import rankcheck.tensors as parts
from rankcheck.probes.collectives import messages
from rankcheck.probes.cpu_backend import on_gpu, process
from rankcheck.probes.files import opened, results
from rankcheck.probes.recorder import replace
from rankcheck.probes.updates import Updates
from rankcheck.tensors import thin

NO_OUTPUT = ("/dev/", "/proc/", "/.cache/", "__pycache__", ".lock")


def probes(folder, size, steps, kind="", on_gpus=False, device="cpu"):
    """Verify's. size: the number of processes; steps, kind: of `Rows`.

    folder: the log's, in that of all runs. on_gpus: whether a CPU stands in
    for them. device: "gpu" where they are there.
    """
    return [Rows(size, steps, kind), Modules(), use, Updates(),
            process if device == "cpu" else on_gpu, messages,
            *[stand_in] * on_gpus, partial(opened, without=(
                str(folder), *(f"{os.path.dirname(folder)}/{name}/"
                               for name in ("guard", "tmp")),
                *NO_OUTPUT)), results]


def use(log):
    """What scripts use beside a model; verify itself need not import it."""
    from rankcheck.probes.torch_api import PROBES

    for probe in PROBES:
        probe(log)


def stand_in(log):
    from rankcheck.probes.fake_cuda import gpus

    gpus(log)


class Rows:
    """A row of what led to each update, and the end of the process.

    size: the number of processes. steps: after so many updates of the first
    optimizer the process ends. kind: "still" if nothing is to be updated, so
    that all gradients are those of the first weights; "saved" if it ends as
    soon as each optimizer has its gradients for the first update after
    torch.save(); "resumed" if it goes on from there.
    """

    def __init__(self, size, steps, kind):
        self.size, self.steps, self.kind = size, steps, kind

    def __call__(self, log):
        draw_anew()
        self.log, self.seen = log, log.seen
        self.seen |= {"updates": [], "names": {}, "shapes": {}, "saved": None}
        log.begun = True  # updates count without a module, too
        self.optimizers, self.made = [], Counter()
        self.recorded = False
        self.since = set()  # optimizers with gradients since it has saved
        log.told = {}  # sampler -> whether set_epoch came before its start
        log.local = {}  # gradients as this rank alone has computed them
        log.sums = {}  # what all backward passes have computed, added up
        log.weighed = {}  # the same, each times the number of its targets
        self.begin_update()
        log.on("gradients", self.record)
        log.on("updated", self.on_updated)
        log.on("message", self.on_message)

    def begin_update(self):
        """row: what is recorded. now: what else belongs to this update."""
        self.log.row = SimpleNamespace(
            rows=[], columns=[], losses=[], wrapped=0, reduced=0, bytes=0,
            calls=0, late=0, counts=[], targets=False, mixed=False)
        self.log.now = SimpleNamespace(
            pending=[], stream=None, unclipped={}, scaled=False, targets=0)

    def on_message(self, name, tensors):
        row, now = self.log.row, self.log.now
        self.seen["low"] |= any(map(is_low, tensors))  # mixed, or compressed
        row.mixed |= "gather" in name and bool(now.pending)
        if "reduce" in name:
            count = sum(tensor.numel() for tensor in tensors)
            row.calls += 1
            row.reduced += count
            row.late += count * bool(now.unclipped)  # after it was clipped
            row.bytes += sum(part.nbytes for tensor in tensors for part in (
                [tensor._indices(), tensor._values()] if tensor.is_sparse
                else [tensor]))

    def record(self, optimizer):
        """What led to an update: losses and samples since the last one.

        weights: before it; gradients: of the parameters, before they are
        clipped; local: what this rank alone has computed of them.
        """
        log = self.log
        if self.recorded:  # a closure may be called several times
            return
        self.recorded = True
        if not log.row.counts:  # no loss.backward(), but autograd.grad()
            take_pending(log)
        if log.told and not self.made:  # others are of a validation
            log.asked("epoch", any(log.told.values()))
        number = next((i for i, one in enumerate(self.optimizers)
                       if one is optimizer), len(self.optimizers))
        if number == len(self.optimizers):
            self.optimizers.append(optimizer)
        if self.made[number] == self.steps:
            self.leave()
        if self.kind == "saved" and any(
                os.path.exists(f"{log.folder}/saved-{count}")
                for count in range(len(self.seen["updates"]) + 1)):
            self.since.add(number)
            if self.seen["saved"] is None:
                self.seen["saved"] = len(self.seen["updates"])
        weights = {f"{number}.{i}": weight for i, weight in enumerate(
            weight for group in optimizer.param_groups
            for weight in group["params"])}
        self.seen["names"] |= {
            key: log.names.get(id(weight), f"parameter {key}")
            for key, weight in weights.items()}
        self.seen["shapes"] |= {key: tuple(weight.shape)
                                for key, weight in weights.items()}

        def state(tensor_of):
            return parts.describe((key, tensor_of(weight))
                                  for key, weight in weights.items())

        now = state(thin)
        self.seen["updates"].append(vars(log.row) | {
            "optimizer": number,
            "rates": [float(group["lr"]) for group in optimizer.param_groups
                      if "lr" in group],
            "elements": sum(weight.numel() for weight in weights.values()
                            if weight.requires_grad),
            "without": [key for key, weight in weights.items()
                        if weight.requires_grad and weight.grad is None
                        and id(weight) not in log.sums],  # nor had one
            "before": now if not self.made[number] or self.since else None,
            "now": now,  # again before each
            "random": random_states(),
            "gradients": state(lambda weight: log.now.unclipped.get(
                id(weight), thin(weight.grad))),
            "local": state(lambda weight: log.local.get(id(weight))),
            "sums": state(lambda weight: log.sums.get(id(weight))),
            "weighed": state(lambda weight: log.weighed.get(id(weight)))})
        log.sums.clear()
        log.weighed.clear()
        if self.kind in ("saved", "resumed"):
            self.seen["updates"][-1]["kept"] = parts.describe(
                kept(optimizer, weights))
        self.made[number] += 1
        if len(self.since) == len(self.optimizers):
            self.leave()
        if self.kind == "still":
            for weight in weights.values():
                weight.grad = None  # an optimizer leaves such a weight alone
        self.weights = state
        if self.seen["dropout"]:
            torch.rand(1)  # in its place, which moves the generator on
        self.begin_update()

    def on_updated(self, optimizer):
        self.recorded = False
        # in this step
        self.seen["updates"][-1]["within"] = self.log.row.reduced
        self.begin_update()  # of what a closure computes again, nothing
        buffers = {f"{i}.{name}": thin(buffer)
                   for i, module in enumerate(self.log.modules.values())
                   for name, buffer in module.named_buffers()
                   if buffer.is_floating_point()}
        self.seen["updates"][-1] |= {
            "weights": self.weights(thin), "buffers": parts.describe(
                buffers.items())}

    def leave(self):
        """End here: nothing of the script runs after that.

        Wait for the others: gloo fails where one has gone. Those that never
        come let `Patience` end them all.
        """
        self.log.finish()
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(
                Path(f"{self.log.folder}/{rank}.pt").exists()
                for rank in range(self.size)):
            time.sleep(0.05)
        for worker in multiprocessing.active_children():
            worker.kill()
        sys.stdout.flush()
        os._exit(0)


class Modules:
    """Those that train, and what goes into the outermost of them."""

    def __call__(self, log):
        self.log, self.seen, self.inside = log, log.seen, False
        self.seen |= {"batchnorm": False, "low": False, "draws": False,
                      "copies": []}
        self.scale = self.count = 1  # of the backward pass: see `backward`
        log.modules = {}  # by their id
        log.on("end", self.find_copies)

        @replace(nn.Module, "__call__")  # hooks get no keyword arguments
        def call(call, module, *args, **kwargs):
            if self.inside or not self.trains(module):
                return call(module, *args, **kwargs)
            self.meet(module)
            if is_wrapper(module):
                log.row.wrapped += hasattr(
                    module, "require_backward_grad_sync")
                return call(module, *args, **kwargs)
            self.on_root(module, (args, kwargs))
            self.inside = True
            states = random_states()
            try:
                return call(module, *args, **kwargs)
            finally:
                self.inside = False
                self.seen["draws"] |= random_states() != states

        @replace(torch.Tensor, "backward")
        def backward(backward, loss, *args, **kwargs):
            row, now = log.row, log.now
            self.scale = getattr(loss, "visible_scale", 1.0)
            if loss.numel() == 1:
                row.losses.append(loss.item() / self.scale)
            self.count = now.targets or sum(
                len(rows) for rows, _ in now.pending) or 1
            row.counts.append(self.count)
            row.targets |= now.targets > 0
            take_pending(log)
            now.targets = 0
            return backward(loss, *args, **kwargs)

    def trains(self, module):
        return (self.log.here and torch.is_grad_enabled() and module.training
                and torch._C._current_graph_task_id() == -1
                and any(weight.requires_grad
                        for weight in module.parameters()))

    def meet(self, module):
        """Name its parameters, and watch their gradients."""
        from torch.distributed.tensor import DTensor

        log = self.log
        # torch.func's transforms put others in the place of parameters
        if id(module) in log.modules or (
                torch._C._functorch.peek_interpreter_stack()):
            return
        before = "" if not log.modules else f"{type(module).__name__}."
        log.modules[id(module)] = module  # kept: so is its id
        for name, weight in module.named_parameters():
            if id(weight) in log.parameters:
                continue
            log.parameters[id(weight)] = weight
            log.names[id(weight)] = before + parts.plain_name(name)
            if weight.requires_grad and not isinstance(weight, DTensor):
                weight.register_hook(partial(self.on_part, id(weight)))
                weight.register_post_accumulate_grad_hook(self.on_gradient)

    def on_part(self, key, gradient):
        """What one backward pass has computed.

        The script may take it away, and add up all of them elsewhere.
        """
        log, part = self.log, thin(gradient) / self.scale
        log.sums[key] = log.sums.get(key, 0) + part
        log.weighed[key] = log.weighed.get(key, 0) + self.count * part

    def on_gradient(self, weight):
        """What this rank has computed, before it is reduced."""
        if weight.grad is not None:  # a hook may have used it up already
            self.log.local[id(weight)] = thin(weight.grad) / self.scale

    def on_root(self, module, arguments):
        """The outermost module of a forward pass, with all it is given.

        The samples of an update are what the first of these is given: rows
        of all tensors as long as the first, as far as they are data; or their
        columns, where the batch is the second dimension.
        """
        now = self.log.now
        self.seen["batchnorm"] |= any(
            isinstance(part, _BatchNorm)
            and not isinstance(part, nn.SyncBatchNorm)
            and part.training for part in module.modules())
        self.seen["low"] |= any(
            is_low(weight) or torch.is_autocast_enabled(weight.device.type)
            for weight in module.parameters())
        now.stream = now.stream or id(module)
        with torch._C._DisableFuncTorch():
            tensors = [
                one.detach().cpu() for one in map(
                    unwrap, tree_leaves(arguments))
                if isinstance(one, torch.Tensor) and one.dim()
                and not isinstance(one, nn.Parameter)
                and (one.is_leaf or not one.requires_grad)]
            if tensors and now.stream == id(module):
                now.pending.append([
                    hash_each(tensors, axis) for axis in (0, 1)])

    def find_copies(self):
        """Modules like one that trains, with weights that do not: an average.
        """
        def form(module):
            return [(parts.plain_name(name), weight.shape)
                    for name, weight in module.named_parameters()]

        with contextlib.suppress(Exception):  # of half a module
            forms = [form(module) for module in self.log.modules.values()]
            self.seen["copies"] = [
                parts.describe((name, thin(weight)) for name, weight
                               in one.named_parameters())
                for one in gc.get_objects()
                if issubclass(type(one), nn.Module)
                and not any(id(weight) in self.log.parameters
                            for weight in one.parameters())
                and form(one) in forms]


def take_pending(log):
    """Note what the modules were given as the samples of this update."""
    for rows, columns in log.now.pending:
        log.row.rows += rows
        log.row.columns += columns
    log.now.pending = []


def unwrap(value):
    """The tensor in whose place a transform of torch.func has put another."""
    while isinstance(value, torch.Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(value)):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def draw_anew():
    """Seed what a new process seeds from the system; a fork shares it.

    Python's own generator is seeded at each fork.
    """
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def is_wrapper(module):
    """Whether it only hands its arguments on, or is a Trainer's."""
    return (isinstance(module, DistributedDataParallel)
            or hasattr(module, "_orig_mod")
            or any(base.__name__ == "LightningModule"
                   for base in type(module).__mro__))


def is_low(tensor):
    return tensor.dtype in (torch.bfloat16, torch.float16)


def kept(optimizer, weights):
    """What an optimizer keeps for its parameters: (name, tensor) pairs."""
    for key, weight in weights.items():
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, (int, float)):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor):
                yield f"{key} {name}", thin(value)


def random_states():
    """Of each generator of random numbers, a digest of its state."""
    states = {"PyTorch's": torch.get_rng_state().tolist(),
              "Python's": random.getstate(),
              "NumPy's": sys.modules["numpy"].random.get_state()
              if "numpy" in sys.modules else None,
              "the GPU's": torch.cuda.get_rng_state().tolist()
              if torch.cuda.is_initialized() else None}
    return {name: hashlib.blake2b(repr(state).encode()).hexdigest()
            for name, state in states.items()}


def hash_each(tensors, axis):
    """Of the first tensor's rows or columns, and those of others with as many.

    With tokens, of integers alone: a state that a model is given, which it
    has computed, differs by rounding.
    """
    tokens = tensors[0].dim() > 1 and not tensors[0].is_floating_point()
    parts = [tensor.movedim(axis, 0) for tensor in tensors
             if tensor.dim() > axis
             and not (tokens and tensor.is_floating_point())]
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(
        len(parts[0]) if tensors[0].dim() > axis else 0)]
    for part in parts:
        if len(part) == len(hashes):
            flat = part.reshape(len(part), -1).clone(
                memory_format=torch.contiguous_format)  # its strides, too
            for one, data in zip(hashes, flat.view(torch.uint8), strict=True):
                one.update(ctypes.string_at(data.data_ptr(), len(data)))
    return [one.hexdigest() for one in hashes]
