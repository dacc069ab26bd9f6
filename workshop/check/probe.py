"""Records what the course's scripts do, which the check compares."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
from rankcheck.record.rank_record import RankRecord
from rankcheck.record.recorder import Log, OptimizerSteps, replace
from rankcheck.record.tensors import LocalTensors, describe_tensors, plain_name
from rankcheck.system.errors import InternalError

MOST_STEPS = 100  # steps of which everything is recorded
SAMPLE_COUNT, T = 40, 32  # of a run's dataset, where sample i begins with i


Probe = Callable[[Log], object]


def check_probes(run: str | Path, stopped: bool = False,
                 lightning: bool = False
                 ) -> list[Probe]:
    """Return the check's probes.

    Args:
        run: the run's folder.
        stopped: whether rank 0 gets a SIGTERM in its second step.
        lightning: whether the script uses Lightning.
    """
    found: list[Probe] = [Course()]
    if stopped:
        found.append(send_sigterm)
    found += [OptimizerSteps(), process, watch_backstage, messages]
    if lightning:
        found.append(watch_trainer)
    return [*found, opened, partial(watch_checkpoints, run=str(run))]


@dataclass
class StepSamples:
    """The samples that went through the model since the last step.

    Attributes:
        first: their numbers.
        again: the same, of those that a backward pass computed anew.
    """

    first: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)


@dataclass
class CourseRecord(RankRecord):
    """What the check records of a rank, too. Its tensors are the model's.

    Attributes:
        start: the weights before the first step.
        weights: those after the last.
        gradients: at each step, as the optimizer gets them: clipped.
        samples: that went through the model before each step: their first
            tokens, which are their numbers.
        evaluated: how many samples were.
        continued: the last tokens that a text was continued from.
        optimizers: at the first step, the groups of parameters, by name.
        precision: "bf16" under autocast, "fp32" without; "" if it does not
            train.
        compiled: what was compiled of what trains: "model", "block", None.
        recomputed: whether a module was called in a backward pass.
    """

    start: LocalTensors | None = None
    weights: LocalTensors | None = None
    gradients: list[LocalTensors] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    evaluated: int = 0
    continued: list[list[int]] | None = None
    optimizers: list[dict[str, Any]] | None = None
    precision: str = ""
    compiled: str | None = None
    recomputed: bool = False

    @property
    def first_weights(self) -> LocalTensors:
        """`start`, of a model that trains.

        Raises:
            InternalError: it does not, which the caller has to rule out.
        """
        if self.start is None:
            raise InternalError("the model is never called to train")
        return self.start

    @property
    def last_weights(self) -> LocalTensors:
        """`weights`, of a model whose optimizer has made a step.

        Raises:
            InternalError: it has not, which the caller has to rule out.
        """
        if self.weights is None:
            raise InternalError("the optimizer has made no step")
        return self.weights


class Course:
    """The model, whatever its class is called, and its samples."""

    def __call__(self, log: Log) -> None:
        assert isinstance(log.record, CourseRecord)  # see Bench.try_out
        self.log, self.record = log, log.record
        self.model: torch.nn.Module | None = None
        self.inferring = False
        self.step = StepSamples()
        log.on("gradients", self.before_step)
        log.on("stepped", self.after_step)
        register_module_forward_pre_hook(self.on_forward)
        self.watch_functions()

        from torch.distributed.tensor import DTensor  # takes a second

        @replace(torch.nn.Module, "to")
        def move(move: Callable[..., Any], module: torch.nn.Module,
                 *args: Any, **kwargs: Any) -> Any:
            if is_gpt(module):
                log.note_fact("to", not any(
                    weight.is_meta or isinstance(weight, DTensor)
                    for weight in module.parameters()))
            return move(module, *args, **kwargs)

    def watch_functions(self) -> None:
        from torch.distributed.pipelining import PipelineStage

        @replace(F, "cross_entropy", "gelu", "layer_norm",
                 "scaled_dot_product_attention")
        def compute(compute: Callable[..., Any], *args: Any, **kwargs: Any
                    ) -> Any:
            name = compute.__name__
            if ("pytorch", name) not in self.record.facts:
                self.log.note_fact("pytorch", name)
            if name == "cross_entropy" and not (
                    torch.is_grad_enabled() or self.inferring):
                self.record.evaluated += args[1].numel() // T
            return compute(*args, **kwargs)

        @replace(PipelineStage, "_forward_metadata_inference")
        def infer(infer: Callable[..., Any], stage: PipelineStage,
                  *args: Any, **kwargs: Any) -> Any:
            """It sends a microbatch through once more, for its shapes."""
            self.inferring = True
            try:
                return infer(stage, *args, **kwargs)
            finally:
                self.inferring = False

    def on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self.log.is_own_process:
            return
        if self.model is None and is_gpt(module):
            self.model, self.log.begun = module, True
            self.log.names = {id(weight): plain_name(name) for name, weight
                              in module.named_parameters()}
            self.record.start = self.state("data")
        if self.inferring:
            return
        if isinstance(module, DistributedDataParallel) and (
                not module.require_backward_grad_sync):
            self.log.note_fact("forward in no_sync", None)
        again = torch._C._current_graph_task_id() != -1  # a checkpoint's
        self.record.recomputed |= again
        if torch.is_grad_enabled() and not self.record.compiled:
            self.record.compiled = compiled_part(module)
        if isinstance(module, torch.nn.Embedding) and inputs and isinstance(
                inputs[0], torch.Tensor) and inputs[0].dim() == 2:
            self.on_tokens(module, inputs[0], again)

    def on_tokens(self, module: torch.nn.Embedding, tokens: torch.Tensor,
                  again: bool) -> None:
        if again:
            self.step.again += tokens[:, 0].tolist()
        elif torch.is_grad_enabled():
            self.step.first += tokens[:, 0].tolist()
            self.record.precision = (
                "bf16" if torch.is_autocast_enabled("cpu") else
                "fp32" if module.weight.dtype == torch.float32 else
                f"weights of {module.weight.dtype}")
        else:
            self.record.continued = tokens.tolist()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.log.step < MOST_STEPS:
            self.record.gradients.append(self.state("grad"))
            self.record.samples.append(self.step.first or self.step.again)
        if self.record.optimizers is None:
            self.record.optimizers = [
                {"names": [self.log.names.get(id(weight), "?")
                           for weight in group["params"]],
                 **{key: value for key, value in group.items()
                    if key in ("lr", "betas", "eps", "weight_decay")}}
                for group in optimizer.param_groups]
        self.step = StepSamples()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.weights = self.state("data")

    def state(self, name: str) -> LocalTensors:
        """Describe the model's weights ("data") or gradients ("grad")."""
        weights = self.model.named_parameters() if self.model else ()
        return describe_tensors((key, weight if name == "data"
                                 else weight.grad)
                                for key, weight in weights)


