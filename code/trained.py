"""A trained model, from the checkpoint of any stage: for what it writes."""

from pathlib import Path

import torch

from backstage import ROOT, checkpoint
from backstage.errors import UserError, explain, require, warn
from backstage.files import Damaged, reading
from backstage.record import last_start
from solutions import train_gpt2_std as std
from workshop.results.arithmetic import is_count


def find_checkpoint(run):
    """The newest checkpoint in a run's folder, or of the newest run for "".

    A file is its own. In a run the step decides, and of several runs the one
    that was started last: a copy's files have the time of the copy.
    """
    if Path(run).is_file():
        return Path(run)
    folder = Path(run) if run else ROOT / "runs"
    require(folder.is_dir(), f"{folder}: no such run")
    found = checkpoint.list_checkpoints(folder / "checkpoints")
    if not found:
        runs = {place.parent: checkpoint.list_checkpoints(place)
                for place in folder.glob("**/checkpoints")}
        newest = max((run for run in runs if runs[run]), default=None,
                     key=lambda run: (last_start(run), run))
        found = runs.get(newest)
    require(found, f"{folder} has no checkpoint; fix: train first")
    return first_whole(found)


def first_whole(files: list[Path]) -> Path:
    """The first that is a checkpoint, as a run goes on; else the first."""
    for file in files:
        try:
            checkpoint.load_checkpoint(file, verify=False)
            return file
        except (Damaged, FileNotFoundError) as error:  # of a link
            if file != files[-1]:
                warn(f"{explain(error)}; using the one before it")
        except UserError:  # of an older format
            return file
    return files[0]


def load_trained(file):
    """A checkpoint's dictionary, and its model on the CPU, as stage std's.

    Raises `Damaged` if it has not all that such a model needs.
    """
    state = checkpoint.load_checkpoint(file)
    with reading(file):
        config, data = state["config"], state["hyperparameters"]["data"]
        require(isinstance(data, str) and "\0" not in data,
                "its data is not a path")
        require(all(map(is_count, config.values())),
                "its config is not a model's")
        require(config["n_embd"] % config["n_head"] == 0,
                "n_head does not divide n_embd")
        last = f"transformer.h.{config['n_layer'] - 1}.ln_1.weight"
        require(last in state["model"], f"{last} is missing")
        with torch.device("meta"):  # no weights, but their shapes
            model = std.GPT(std.GPTConfig(**config))
    checkpoint.check_fit(file, state, checkpoint.outline(model))
    model.load_state_dict(state["model"], assign=True)
    return state, model
