"""A trained model, from the checkpoint of any stage: for what it writes."""

from pathlib import Path

import torch

from backstage import ROOT, checkpoint
from backstage.errors import require
from backstage.files import reading
from solutions import train_gpt2_std as std
from workshop.results.arithmetic import is_count


def find_checkpoint(run):
    """The newest checkpoint in a run's folder, or of the newest run for "".

    A file is its own.
    """
    if Path(run).is_file():
        return Path(run)
    folder = Path(run) if run else ROOT / "runs"
    require(folder.is_dir(), f"{folder}: there is no such run")
    files = (file for place in folder.glob("**/checkpoints")
             for file in checkpoint.list_checkpoints(place))
    newest = max(files, default=None,
                 key=lambda file: (file.stat().st_mtime_ns, file.name))
    require(newest, f"{folder}: no checkpoint is there: train first")
    return newest


def load_trained(file):
    """A checkpoint's dictionary, and its model on the CPU, as stage std's.

    Raises `Damaged` if it has not all that such a model needs.
    """
    state = checkpoint.load_checkpoint(file)
    with reading(file):
        config, data = state["config"], state["hyperparameters"]["data"]
        require(isinstance(data, str) and "\0" not in data,
                "its data is no path")
        require(all(map(is_count, config.values())),
                "its config is no model's")
        require(config["n_embd"] % config["n_head"] == 0,
                "n_head does not divide n_embd")
        last = f"transformer.h.{config['n_layer'] - 1}.ln_1.weight"
        require(last in state["model"], f"{last} is missing")
        with torch.device("meta"):  # no weights, but their shapes
            model = std.GPT(std.GPTConfig(**config))
    checkpoint.check_fit(file, state, checkpoint.outline(model))
    model.load_state_dict(state["model"], assign=True)
    return state, model
