"""What a run writes for other tools: --track and --profile.

TensorBoard and wandb write into the run's folder and need no network:
`tensorboard --logdir runs` shows all runs, `wandb sync
runs/*/wandb/offline-run-*` uploads them later.

With --profile N each rank writes what its operators and kernels did in N steps
to RUN/profile/<date>-trace/rank<r>.json.gz: see https://ui.perfetto.dev. The
course's tools make a table of it: where the time goes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from os import environ
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from backstage.errors import require, warn
from backstage.files import new_folder
from backstage.world import call_on_rank_0, get_rank_and_size


def require_tracker(name: str) -> None:
    """Raise a `UserError` if the tool is not installed. All ranks."""
    require(name not in TRACKERS or importlib.util.find_spec(name),
            f"--track {name} needs a package that is not installed; fix: "
            f"pip install {name}")


class TensorBoard:
    def __init__(self, folder: Path, step: int,
                 record: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what a run that was killed wrote after its checkpoint is hidden
        self.writer = SummaryWriter(
            folder, purge_step=step or None, flush_secs=10)
        self.close = self.writer.close

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)


class Wandb:
    def __init__(self, folder: Path, step: int,
                 record: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=environ.get("WANDB_PROJECT", "gpt2-workshop"), dir=folder,
            name=folder.name, mode=environ.get("WANDB_MODE", "offline"),
            config=record["hyperparameters"] | record["config"] | {
                key: record[key] for key in ("stage", "world_size")},
            settings=wandb.Settings(console="off", silent=True))
        self.close = self.run.finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(metrics, step=step)


# by their packages
TRACKERS: dict[str, type[TensorBoard] | type[Wandb]] = {
    "tensorboard": TensorBoard, "wandb": Wandb}
# Steps that do not count: those that allocate and compile, one in which the
# profiler warms up, and the first that it records, which starts late.
BEFORE = 5


class Recorder(profiler.profile):
    """Records N steps. All ranks."""

    def __init__(self, steps: int, folder: Path, device: torch.device) -> None:
        rank, _ = get_rank_and_size()
        traces = call_on_rank_0(
            lambda: str(new_folder(folder / "profile", "trace")))
        environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints
        super().__init__(
            activities=profiler.supported_activities() if device.type != "cpu"
            else {profiler.ProfilerActivity.CPU},
            schedule=profiler.schedule(skip_first=BEFORE - 2, wait=0, warmup=1,
                                       active=steps + 1, repeat=1),
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(
                f"{traces}/rank{rank}.json.gz"))
        self.start()

    def step_ended(self, step: int) -> None:
        """Mark the end of a step."""
        with profiler.record_function(f"end of step {step}"):
            pass  # a mark for those who read the trace
        self.step()

    def finish(self) -> None:
        """Stop recording; warn if no step was recorded."""
        self.stop()
        if self.step_num <= BEFORE and get_rank_and_size()[0] == 0:
            warn("--profile has recorded nothing: the run ended within the "
                 f"first {BEFORE} steps, which it skips; fix: train longer")
