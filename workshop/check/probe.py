"""Watches what the course's own scripts do: what the check compares."""

import contextlib
import os
import re
import signal
import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from backstage import device as devices
from backstage import errors
from backstage.files import PART
from rankcheck.record.collectives import messages
from rankcheck.record.cpu_backend import process
from rankcheck.record.files import opened
from rankcheck.record.recorder import Updates, replace
from rankcheck.record.tensors import describe, plain_name

MOST = 100  # updates of which everything is recorded
SAMPLES, T = 40, 32  # of a trial's dataset, where sample i begins with i


def probes(run, stopped=False, lightning=False):
    """The check's. run: the run's folder.

    stopped: whether rank 0 gets a SIGTERM in its second step. lightning:
    whether the script uses Lightning.
    """
    return [Course(), *[terminated] * stopped, Updates(), process, backstage,
            messages, *[trainer] * lightning, opened,
            partial(written, run=str(run))]


class Course:
    """The model, whatever its class is called, and its samples.

        start       the weights before the first update
        weights     those after the last
        gradients   at each update, as the optimizer gets them: clipped
                    (these three: what `parts.describe` says of them)
        samples     that went through the model before each update, list of
                    lists of their first tokens, which are their numbers
        evaluated   how many samples were
        continued   the last tokens that a text was continued from
        optimizers  at the first update: the groups of parameters, by name
        precision   "bf16" under autocast, "fp32" without
        compiled    what was compiled of what trains: "model", "block", None
        recomputed  whether a module was called in a backward pass
    """

    def __call__(self, log):
        self.log, self.seen = log, log.seen
        self.model, self.inferring = None, False
        self.seen |= {
            "start": None, "weights": None, "gradients": [], "samples": [],
            "evaluated": 0, "continued": None, "optimizers": None,
            "precision": None, "compiled": None, "recomputed": False}
        log.row = SimpleNamespace(samples=[], again=[])
        log.on("gradients", self.record)
        log.on("updated", lambda _: self.seen.update(
            weights=self.state("data")))
        register_module_forward_pre_hook(self.on_forward)
        self.watch_functions()

        from torch.distributed.tensor import DTensor  # takes a second

        @replace(torch.nn.Module, "to")
        def move(move, module, *args, **kwargs):
            if is_gpt(module):
                log.asked("to", not any(
                    weight.is_meta or isinstance(weight, DTensor)
                    for weight in module.parameters()))
            return move(module, *args, **kwargs)

    def watch_functions(self):
        from torch.distributed.pipelining import PipelineStage

        @replace(F, "cross_entropy", "gelu", "layer_norm",
                 "scaled_dot_product_attention")
        def compute(compute, *args, **kwargs):
            name = compute.__name__
            if ("pytorch", name) not in self.seen["asked"]:
                self.log.asked("pytorch", name)
            if name == "cross_entropy" and not (
                    torch.is_grad_enabled() or self.inferring):
                self.seen["evaluated"] += args[1].numel() // T
            return compute(*args, **kwargs)

        @replace(PipelineStage, "_forward_metadata_inference")
        def infer(infer, stage, *args, **kwargs):
            """It sends a microbatch through once more, for its shapes."""
            self.inferring = True
            try:
                return infer(stage, *args, **kwargs)
            finally:
                self.inferring = False

    def on_forward(self, module, inputs):
        if not self.log.here:
            return
        if self.model is None and is_gpt(module):
            self.model, self.log.begun = module, True
            self.log.names = {id(weight): plain_name(name) for name, weight
                              in module.named_parameters()}
            self.seen["start"] = self.state("data")
        if self.inferring:
            return
        if isinstance(module, DistributedDataParallel) and (
                not module.require_backward_grad_sync):
            self.log.asked("forward in no_sync", None)
        again = torch._C._current_graph_task_id() != -1  # a checkpoint's
        self.seen["recomputed"] |= again
        if torch.is_grad_enabled() and not self.seen["compiled"]:
            self.seen["compiled"] = compiled_part(module)
        if isinstance(module, torch.nn.Embedding) and inputs and isinstance(
                inputs[0], torch.Tensor) and inputs[0].dim() == 2:
            self.on_tokens(module, inputs[0], again)

    def on_tokens(self, module, tokens, again):
        if again:
            self.log.row.again += tokens[:, 0].tolist()
        elif torch.is_grad_enabled():
            self.log.row.samples += tokens[:, 0].tolist()
            self.seen["precision"] = (
                "bf16" if torch.is_autocast_enabled("cpu") else
                "fp32" if module.weight.dtype == torch.float32 else
                f"weights of {module.weight.dtype}")
        else:
            self.seen["continued"] = tokens.tolist()

    def record(self, optimizer):
        if self.log.updates < MOST:
            self.seen["gradients"].append(self.state("grad"))
            self.seen["samples"].append(
                self.log.row.samples or self.log.row.again)
        if self.seen["optimizers"] is None:
            self.seen["optimizers"] = [
                {"names": [self.log.names.get(id(weight), "?")
                           for weight in group["params"]],
                 **{key: value for key, value in group.items()
                    if key in ("lr", "betas", "eps", "weight_decay")}}
                for group in optimizer.param_groups]
        self.log.row = SimpleNamespace(samples=[], again=[])

    def state(self, name):
        """The model's weights ("data") or gradients ("grad"), described."""
        weights = self.model.named_parameters() if self.model else ()
        return describe((key, weight if name == "data" else weight.grad)
                        for key, weight in weights)


