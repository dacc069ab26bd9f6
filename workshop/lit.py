"""The run around Lightning's Trainer: what the Lightning stage does not teach.

A Trainer has its own ways to log, to save, to resume and to handle signals.
`LitRun` puts `workshop.run.Run` in their place, so that a run has the
same folder in every stage, and any stage goes on with another's checkpoint.
"""

import atexit
import copy
import logging
import math
import os
import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from workshop import run
from workshop.errors import check
from workshop.run import Run

STRATEGIES = ("ddp", "fsdp2", "fsdp", "deepspeed_stage_1",
              "deepspeed_stage_2", "deepspeed_stage_3")

for name in ("lightning.pytorch", "lightning.fabric"):  # hints, tips
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"lightning\.")


# --------------------------------------------------------- who takes part


def get_world(hp):
    """Rank, local rank, world size and number of nodes.

    A launcher has started the processes, or Lightning will start --devices
    of them on this node. Raises `UserError` where the numbers do not match.
    """
    world_size, devices = count_processes(hp)
    check(devices > 0, "--devices must be 1 or more")
    check(hp.devices in (0, devices),
          f"--devices {hp.devices}, but {devices} process(es) were started "
          "on a node: make srun's --ntasks-per-node (torchrun's "
          "--nproc-per-node) the same, or leave --devices out")
    check_device(hp, devices)
    rank, local_rank = (int(os.environ.get(name, 0))
                        for name in ("RANK", "LOCAL_RANK"))
    return rank, local_rank, world_size, world_size // devices


def count_processes(hp):
    """How many processes there are, or will be: in all, and on a node."""
    if "RANK" not in os.environ:
        return hp.devices or 1, hp.devices or 1
    world_size = int(os.environ["WORLD_SIZE"])
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def check_device(hp, devices):
    """Raise a `UserError` for what Lightning would not train on."""
    device = run.get_device(hp.device).type
    check(device != "xpu", "Lightning 2.6 does not know XPUs: use the DDP "
          "stage, or --device cpu")
    count = torch.accelerator.device_count()
    check(device == "cpu" or devices <= count,
          f"{devices} processes on a node, but {count} {device} device(s) "
          "for each: one device a process, all visible to all of them")
    check(hp.strategy in STRATEGIES, f"--strategy {hp.strategy}: choose from "
          f"{', '.join(STRATEGIES)}")
    check(device != "cpu" or hp.strategy in ("ddp", "fsdp2"),
          f"--strategy {hp.strategy} needs a GPU: on a CPU, --strategy fsdp2 "
          "shards the model too")
    check("deepspeed" not in hp.strategy or find_spec("deepspeed"),
          "DeepSpeed is not installed: "
          "pip install -r requirements-deepspeed.txt")
    if hp.compile and hp.strategy not in ("ddp", "fsdp"):
        hp.compile = False
        if os.environ.get("RANK", "0") == "0":
            run.warn(f"Lightning does not compile with {hp.strategy}: going "
                     "on without")


# ----------------------------------------------------- what a Trainer needs


def options(hp):
    """Flags of the Trainer: whom to ask for ranks, and what it leaves to us.
    """
    if "RANK" in os.environ:
        environment = TorchElasticEnvironment()
    else:  # it starts the others itself, on this node
        environment = LightningEnvironment()
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.pop("MASTER_PORT", None)  # any free one
    return {
        "plugins": [environment], "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None, "use_distributed_sampler": False,
    }


def get_strategy(hp):
    """The strategy that --strategy names, as the Trainer takes it."""
    world_size, _ = count_processes(hp)
    if hp.strategy == "ddp":
        if world_size == 1:
            return "auto"  # nothing to reduce
        return DDPStrategy(gradient_as_bucket_view=True)
    if hp.strategy == "fsdp2":
        return FSDP2(world_size)
    if hp.strategy == "fsdp":
        return FSDPStrategy(auto_wrap_policy=is_block)
    return DeepSpeedStrategy(
        stage=int(hp.strategy[-1]),
        logging_batch_size_per_gpu=hp.microbatch_size)


