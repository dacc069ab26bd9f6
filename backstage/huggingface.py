"""GPT-2 in a folder as Hugging Face's transformers read and write it.

Three things differ from ours. Their linear layers are of a class of their own,
Conv1D, whose weights are transposed. The rows of c_attn are ordered q, k, v,
and by heads only within these; ours are ordered by heads, and q, k, v within
each. And our vocabulary is padded to a multiple of 128 rows.
"""

import json
import shutil
from pathlib import Path

import torch

from backstage.errors import UserError, require
from backstage.files import write_atomically
from backstage.flops import padded_vocab_size
from backstage.schema import COUNT, check, read_json

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
WTE, LM_HEAD = "transformer.wte.weight", "lm_head.weight"  # tied


def is_folder(path):
    """Whether the path is a folder in Hugging Face's format."""
    return (Path(path) / CONFIG).is_file()


def safetensors():
    """The library's module for torch."""
    try:
        import safetensors.torch as module
    except ModuleNotFoundError as error:
        raise UserError("safetensors is not installed: run `pip install -r "
                        "requirements.txt`") from error
    return module


def read_folder(folder):
    """(config, weights) as in our checkpoints, in fp32, on the CPU.

    Raises `ValueError` if the folder holds another kind of model, and whatever
    the libraries raise if it is damaged.
    """
    folder = Path(folder)
    theirs = read_json(folder / CONFIG, dict.fromkeys(NAMES.values(), COUNT),
                       "copy it again")
    for name, value in FIXED.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"{name} is {theirs[name]}, but the course's "
                             f"model has {value}")
    config = {ours: theirs[name] for ours, name in NAMES.items()}
    if theirs.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError("n_inner is not 4 * n_embd")
    if (folder / WEIGHTS).exists():
        found = safetensors().load_file(folder / WEIGHTS)
    elif (folder / PICKLED).exists():
        found = torch.load(folder / PICKLED, map_location="cpu",
                           weights_only=True)
    else:
        raise ValueError(f"it has no {WEIGHTS} and no {PICKLED}")
    check(found, {str: torch.Tensor})
    weights = {}
    for name, weight in found.items():
        if not name.endswith((*MASKS, LM_HEAD)):
            name = f"transformer.{name.removeprefix('transformer.')}"
            weights[name] = from_theirs(name, weight.float(), config["n_head"])
    if WTE not in weights:
        raise ValueError(f"{WTE} is missing")
    weights[LM_HEAD] = weights[WTE] = pad(weights[WTE])
    return config, weights


def from_theirs(name, weight, heads):
    """A weight in our layout."""
    if name.endswith(TRANSPOSED):
        weight = weight.t()
    if ".c_attn." in name:
        weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(
            0, 2)
    return weight.contiguous()


def to_theirs(name, weight, heads):
    """A weight of ours in their layout."""
    if ".c_attn." in name:
        weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(
            0, 2)
    if name.endswith(TRANSPOSED):
        weight = weight.t()
    return weight.contiguous()


def pad(embedding):
    """The embedding with as many rows as ours has.

    Each new row is the mean of the others. Its logit is the mean logit then,
    of which the exponential is at most the mean of their exponentials: the 47
    new rows of GPT-2's 50,257 make the loss at most 0.001 larger. A row of
    zeros would have the logit 0, by far the largest.
    """
    rows, width = embedding.shape
    mean = embedding.mean(dim=0, keepdim=True)
    return torch.cat((embedding, mean.expand(
        padded_vocab_size(rows) - rows, width)))


def write_folder(folder, config, weights):
    """Write a model of ours for transformers; the folder must be new."""
    folder = Path(folder)
    require(not folder.exists(), f"{folder} is there already: name another")
    library = safetensors()
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
        write_atomically(folder / WEIGHTS, library.save(
            theirs, metadata={"format": "pt"}))
        write_atomically(folder / CONFIG, json.dumps(text, indent=1).encode())
    except UserError:  # the next attempt may make it anew
        shutil.rmtree(folder, ignore_errors=True)
        raise
