"""The metrics for another tool, in addition to metrics.csv: --track.

Both write into the run's folder and need no network. TensorBoard shows all
runs at once, `tensorboard --logdir runs`; what wandb has written is uploaded
later, `wandb sync runs/*/wandb/offline-run-*`.
"""

import importlib.util
import os

from backstage.errors import require

TOOLS = ("tensorboard", "wandb")  # the names of their packages, too


def check(name):
    """Raise a `UserError` if the tool is not installed. All ranks."""
    require(name not in TOOLS or importlib.util.find_spec(name),
            f"--track {name} needs a package that is not installed: "
            f"pip install {name}")


def start(name, folder, step, record):
    """The tool, which logs rows of metrics; None for "no". Rank 0 alone.

    folder: the run's; step: the first one that will be logged; record: what
    the run was started with.
    """
    tool = {"tensorboard": TensorBoard, "wandb": Wandb}.get(name)
    return tool and tool(folder, step, record)


class TensorBoard:
    def __init__(self, folder, step, record):
        from torch.utils.tensorboard import SummaryWriter

        # what a run that was killed wrote after its checkpoint is hidden
        self.writer = SummaryWriter(
            folder, purge_step=step or None, flush_secs=10)

    def log(self, row):
        for name, value in row.items():
            if value is not None and name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self):
        self.writer.close()


class Wandb:
    def __init__(self, folder, step, record):
        import wandb

        self.run = wandb.init(
            project="gpt2-workshop", name=folder.name, dir=folder,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=record["hyperparameters"] | {
                key: record[key] for key in ("stage", "world_size")},
            settings=wandb.Settings(console="off", silent=True))

    def log(self, row):
        self.run.log({name: value for name, value in row.items()
                      if value is not None and name != "step"},
                     step=row["step"])

    def close(self):
        self.run.finish()
