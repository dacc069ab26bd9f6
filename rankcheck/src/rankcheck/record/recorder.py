"""Record what each process of a script does, from outside.

The script needs nothing for it, and nothing here waits for another process.
A probe is a function of the process's `Log`: it puts functions in the place
of PyTorch's, which note there what the script does. The check, verify and
the tests choose theirs. A rank leaves in a folder, if one is named,

    <rank>.jsonl    a line for each collective and step, written as it
                    happens: it is there after a hang, too
    <rank>.steps    a byte for each step
    <rank>.json     at its end, what its probes have seen: a `RankRecord`
    <rank>.pt       its tensors
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from inspect import CO_NESTED
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from rankcheck.record.rank_record import RankRecord

if TYPE_CHECKING:
    from torch.utils.data import DistributedSampler

Probe = Callable[["Log"], object]
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

HERE = f"{Path(__file__).parent}/"
# Other files, whose functions stand in the place of PyTorch's
PROBE_FILES: set[str] = set()
AROUND = "__call__", "_wrapped_call_impl", "_call_impl"  # the call is inside
SAVE = torch.save  # a probe may put another in its place


class Log:
    """The record of one process, through which its probes communicate.

    They `tell` of an event to those that wait for it `on` its name:

        gradients  an optimizer has all of them, and is about to make its step
        stepped    it has made its step
        skipped    a GradScaler leaves the step out
        root       the outermost module of a forward pass, the hashes of its
                   rows and of its columns, or None
        output     a module in it, or itself, and what it has put out
        unnamed    the parameters of an optimizer, one of which has no name
        zeroed     the parameters whose gradients are about to be thrown away
        message    the name of a collective, the tensors that go in, its group
        call       the name of one of MPI's, and the number of elements
        end        the process ends
    """

    def __init__(self, folder: str | os.PathLike[str] | None, rank: int,
                 record: RankRecord | None = None) -> None:
        """Begin the record of this process.

        Args:
            folder: where it is written; None for nowhere.
            rank: of this process.
            record: an empty one, if it is a client's own.
        """
        self.folder = str(folder) if folder else None
        self.rank = rank
        self.script, self.owner = sys.argv[0], os.getpid()
        self.record = RankRecord() if record is None else record
        self.step, self.ended = 0, False
        self.begun = False  # whether steps of optimizers count
        self.calls = 0  # of optimizers that have not left their step out
        # By the id of what is named, or that belongs to it: of parameters
        self.names: dict[int, str] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        # gradients as this rank alone has computed them; what all backward
        # passes of a step have computed, added up; the same, each times
        # the number of its targets
        self.local: dict[int, torch.Tensor] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.weighed: dict[int, torch.Tensor] = {}
        self.scale = 1.0  # of the last backward pass
        self.inside = False  # whether the outermost module is being called
        self.modules: dict[int, torch.nn.Module] = {}
        self.drawn: Counter[int] = Counter()  # indices, of samplers
        # Whether set_epoch came before the sampler's start
        self.has_set_epoch: dict[DistributedSampler[Any], bool] = {}
        # Of the step to come: what is recorded, and what else is known of
        # it. In verify a `StepRow` and `Notes`; the check has its own classes
        self.row: Any = SimpleNamespace()
        self.notes: Any = self.row
        self.listeners: defaultdict[str, list[Callable[..., object]]] = (
            defaultdict(list))
        self.lines = self.open_file("jsonl")
        self.counter = self.open_file("steps")

    def open_file(self, kind: str) -> int | None:
        """Open a file of the record that lasts; None if there is no folder."""
        if self.folder is None:
            return None
        return os.open(f"{self.folder}/{self.rank}.{kind}",
                       os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on(self, event: str, function: Callable[..., object]) -> None:
        """Call a function whenever a probe reports this event."""
        self.listeners[event].append(function)

    def tell(self, event: str, *about: Any) -> None:
        """Report an event to those that listen for it."""
        for function in self.listeners[event]:
            function(*about)

    def note_fact(self, name: str, value: Any) -> None:
        """Note a fact about the script, such as an option that it uses."""
        self.record.facts.append((name, value))

    @property
    def is_own_process(self) -> bool:
        """Whether this is the rank's own process, and no worker of it."""
        return os.getpid() == self.owner

    def say(self, **event: Any) -> None:
        """Write a line of the record that lasts."""
        if self.lines is None or self.counter is None:
            return
        if not self.is_own_process:
            return
        os.write(self.lines, json.dumps(event).encode() + b"\n")
        if "call" not in event:
            os.write(self.counter, b".")

    def place(self) -> list[tuple[int, str, str]]:
        """Return the lines of the script that lead here, the innermost first.

        Returns:
            For each: its number, its function, and what it calls, as far as
            that has a name.
        """
        frame: FrameType | None = sys._getframe(1)
        lines, called = [], ""
        while frame:
            code = frame.f_code
            own = code.co_filename == self.script
            if own:
                lines.append((frame.f_lineno, code.co_name, called))
            if not (code.co_filename.startswith(HERE) or code.co_name in AROUND
                    or code.co_filename in PROBE_FILES
                    or (code.co_flags & CO_NESTED and not own)):  # a wrapper
                called = code.co_name
            frame = frame.f_back
        return lines

    def finish(self) -> None:
        """Report the end, once, and write what the probes recorded."""
        if self.ended:
            return
        self.ended = True
        self.tell("end")
        if not self.folder:
            return
        self.record.joined = dist.is_initialized()
        try:
            self.record.write(self.folder, self.rank, SAVE)
        except (OSError, RuntimeError, TypeError) as error:
            os.write(2, f"rankcheck could not write: {error}\n".encode())


