"""The metrics for another tool, in addition to metrics.csv: --track.

Both write into the run's folder and need no network. TensorBoard shows all
runs at once, `tensorboard --logdir runs`; what wandb has written is uploaded
later, `wandb sync runs/*/wandb/offline-run-*`.
"""

import importlib.util
import os

from backstage.errors import require
from backstage.record import read_record

TOOLS = ("tensorboard", "wandb")  # the names of their packages, too


def check(name):
    """Raise a `UserError` if the tool is not installed. All ranks."""
    require(name not in TOOLS or importlib.util.find_spec(name),
            f"--track {name} needs a package that is not installed: "
            f"pip install {name}")


def start(name, folder, step):
    """The tool's `log(step, metrics)` and `close()`. Rank 0 alone.

    folder: the run's; step: the first one that will be logged.
    """
    return {"tensorboard": TensorBoard, "wandb": Wandb}.get(name, Tracker)(
        folder, step)


class Tracker:
    """Does nothing: for --track no."""

    def __init__(self, folder, step):
        pass

    def log(self, step, metrics):
        """metrics: {name: number, or None where it was not measured}."""

    def close(self):
        """The run has ended."""


class TensorBoard(Tracker):
    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter

        # what a run that was killed wrote after its checkpoint is hidden
        self.writer = SummaryWriter(
            folder, purge_step=step or None, flush_secs=10)

    def log(self, step, metrics):
        for name, value in metrics.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)

    def close(self):
        self.writer.close()


class Wandb(Tracker):
    def __init__(self, folder, step):
        import wandb

        record = read_record(folder)
        self.run = wandb.init(
            project="gpt2-workshop", name=folder.name, dir=folder,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=record["hyperparameters"] | {
                key: record[key] for key in ("stage", "world_size")},
            settings=wandb.Settings(console="off", silent=True))

    def log(self, step, metrics):
        self.run.log({name: value for name, value in metrics.items()
                      if value is not None}, step=step)

    def close(self):
        self.run.finish()
