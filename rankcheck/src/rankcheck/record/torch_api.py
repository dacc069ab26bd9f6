"""Watches what training scripts take from PyTorch beside a model.

Dropout, which draws other numbers on each rank, is switched off.
"""

import hashlib

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils.data import DistributedSampler, Subset

from rankcheck.record.recorder import note, replace
from rankcheck.record.tensors import thin, unwrap


def clipping(log):
    """Keeps the gradients as they were before."""
    names = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")

    @replace(nn.utils, *names)
    def clip(clip, parameters, *args, **kwargs):
        if log.now.scaled:
            log.asked("clipped", "scaled")
        parameters = ([parameters] if isinstance(parameters, torch.Tensor)
                      else [*parameters])  # what a generator gives only once
        for weight in parameters:
            if id(weight) not in log.now.unclipped:
                log.now.unclipped[id(weight)] = thin(weight.grad)
        return clip(parameters, *args, **kwargs)

    for name in names:
        setattr(clip_grad, name, getattr(nn.utils, name))


def scaler(log):
    """Also one that is disabled because there is no GPU."""
    @replace(torch.amp.GradScaler, "__init__")
    def make(make, scaler, *args, **kwargs):
        scaler._wanted = kwargs.get("enabled", args[5] if args[5:] else True)
        make(scaler, *args, **kwargs)

    @replace(torch.amp.GradScaler, "scale")
    def scale(scale, scaler, *args):
        log.now.scaled = scaler._wanted
        scaled = scale(scaler, *args)
        if scaler.is_enabled() and isinstance(scaled, torch.Tensor):
            scaled.visible_scale = scaler.get_scale()
        return scaled

    @replace(torch.amp.GradScaler, "step")
    def step(step, scaler, optimizer, *args, **kwargs):
        before = log.calls
        result = step(scaler, optimizer, *args, **kwargs)
        if log.calls == before:
            log.tell("skipped")
        return result

    @replace(torch.amp.GradScaler, "unscale_")
    def unscale(unscale, scaler, *args):
        log.now.scaled = False
        return unscale(scaler, *args)


def dropout(log):
    """dropout: whether it was switched off. In its place a random number is
    drawn for each update, which moves the generator on.
    """
    log.seen["dropout"] = False
    log.on("gradients", lambda _: log.seen["dropout"] and torch.rand(1))

    def switch_off(p):
        log.seen["dropout"] |= p > 0 and torch.is_grad_enabled()
        return 0.0

    @replace(F, "dropout", "dropout1d", "dropout2d", "dropout3d",
             "alpha_dropout", "feature_alpha_dropout")
    def dropout(function, input, p=0.5, *args, **kwargs):
        return function(input, switch_off(p), *args, **kwargs)

    @replace(F, "scaled_dot_product_attention")
    def attention(function, query, key, value, attn_mask=None, dropout_p=0.0,
                  *args, **kwargs):
        return function(query, key, value, attn_mask, switch_off(dropout_p),
                        *args, **kwargs)


def batchnorm(log):
    """PyTorch's SyncBatchNorm needs a GPU: here it gathers the samples."""
    @replace(SyncBatchNorm, "forward")
    def forward(forward, norm, x):
        if not (norm.training and dist.is_initialized()):
            return forward(norm, x)
        group = norm.process_group or dist.group.WORLD
        parts = all_gather(x, group)
        whole = _BatchNorm.forward(norm, torch.cat(parts))
        # a copy: what follows may change it in place, as a ReLU does
        return whole.split(list(map(len, parts)))[dist.get_rank(group)].clone()

    DistributedDataParallel._passing_sync_batchnorm_handle = (
        lambda ddp, module: None)  # it refuses a CPU

    @replace(DistributedDataParallel, "_check_comm_hook")  # nor in bf16
    def check(check, ddp, hook):
        if not getattr(hook, "__name__", "").startswith("bf16_compress_"):
            check(ddp, hook)


def targets(log):
    """How many there are: a loss is often a mean over those."""
    @replace(F, "cross_entropy", "nll_loss")
    def count(function, *args, **kwargs):
        target = kwargs.get("target", args[1] if args[1:] else None)
        ignored = kwargs.get("ignore_index", args[4] if args[4:] else -100)
        if torch.is_grad_enabled() and isinstance(
                target, torch.Tensor) and not target.is_floating_point():
            # within vmap, those of one sample stand for those of all
            with torch._C._DisableFuncTorch():
                counted_targets = unwrap(target) != ignored
                log.now.targets += counted_targets.sum().item()
        return function(*args, **kwargs)


def samplers(log):
    @replace(DistributedSampler, "__iter__")
    def begin(begin, sampler):
        subset = isinstance(sampler.dataset, Subset) and hashlib.blake2b(
            repr([*sampler.dataset.indices]).encode()).hexdigest()
        log.asked("sampler", (sampler.num_replicas, sampler.seed, subset))
        if sampler.shuffle:
            log.told[sampler] = hasattr(sampler, "_was_told")
            if sampler.__dict__.pop("_is_told", False):
                log.asked("epochs", (id(sampler), sampler.epoch))
        return counted(log, sampler, begin(sampler))

    @replace(DistributedSampler, "set_epoch")
    def set_epoch(set_epoch, sampler, epoch):
        sampler._was_told = sampler._is_told = True
        return set_epoch(sampler, epoch)


def counted(log, sampler, indices):
    """Yield a sampler's indices; `log.drawn` counts them by its id."""
    for index in indices:
        log.drawn[id(sampler)] += 1
        yield index


def zeroing(log):
    """Tells that gradients are thrown away, before they are."""
    @replace(torch.optim.Optimizer, "zero_grad")
    def of_optimizer(zero_grad, optimizer, *args, **kwargs):
        log.tell("zeroed", [weight for group in optimizer.param_groups
                            for weight in group["params"]])
        return zero_grad(optimizer, *args, **kwargs)

    @replace(nn.Module, "zero_grad")
    def of_module(zero_grad, module, *args, **kwargs):
        log.tell("zeroed", [*module.parameters()])
        return zero_grad(module, *args, **kwargs)


def sharding(log):
    note(log, DistributedDataParallel, "register_comm_hook")
    note(log, DistributedDataParallel, "no_sync")
    note(log, fsdp, "fully_shard")

    @replace(fsdp.FSDPModule, "set_requires_gradient_sync")
    def switch_sync(switch, module, wanted, *args, **kwargs):
        log.asked("gradient sync", bool(wanted))
        return switch(module, wanted, *args, **kwargs)

    note(log, fsdp.FullyShardedDataParallel, "__init__", "FSDP1")

    @replace(nn.Module, "to_empty")
    def empty(empty, module, *args, **kwargs):
        empty(module, *args, **kwargs)
        with torch.no_grad():  # memory may hold numbers by chance
            for weight in module.parameters(kwargs.get("recurse", True)):
                if weight.is_floating_point():
                    weight.fill_(torch.nan)
        return module


PROBES = [clipping, scaler, dropout, batchnorm, targets, samplers, zeroing,
          sharding]
