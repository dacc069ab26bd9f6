"""GPT-2 in a folder as Hugging Face's transformers read and write it.

    python code/huggingface.py export RUN FOLDER   # our model for theirs
    python code/huggingface.py import FOLDER FILE  # theirs, for --init

RUN is the folder of a run, or a checkpoint; FILE the checkpoint to write.

Three things differ from ours. Their linear layers are of a class of their own,
Conv1D, whose weights are transposed. The rows of c_attn are ordered q, k, v,
and by heads only within these; ours are ordered by heads, and q, k, v within
each. And our vocabulary is padded to a multiple of 128 rows.
"""

import json
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
from trained import find_checkpoint, load_trained, std

from backstage import dataset
from backstage.checkpoint import FORMAT, TIED, check_fit, outline
from backstage.errors import UserError, require, run_main
from backstage.files import reading, write_atomically
from backstage.flops import padded_vocab_size
from workshop.results.arithmetic import is_count

CONFIG, WEIGHTS, PICKLED = (
    "config.json", "model.safetensors", "pytorch_model.bin")
NAMES = {"block_size": "n_positions"} | {
    name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
FIXED = {  # what our model does; what a config.json leaves out is like that
    "model_type": "gpt2", "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # which older versions saved
WTE, LM_HEAD = TIED


def read_config(file):
    """Our `GPTConfig`, a dictionary, of a model of theirs."""
    with reading(file, "copy it again"):
        theirs = json.loads(file.read_bytes())
        config = {ours: theirs[name] for ours, name in NAMES.items()}
        for name, value in config.items():
            require(is_count(value), f"{name} is {value}")
    fixed = FIXED | {"n_inner": theirs.get("n_inner") and 4 * config["n_embd"]}
    for name, value in fixed.items():
        require(theirs.get(name, value) == value, f"{file}: {name} is "
                f"{theirs.get(name)}, but the course's model has {value}")
    return config


def read_weights(file, heads):
    """The weights as in our checkpoints, in fp32, on the CPU."""
    weights = {}
    with reading(file, "copy it again"):
        found = (safetensors.torch.load_file(file) if file.name == WEIGHTS else
                 torch.load(file, map_location="cpu", weights_only=True))
        for name, weight in found.items():
            name = name.removeprefix("_orig_mod.")  # of torch.compile
            if not name.endswith((*MASKS, LM_HEAD)):
                name = f"transformer.{name.removeprefix('transformer.')}"
                weights[name] = from_theirs(name, weight.float(), heads)
        weights[LM_HEAD] = weights[WTE] = pad(weights[WTE])
    return weights


def import_folder(folder, file):
    """Write a model of theirs as a checkpoint with weights alone.

    A run starts from it with --init; `code/generate.py` lets it write. The
    file must be new.
    """
    folder, file = Path(folder).resolve(), Path(file)
    require(not file.exists(), f"{file} already exists; fix: choose another")
    config = read_config(folder / CONFIG)
    weights = next((path for path in (folder / WEIGHTS, folder / PICKLED)
                    if path.exists()), None)
    require(weights, f"{folder} has no {WEIGHTS} and no {PICKLED}; fix: copy "
            "it again")
    state = {"format": FORMAT, "stage": "Hugging Face", "step": 0,
             "model": read_weights(weights, config["n_head"]),
             "optimizer": {"state": {}, "param_groups": []}, "config": config,
             "hyperparameters": {"data": str(folder)}}
    last = f"transformer.h.{config['n_layer'] - 1}.ln_1.weight"
    require(last in state["model"], f"{weights}: {last} is missing, but "
            f"{CONFIG} has n_layer {config['n_layer']}")  # to make it is long
    # no weights, but their shapes
    with reading(folder / CONFIG), torch.device("meta"):
        model = std.GPT(std.GPTConfig(**config))
    check_fit(weights, state, outline(model))
    write_atomically(file, lambda part: torch.save(state, part))
    print(f"{file} has the weights: start a run with --init {file}")


def from_theirs(name, weight, heads):
    if name.endswith(TRANSPOSED):
        weight = weight.t()
    if ".c_attn." in name:
        weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(
            0, 2)
    return weight.contiguous()


def to_theirs(name, weight, heads):
    if ".c_attn." in name:
        weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(
            0, 2)
    if name.endswith(TRANSPOSED):
        weight = weight.t()
    return weight.contiguous()


def pad(embedding):
    """The embedding with as many rows as ours has.

    Each new row is the mean of the others. Its logit is then the mean
    logit, whose exponential is at most the mean of their exponentials: the 47
    new rows of GPT-2's 50,257 make the loss at most 0.001 larger. A row of
    zeros would have the logit 0, by far the largest.
    """
    rows, width = embedding.shape
    mean = embedding.mean(dim=0, keepdim=True)
    return torch.cat((embedding, mean.expand(
        padded_vocab_size(rows) - rows, width)))


def export_run(run, folder):
    """Write the newest checkpoint of a run; the folder must be new.

    The vocabulary is written beside it as ours, for an import, if it is not
    GPT-2's, which transformers has.
    """
    file, folder = find_checkpoint(run), Path(folder)
    state, _ = load_trained(file)
    config, weights = state["config"], state["model"]
    require(not folder.exists(), f"{folder} already exists; fix: choose "
            "another")
    theirs = {name: to_theirs(name, weight.float(), config["n_head"])
              for name, weight in weights.items() if name != LM_HEAD}
    theirs[WTE] = theirs[WTE][:config["vocab_size"]].contiguous()
    text = FIXED | {theirs: config[ours] for ours, theirs in NAMES.items()} | {
        "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": config["vocab_size"] - 1,
        "eos_token_id": config["vocab_size"] - 1}
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} could not be made: {error.strerror}"
                        ) from error
    try:
        write_atomically(folder / WEIGHTS, safetensors.torch.save(
            theirs, metadata={"format": "pt"}))
        write_atomically(folder / CONFIG, json.dumps(text, indent=1).encode())
        for name in (dataset.TOKENS, dataset.SETTINGS):
            source = Path(state["hyperparameters"]["data"], name)
            if source.exists():
                write_atomically(folder / name, source.read_bytes())
    except UserError:  # the next attempt may make it anew
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{file} is in {folder}: "
          f"GPT2LMHeadModel.from_pretrained({str(folder)!r})")


def main():
    commands = {"export": export_run, "import": import_folder}
    command, *words = sys.argv[1:] or [""]
    require(command in commands and len(words) == 2, "invalid arguments; fix: "
            "python code/huggingface.py export RUN FOLDER, or import FOLDER "
            "FILE")
    commands[command](*(Path(word).expanduser() for word in words))


if __name__ == "__main__":
    run_main(main)