def backstage(log):
    """Notes which device the script asks for, and where it calls no_sync();
    any rank's error is said at once, as no launcher will end this rank.
    """
    def ask(what, device):
        number = re.search(r"\d+$", str(device))
        log.asked(what, int(number[0]) if number else None)

    @replace(DistributedDataParallel, "__init__")
    def wrap(wrap, ddp, module, device_ids=None, *args, **kwargs):
        if device_ids:
            ask("device_ids", device_ids[0])
        wrap(ddp, module, device_ids, *args, **kwargs)

    @replace(DistributedDataParallel, "no_sync")
    def no_sync(no_sync, ddp):
        (line, *_), *_ = log.place()
        log.asked("no_sync", line)
        return no_sync(ddp)

    @replace(torch.accelerator, "set_device_index")
    @replace(torch.cuda, "set_device")
    def set_device(function, device):
        ask("set_device", device)

    @replace(devices, "use_device")
    def use(use, name="auto", local_rank=0):
        log.asked("device", str(name))
        log.asked("local_rank", local_rank if isinstance(
            local_rank, int) else str(local_rank))
        return use(name, local_rank)

    errors.say_once = lambda message: print(
        f"error: {message}", file=sys.stderr, flush=True)


def written(log, run):
    """Those of the run's folder alone, by their names once they are whole."""
    def rename():
        log.seen["written"] = {
            re.sub(rf"/\.([^/]*)\.\d+-\d+{PART}$", r"/\1", path): opener
            for path, opener in log.seen["written"].items() if run in path}

    log.on("end", rename)


def terminated(log):
    """A SIGTERM to rank 0, in its second step."""
    def end(optimizer):
        if log.updates == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    if log.rank == 0:
        log.on("updated", end)


def trainer(log):
    """Lightning's, which writes into the log's folder if it is told none."""
    with contextlib.suppress(ImportError):  # the script will say it
        from lightning.pytorch.trainer.trainer import Trainer

        @replace(Trainer, "__init__")
        def make(make, trainer, *args, **kwargs):
            log.asked("plugins", bool(kwargs.get("plugins")))
            log.asked("accelerator", kwargs.get("accelerator"))
            # not into the attendee's
            kwargs.setdefault("default_root_dir", log.folder)
            return make(trainer, *args, **kwargs)

        @replace(Trainer, "fit")
        def fit(fit, trainer, *args, **kwargs):
            log.asked("fit", True)
            log.asked("writers", [type(one).__name__ for one in (
                *trainer.loggers, *trainer.checkpoint_callbacks)])
            return fit(trainer, *args, **kwargs)


def compiled_part(module):
    """What of the model is compiled if this module is: "model" or "block".
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "block"  # in its place, by module.compile()
    around = hasattr(module, "_orig_mod")
    if around or getattr(module, "_compiler_ctx", None) is not None:
        return "model"  # the latter is Lightning's
    return None


def is_gpt(module):
    """Whether it is the course's model, whatever its class is called."""
    inside = getattr(module, "transformer", None)
    return hasattr(inside, "wte") and hasattr(inside, "h") and not (
        hasattr(module, "_orig_mod"))  # torch.compile's, around it