class FSDP2(ModelParallelStrategy):
    """Every device keeps a shard of each block, and gathers it when used."""

    def __init__(self, world_size):
        super().__init__(
            data_parallel_size=world_size, tensor_parallel_size=1,
            save_distributed_checkpoint=False)

    def setup_environment(self):
        super().setup_environment()
        self.lightning_module.configure_model = self.shard  # called next

    def shard(self):
        model, mesh = self.lightning_module, self.device_mesh["data_parallel"]
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)  # the embeddings, the last LayerNorm


def is_block(module, recurse, nonwrapped_numel):
    """Which modules Lightning's fsdp shards one by one."""
    return recurse or type(module).__name__ == "Block"


class Microbatches(IterableDataset):
    """A DataIterator's microbatches, from where it stands, for a DataLoader.

    The DataIterator knows which samples are this rank's: the DataLoader is to
    have no sampler that shuffles or deals them out again, and no workers, each
    of which would read all of them.
    """

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return copy.copy(self.data)  # each sweep begins where `data` stands


# --------------------------------------------------------------- the run


class LitRun(L.Callback):
    """Logs, validates, saves, resumes and stops as the other stages do.

    write_texts(model, encoding, device, seed) returns what is printed every
    --generate-every steps. All ranks call every method.
    """

    def __init__(self, stage, train_data, write_texts):
        self.stage, self.train_data = stage, train_data
        self.write_texts = write_texts

    def setup(self, trainer, module, stage):
        """Make the run, and load the weights while the model is whole."""
        hp = self.hp = module.hp
        if dist.is_initialized():
            atexit.register(dist.destroy_process_group)  # also after an error
        microbatches = trainer.accumulate_grad_batches
        trainer.val_check_interval = hp.eval_every * microbatches
        trainer.limit_val_batches = hp.eval_minibatches * microbatches
        if not isinstance(trainer.strategy, DeepSpeedStrategy):
            # Lightning does not say what it clipped, and refuses to with a
            # fused AdamW under bf16
            self.clip, trainer.gradient_clip_val = (
                trainer.gradient_clip_val, None)
        self.device = trainer.strategy.root_device
        self.run = Run(
            self.stage, hp, module.config, trainer.max_steps, self.device)
        self.step, self.optimizer_state = self.run.load(module)
        check(self.step == 0 or "deepspeed" not in hp.strategy, "a run does "
              "not go on with DeepSpeed, which keeps the optimizer's state to "
              "itself: start another from the weights, with --init")
        self.train_data.seek(self.step * hp.minibatch_size)

    def on_fit_start(self, trainer, module):
        """Let Lightning go on at our step."""
        if self.step == 0:
            return
        spread_optimizer_state(trainer, module, self.optimizer_state)
        self.optimizer_state = None
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress.optimizer
        progress.step.total.completed = self.step  # trainer.global_step
        loop.batch_progress.total.ready = (  # says when to validate
            self.step * trainer.accumulate_grad_batches)
        for config in trainer.lr_scheduler_configs:
            config.scheduler.last_epoch = self.step - 1
            with warnings.catch_warnings():  # of a step before the optimizer's
                warnings.simplefilter("ignore")
                config.scheduler.step()

    def on_train_start(self, trainer, module):
        self.run.catch_signals()  # Lightning's handler waits for other ranks
        # for which all ranks, and their GPUs, wait at every microbatch
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self.begin_step()

    def begin_step(self):
        self.start_time = time.perf_counter()
        self.mean_loss = torch.zeros((), device=self.device)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.lr = optimizer.param_groups[0]["lr"]
        if not isinstance(trainer.strategy, DeepSpeedStrategy):
            self.norm = clip_gradients(trainer.strategy.model, self.clip)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.mean_loss += outputs["loss"]  # is divided already
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        report = torch.stack((
            self.mean_loss,
            torch.tensor(self.run.stop_requested, device=self.device)))
        loss, stop = trainer.strategy.reduce(report, reduce_op="mean").tolist()
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            self.norm = trainer.strategy.model.get_global_grad_norm()
        norm = float(self.norm)
        seconds = time.perf_counter() - self.start_time
        self.run.check_finite(self.step - 1, loss, norm)

        last, every = self.step == trainer.max_steps, self.hp.eval_every
        trainer.should_stop = last or bool(stop)
        self.row = loss, self.lr, norm, seconds
        if not last and self.step % every:
            if stop:  # Lightning would validate before it stops
                trainer.limit_val_batches = 0
            self.end_step(trainer, module)

    def on_validation_end(self, trainer, module):
        self.end_step(trainer, module,
                      trainer.callback_metrics["val_loss"].item())

    def end_step(self, trainer, module, val_loss=None):
        """Log; save, and let the model write, where it is time to."""
        hp, run, step = self.hp, self.run, self.step
        loss, lr, norm, seconds = self.row
        last = step == trainer.max_steps
        if run.rank == 0:
            run.log(step - 1, loss, val_loss, lr, norm, seconds)
        if trainer.should_stop or step % hp.checkpoint_every == 0:
            model, optimizer = gather_state(trainer, module)
            if run.rank == 0:
                run.save(step, Gathered(model), Gathered(optimizer))
        if last or step % hp.generate_every == 0:
            self.print_texts(module)
        self.begin_step()

    def print_texts(self, module):
        if not self.run.encoding or self.hp.strategy not in ("ddp", "fsdp2"):
            return  # elsewhere a part of the model does not run by itself
        seed = self.hp.seed + 1000 * (self.step - 1) + self.run.rank
        texts = [None] * self.run.world_size
        with torch.compiler.set_stance("force_eager"):  # of many lengths
            texts[0] = self.write_texts(
                module, self.run.encoding, self.device, seed)
        if self.run.world_size > 1:
            dist.all_gather_object(texts, texts[0])
        if self.run.rank == 0:
            print(*texts, sep="\n")

    def on_fit_end(self, trainer, module):
        trainer.strategy.barrier()
        self.run.finish()


