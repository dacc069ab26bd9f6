"""Watches what training scripts take from PyTorch beside a model.

Dropout, which draws other numbers on each rank, is switched off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from rankcheck.record.recorder import Log, assign, note, replace
from rankcheck.record.tensors import thin, unwrap


def watch_clipping(log: Log) -> None:
    """Keep the gradients as they were before they are clipped."""
    names = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")

    @replace(nn.utils, *names)
    def clip(clip: Callable[..., Any],
             parameters: torch.Tensor | Iterable[torch.Tensor],
             *args: Any, **kwargs: Any) -> Any:
        if log.notes.scaled:
            log.note_fact("clipped", "scaled")
        weights = ([parameters] if isinstance(parameters, torch.Tensor)
                   else [*parameters])  # what a generator gives only once
        for weight in weights:
            if id(weight) not in log.notes.unclipped:
                log.notes.unclipped[id(weight)] = thin(weight.grad)
        return clip(weights, *args, **kwargs)

    for name in names:
        setattr(clip_grad, name, getattr(nn.utils, name))


def watch_scaler(log: Log) -> None:
    """Watch a GradScaler, also one that is disabled because there is no GPU.
    """
    @replace(torch.amp.GradScaler, "__init__")
    def make(make: Callable[..., None], scaler: Any, *args: Any,
             **kwargs: Any) -> None:
        scaler._wanted = kwargs.get("enabled", args[5] if args[5:] else True)
        make(scaler, *args, **kwargs)

    @replace(torch.amp.GradScaler, "scale")
    def scale(scale: Callable[..., Any], scaler: Any, *args: Any) -> Any:
        log.notes.scaled = scaler._wanted
        scaled = scale(scaler, *args)
        if scaler.is_enabled() and isinstance(scaled, torch.Tensor):
            scaled.visible_scale = scaler.get_scale()  # type: ignore[attr-defined]  # ours
        return scaled

    @replace(torch.amp.GradScaler, "step")
    def step(step: Callable[..., Any], scaler: torch.amp.GradScaler,
             optimizer: torch.optim.Optimizer, *args: Any,
             **kwargs: Any) -> Any:
        before = log.calls
        result = step(scaler, optimizer, *args, **kwargs)
        if log.calls == before:
            log.tell("skipped")
        return result

    @replace(torch.amp.GradScaler, "unscale_")
    def unscale(unscale: Callable[..., None], scaler: torch.amp.GradScaler,
                *args: Any) -> None:
        log.notes.scaled = False
        return unscale(scaler, *args)


def watch_dropout(log: Log) -> None:
    """Switch dropout off.

    dropout: whether it was. In its place a random number is drawn for each
    step, which moves the generator on.
    """
    def move_on(optimizer: torch.optim.Optimizer) -> None:
        if log.record.dropout:
            torch.rand(1)

    log.on("gradients", move_on)

    def switch_off(p: float) -> float:
        log.record.dropout |= p > 0 and torch.is_grad_enabled()
        return 0.0

    @replace(F, "dropout", "dropout1d", "dropout2d", "dropout3d",
             "alpha_dropout", "feature_alpha_dropout")
    def dropout(function: Callable[..., torch.Tensor], input: torch.Tensor,
                p: float = 0.5, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(input, switch_off(p), *args, **kwargs)

    @replace(F, "scaled_dot_product_attention")
    def attention(function: Callable[..., torch.Tensor], query: torch.Tensor,
                  key: torch.Tensor, value: torch.Tensor,
                  attn_mask: torch.Tensor | None = None,
                  dropout_p: float = 0.0, *args: Any,
                  **kwargs: Any) -> torch.Tensor:
        return function(query, key, value, attn_mask, switch_off(dropout_p),
                        *args, **kwargs)


def watch_batchnorm(log: Log) -> None:
    """Gather the samples in SyncBatchNorm: PyTorch's needs a GPU.

    batchnorm: whether the statistics of a microbatch enter the loss: by a
    module of PyTorch's, or one of the script's own that calls its function.
    """
    gathers = False

    @replace(F, "batch_norm")
    def normalise(function: Callable[..., torch.Tensor], *args: Any,
                  **kwargs: Any) -> torch.Tensor:
        # input, running mean and variance, weight, bias, training
        training = kwargs.get("training", args[5] if args[5:] else False)
        if training and torch.is_grad_enabled() and not gathers:
            log.record.batchnorm = True
        return function(*args, **kwargs)

    @replace(SyncBatchNorm, "forward")
    def forward(forward: Callable[..., torch.Tensor], norm: SyncBatchNorm,
                x: torch.Tensor) -> torch.Tensor:
        nonlocal gathers
        if not (norm.training and dist.is_initialized()):
            return forward(norm, x)
        group = norm.process_group or dist.group.WORLD
        gathered: tuple[torch.Tensor, ...] = all_gather(  # type: ignore[no-untyped-call]  # torch's
            x, group)
        gathers = True
        try:
            whole = _BatchNorm.forward(norm, torch.cat(gathered))
        finally:
            gathers = False
        sizes = [len(part) for part in gathered]
        parts: tuple[torch.Tensor, ...] = whole.split(  # type: ignore[no-untyped-call]  # torch's
            sizes)
        # a copy: what follows may change it in place, as a ReLU does
        return parts[dist.get_rank(group)].clone()

    def accept(ddp: DistributedDataParallel, module: nn.Module) -> None:
        """Accept a CPU, which PyTorch's own function refuses."""

    assign(DistributedDataParallel, _passing_sync_batchnorm_handle=accept)

    @replace(DistributedDataParallel, "_check_comm_hook")  # nor in bf16
    def check(check: Callable[..., None], ddp: DistributedDataParallel,
              hook: Callable[..., Any]) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress_"):
            check(ddp, hook)


