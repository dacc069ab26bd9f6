"""What is recorded in each process of any training script, from outside.

It is the check's observer with another scope. A rank leaves RANK.jsonl as in
the check, and RANK.pt, a dictionary:

    updates   of each call of an optimizer's step: see `record`
    names     of the parameters: "optimizer.index" -> name
    dropout   whether it was switched off
    batchnorm whether statistics of a microbatch enter the loss
    low       whether it computes in bf16 or fp16
    draws     whether the model draws random numbers, dropout apart
    saved     how many updates were recorded when it had saved something
    read      files it has opened before its first update
    results   files it has written after that
    new       {path: its inode} of the files and folders that it has made
    copies    of the model: what `parts.describe` says of each at the end
    asked, written  as in the check
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from workshop import parts
from workshop.check.observe import Observer

MOST = 8192  # elements of a tensor that are kept
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
            "feature_alpha_dropout")
NO_OUTPUT = ("/dev/", "/proc/", "/.cache/", "__pycache__", ".lock")


class Watcher(Observer):
    """A function of the rank for `workshop.processes.Launch`.

    size: the number of processes. steps: after so many updates of the first
    optimizer the process ends. kind: "still" if nothing is to be updated, so
    that all gradients are those of the first weights; "saved" if it ends as
    soon as each optimizer has its gradients for the first update after
    torch.save(); "resumed" if it goes on from there. gpus: whether a CPU
    stands in for them.
    """

    def __init__(self, folder, size, steps, kind="", gpus=False):
        super().__init__(folder, folder)
        self.size, self.steps, self.kind = size, steps, kind
        self.gpus = gpus

    def __call__(self, rank):
        self.optimizers, self.made = [], Counter()
        self.modules, self.parameters, self.local = {}, {}, {}
        self.inside = self.finished = self.recorded = False
        self.told = {}  # sampler -> whether set_epoch came before its start
        self.since = set()  # optimizers with gradients since it has saved
        draw_anew()
        return super().__call__(rank)

    def nothing_seen(self):
        return {"updates": [], "names": {}, "dropout": False,
                "batchnorm": False, "low": False, "draws": False,
                "saved": None, "read": [], "results": [], "new": {},
                "copies": [],
                "asked": [], "written": []}

    def finish(self):
        if not self.finished:
            self.finished = True
            with contextlib.suppress(Exception):  # of half a module
                self.seen["copies"] = [
                    parts.describe((name, thin(weight)) for name, weight
                                   in module.named_parameters())
                    for module in self.copies()]
            for path in self.seen["new"]:
                with contextlib.suppress(OSError):
                    self.seen["new"][path] = os.lstat(path).st_ino
            super().finish()

    def leave(self):
        """End here: nothing of the script runs after that.

        Wait for the others: gloo fails where one has gone. Those that never
        come let `Patience` end them all.
        """
        self.finish()
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(
                Path(f"{self.folder}/{rank}.pt").exists()
                for rank in range(self.size)):
            time.sleep(0.05)
        for worker in multiprocessing.active_children():
            worker.kill()
        sys.stdout.flush()
        os._exit(0)

    # ---------------------------------------------------------- training

    def watch_training(self):
        import torch
        from torch import nn
        from torch.nn.utils import clip_grad
        from torch.utils.data.distributed import DistributedSampler

        super().watch_training()
        self.model = ()  # updates count without a module, too
        for name in ("clip_grad_norm_", "clip_grad_value_",
                     "clip_grads_with_norm_"):
            clip = self.watch_clip(getattr(nn.utils, name))
            setattr(clip_grad, name, clip)
            setattr(nn.utils, name, clip)
        self.watch_modules()
        self.watch_dropout()
        self.watch_batchnorm()
        self.watch_targets()
        self.watch_scaler()
        backward, begin, set_epoch = (
            torch.Tensor.backward, DistributedSampler.__iter__,
            DistributedSampler.set_epoch)

        @functools.wraps(backward)
        def visible_backward(loss, *args, **kwargs):
            if loss.numel() == 1:
                self.losses.append(loss.item())
            self.samples += self.pending
            self.pending = []
            return backward(loss, *args, **kwargs)

        @functools.wraps(begin)
        def visible_begin(sampler):
            self.asked("sampler", (sampler.num_replicas, sampler.seed))
            if sampler.shuffle:
                self.told[sampler] = hasattr(sampler, "_was_told")
                if sampler.__dict__.pop("_is_told", False):
                    self.asked("epochs", (id(sampler), sampler.epoch))
            return begin(sampler)

        @functools.wraps(set_epoch)
        def visible_set_epoch(sampler, epoch):
            sampler._was_told = sampler._is_told = True
            return set_epoch(sampler, epoch)

        torch.Tensor.backward = visible_backward
        DistributedSampler.__iter__ = visible_begin
        DistributedSampler.set_epoch = visible_set_epoch

    def watch_sharding(self):
        import torch
        from torch.distributed import fsdp

        super().watch_sharding()
        shard = fsdp.fully_shard

        @functools.wraps(shard)
        def visible_shard(module, *args, **kwargs):
            self.asked("fully_shard", None)
            return shard(module, *args, **kwargs)

        fsdp.fully_shard = visible_shard
        wrap = fsdp.FullyShardedDataParallel.__init__

        @functools.wraps(wrap)
        def visible_wrap(module, *args, **kwargs):
            self.asked("FSDP1", None)
            wrap(module, *args, **kwargs)

        fsdp.FullyShardedDataParallel.__init__ = visible_wrap
        empty = torch.nn.Module.to_empty

        @functools.wraps(empty)
        def visible_empty(module, *args, **kwargs):
            empty(module, *args, **kwargs)
            with torch.no_grad():  # memory may hold numbers by chance
                for weight in module.parameters(kwargs.get("recurse", True)):
                    if weight.is_floating_point():
                        weight.fill_(torch.nan)
            return module

        torch.nn.Module.to_empty = visible_empty

    on_forward = watch_evaluation = watch_pipelines = lambda self, *_: None

    def watch_modules(self):
        """Keyword arguments do not come by PyTorch's global hooks."""
        import torch

        call = torch.nn.Module.__call__

        @functools.wraps(call)
        def visible_call(module, *args, **kwargs):
            if self.inside or not self.trains(module):
                return call(module, *args, **kwargs)
            self.meet(module)
            if is_wrapper(module):
                if hasattr(module, "require_backward_grad_sync"):
                    self.synced.append(bool(
                        module.require_backward_grad_sync))
                return call(module, *args, **kwargs)
            self.on_root(module, (args, kwargs))
            self.inside = True
            states = random_states()
            try:
                return call(module, *args, **kwargs)
            finally:
                self.inside = False
                self.seen["draws"] |= random_states() != states

        torch.nn.Module.__call__ = visible_call

    def trains(self, module):
        import torch

        return (os.getpid() == self.owner and torch.is_grad_enabled()
                and module.training
                and torch._C._current_graph_task_id() == -1
                and any(weight.requires_grad
                        for weight in module.parameters()))

    def meet(self, module):
        """Name its parameters, and watch their gradients."""
        from torch.distributed.tensor import DTensor

        if id(module) in self.modules:
            return
        before = "" if not self.modules else f"{type(module).__name__}."
        self.model = self.modules[id(module)] = module  # kept: so is its id
        for name, weight in module.named_parameters():
            if id(weight) in self.parameters:
                continue
            self.parameters[id(weight)] = weight
            self.names[id(weight)] = before + parts.plain_name(name)
            if weight.requires_grad and not isinstance(weight, DTensor):
                weight.register_post_accumulate_grad_hook(self.on_gradient)

    def copies(self):
        """Modules like one that trains, with weights that do not: an average.
        """
        import torch

        def form(module):
            return [(parts.plain_name(name), weight.shape)
                    for name, weight in module.named_parameters()]

        forms = [form(module) for module in self.modules.values()]
        return [one for one in gc.get_objects()
                if issubclass(type(one), torch.nn.Module)
                and not any(id(weight) in self.parameters
                            for weight in one.parameters())
                and form(one) in forms]

    def on_gradient(self, weight):
        """What this rank has computed, before it is reduced."""
        self.local[id(weight)] = thin(weight.grad)

    def on_root(self, module, arguments):
        """The outermost module of a forward pass, with all it is given.

        The samples of an update are what the first of these is given: rows
        of all tensors as long as the first, as far as they are data; or their
        columns, where the batch is the second dimension.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        self.seen["batchnorm"] |= any(
            isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
            and not isinstance(part, torch.nn.SyncBatchNorm)
            and part.training for part in module.modules())
        self.seen["low"] |= torch.is_autocast_enabled("cpu") or any(
            map(is_low, module.parameters()))
        self.stream = self.stream or id(module)
        tensors = [one.detach().cpu() for one in tree_leaves(arguments)
                   if isinstance(one, torch.Tensor) and one.dim()
                   and not isinstance(one, torch.nn.Parameter)
                   and (one.is_leaf or not one.requires_grad)]
        if not tensors or self.stream != id(module):
            return
        self.pending.append([hash_each(tensors, axis) for axis in (0, 1)])

    def watch_dropout(self):
        """Switch it off: it draws other numbers on each rank.

        `record` draws one in its place, which moves the generator on.
        """
        import torch
        from torch.nn import functional as F

        def quiet(name, place, key):
            function = getattr(F, name)

            @functools.wraps(function)
            def visible(*args, **kwargs):
                args = list(args)
                p = kwargs.get(key, args[place] if args[place:] else
                               0.5 if key == "p" else 0.0)
                if p > 0 and torch.is_grad_enabled():
                    self.seen["dropout"] = True
                if args[place:]:
                    args[place] = 0.0
                else:
                    kwargs[key] = 0.0
                return function(*args, **kwargs)

            setattr(F, name, visible)

        for name in DROPOUTS:
            quiet(name, 1, "p")
        quiet("scaled_dot_product_attention", 4, "dropout_p")

    def watch_batchnorm(self):
        """PyTorch's SyncBatchNorm needs a GPU: here it gathers the samples.
        """
        import torch
        from torch import distributed as dist
        from torch.distributed.nn.functional import all_gather
        from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
        from torch.nn.parallel import DistributedDataParallel

        forward = SyncBatchNorm.forward

        @functools.wraps(forward)
        def visible_forward(norm, x):
            if not (norm.training and dist.is_initialized()):
                return forward(norm, x)
            group = norm.process_group or dist.group.WORLD
            parts = all_gather(x, group)
            whole = _BatchNorm.forward(norm, torch.cat(parts))
            return whole.split(list(map(len, parts)))[dist.get_rank(group)]

        SyncBatchNorm.forward = visible_forward
        DistributedDataParallel._passing_sync_batchnorm_handle = (
            lambda ddp, module: None)  # it refuses a CPU

    def watch_scaler(self):
        """Also one that is disabled because there is no GPU."""
        import torch

        scaler = torch.amp.GradScaler
        make, scale, unscale = scaler.__init__, scaler.scale, scaler.unscale_

        @functools.wraps(make)
        def visible_make(one, *args, **kwargs):
            one._wanted = kwargs.get("enabled", args[5] if args[5:] else True)
            make(one, *args, **kwargs)

        @functools.wraps(scale)
        def visible_scale(one, *args):
            self.scaled = one._wanted
            if one.is_enabled() and ("scaler", True) not in self.seen["asked"]:
                self.asked("scaler", True)
            return scale(one, *args)

        @functools.wraps(unscale)
        def visible_unscale(one, *args):
            self.scaled = False
            return unscale(one, *args)

        scaler.__init__, scaler.scale, scaler.unscale_ = (
            visible_make, visible_scale, visible_unscale)

    def watch_targets(self):
        """How many there are: a loss is often a mean over those."""
        import torch
        from torch.nn import functional as F

        def count(name):
            function = getattr(F, name)

            @functools.wraps(function)
            def visible(*args, **kwargs):
                target = kwargs.get("target", args[1] if args[1:] else None)
                ignored = kwargs.get("ignore_index", args[4] if args[4:]
                                     else -100)
                if torch.is_grad_enabled() and isinstance(
                        target, torch.Tensor) and (
                            not target.is_floating_point()):
                    self.targets += (target != ignored).sum().item()
                return function(*args, **kwargs)

            setattr(F, name, visible)

        count("cross_entropy")
        count("nll_loss")

    # ----------------------------------------------------------- updates

    def begin_update(self):
        super().begin_update()
        self.samples, self.losses, self.stream = [], [], None
        self.unclipped, self.bytes, self.calls = {}, 0, 0
        self.synced, self.reduced, self.late = [], 0, 0
        self.targets, self.mixed, self.scaled = 0, False, False

    def watch_clip(self, clip):
        @functools.wraps(clip)
        def visible_clip(*args, **kwargs):
            if self.scaled:
                self.asked("clipped", "scaled")
            if not self.unclipped:
                self.unclipped = {key: thin(weight.grad) for key, weight
                                  in self.parameters.items()}
            return clip(*args, **kwargs)

        return visible_clip

    def on_collective(self, name, tensors, function, args):
        super().on_collective(name, tensors, function, args)
        self.seen["low"] |= any(map(is_low, tensors))  # mixed, or compressed
        self.mixed |= "gather" in name and bool(self.pending)
        if "reduce" in name:
            count = sum(tensor.numel() for tensor in tensors)
            self.calls += 1
            self.reduced += count
            self.late += count * bool(self.unclipped)  # after it was clipped
            self.bytes += sum(tensor.numel() * tensor.element_size()
                              for tensor in tensors)

    def record(self, optimizer):
        """What led to an update: losses and samples since the last one.

        weights: before it; gradients: of the parameters, before they are
        clipped; local: what this rank alone has computed of them.
        """
        import torch

        if self.recorded:  # a closure may be called several times
            return
        self.recorded = True
        if self.told and not self.made:  # others are of a validation
            self.asked("epoch", any(self.told.values()))
        number = next((i for i, one in enumerate(self.optimizers)
                       if one is optimizer), len(self.optimizers))
        if number == len(self.optimizers):
            self.optimizers.append(optimizer)
        if self.made[number] == self.steps:
            self.leave()
        if self.kind == "saved" and any(
                os.path.exists(f"{self.folder}/saved-{count}")
                for count in range(len(self.seen["updates"]) + 1)):
            self.since.add(number)
            if self.seen["saved"] is None:
                self.seen["saved"] = len(self.seen["updates"])
        weights = {f"{number}.{i}": weight for i, weight in enumerate(
            weight for group in optimizer.param_groups
            for weight in group["params"])}
        self.seen["names"] |= {
            key: self.names.get(id(weight), f"parameter {key}")
            for key, weight in weights.items()}

        def state(tensor_of):
            return parts.describe((key, tensor_of(weight))
                                  for key, weight in weights.items())

        now = state(thin)
        self.seen["updates"].append({
            "optimizer": number,
            "rows": [row for rows, _ in self.samples for row in rows],
            "columns": [row for _, rows in self.samples for row in rows],
            "losses": self.losses, "wrapped": len(self.synced),
            "rates": [float(group["lr"]) for group in optimizer.param_groups
                      if "lr" in group],
            "elements": sum(weight.numel() for weight in weights.values()
                            if weight.requires_grad),
            "without": [key for key, weight in weights.items()
                        if weight.requires_grad and weight.grad is None],
            "reduced": self.reduced, "bytes": self.bytes,
            "calls": self.calls,
            "late": self.late, "targets": self.targets, "mixed": self.mixed,
            "before": now if not self.made[number] or self.since else None,
            "now": now,  # again before each
            "random": random_states(),
            "gradients": state(lambda weight: self.unclipped.get(
                id(weight), thin(weight.grad))),
            "local": state(lambda weight: self.local.get(id(weight)))})
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
            torch.rand(1)
        self.begin_update()

    def on_updated(self, optimizer):
        self.recorded = False
        self.begin_update()  # of what a closure computes again, nothing
        buffers = {f"{i}.{name}": thin(buffer)
                   for i, module in enumerate(self.modules.values())
                   for name, buffer in module.named_buffers()
                   if buffer.is_floating_point()}
        self.seen["updates"][-1] |= {
            "weights": self.weights(thin), "buffers": parts.describe(
                buffers.items())}

    def watch_devices(self):
        super().watch_devices()
        if self.gpus:
            from workshop.verify import gpus

            gpus.stand_in()

    # ------------------------------------------------------------- files

    def watch_files(self):
        import torch

        super().watch_files()
        save = torch.save

        @functools.wraps(save)
        def visible_save(obj, f, *args, **kwargs):
            if isinstance(f, (str, Path)):  # not opened by Python
                self.makes(f)
            save(obj, f, *args, **kwargs)
            if self.made:
                # the other ranks may be an update behind
                Path(f"{self.folder}/saved-{len(self.seen['updates'])}"
                     ).touch()

        torch.save = visible_save

    def on_event(self, event, args):
        super().on_event(event, args)
        if event == "os.mkdir" or (
                event == "open" and (args[2] or 0) & os.O_CREAT):
            self.makes(args[0])
        if event in ("os.rename", "os.symlink", "os.link"):
            self.makes(args[1])
        if event == "open" and isinstance(args[0], str) and not (
                self.made or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            self.seen["read"].append(os.path.abspath(args[0]))

    def makes(self, path):
        if isinstance(path, (str, Path)) and not os.path.lexists(path):
            self.seen["new"][os.path.abspath(path)] = None

    def wrote(self, path):
        super().wrote(path)
        if self.made:
            self.seen["results"].append(os.path.abspath(path))

    def is_output(self, path):
        path = os.path.abspath(path)
        return not (path.startswith(os.path.dirname(self.folder))
                    or any(part in path for part in NO_OUTPUT))


def draw_anew():
    """Seed what a new process seeds from the system; a fork shares it.

    Python's own generator is seeded at each fork.
    """
    import torch

    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def is_wrapper(module):
    """Whether it only hands its arguments on, or is a Trainer's."""
    from torch.nn.parallel import DistributedDataParallel

    return (isinstance(module, DistributedDataParallel)
            or hasattr(module, "_orig_mod")
            or any(base.__name__ == "LightningModule"
                   for base in type(module).__mro__))