def clip_gradients(model, clip):
    """Their norm before they are clipped, over all ranks, a tensor."""
    clip = clip or math.inf
    if isinstance(model, FullyShardedDataParallel):  # of --strategy fsdp
        return model.clip_grad_norm_(clip)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ------------------------------------------- one format for every strategy


@dataclass
class Gathered:
    """A state from all ranks, as `Run.save` asks for it."""

    state: dict

    def state_dict(self):
        return self.state


def gather_state(trainer, module):
    """The model's and the optimizer's whole state, on rank 0. All ranks.

    As the other stages write it: the optimizer's parameters are numbers. Of
    DeepSpeed's optimizer there is none.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(weight).cpu() for name, weight
                in module.named_parameters(remove_duplicate=False)}, None
    model, options = trainer.strategy.model, StateDictOptions(
        full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(
        model, trainer.optimizers[0], options=options)
    names = [name for group in state.get("param_groups", ())
             for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return weights, rename(state, numbers)


def spread_optimizer_state(trainer, module, state):
    """Give each rank its part of what `gather_state` returned. All ranks."""
    optimizer = trainer.optimizers[0]
    names = {weight: name.replace("_fsdp_wrapped_module.", "")
             for name, weight in module.named_parameters()}
    weights = [weight for group in optimizer.param_groups
               for weight in group["params"]]
    names = dict(enumerate(names[weight] for weight in weights))
    set_optimizer_state_dict(
        trainer.strategy.model, optimizer, rename(state, names),
        options=StateDictOptions(full_state_dict=True))


def rename(state, names):
    """An optimizer's state with other keys for its parameters."""
    if not state:  # of another rank than 0
        return {}
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]}
            for group in state["param_groups"]],
    }
