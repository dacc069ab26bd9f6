"""The run around Lightning's Trainer, which the stage does not teach.

`LitRun` puts `backstage.run.Run` in the place of the Trainer's own ways to
log, to save, to resume and to handle signals: a run has the same folder in
every stage, and any stage goes on with another's checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import environments
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from backstage.checkpoint import is_sharded
from backstage.device import check_local_rank, find_device
from backstage.errors import require
from backstage.interfaces import LightningFlags, Samples, WriteTexts
from backstage.process import count_processes, use_cores
from backstage.run import Run
from backstage.world import is_joined, on_every_rank
from backstage.zero import Zero

for name in ("lightning.pytorch", "lightning.fabric"):  # hints, tips
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"lightning\.")


@dataclass(frozen=True)
class PendingStep:
    """The values of a finished step that is not logged yet."""

    loss: float
    lr: float
    norm: float
    seconds: float


def get_world(hp: LightningFlags) -> tuple[int, int, int, int]:
    """Rank, local rank, world size and number of nodes.

    Raises `UserError` where --devices does not match what a launcher has
    started, and for what Lightning would not train on.
    """
    devices, world_size = count_processes(hp.devices or 1)
    require(hp.devices in (0, devices),
            f"--devices {hp.devices} differs from the number of processes "
            f"started per node, {devices}; fix: set srun's --ntasks-per-node "
            "(torchrun's --nproc-per-node) to the same number, or leave "
            "--devices out")
    device = find_device(hp.device)
    require(device.type != "xpu", "Lightning 2.6 does not support XPUs; fix: "
            "use the DDP stage, or --device cpu")
    if device.type != "cpu":
        check_local_rank(device, devices - 1)
    if hp.strategy.startswith("deepspeed"):
        Zero.check(device)
    use_cores(devices)  # it may start them itself
    rank, local_rank = (int(os.environ.get(name, 0))
                        for name in ("RANK", "LOCAL_RANK"))
    return rank, local_rank, world_size, world_size // devices


def get_launcher() -> environments.ClusterEnvironment:
    """Return the Trainer's plugin that provides this process's rank.

    Left to choose, Lightning would take the shell of a SLURM job for a task
    that has to wait for others. Here it starts the others itself if need be.
    """
    if "RANK" in os.environ:
        return environments.TorchElasticEnvironment()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.pop("MASTER_PORT", None)  # any free one
    return environments.LightningEnvironment()


def get_strategy(hp: LightningFlags, world_size: int) -> Strategy | str:
    """Return the Trainer's strategy: what each process keeps of the model.

    fsdp2: what the module's configure_model leaves it, on a mesh whose
    dimension "data_parallel" has all processes (Lightning's default would
    split matrices among those of a node).
    """
    if hp.strategy.startswith("deepspeed"):
        return Zero(stage=int(hp.strategy[-1]))
    if hp.strategy == "fsdp2":
        return ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1)
    if world_size > 1:
        return DDPOnOneStream(gradient_as_bucket_view=True)
    return "auto"


class LitRun(L.Callback):
    """Logs, saves, resumes and stops as the other stages do.

    write_texts(model, run, seed): the texts. The module has the GPT as its
    `model`, and as its `norm` that of the gradients. The Trainer calls
    `setup` and "on_..." on all ranks, in the order in which they stand here.
    """

    def __init__(self, stage: str, train_data: Samples, val_data: Samples,
                 write_texts: WriteTexts) -> None:
        self.stage, self.write_texts = stage, write_texts
        self.train_data, self.val_data = train_data, val_data

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        """Create the run: the processes are connected now."""
        leave_signals_alone(trainer)
        self.hp, self.model = module.hp, module.model
        self.device = trainer.strategy.root_device
        self.run = Run(self.stage, self.hp, self.model.config,
                       trainer.max_steps, self.device)

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        """Restore the checkpoint: model and optimizer exist now."""
        if isinstance(trainer.strategy, Zero):
            self.step = trainer.strategy.restore(self.run)
        else:
            self.step = self.run.restore(self.model, trainer.optimizers[0])
        self.train_data.seek(self.step * self.hp.minibatch_size)
        if self.step > 0:
            count_from(self.step, trainer)

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.run.begin()
        self.begin_step()

    def begin_step(self) -> None:
        self.row: PendingStep | None = None
        self.start_time = time.perf_counter()
        self.mean_loss = torch.zeros((), device=self.device)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any,
                                 optimizer: torch.optim.Optimizer) -> None:
        self.lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        """Add up a step's losses; after its last microbatch, end the step.

        Where the Trainer validates now, `on_validation_end` ends it.
        """
        self.mean_loss += outputs["loss"]  # is divided already
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        report = torch.tensor(
            [self.mean_loss, self.run.stop_requested], device=self.device)
        if is_joined():
            dist.all_reduce(report)  # the sum over all ranks
        loss, stop = (report / self.run.world_size).tolist()
        norm = module.norm
        if isinstance(norm, DTensor):  # each rank has that of its shards
            norm = norm.full_tensor()
        norm = float(norm)
        seconds = time.perf_counter() - self.start_time
        self.run.check_finite(self.step - 1, loss, norm)

        self.row = PendingStep(loss, self.lr, norm, seconds)
        self.last = self.step == trainer.max_steps
        self.stopping = bool(stop)
        trainer.should_stop = self.last or self.stopping
        if not self.last and self.step % self.hp.eval_every > 0:
            if self.stopping:  # asked to stop, the Trainer would validate
                trainer.limit_val_batches = 0
            self.end_step(trainer)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.val_data.seek(0)  # for the next time
        if self.row:  # not in the middle of a step
            self.end_step(trainer, trainer.callback_metrics["val_loss"].item())

    def end_step(self, trainer: L.Trainer,
                 val_loss: float | None = None) -> None:
        """Log; save and write texts where it is time to. All ranks."""
        hp, run, step, last = self.hp, self.run, self.step, self.last
        row = self.row
        if run.rank == 0 and row:
            run.log(
                step - 1, row.loss, val_loss, row.lr, row.norm, row.seconds)
        if last or self.stopping or step % hp.checkpoint_every == 0:
            if isinstance(trainer.strategy, Zero):
                trainer.strategy.save(run, step)
            elif run.rank == 0 or is_sharded(self.model):
                run.save(step, self.model, trainer.optimizers[0])
        if run.tokenizer and (last or (step - 1) % hp.generate_every == 0):
            seed = hp.seed + 1000 * (step - 1) + run.rank
            with torch.compiler.set_stance("force_eager"):  # of many lengths
                texts = on_every_rank(self.write_texts(self.model, run, seed))
            if run.rank == 0:
                print(*texts, sep="\n")
        self.begin_step()

    def on_fit_end(self, trainer: L.Trainer, module: Any) -> None:
        self.run.finish()
        if is_joined():
            dist.destroy_process_group()


# ------------------------- what is private in Lightning, as of 2.6.6
# (and, in backstage/zero.py, Zero._setup_model_and_optimizer)


class DDPOnOneStream(DDPStrategy):
    """DDPStrategy that wraps the model on the CUDA stream it trains on.

    Lightning 2.6.6 wraps it on another: backward() warns that "the
    AccumulateGrad node's stream does not match", and the GPU waits. To be
    deleted with the first version after it (issue 21567, fixed by 21746).
    """

    def configure_ddp(self) -> None:
        self.model = DistributedDataParallel(
            self.model, device_ids=self.determine_ddp_device_ids(),
            **self._ddp_kwargs)


def count_from(step: int, trainer: L.Trainer) -> None:
    """Let the Trainer's loops and schedule continue at `step`. All ranks.

    The microbatches are those that `step` steps take now: the run before may
    have had another number of processes.
    """
    batches = dict.fromkeys(("ready", "started", "processed", "completed"),
                            step * trainer.accumulate_grad_batches)
    steps = dict.fromkeys(("ready", "completed"), step)
    loop = trainer.fit_loop
    state = loop.state_dict()
    state["epoch_loop.batch_progress"].update(total=batches, current=batches)
    optimizer = state[
        "epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"].update(total=steps, current=steps)
    loop.load_state_dict(state)
    for config in trainer.lr_scheduler_configs:
        config.scheduler.last_epoch = step - 1
        with warnings.catch_warnings():  # of a step before the optimizer's
            warnings.simplefilter("ignore")
            schedule: Any = config.scheduler  # the stage's LambdaLR
            schedule.step()


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Let the run's handlers be the only ones, from the start. All ranks.

    Lightning 2.6 has a handler of its own for SIGTERM, which broadcasts from
    rank 0: for ever, if the others wait for this one or got no signal. Before
    each microbatch it asks rank 0 for a signal, and the GPUs run empty. No
    flag of 2.6.6 turns that off (issue 21487).
    """
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None
