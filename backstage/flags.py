"""The flags of a stage: what a run does, and why.

The flags are the fields of the stage's `Hyperparameters`, first `RunFlags`.
Their defaults come from the resumed run, the preset, or the machine.
"""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import torch

from backstage import ROOT, dataset, errors, track
from backstage.device import device_name, find_device, has_bf16, memory_size
from backstage.errors import UserError, require, warn
from backstage.files import show_path
from backstage.interfaces import ModelConfig, StageFlags
from backstage.process import count_processes
from backstage.record import is_claimed, read_record

DEMO = ROOT / "fineweb" / "demo"
FINEWEB = ROOT / "fineweb" / "edu_fineweb10B"

SHAPE = "n_layer", "n_head", "n_embd", "block_size"
AT_LEAST = {"seed": -errors.LARGEST} | dict.fromkeys((
    *SHAPE, "microbatch_size", "max_steps", "warmup_steps", "profile",
    "devices", "weight_decay", "learning_rate"), 0)  # 1 for all others
OF_ONE_START = ("run_dir", "resume", "init", "profile", "devices",
                "tensor_parallel", "pipeline_parallel")
SAID = ("preset", "data", "device", "precision", "microbatch_size",
        "run_dir", "resume")  # in another place of the log's first lines


@dataclass
class RunFlags:
    """What a run reads, where it writes, and on which device."""

    data: str = ""  # folder of the shards
    run_dir: str = ""  # the run's folder (empty: runs/<date>-<time>-<stage>)
    resume: bool = False  # continue from the last checkpoint in --run-dir
    init: str = ""  # start from the weights of this checkpoint
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator, if any)
    track: Literal["no", "tensorboard", "wandb"] = "no"  # metrics for it, too
    profile: int = 0  # steps to record: where does their time go?
    n_layer: int = 0  # blocks (here and in the next three, 0: the preset's)
    n_head: int = 0  # heads of each attention
    n_embd: int = 0  # how wide the model is
    block_size: int = 0  # the longest sequence
    prompt: str = "Hello, I'm a language model,"  # what texts begin with

    # Flags that some stages have; 0: this one has none.
    devices = tensor_parallel = pipeline_parallel = 0


Hp = TypeVar("Hp", bound=StageFlags)
Config = TypeVar("Config", bound=ModelConfig)


def parse(Hyperparameters: type[Hp], presets: Mapping[str, Hp],
          models: Mapping[str, Config]) -> tuple[Hp, Config]:
    """Return (hyperparameters, the model's GPTConfig) for the flags.

    presets: name -> Hyperparameters; models: name -> GPTConfig. All ranks.
    """
    arguments = sys.argv[1:]
    least = dict.fromkeys(vars(presets["nano"]), 1) | AT_LEAST
    hp = errors.parse_flags(Hyperparameters, presets["nano"], arguments,
                            **least)
    flags = {re.sub("--(no-)?", "", argument.split("=")[0]).replace("-", "_")
             for argument in arguments if argument.startswith("--")}
    given = {name: value for name, value in vars(hp).items() if name in flags}
    saved = read_hyperparameters(hp) if hp.resume else {}
    device = find_device((saved | given).get("device", "auto"))
    hp, config, why = choose_hyperparameters(
        presets, models, saved, given, device)
    errors.check_numbers(hp, least)
    if not given.get("microbatch_size"):
        hp.microbatch_size = choose_microbatch_size(hp, device)
    dataset.check_shards(hp.data, hp.sequence_length)
    track.require_tracker(hp.track)
    if os.environ.get("RANK", "0") == "0":
        announce_run(hp, presets[hp.preset], device, why)
    return hp, config


def choose_hyperparameters(
        presets: Mapping[str, Hp], models: Mapping[str, Config],
        saved: dict[str, Any], given: dict[str, Any],
        device: torch.device) -> tuple[Hp, Config, list[str]]:
    """(hyperparameters, the model's GPTConfig, why: a list of texts)."""
    asked, why = saved | given, []
    accelerated, has_data = device.type != "cpu", find_data("gpt2") is not DEMO
    preset = asked.get("preset")
    if not preset:
        large = accelerated and (asked.get("data") or has_data)
        preset = "gpt2" if large else "nano"
        why += ["an accelerator" if accelerated else "no accelerator"]
    data = asked.get("data") or find_data(preset)
    if data is DEMO:
        why += ["the demo dataset suits the preset" if has_data else
                "no FineWeb folder"]
    data = Path(data).resolve()
    require(data.is_dir() or data != DEMO, f"{show_path(DEMO)} does not exist"
            "; fix: name a dataset with --data, or build this one with the "
            "course's `source activate.sh`")
    values = vars(presets[preset]) | {
        "compile": preset.startswith("gpt2") and device.type == "cuda"}
    if not has_bf16(device):
        values["precision"] = "fp32"
        if accelerated:
            why.append("no bf16 arithmetic")
    if preset == saved.get("preset"):  # whichever stage saved it
        values |= saved
    hp = type(presets[preset])(
        **values | given | {"preset": preset, "data": str(data)})
    config = replace(models[preset], **{
        name: getattr(hp, name) for name in SHAPE if getattr(hp, name)})
    require(hp.sequence_length <= config.block_size,
            f"--sequence-length {hp.sequence_length} is longer than the "
            f"{config.block_size} positions of the model; fix: reduce it, or "
            "raise --block-size")
    require(config.n_embd % config.n_head == 0, f"--n-embd {config.n_embd} is "
            f"not divisible by --n-head {config.n_head}; fix: change one")
    # The position in the data follows from the step, S and T.
    for name in ("preset", "minibatch_size", "sequence_length"):
        flag, now = "--" + name.replace("_", "-"), getattr(hp, name)
        require(now == saved.get(name, now), f"{hp.run_dir}: this run was "
                f"started with {flag} {saved.get(name)} and cannot continue "
                f"with {now}; fix: leave {flag} out")
    return hp, config, why


