"""DeepSpeed's ZeRO, as the Lightning stage uses it.

Each process keeps a shard of the optimizer's state (stage 1), of the gradients
as well (stage 2), and of the parameters as well (stage 3). For a checkpoint
DeepSpeed gathers its shards into a whole model and optimizer on the CPU. Few
have DeepSpeed installed, so the methods import it.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from backstage.checkpoint import MOMENTS
from backstage.errors import require
from backstage.interfaces import RestorableRun

# DeepSpeed 0.19 calls what PyTorch 2.13 has other names for
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)

DEVICES = {"cuda"}  # on which Lightning runs it


class Zero(DeepSpeedStrategy):
    """DeepSpeedStrategy, which saves and resumes as the other stages do."""

    @staticmethod
    def check(device: torch.device) -> None:
        """Raise a `UserError` if DeepSpeed cannot run here."""
        require(device.type in DEVICES, "Lightning runs DeepSpeed on NVIDIA "
                f"GPUs, not on {device.type}; fix: use --strategy fsdp2")
        require(importlib.util.find_spec("deepspeed"), "DeepSpeed is not "
                "installed; fix: run `source activate.sh deepspeed`, or use "
                "--strategy fsdp2")

    def setup(self, trainer: L.Trainer) -> None:
        """Keep a full copy on the CPU, to save from and load into."""
        module: Any = self.lightning_module
        self.whole: Any
        self.whole = copy.deepcopy(module.model)
        self.whole_optimizer = self.whole.configure_optimizers(module.hp)
        # DeepSpeed clips: at this point it has no gradients to show
        module.configure_gradient_clipping = lambda *args, **options: None
        super().setup(trainer)

    def _setup_model_and_optimizer(
            self, model: nn.Module, optimizer: Optimizer | None,
            lr_scheduler: Any = None) -> Any:
        if self.zero_stage_3:  # one by one: no device ever holds all of it
            from deepspeed import zero
            if "bf16" in (self.config or {}):
                model.bfloat16()
            zero.Init(module=model, config_dict_or_path=self.config)
        return super()._setup_model_and_optimizer(
            model, optimizer, lr_scheduler)

    def backward(self, closure_loss: torch.Tensor,
                 optimizer: Optimizer | None, *args: Any,
                 **options: Any) -> torch.Tensor:
        # Lightning has divided the loss by the accumulation steps already
        return super().backward(
            closure_loss, optimizer, *args, scale_wrt_gas=False, **options)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        module: Any = self.lightning_module
        module.norm = (  # before clipping
            self.deepspeed_engine.get_global_grad_norm())

    def restore(self, run: RestorableRun) -> int:
        """What `Run.restore` does. All ranks."""
        from deepspeed import zero
        optimizer = self.whole_optimizer
        step = run.restore(self.whole, optimizer)
        self.make_moments(step)
        for parameter, weight in self.pairs():
            with zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.data.copy_(weight.data)
            self.spread("fp32_param", parameter, weight.data)
            for name in MOMENTS if step > 0 else ():
                self.spread("optimizer_state", parameter,
                            optimizer.state[weight][name], name)
        optimizer.state.clear()
        return step

    def spread(self, kind: str, parameter: Any, whole: torch.Tensor,
               *name: str) -> None:
        """Set this rank's shard of a weight, or of its moment of that name."""
        from deepspeed import utils
        value, where = whole.to(self.root_device), "full"
        if self.zero_stage_3:  # DeepSpeed 0.19 would not pad the last shard
            size, where = parameter.ds_tensor.numel(), "local"
            missing = size * self.world_size - value.numel()
            value = F.pad(value.flatten(), (0, missing))[
                size * self.global_rank:][:size]
        getattr(utils, f"safe_set_{where}_{kind}")(parameter, value, *name)

    def save(self, run: RestorableRun, step: int) -> None:
        """What `Run.save` does. All ranks."""
        from deepspeed import utils
        optimizer = self.whole_optimizer
        for parameter, weight in self.pairs():
            weight.data.copy_(utils.safe_get_full_fp32_param(parameter))
            state = {name: utils.safe_get_full_optimizer_state(parameter, name)
                     for name in MOMENTS}
            if run.rank == 0:
                optimizer.state[weight] = {
                    "step": torch.tensor(float(step)),
                    **{name: tensor.cpu() for name, tensor in state.items()}}
        if run.rank == 0:
            run.save(step, self.whole, optimizer)
        optimizer.state.clear()

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of DeepSpeed's, with that of the whole copy."""
        module: Any = self.lightning_module
        return zip(module.parameters(), self.whole.parameters(), strict=True)

    def make_moments(self, step: int) -> None:
        """Create the optimizer's moments, as after N steps.

        It would make them in its first step, too late for a checkpoint's. And
        DeepSpeed 0.19 would find those of the first group of weights alone.
        """
        zero: Any = self.optimizers[0]  # DeepSpeed's own class
        shards = (zero.fp32_partitioned_groups_flat if self.zero_stage_3
                  else zero.single_partition_of_fp32_groups)
        for shard in shards:
            zero.optimizer.state[shard] = {
                "step": torch.tensor(float(step), device=shard.device),
                **{name: torch.zeros_like(shard) for name in MOMENTS}}
        if not self.zero_stage_3:
            zero._lazy_init_hp_params_optimizer_state()