def is_low(tensor):
    import torch

    return tensor.dtype in (torch.bfloat16, torch.float16)


def kept(optimizer, weights):
    """What an optimizer keeps for its parameters: (name, tensor) pairs."""
    import torch

    for key, weight in weights.items():
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, (int, float)):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor):
                yield f"{key} {name}", thin(value)


def random_states():
    """Of each generator of random numbers, a digest of its state."""
    import torch

    states = {"PyTorch's": torch.get_rng_state().tolist(),
              "Python's": random.getstate(),
              "NumPy's": sys.modules["numpy"].random.get_state()
              if "numpy" in sys.modules else None}
    return {name: hashlib.blake2b(repr(state).encode()).hexdigest()
            for name, state in states.items()}


def hash_each(tensors, axis):
    """Of the first tensor's rows or columns, and those of others with as many.

    With tokens, of integers alone: a state that a model is given, which it
    has computed, differs by rounding.
    """
    import torch

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


def thin(tensor):
    """A copy of a tensor: of a large one some elements, and its sum.

    Both are linear: they can be averaged over ranks.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if tensor is None or isinstance(tensor, DTensor):
        return tensor if tensor is None else tensor.detach().clone()
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).flatten()
    if len(tensor) <= MOST:
        return tensor.clone()
    some = tensor[::-(-len(tensor) // MOST)].float()
    return torch.cat([some, tensor.float().sum()[None]])
