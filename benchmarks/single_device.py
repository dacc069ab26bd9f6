"""The speed of one device against a plain loop over transformers' GPT-2.

    pip install -r benchmarks/requirements.txt
    python benchmarks/single_device.py                 # both shapes
    python benchmarks/single_device.py --shape gpt2 --rounds 5

Both sides hold the same model: first their logits for the same tokens, in fp32
and with the same weights, are compared. Then each side is a process of its own
(with a peak memory of its own). They take short turns, so that whatever else
the machine does slows all of them down. The plain side is what one would write
first: fp32, AdamW, the model's own loss. Ours is measured with --no-compile
and with --compile.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from backstage import ROOT
from backstage.command_line import parse_flags
from backstage.device import compile_model, cpu_has_bf16, pin, use_device
from backstage.errors import require, run_main

sys.path.insert(0, str(ROOT / "solutions"))
import train_gpt2_std as std

SHAPES = {  # config, vocabulary (nano: the demo's), microbatch on CPU and GPU
    "nano": (std.MODELS["nano"], 2048, 2, 64),
    "gpt2": (std.MODELS["gpt2"], 50257, 1, 16),
}
SIDES = ("eager", "compiled", "plain")


@dataclass
class Flags:
    """Measure how fast one device trains."""

    shape: Literal["nano", "gpt2", "both"] = "both"  # which model
    rounds: int = 10  # turns of each side
    seconds: float = 3.0  # of training in each turn
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator if any)
    side: Literal["", "eager", "compiled", "plain"] = ""  # only measure this


def make(side, shape, device):
    """A function that trains on one microbatch, and how many tokens it has."""
    config, vocab_size, on_cpu, on_gpu = SHAPES[shape]
    B = on_cpu if device.type == "cpu" else on_gpu
    T = config.block_size
    config = std.GPTConfig(**asdict(config) | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    tokens = torch.randint(vocab_size, (B, T + 1))
    batch = pin(torch.stack((tokens[:, :-1], tokens[:, 1:])))
    if side == "plain":
        model = plain_model(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def loss():
            x = batch[0].to(device)
            return model(input_ids=x, labels=x).loss
    else:
        hp = std.PRESETS[shape]
        raw_model = std.GPT(config).to(device)
        optimizer = raw_model.configure_optimizers(hp)
        precision = "bf16"
        if device.type == "cpu" and not cpu_has_bf16():
            precision = "fp32"
        if precision == "bf16":
            torch.set_float32_matmul_precision("high")
        model = raw_model
        if side == "compiled":
            model = compile_model(model, device)

        def loss():
            return std.training_step(model, batch, device, precision)

    def step():
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return step, B * T


def plain_model(config):
    """transformers' GPT-2 with this config, without dropout, like ours."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size,
        n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def difference(shape):
    """The relative difference of both models' logits, with the same weights.

    In fp32, with our weights in both.
    """
    config, vocab_size, _, _ = SHAPES[shape]
    config = std.GPTConfig(**asdict(config) | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    ours, plain = std.GPT(config), plain_model(config)
    weights = {}
    for name, weight in ours.state_dict().items():
        if ".c_attn." in name:  # transformers has all queries first
            weight = weight.unflatten(0, (config.n_head, 3, -1)).transpose(
                0, 1).flatten(0, 2)
        if ".c_" in name and name.endswith("weight"):
            weight = weight.t()  # transformers uses Conv1D for these
        if name.endswith(("wte.weight", "lm_head.weight")):
            weight = weight[:vocab_size]
        weights[name] = weight
    plain.load_state_dict(weights)
    with torch.no_grad():  # no token of the padding is ever a target
        ours.lm_head.weight[vocab_size:] = 0
    tokens = torch.randint(vocab_size, (1, 65))
    with torch.no_grad():
        a = ours(tokens[:, :-1])[:, :, :vocab_size]
        b = plain(tokens[:, :-1]).logits
    return ((a - b).norm() / b.norm()).item()


def measure(flags):
    """Measure one side in this process: a turn for each line on stdin.

    It answers with a line: the turn's tokens/s and the peak memory in bytes.
    """
    device = use_device(flags.device)
    step, tokens = make(flags.side, flags.shape, device)
    for _ in range(3):  # the first steps are slow: allocation, compilation
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        steps, begin = 0, time.perf_counter()
        while steps < 2 or time.perf_counter() < begin + flags.seconds:
            step()
            steps += 1
        seconds = time.perf_counter() - begin
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            rusage = resource.getrusage(resource.RUSAGE_SELF)
            memory = rusage.ru_maxrss * 1024
        print(json.dumps({"speed": steps * tokens / seconds,
                          "memory": memory}), flush=True)


class Side:
    """A process that measures one side."""

    def __init__(self, name, shape, flags):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--shape", shape, "--side", name,
             "--device", flags.device, "--seconds", str(flags.seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        require(line, f"the side {self.name} failed: see above")
        return line

    def turn(self):
        print(file=self.process.stdin, flush=True)
        return json.loads(self.answer())


def compare(flags, shape):
    error = difference(shape)
    print(f"{shape}: the same model, logits differ by {error:.0e} relative")
    require(error < 1e-4, "the two sides are not the same model")
    sides = [Side(name, shape, flags) for name in SIDES]
    ratios = {name: [] for name in SIDES}
    for turn in range(flags.rounds):
        found = {side.name: side.turn() for side in sides}
        for name, values in ratios.items():
            values.append(found[name]["speed"] / found["plain"]["speed"])
        print(f"  turn {turn + 1}: " + ", ".join(
            f"{name} {values['speed']:,.0f} tok/s"
            for name, values in found.items()), flush=True)
    for side in sides:
        side.process.communicate()
    for name, values in ratios.items():
        print(f"  {name}: {statistics.median(values):.2f} times plain (turns "
              f"from {min(values):.2f} to {max(values):.2f}), peak memory "
              f"{found[name]['memory'] / 2**20:,.0f} MiB")


def main():
    flags = parse_flags(Flags)
    try:
        import transformers  # noqa: F401
    except ImportError:
        require(False, "transformers is missing: "
                "pip install -r benchmarks/requirements.txt")
    if flags.side:
        measure(flags)
        return
    for shape in SHAPES if flags.shape == "both" else [flags.shape]:
        compare(flags, shape)


if __name__ == "__main__":
    run_main(main)
