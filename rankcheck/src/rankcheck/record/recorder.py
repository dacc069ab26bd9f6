"""What is recorded in each process of a script, from outside.

The script needs nothing for it, and nothing here waits for another process.
A probe is a function of the process's `Log`: it puts functions in the place
of PyTorch's, which note there what the script does. The check, verify and
the tests choose theirs. A rank leaves in a folder, if one is named,

    <rank>.jsonl    a line for each collective and update, written as it
                    happens: it is there after a hang, too
    <rank>.updates  a byte for each update
    <rank>.pt       at its end, a dictionary of what its probes have seen, and

        asked       what was asked for: (what, value), in their order
        joined      whether it is still in a process group
"""

import functools
import json
import os
import sys
import traceback
from collections import defaultdict
from inspect import CO_NESTED
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch.optim import optimizer as optimizers

HERE = f"{Path(__file__).parent}/"
PROBES = set()  # other files, whose functions stand in the place of PyTorch's
AROUND = "__call__", "_wrapped_call_impl", "_call_impl"  # the call is inside
SAVE = torch.save  # a probe may put another in its place


class Log:
    """What is known of one process. Its probes hear of one another by it.

    They `tell` of an event to those that wait for it `on` its name:

        gradients  an optimizer has all of them, and will update next
        updated    it has
        skipped    a GradScaler leaves the update out
        root       the outermost module of a forward pass, the hashes of its
                   rows and of its columns, or None
        output     a module in it, or itself, and what it has put out
        unnamed    the parameters of an optimizer, one of which has no name
        zeroed     the parameters whose gradients are about to be thrown away
        message    the name of a collective, the tensors that go in, its group
        call       the name of one of MPI's, and the number of elements
        end        the process ends
    """

    def __init__(self, folder, rank):
        self.folder, self.rank = folder and str(folder), rank
        self.script, self.owner = sys.argv[0], os.getpid()
        self.seen, self.updates, self.ended = {"asked": []}, 0, False
        self.begun = False  # whether updates of optimizers count
        self.names, self.parameters = {}, {}  # by their id
        self.row = self.now = SimpleNamespace()  # of the update to come
        self.listeners = defaultdict(list)
        self.lines, self.counter = (
            os.open(f"{folder}/{rank}.{kind}",
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for kind in ("jsonl", "updates")) if folder else (None, None)

    def on(self, event, function):
        self.listeners[event].append(function)

    def tell(self, event, *about):
        for function in self.listeners[event]:
            function(*about)

    def asked(self, what, value):
        self.seen["asked"].append((what, value))

    @property
    def here(self):
        """Whether this is the rank's own process, and no worker of it."""
        return os.getpid() == self.owner

    def say(self, **event):
        """Write a line of the record that lasts."""
        if self.here and self.folder:
            os.write(self.lines, json.dumps(event).encode() + b"\n")
            if "call" not in event:
                os.write(self.counter, b".")

    def place(self):
        """(line, its function, what it calls) here, the innermost first."""
        frame, lines, called = sys._getframe(1), [], ""
        while frame:
            code = frame.f_code
            own = code.co_filename == self.script
            if own:
                lines.append((frame.f_lineno, code.co_name, called))
            if not (code.co_filename.startswith(HERE) or code.co_name in AROUND
                    or code.co_filename in PROBES
                    or (code.co_flags & CO_NESTED and not own)):  # a wrapper
                called = code.co_name
            frame = frame.f_back
        return lines

    def finish(self):
        if self.ended:
            return
        self.ended = True
        self.tell("end")
        if not self.folder:
            return
        self.seen["joined"] = dist.is_initialized()
        file = f"{self.folder}/{self.rank}.pt"
        try:
            SAVE(self.seen, file + ".part")
            os.replace(file + ".part", file)
        except (OSError, RuntimeError) as error:
            os.write(2, f"rankcheck could not write: {error}\n".encode())


def replace(owner, *names):
    """Replace functions by the decorated one, which gets the old one first."""
    def put(visible):
        PROBES.add(visible.__code__.co_filename)
        for name in names:
            setattr(owner, name, around(getattr(owner, name), visible))
        return visible

    return put


def note(log, owner, name, what=""):
    """Note that a function of the owner's is called, as `what` or its name."""
    @replace(owner, name)
    def noted(function, *args, **kwargs):
        log.asked(what or name, None)
        return function(*args, **kwargs)


def around(function, visible):
    @functools.wraps(function)
    def replaced(*args, **kwargs):
        return visible(original, *args, **kwargs)

    @functools.wraps(function)
    def original(*args, **kwargs):
        return pass_on(function, *args, **kwargs)

    return replaced


def pass_on(function, *args, **kwargs):
    """Call a function of torch's or the script's, whose errors are theirs."""
    return function(*args, **kwargs)


def is_own(error: BaseException) -> bool:
    """Return whether a probe raised this error, not torch or the script.

    It is a probe's if the innermost frame of the probes' is not `pass_on`.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(
        error.__traceback__) if frame.f_code.co_filename.startswith(HERE)]
    return bool(codes) and codes[-1] is not pass_on.__code__


class Updates:
    """Tells when an optimizer has its gradients, and when it has updated."""

    def __call__(self, log):
        self.log, self.depth = log, 0
        log.calls = 0  # of optimizers that have not left their update out
        optimizers.register_optimizer_step_pre_hook(self.before)
        optimizers.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, args, kwargs):
        self.depth += 1  # an optimizer may have another in it
        # a fused one leaves the update out itself, if a GradScaler says so
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

        def visible_closure():  # Lightning's: it computes the gradients
            loss = pass_on(closure)
            self.log.tell("gradients", optimizer)
            return loss

        return args[:1], {"closure": visible_closure}

    def after(self, optimizer, args, kwargs):
        self.depth -= 1
        if not self.depth and self.counts:
            self.log.updates += 1
            self.log.say(update=self.log.updates)
            self.log.tell("updated", optimizer)


def makes_state():
    """Whether PyTorch initialises an optimizer's state with zero gradients."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None
