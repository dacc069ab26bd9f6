"""Records what led to each step of an optimizer, and ends the process."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from torch.utils.data._utils import signal_handling

import rankcheck.record.tensors as parts
from rankcheck.record.collectives import Group
from rankcheck.record.fingerprints import slice_fingerprints
from rankcheck.record.rank_record import record_file
from rankcheck.record.recorder import Log, assign, replace
from rankcheck.record.tensors import Hashes, LocalTensors, is_low, thin

MUCH = 1_000_000  # elements of a message that is not looked into


@dataclass
class StepRow:
    """What led to a step, as it is recorded: a dictionary in the record."""

    rows: list[str] = field(default_factory=list)  # hashes of samples
    columns: list[str] = field(default_factory=list)  # where those are columns
    losses: list[float] = field(default_factory=list)  # of backward passes
    wrapped: int = 0  # forward passes of a DistributedDataParallel
    reduced: float = 0  # elements that were reduced; see `Reduction`
    bytes: int = 0  # of reductions
    calls: int = 0  # reductions
    late: float = 0  # elements that were reduced after clipping
    # of each backward pass, how many targets, or else samples, it had
    counts: list[int] = field(default_factory=list)
    targets: bool = False  # whether these are targets
    mixed: bool = False  # whether samples are gathered from all ranks
    summed: bool = False  # whether the model reduces over ranks in forward()


@dataclass
class Notes:
    """What else is known of the step to come, and is not recorded."""

    # forward passes whose backward pass has not begun
    pending: list[Hashes] = field(default_factory=list)
    stream: int | None = None  # id of the module that is given the samples
    # gradients before they were clipped, by their parameter's id
    unclipped: dict[int, torch.Tensor | None] = field(default_factory=dict)
    scaled: bool = False  # whether the gradients are those of a scaled loss
    targets: int = 0  # of the forward passes since the last backward pass
    received: list[torch.Tensor] = field(default_factory=list)  # messages
    early: list[Reduction] = field(default_factory=list)  # before backward()


@dataclass(frozen=True)
class Reduction:
    """A collective that reduces."""

    # those of its tensors, times the group's share in a reduction over all
    # ranks: one among nodes and one in each of them are one
    elements: float
    size: int  # bytes
    late: bool  # whether gradients were clipped before it


@dataclass
class PutAside:
    """What led to gradients that were thrown away; see `Rows.on_zeroed`."""

    row: StepRow
    sums: dict[int, torch.Tensor]
    weighed: dict[int, torch.Tensor]

    def add(self, other: PutAside) -> None:
        """Add what led to others, later."""
        for name, value in vars(other.row).items():
            setattr(self.row, name, getattr(self.row, name) + value)
        add_parts(self.sums, other.sums)
        add_parts(self.weighed, other.weighed)


def add_parts(total: dict[int, torch.Tensor],
              others: Mapping[int, torch.Tensor]) -> None:
    """Add tensors to those of the same key."""
    for key, part in others.items():
        total[key] = total.get(key, 0) + part


class Rows:
    """A row of what led to each step, and the end of the process."""

    def __init__(self, log: Log, size: int, steps: int, kind: str) -> None:
        """Watch a process.

        Args:
            log: its record.
            size: the number of processes.
            steps: after so many steps of the first optimizer it ends.
            kind: "frozen" if nothing is to be updated, so that all gradients
                are those of the first weights; "saved" if it ends as soon as
                each optimizer has its gradients for the first step after
                torch.save(); "resumed" if it goes on from there; or "".
        """
        self.log, self.record = log, log.record
        self.size, self.steps, self.kind = size, steps, kind
        # forked ranks would share the generators' state; Python's own is
        # seeded at each fork
        torch.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        log.begun = True  # steps count without a module, too
        self.made: Counter[int] = Counter()  # of each optimizer's number
        # id -> (number, the optimizer: its id stays)
        self.optimizers: dict[int, tuple[int, Optimizer]] = {}
        self.recorded = False
        self.since: set[int] = set()  # with gradients since it has saved
        self.weights: dict[str, torch.Tensor] = {}  # of the last step
        self.put_aside: list[PutAside] = []  # since the last step
        self.begin_step()
        log.on("gradients", self.on_gradients)
        log.on("zeroed", self.on_zeroed)
        log.on("stepped", self.on_step)
        log.on("skipped", self.on_skipped)
        log.on("message", self.on_message)

        @replace(Join, "__exit__")
        def join(join: Callable[..., Any], *args: Any) -> Any:
            log.note_fact("join", None)
            joined = threading.Event()
            threading.Thread(target=self.leave_with_others, args=[joined],
                             daemon=True).start()
            try:
                return join(*args)
            finally:
                joined.set()

    def begin_step(self) -> None:
        """Forget what led to the last step."""
        self.log.sums, self.log.weighed = {}, {}
        self.log.row, self.log.notes = StepRow(), Notes()

    def on_zeroed(self, weights: list[torch.Tensor]) -> None:
        """Put aside what led to gradients that are thrown away.

        It belongs to no step, if a backward pass follows: see
        `take_back`.
        """
        log, zeroed = self.log, {id(weight) for weight in weights}
        if not log.row.counts or self.recorded:
            return
        sharded = {key for key, weight in log.parameters.items()
                   if key not in log.sums and weight.grad is not None}
        if (log.sums.keys() | sharded) - zeroed:
            for key in zeroed:  # another optimizer keeps its gradients
                for values in log.sums, log.weighed, log.local:
                    values.pop(key, None)
            return
        pending = log.notes.pending  # forward passes whose backward comes yet
        self.put_aside.append(PutAside(log.row, log.sums, log.weighed))
        self.begin_step()
        log.notes.pending = pending

    def take_back(self) -> None:
        """Decide whether what was put aside led to this step.

        It did if no backward pass came after it: then the script has taken
        the gradients elsewhere before it threw them away.
        """
        log, aside, self.put_aside = self.log, self.put_aside, []
        if log.row.counts or not aside:
            step = len(self.record.steps)
            self.record.discarded_steps += [step] * len(aside)
            return
        first, *others = aside
        for one in others:
            first.add(one)
        vars(log.row).update(vars(first.row))
        log.sums, log.weighed = first.sums, first.weighed

    def on_message(self, name: str, tensors: list[torch.Tensor],
                   group: Group | None = None) -> None:
        """Note what a collective says of the step to come."""
        row: StepRow = self.log.row
        notes: Notes = self.log.notes
        # in mixed precision, or compressed
        self.record.low_precision |= any(map(is_low, tensors))
        row.mixed |= "gather" in name and bool(notes.pending)
        row.summed |= "reduce" in name and self.log.inside
        if name.startswith("recv"):
            notes.received += tensors  # kept: so is where they are
        share = self.find_share(group)
        if "reduce" not in name or not share:
            return
        reduction = Reduction(
            sum(tensor.numel() for tensor in tensors) * share,
            sum(map(count_bytes, tensors)), bool(notes.unclipped))
        if self.recorded or any(map(self.carries_gradient, tensors)):
            self.count(reduction)
        elif not self.log.sums:  # before backward(), if there is one
            notes.early.append(reduction)

    def find_share(self, group: Group | None) -> float:
        """Return which part of a reduction over all ranks a group's is.

        One among nodes and one in each of them are one among all ranks.
        """
        if group is None or self.size <= 1:
            return 1
        _, ranks = group
        return math.log(len(ranks), self.size)

    def count(self, reduction: Reduction) -> None:
        """Note a reduction of gradients."""
        row: StepRow = self.log.row
        row.calls += 1
        row.reduced += reduction.elements
        row.late += reduction.elements * reduction.late
        row.bytes += reduction.size

    def carries_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether a message has a gradient that this rank has computed.

        It is known by two neighbours in it, perhaps divided by the number of
        processes.
        """
        log = self.log
        known = {storage(weight.grad) for weight in log.parameters.values()}
        if (tensor.is_sparse or tensor.numel() > MUCH
                or storage(tensor) in known):
            return True  # or it cannot be told
        values = tensor.detach().float().flatten()
        close = 1e-2 if is_low(tensor) else 1e-5
        for key, part in log.sums.items():
            weight = log.parameters[key]
            grad, count = weight.grad, weight.numel()
            if count > len(values) or count == 1 < len(values):
                continue  # one number is in there by chance
            if not part.any() and not values.any():
                return True
            stride = 1
            if grad is None or grad.is_sparse or not grad.any():  # taken away
                stride = -(-count // parts.MOST_KEPT)  # see `thin`
                some = part[:-1] if stride > 1 else part  # without the sum
                grad = some * log.scale
            grad = grad.detach().float().flatten().to(values.device)
            largest = int(grad.abs().argmax().item())
            at = min(largest, max(len(grad) - 2, 0))
            pair = grad[at:at + 2]
            pairs = values.unfold(
                0, stride * (len(pair) - 1) + 1, 1)[:, ::stride]
            for divisor in (1, self.size):
                if pair.any() and ((pairs - pair / divisor).abs() <= (
                        close * pair.abs() / divisor)).all(1).any():
                    return True
        return False

    def on_gradients(self, optimizer: Optimizer) -> None:
        """Record a step that is to come, and end where it is the last."""
        if self.recorded:  # a closure may be called several times
            return
        log, self.recorded = self.log, True
        self.take_back()
        if not (log.sums and all(
                key in log.sums for key, weight in log.parameters.items()
                if weight.grad is not None)):  # it may have been one's
            for reduction in log.notes.early:
                self.count(reduction)
        if not log.row.counts:  # no loss.backward(), but autograd.grad()
            take_pending(log)
        if log.has_set_epoch and not self.made:  # others are of a validation
            log.note_fact("epoch", any(log.has_set_epoch.values()))
        number, _ = self.optimizers.setdefault(
            id(optimizer), (len(self.optimizers), optimizer))
        if self.made[number] == self.steps:
            self.leave()
        if self.kind == "saved" and any(
                os.path.exists(f"{log.folder}/saved-{count}")
                for count in range(len(self.record.steps) + 1)):
            self.since.add(number)
            if self.record.saved_before_step is None:
                self.record.saved_before_step = len(self.record.steps)
        weights = self.name_weights(number, optimizer)
        if not self.made[number] and not self.kind:
            self.record.fingerprints |= {
                name: slice_fingerprints(weight)
                for name, weight in weights.items()
                if not parts.is_dtensor(weight)}
        self.record.steps.append(self.snapshot(number, optimizer, weights))
        self.made[number] += 1
        if len(self.since) == len(self.optimizers):
            self.leave()
        if self.kind == "frozen":  # the optimizer leaves these alone then
            for weight in weights.values():
                weight.grad = None
        self.weights = weights
        self.begin_step()

    def name_weights(self, number: int,
                     optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return an optimizer's parameters by name."""
        log = self.log
        weights: list[torch.Tensor] = [
            weight for group in optimizer.param_groups
            for weight in group["params"]]
        if not all(id(weight) in log.names for weight in weights):
            log.tell("unnamed", weights)
        named = {log.names.get(id(weight), f"parameter {number}.{i}"): weight
                 for i, weight in enumerate(weights)}
        self.record.shapes |= {name: tuple(weight.shape)
                               for name, weight in named.items()}
        return named

    def snapshot(self, number: int, optimizer: Optimizer,
                 weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return what is recorded of a step before it is made.

        Args:
            number: of the optimizer.
            optimizer: which is about to make its step.
            weights: its parameters by name.

        Returns:
            The step's `StepRow`, and

            optimizer  its number
            rates      the learning rates of its groups
            drawn      how many indices each DistributedSampler has given
            elements   of the parameters that can be trained
            without    names of parameters that have no gradient
            before     the weights at an optimizer's first step; else None
            now        the weights
            random     what `random_states` returns
            gradients  before they are clipped
            local      as this rank alone computed them
            sums       see `Log`
            weighed    see `Log`
            kept       the optimizer's state, where a run is saved or resumed
        """
        log, now = self.log, describe_parts(weights, thin)
        # a fused optimizer takes the scale away itself
        scale = getattr(optimizer, "grad_scale", None) or 1.0
        gradients: dict[int, torch.Tensor | None] = {
            id(weight): thin(weight.grad) / scale
            for weight in weights.values() if weight.grad is not None}
        gradients |= log.notes.unclipped
        record: dict[str, Any] = vars(log.row) | {
            "optimizer": number,
            "rates": [float(group["lr"]) for group in optimizer.param_groups
                      if "lr" in group],
            "drawn": dict(log.drawn),
            "elements": sum(weight.numel() for weight in weights.values()
                            if weight.requires_grad),
            "without": [name for name, weight in weights.items()
                        if weight.requires_grad and weight.grad is None
                        and id(weight) not in log.sums],  # nor had one
            "before": now if not self.made[number] or self.since else None,
            "now": now,  # again before each
            "random": random_states(),
            "gradients": describe_known(weights, gradients),
            "local": describe_known(weights, log.local),
            "sums": describe_known(weights, log.sums),
            "weighed": describe_known(weights, log.weighed)}
        if self.kind in ("saved", "resumed"):
            record["kept"] = parts.describe_tensors(optimizer_state(optimizer,
                                                                    weights))
        return record

    def on_step(self, optimizer: Optimizer) -> None:
        """Record what has become of the weights."""
        self.recorded = False
        # in this step
        self.record.steps[-1]["within"] = self.log.row.reduced
        self.begin_step()  # drop what a closure recomputes
        buffers = {f"{i}.{name}": thin(buffer)
                   for i, module in enumerate(self.log.modules.values())
                   for name, buffer in persistent_buffers(module)
                   if buffer.is_floating_point()}
        self.record.steps[-1].update(weights=describe_parts(
            self.weights, thin),
            buffers=parts.describe_tensors(buffers.items()))

    def on_skipped(self) -> None:
        """Forget what led to a step that a GradScaler leaves out."""
        self.record.skipped_steps.append(len(self.record.steps))
        self.recorded, self.put_aside = False, []
        self.begin_step()

    def leave(self) -> NoReturn:
        """End here, once all others have: gloo fails where one has gone."""
        self.log.note_fact("left", None)
        self.log.finish()
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(
                map(self.has_left, range(self.size))):
            time.sleep(0.05)
        end_loader_workers()
        sys.stdout.flush()
        os._exit(0)

    def leave_with_others(self, joined: threading.Event) -> None:
        """Leave if another has: this rank, out of samples, waits for it."""
        while not joined.wait(0.1):
            if any(self.has_left(rank) for rank in range(self.size)):
                self.leave()

    def has_left(self, rank: int) -> bool:
        """Whether a rank has written its record, and ends."""
        return record_file(self.log.folder or "", rank).exists()


def end_loader_workers() -> None:
    """End the processes of data loaders, which is no error of theirs.

    PyTorch raises one in the main thread when a worker is killed.
    """
    assign(signal_handling, _error_if_any_worker_fails=lambda: None)
    for worker in multiprocessing.active_children():
        worker.kill()


def persistent_buffers(
        module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those that a checkpoint has: others may be a rank's own."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def describe_parts(
        weights: Mapping[str, torch.Tensor],
        tensor_of: Callable[[torch.Tensor], torch.Tensor | None],
        ) -> LocalTensors:
    """Return what `parts.describe` says of a tensor of each named parameter.
    """
    return parts.describe_tensors((name, tensor_of(weight))
                                  for name, weight in weights.items())


def describe_known(weights: Mapping[str, torch.Tensor],
                   by_id: Mapping[int, torch.Tensor | None]) -> LocalTensors:
    """Return the same of tensors that are known by their parameters' ids."""
    return describe_parts(weights, lambda weight: by_id.get(id(weight)))


def storage(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's elements are, None if that cannot be told."""
    if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
        return tensor.untyped_storage().data_ptr()
    return None


def count_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor has, of a sparse one its own ones."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def optimizer_state(optimizer: Optimizer, weights: Mapping[str, torch.Tensor],
                    ) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what an optimizer keeps for its parameters, with names."""
    for key, weight in weights.items():
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, (int, float)):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor):
                yield f"{key} {name}", thin(value)


def random_states() -> dict[str, str]:
    """Return a digest of the state of each generator of random numbers."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    numpy = sys.modules.get("numpy")
    states = {
        "PyTorch's": torch.get_rng_state().tolist(),
        "Python's": random.getstate(),
        "NumPy's": numpy.random.get_state() if numpy else None,
        "the GPU's": torch.cuda.get_rng_state().tolist() if on_gpu else None}
    return {name: hashlib.blake2b(repr(state).encode()).hexdigest()
            for name, state in states.items()}


def take_pending(log: Log) -> None:
    """Note what the modules were given as the samples of this step."""
    for rows, columns in log.notes.pending:
        log.row.rows += rows
        log.row.columns += columns
    log.notes.pending = []
