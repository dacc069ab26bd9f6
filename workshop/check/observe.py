"""What is recorded in each process of a script, from outside.

The script needs nothing for it, and nothing here waits for another process.
A rank leaves two files in the observer's folder:

    <rank>.jsonl   a line for each collective and update, written as it
                   happens: it is there after a hang, too
    <rank>.pt      at its end, a dictionary:

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
        asked       what was asked for: (what, value), in their order
        written     files that were opened to write them
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from backstage import device as devices
from backstage import errors
from workshop.collectives import Collectives
from workshop.parts import describe, plain_name

MOST = 100  # updates of which everything is recorded
SAMPLES, T = 40, 32  # of a trial's dataset, where sample i begins with i


class Observer:
    """A function of the rank for `workshop.processes.Launch`.

    terminated: the rank, if any, that gets a SIGTERM in its second step.
    lightning: whether the script uses Lightning.
    """

    def __init__(self, folder, run, terminated=None, lightning=False):
        self.folder, self.run = str(folder), str(run)
        self.terminated, self.lightning = terminated, lightning

    def __call__(self, rank):
        self.rank, self.model, self.names = rank, None, {}
        self.script, self.owner = sys.argv[0], os.getpid()
        self.updates = self.depth = 0
        self.kept, self.seen = [], self.nothing_seen()
        self.begin_update()
        self.events = os.open(f"{self.folder}/{rank}.jsonl",
                              os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.watch_training()
        self.watch_processes()
        self.watch_mpi()
        self.watch_devices()
        self.watch_files()
        self.watch_errors()
        return self.finish

    def nothing_seen(self):
        return {"start": None, "weights": None, "gradients": [],
                "samples": [], "evaluated": 0, "continued": None,
                "optimizers": None, "precision": None, "compiled": None,
                "recomputed": False, "asked": [], "written": []}

    def finish(self):
        self.seen["joined"] = dist.is_initialized()
        file = f"{self.folder}/{self.rank}.pt"
        try:
            self.save(self.seen, file + ".part")
            os.replace(file + ".part", file)
        except (OSError, RuntimeError) as error:
            os.write(2, f"the check could not write: {error}\n".encode())

    def say(self, **event):
        """Write a line of the record that lasts."""
        if os.getpid() == self.owner:
            os.write(self.events, json.dumps(event).encode() + b"\n")

    def asked(self, what, value):
        self.seen["asked"].append((what, value))

    def place(self):
        """The lines of the script that led here, the innermost first.

        Each with its function, and the function that it calls.
        """
        frame, lines, called = sys._getframe(1), [], ""
        while frame:
            name = frame.f_code.co_name
            if frame.f_code.co_filename == self.script:
                lines.append((frame.f_lineno, name, called))
            if not name.startswith("visible_") and name not in (
                    "wrapper", "inner", "decorate_context", "__call__",
                    "_wrapped_call_impl", "_call_impl"):
                called = name
            frame = frame.f_back
        return lines

    # ---------------------------------------------------------- training

    def watch_training(self):
        # what torch.compile returns is called, but nothing is compiled
        torch.compiler.set_stance("force_eager")
        register_module_forward_pre_hook(self.on_forward)
        register_optimizer_step_pre_hook(self.before_update)
        register_optimizer_step_post_hook(self.after_update)
        self.watch_evaluation()
        self.watch_pipelines()

    def watch_evaluation(self):
        for name in ("cross_entropy", "gelu", "layer_norm",
                     "scaled_dot_product_attention"):
            compute = getattr(F, name)

            @functools.wraps(compute)
            def visible_compute(*args, name=name, compute=compute, **kwargs):
                if ("pytorch", name) not in self.seen["asked"]:
                    self.asked("pytorch", name)
                if name == "cross_entropy" and not (
                        torch.is_grad_enabled() or self.inferring):
                    self.seen["evaluated"] += args[1].numel() // T
                return compute(*args, **kwargs)

            setattr(F, name, visible_compute)

    def watch_pipelines(self):
        from torch.distributed.pipelining import PipelineStage

        infer = PipelineStage._forward_metadata_inference

        def visible_infer(stage, *args, **kwargs):
            """It sends a microbatch through once more, for its shapes."""
            self.inferring = True
            try:
                return infer(stage, *args, **kwargs)
            finally:
                self.inferring = False

        PipelineStage._forward_metadata_inference = visible_infer

    def begin_update(self):
        self.pending, self.again, self.inferring = [], [], False

    def on_forward(self, module, inputs):
        if os.getpid() != self.owner:
            return
        if self.model is None and is_gpt(module):
            self.model = module
            self.names = {id(weight): plain_name(name) for name, weight
                          in module.named_parameters()}
            self.seen["start"] = self.state("data")
        if self.inferring:
            return
        again = torch._C._current_graph_task_id() != -1  # a checkpoint's
        self.seen["recomputed"] |= again
        if torch.is_grad_enabled() and not self.seen["compiled"]:
            self.seen["compiled"] = compiled_part(module)
        if isinstance(module, torch.nn.Embedding) and inputs and isinstance(
                inputs[0], torch.Tensor) and inputs[0].dim() == 2:
            self.on_tokens(module, inputs[0], again)

    def on_tokens(self, module, tokens, again):
        """Samples on their way through the model."""
        if again:
            self.again += tokens[:, 0].tolist()
        elif torch.is_grad_enabled():
            self.pending += tokens[:, 0].tolist()
            self.seen["precision"] = (
                "bf16" if torch.is_autocast_enabled("cpu") else
                "fp32" if module.weight.dtype == torch.float32 else
                f"weights of {module.weight.dtype}")
        else:
            self.seen["continued"] = tokens.tolist()

    def before_update(self, optimizer, args, kwargs):
        self.depth += 1  # an optimizer may have another in it
        closure = kwargs.get("closure") or (args[1] if args[1:] else None)
        if self.depth == 1:  # a closure may be where the model is first used
            self.counts = not makes_state() and (
                self.model is not None or closure is not None)
        if self.depth > 1 or not self.counts:
            return None
        if closure is None:
            self.record(optimizer)
            return None

        def visible_closure():  # Lightning's: it computes the gradients
            loss = closure()
            self.record(optimizer)
            return loss

        return args[:1], {"closure": visible_closure}

    def record(self, optimizer):
        seen = self.seen
        if self.updates < MOST:
            seen["gradients"].append(self.state("grad"))
            seen["samples"].append(self.pending or self.again)
        if seen["optimizers"] is None:
            seen["optimizers"] = [
                {"names": [self.names.get(id(weight), "?")
                           for weight in group["params"]],
                 **{key: value for key, value in group.items()
                    if key in ("lr", "betas", "eps", "weight_decay")}}
                for group in optimizer.param_groups]
        self.begin_update()

    def after_update(self, optimizer, args, kwargs):
        self.depth -= 1
        if self.depth or not self.counts:
            return
        self.updates += 1
        self.say(update=self.updates)
        self.on_updated(optimizer)

    def on_updated(self, optimizer):
        self.seen["weights"] = self.state("data")
        if self.rank == self.terminated and self.updates == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def state(self, name):
        """The model's weights ("data") or gradients ("grad"), described."""
        weights = self.model.named_parameters() if self.model else ()
        return describe((key, weight if name == "data" else weight.grad)
                        for key, weight in weights)

    # --------------------------------------------------------- processes

    def watch_processes(self):
        """Note each collective, and let what PyTorch does not keep live on.
        """
        Collectives(self.on_collective).__enter__()
        initialise, destroy = (
            dist.init_process_group, dist.destroy_process_group)
        wrap = DistributedDataParallel.__init__

        def visible_initialise(backend=None, *args, **kwargs):
            self.asked("init_process_group", backend and str(backend))
            kwargs.pop("device_id", None)  # gloo has none
            if isinstance(backend, str) and "gloo" not in backend:
                backend = "gloo"  # what is no name PyTorch refuses
            return initialise(backend, *args, **kwargs)

        def visible_destroy(group=None):
            # The end of a gloo group joins its thread with the interpreter's
            # lock in hand, which that thread may wait for: it never ends.
            self.kept += list(c10d._world.pg_map)
            return destroy(group)

        def visible_wrap(ddp, module, device_ids=None, output_device=None,
                         *args, **kwargs):
            self.asked("DistributedDataParallel", None)
            if device_ids:  # a CPU has no number
                self.asked("device_ids", number(device_ids[0]))
            wrap(ddp, module, None, None, *args, **kwargs)

        for module in (dist, c10d):
            module.init_process_group = visible_initialise
            module.destroy_process_group = visible_destroy
        DistributedDataParallel.__init__ = visible_wrap
        self.watch_sharding()

    def watch_sharding(self):
        from torch.distributed.tensor import DTensor

        move = torch.nn.Module.to

        def visible_move(module, *args, **kwargs):
            if is_gpt(module):
                self.asked("to", not any(
                    weight.is_meta or isinstance(weight, DTensor)
                    for weight in module.parameters()))
            return move(module, *args, **kwargs)

        torch.nn.Module.to = visible_move

    def on_collective(self, name, tensors, function, args):
        self.on_message(name, sum(tensor.numel() for tensor in tensors))

    def watch_mpi(self):
        """Note the calls of MPI, if `Launch` lets its ranks sleep."""
        mpi = sys.modules.get("workshop.sleeping_mpi")
        if mpi:
            mpi.SleepingComm.on_call = staticmethod(self.on_message)

    def on_message(self, name, elements, group=None):
        self.say(call=name, elements=elements, lines=self.place()[:6],
                 update=self.updates)

    # ----------------------------------------------------------- devices

    def watch_devices(self):
        """There is no accelerator in a check: note what is asked for."""
        use = devices.use_device

        def visible_use(name="auto", local_rank=0):
            self.asked("device", str(name))
            self.asked("local_rank", local_rank if isinstance(
                local_rank, int) else str(local_rank))
            return use(name, local_rank)

        def no_accelerator(check_available=False):
            return None

        def visible_set(device):
            self.asked("set_device", number(device))

        devices.use_device = visible_use
        torch.accelerator.current_accelerator = no_accelerator
        torch.accelerator.set_device_index = visible_set
        torch.cuda.set_device = visible_set
        if self.lightning:
            with contextlib.suppress(ImportError):  # the script will say it
                self.watch_trainer()

    def watch_trainer(self):
        from lightning.pytorch.trainer import trainer

        make, fit = trainer.Trainer.__init__, trainer.Trainer.fit

        @functools.wraps(make)
        def visible_make(self_, *args, **kwargs):
            self.asked("plugins", bool(kwargs.get("plugins")))
            self.asked("accelerator", kwargs.get("accelerator"))
            # what it writes, if anything, is not for the attendee's folder
            kwargs.setdefault("default_root_dir", str(self.folder))
            return make(self_, *args, **kwargs)

        @functools.wraps(fit)
        def visible_fit(self_, *args, **kwargs):
            self.asked("fit", True)
            self.asked("writers", [
                type(one).__name__ for one in (
                    *self_.loggers, *self_.checkpoint_callbacks)])
            return fit(self_, *args, **kwargs)

        trainer.Trainer.__init__ = visible_make
        trainer.Trainer.fit = visible_fit

    # ------------------------------------------------- files and errors

    def watch_files(self):
        self.save = torch.save
        sys.addaudithook(self.on_event)

        @functools.wraps(torch.save)
        def visible_save(obj, f, *args, **kwargs):
            if isinstance(f, (str, Path)):  # not opened by Python
                self.wrote(f)
            self.save(obj, f, *args, **kwargs)

        torch.save = visible_save

    def on_event(self, event, args):
        if event == "open" and isinstance(args[0], str):
            path, flags = args[0], args[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR) and self.is_output(path):
                self.wrote(path)

    def is_output(self, path):
        return self.run in path

    def wrote(self, path):
        if os.getpid() == self.owner:
            path = os.path.abspath(path)
            folder, name = os.path.split(path)
            name = re.sub(r"^\.(.*)\.\d+\.part$", r"\1", name)  # of its own
            path = os.path.join(folder, name)
            if path not in self.seen["written"]:
                self.seen["written"].append(path)

    def watch_errors(self):
        """No launcher will end this rank: it is to speak at once."""
        def say_now(message):
            print(f"error: {message}", file=sys.stderr, flush=True)

        errors.say_once = say_now


def makes_state():
    """Whether it is torch's own update of zeros, which makes a new state."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


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


def number(device):
    """The index of a device, as an int or None."""
    found = re.search(r"\d+$", str(device))
    return int(found[0]) if found else None