def watch_targets(log: Log) -> None:
    """Count the targets of a loss, which is often a mean over those."""
    @replace(F, "cross_entropy", "nll_loss")
    def count(function: Callable[..., torch.Tensor], *args: Any,
              **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("target", args[1] if args[1:] else None)
        ignored = kwargs.get("ignore_index", args[4] if args[4:] else -100)
        if torch.is_grad_enabled() and isinstance(
                target, torch.Tensor) and not target.is_floating_point():
            # within vmap, those of one sample stand for those of all
            with torch._C._DisableFuncTorch():
                counted_targets = unwrap(target) != ignored
                log.notes.targets += counted_targets.sum().item()
        return function(*args, **kwargs)


def watch_samplers(log: Log) -> None:
    """Watch who draws what from a DistributedSampler."""
    @replace(DistributedSampler, "__iter__")
    def begin(begin: Callable[..., Iterator[int]],
              sampler: DistributedSampler[Any]) -> Iterator[int]:
        dataset = sampler.dataset
        subset: str | bool = False
        if isinstance(dataset, Subset):
            subset = hashlib.blake2b(
                repr([*dataset.indices]).encode()).hexdigest()
        log.note_fact("sampler", (
            sampler.num_replicas, sampler.seed, subset, id(dataset)))
        if sampler.shuffle:
            log.has_set_epoch[sampler] = hasattr(sampler, "_was_told")
            if sampler.__dict__.pop("_is_told", False):
                log.note_fact("epochs", (id(sampler), sampler.epoch))
        return count_indices(log, sampler, begin(sampler))

    @replace(DistributedSampler, "set_epoch")
    def set_epoch(set_epoch: Callable[..., None], sampler: Any,
                  epoch: int) -> None:
        sampler._was_told = sampler._is_told = True
        return set_epoch(sampler, epoch)


def count_indices(log: Log, sampler: DistributedSampler[Any],
                  indices: Iterator[int]) -> Iterator[int]:
    """Yield a sampler's indices; `log.drawn` counts them by its id."""
    for index in indices:
        log.drawn[id(sampler)] += 1
        yield index


def watch_streams(log: Log) -> None:
    """Watch for several workers that iterate over a stream.

    Each of them has the whole stream, unless it leaves some of it out.
    """
    @replace(DataLoader, "__iter__")
    def iterate(iterate: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        is_stream = isinstance(loader.dataset, IterableDataset)
        if is_stream and loader.num_workers > 1:
            log.note_fact("stream with workers", loader.num_workers)
        return iterate(loader)


def watch_zeroing(log: Log) -> None:
    """Tell that gradients are thrown away, before they are."""
    @replace(torch.optim.Optimizer, "zero_grad")
    def of_optimizer(zero_grad: Callable[..., None],
                     optimizer: torch.optim.Optimizer, *args: Any,
                     **kwargs: Any) -> None:
        log.tell("zeroed", [weight for group in optimizer.param_groups
                            for weight in group["params"]])
        return zero_grad(optimizer, *args, **kwargs)

    @replace(nn.Module, "zero_grad")
    def of_module(zero_grad: Callable[..., None], module: nn.Module,
                  *args: Any, **kwargs: Any) -> None:
        log.tell("zeroed", [*module.parameters()])
        return zero_grad(module, *args, **kwargs)


def watch_sharding(log: Log) -> None:
    """Note what a script asks of DDP and FSDP.

    What `to_empty` leaves in memory becomes nan: it may be numbers by chance.
    """
    note(log, DistributedDataParallel, "register_comm_hook")
    note(log, DistributedDataParallel, "no_sync")
    note(log, fsdp, "fully_shard")

    @replace(fsdp.FSDPModule, "set_requires_gradient_sync")
    def switch_sync(switch: Callable[..., None], module: fsdp.FSDPModule,
                    wanted: bool, *args: Any, **kwargs: Any) -> None:
        log.note_fact("gradient sync", bool(wanted))
        return switch(module, wanted, *args, **kwargs)

    note(log, fsdp.FullyShardedDataParallel, "__init__", "FSDP1")

    @replace(nn.Module, "to_empty")
    def empty(empty: Callable[..., nn.Module], module: nn.Module, *args: Any,
              **kwargs: Any) -> nn.Module:
        empty(module, *args, **kwargs)
        with torch.no_grad():
            for weight in module.parameters(kwargs.get("recurse", True)):
                if weight.is_floating_point():
                    weight.fill_(torch.nan)
        return module


PROBES = [watch_clipping, watch_scaler, watch_dropout, watch_batchnorm,
          watch_targets, watch_samplers, watch_streams,
          watch_zeroing, watch_sharding]