def watch_backstage(log: Log) -> None:
    """Note which device the script asks for, and where it calls no_sync().

    Any rank's error is said at once, as no launcher will end this rank.
    """
    def ask(what: str, device: object) -> None:
        number = re.search(r"\d+$", str(device))
        log.note_fact(what, int(number[0]) if number else None)

    @replace(DistributedDataParallel, "__init__")
    def wrap(wrap: Callable[..., None], ddp: DistributedDataParallel,
             module: torch.nn.Module, device_ids: Any = None,
             *args: Any, **kwargs: Any) -> None:
        if device_ids:
            ask("device_ids", device_ids[0])
        wrap(ddp, module, device_ids, *args, **kwargs)

    @replace(DistributedDataParallel, "no_sync")
    def no_sync(no_sync: Callable[..., Any], ddp: DistributedDataParallel
                ) -> Any:
        (line, *_), *_ = log.place()
        log.note_fact("no_sync", line)
        return no_sync(ddp)

    @replace(torch.accelerator, "set_device_index")
    @replace(torch.cuda, "set_device")
    def set_device(function: Callable[..., Any], device: object) -> None:
        ask("set_device", device)

    @replace(devices, "use_device")
    def use(use: Callable[..., Any], name: str = "auto", local_rank: int = 0
            ) -> Any:
        log.note_fact("device", str(name))
        log.note_fact("local_rank", local_rank if isinstance(
            local_rank, int) else str(local_rank))
        return use(name, local_rank)

    errors.say_once = lambda message, status: print(
        f"error: {message}", file=sys.stderr, flush=True)


def watch_checkpoints(log: Log, run: str) -> None:
    """Keep the files of the run's folder alone, by their final names."""
    def rename() -> None:
        log.record.writers = {
            re.sub(rf"/\.([^/]*)\.\d+-\d+{PART}$", r"/\1", path): opener
            for path, opener in log.record.writers.items() if run in path}

    log.on("end", rename)


def send_sigterm(log: Log) -> None:
    """Send a SIGTERM to rank 0, in its second step."""
    def end(optimizer: torch.optim.Optimizer) -> None:
        if log.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    if log.rank == 0:
        log.on("stepped", end)


def watch_trainer(log: Log) -> None:
    """Watch Lightning's Trainer; by default it writes to the log's folder."""
    with contextlib.suppress(ImportError):  # the script will say it
        from lightning.pytorch.trainer.trainer import Trainer

        @replace(Trainer, "__init__")
        def make(make: Callable[..., None], trainer: Trainer, *args: Any,
                 **kwargs: Any) -> None:
            log.note_fact("plugins", bool(kwargs.get("plugins")))
            log.note_fact("accelerator", kwargs.get("accelerator"))
            # not into the attendee's
            kwargs.setdefault("default_root_dir", log.folder)
            return make(trainer, *args, **kwargs)

        @replace(Trainer, "fit")
        def fit(fit: Callable[..., Any], trainer: Trainer, *args: Any,
                **kwargs: Any) -> Any:
            log.note_fact("fit", True)
            log.note_fact("writers", [type(one).__name__ for one in (
                *trainer.loggers, *trainer.checkpoint_callbacks)])
            return fit(trainer, *args, **kwargs)


def compiled_part(module: torch.nn.Module) -> str | None:
    """Return what of the model is compiled if this module is: "model" or
    "block".
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "block"  # in its place, by module.compile()
    around = hasattr(module, "_orig_mod")
    if around or getattr(module, "_compiler_ctx", None) is not None:
        return "model"  # the latter is Lightning's
    return None


def is_gpt(module: torch.nn.Module) -> bool:
    """Return whether it is the course's model, by any class name."""
    inside = getattr(module, "transformer", None)
    return hasattr(inside, "wte") and hasattr(inside, "h") and not (
        hasattr(module, "_orig_mod"))  # torch.compile's, around it