def announce_run(hp: StageFlags, preset: StageFlags, device: torch.device,
                 why: list[str]) -> None:
    """Print the log's first line, and before it what may be unwanted."""
    if hp.warmup_steps > hp.max_steps > 0:
        warn("the run ends before the learning rate's warm-up: "
             f"--warmup-steps is {hp.warmup_steps}, --max-steps "
             f"{hp.max_steps}; fix: use fewer --warmup-steps")
    with suppress(UserError):  # training needs no manifest
        if dataset.read_manifest(hp.data).get("complete") is False:
            warn(f"{hp.data} is incomplete: the program that builds it is "
                 "still running or was stopped; fix: let it finish")
    if hp.precision == "bf16" and "no bf16 arithmetic" in why:
        warn(f"{device_name(device)} only emulates bf16, which is slower than "
             "fp32; fix: --precision fp32")
    other = [f"{name} {value}" for name, value in vars(hp).items()
             if name not in SAID and value != getattr(preset, name)]
    line = f"preset {hp.preset}, data {show_path(hp.data, Path.cwd())}"
    if why:
        line += f" ({', '.join(why)})"
    line += (f", device {device.type}, {hp.precision}, microbatches of "
             f"{hp.microbatch_size}")
    if other:
        line += f"; unlike the preset: {', '.join(other)}"
    print(line, flush=True)


def read_hyperparameters(hp: StageFlags) -> dict[str, Any]:
    """Return the hyperparameters of the run to resume, as defaults."""
    require(hp.run_dir, "--resume needs the run's folder; fix: add --run-dir "
            "DIR")
    if is_claimed(hp.run_dir):
        return {}
    record: dict[str, Any] = {"hyperparameters": {}}
    with suppress(FileNotFoundError):
        record = read_record(hp.run_dir, get_type_hints(type(hp)))
    return {name: value for name, value in record["hyperparameters"].items()
            if name in vars(hp) and name not in OF_ONE_START}


def find_data(preset: str) -> Path:
    """The dataset of a preset: FineWeb for the large ones, if it is here."""
    fineweb = Path(os.environ.get("WORKSHOP_DATA") or FINEWEB).expanduser()
    return fineweb if preset.startswith("gpt2") and fineweb.is_dir() else DEMO


def choose_microbatch_size(hp: StageFlags, device: torch.device) -> int:
    """Choose the microbatch size if none is given.

    The most that divide a data-parallel group's part of the minibatch, up to
    what the preset or the resumed run has, or what fits into the device.
    """
    _, world_size = count_processes(hp.devices or 1)
    share = (hp.tensor_parallel or 1) * (hp.pipeline_parallel or 1)
    part = max(1, hp.minibatch_size // max(1, world_size // share))
    most = hp.microbatch_size or 64
    if hp.preset == "gpt2" and not hp.microbatch_size:
        # Sequences of 1,024 in bf16, not compiled: 16 of them take 16 GiB, 32
        # take 31, 64 take 60; fp32 takes up to twice as much. The loss has
        # three tensors of 0.19 GiB for each; loss_parallel has four, divided.
        more = 0.19 * (4 / hp.tensor_parallel - 3) if hp.tensor_parallel else 0
        gibibytes = memory_size(device) / 2**30
        most = next((size for size, least in ((64, 70), (32, 35), (16, 20))
                     if gibibytes >= least + size * more), 8)
        most //= 1 + (hp.precision == "fp32")
    if hp.pipeline_parallel > 1:
        # with 8 microbatches each stage waits for 11% of the time at most
        most = min(most, part // (8 * hp.pipeline_parallel))
    return max(size for size in range(1, max(1, most) + 1) if part % size == 0)