def replace(owner: object,
            *names: str) -> Callable[[Function], Function]:
    """Replace functions by the decorated one, which gets the old one first.

    Args:
        owner: a module, a class or an object.
        names: of the functions in it.
    """
    def put(visible: Function) -> Function:
        PROBE_FILES.add(visible.__code__.co_filename)
        for name in names:
            setattr(owner, name, around(getattr(owner, name), visible))
        return visible

    return put


def assign(owner: object, **values: Any) -> None:
    """Replace attributes of an owner; nothing calls the old ones again."""
    for name, value in values.items():
        setattr(owner, name, value)


def note(log: Log, owner: object, name: str, what: str = "") -> None:
    """Note that a function of the owner's is called, as `what` or its name."""
    @replace(owner, name)
    def noted(function: Callable[..., Result], *args: Any,
              **kwargs: Any) -> Result:
        log.note_fact(what or name, None)
        return function(*args, **kwargs)


def around(function: Callable[..., Any],
           visible: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `visible`, and looks like the function itself."""
    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return visible(original, *args, **kwargs)

    @functools.wraps(function)
    def original(*args: Any, **kwargs: Any) -> Any:
        return pass_on(function, *args, **kwargs)

    return replaced


def pass_on(function: Callable[..., Result], *args: Any,
            **kwargs: Any) -> Result:
    """Call a function of torch's or the script's, whose errors are theirs."""
    return function(*args, **kwargs)


def is_own(error: BaseException) -> bool:
    """Return whether a probe raised this error, not torch or the script.

    It is a probe's if the innermost frame of the probes' is not `pass_on`.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(
        error.__traceback__) if frame.f_code.co_filename.startswith(HERE)]
    return bool(codes) and codes[-1] is not pass_on.__code__


class OptimizerSteps:
    """Tells when an optimizer has its gradients, and when it has stepped."""

    log: Log
    depth = 0  # of steps within a step: an optimizer may have another in it
    counts = False  # whether the outermost one is a step

    def __call__(self, log: Log) -> None:
        self.log = log
        optimizers.register_optimizer_step_pre_hook(self.before)
        optimizers.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer: Optimizer, args: tuple[Any, ...],
               kwargs: dict[str, Any],
               ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tell of the gradients, or have the step's closure tell of them.

        Returns:
            The arguments of `step` with such a closure; None if they stay.
        """
        self.depth += 1
        # a fused one leaves the step out itself, if a GradScaler says so
        skips = getattr(optimizer, "found_inf", None)
        self.log.calls += not skips
        closure = kwargs.get("closure") or (args[1] if args[1:] else None)
        if self.depth == 1:  # a closure may be where the model is first used
            self.counts = not makes_state() and not skips and (
                self.log.begun or closure is not None)
        if self.depth > 1 or not self.counts:
            return None
        if closure is None:
            self.log.tell("gradients", optimizer)
            return None

        def visible_closure() -> Any:  # Lightning's: it computes the gradients
            loss = pass_on(closure)
            self.log.tell("gradients", optimizer)
            return loss

        return args[:1], {"closure": visible_closure}

    def after(self, optimizer: Optimizer, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> None:
        """Tell that the optimizer has made its step."""
        self.depth -= 1
        if not self.depth and self.counts:
            self.log.step += 1
            self.log.say(step=self.log.step)
            self.log.tell("stepped", optimizer)


def makes_state() -> bool:
    """Whether PyTorch initialises an optimizer's state with zero gradients.

    To be called by the hook of a step.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None
