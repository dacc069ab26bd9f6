"""How fast one device trains, beside a plain loop over transformers' GPT-2.

    pip install -r benchmarks/requirements.txt
    python benchmarks/single_device.py                 # both shapes
    python benchmarks/single_device.py --shape gpt2 --rounds 5

Both sides hold the same model: their losses on the same tokens, in fp32 and
with the same weights, are compared first. Then they take turns, each time as
a process of its own, so that a busy machine slows both and each has a peak
memory of its own. The plain side is what one writes first: fp32, AdamW, the
model's own loss.
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

from workshop import ROOT
from workshop.errors import check, parse_flags, start
from workshop.run import compile_model, cpu_has_bf16, get_device

sys.path.insert(0, str(ROOT / "solutions"))
import train_gpt2_std as std

SHAPES = {  # microbatch on a CPU, on a GPU; the demo dataset's vocabulary
    "nano": (std.PRESETS["nano"][0], 2048, 2, 64),
    "gpt2": (std.GPTConfig(), 50257, 1, 16),
}


@dataclass
class Flags:
    """Measure how fast one device trains."""

    shape: Literal["nano", "gpt2", "both"] = "both"  # which model
    rounds: int = 3  # turns of each side
    seconds: float = 20.0  # of training in each turn
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator if any)
    side: Literal["", "ours", "plain"] = ""  # measure this one, in here


def make(side, shape, device):
    """A function that trains on one microbatch, and its tokens."""
    config, vocab_size, on_cpu, on_gpu = SHAPES[shape]
    B = on_cpu if device.type == "cpu" else on_gpu
    T = config.block_size
    config = std.GPTConfig(**asdict(config) | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    tokens = torch.randint(vocab_size, (B, T + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    if side == "plain":
        model = plain_model(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def loss():
            x = batch[0].to(device)
            return model(input_ids=x, labels=x).loss
    else:
        hp = std.PRESETS[shape][1]
        raw_model = std.GPT(config).to(device)
        optimizer = raw_model.configure_optimizers(hp)
        model = raw_model
        precision = "bf16"
        if device.type == "cpu" and not cpu_has_bf16():
            precision = "fp32"
        if precision == "bf16":
            torch.set_float32_matmul_precision("high")
        if device.type == "cuda":
            model = compile_model(raw_model, device)

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
    """transformers' GPT-2 of a shape, without dropout as ours."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size,
        n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def difference(shape):
    """Of both models' losses, relative, with our weights in both, fp32."""
    config, vocab_size, _, _ = SHAPES[shape]
    config = std.GPTConfig(**asdict(config) | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    ours, plain = std.GPT(config), plain_model(config)
    weights = {}
    for name, weight in ours.state_dict().items():
        if ".c_" in name and name.endswith("weight"):
            weight = weight.t()  # transformers keeps them as Conv1D
        if name.endswith(("wte.weight", "lm_head.weight")):
            weight = weight[:vocab_size]
        weights[name] = weight
    plain.load_state_dict(weights)
    with torch.no_grad():  # of the padding no token is ever a target
        ours.lm_head.weight[vocab_size:] = 0
    tokens = torch.randint(vocab_size, (1, 65))
    with torch.no_grad():
        a = ours(tokens[:, :-1])[:, :, :vocab_size]
        b = plain(tokens[:, :-1]).logits
    return ((a - b).norm() / b.norm()).item()


def measure(flags):
    """One side in this process: tokens/s and peak memory in bytes."""
    device = get_device(flags.device)
    step, tokens = make(flags.side, flags.shape, device)
    for _ in range(3):  # the first are slow: allocation, compilation
        step()
    times = []
    end = time.perf_counter() + flags.seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"speed": tokens / statistics.median(times),
                      "memory": memory}))


def compare(flags, shape):
    error = difference(shape)
    print(f"{shape}: the same model, logits differ by {error:.0e} relative")
    check(error < 1e-4, "the two sides are not the same model")
    results = {"ours": [], "plain": []}
    for turn in range(flags.rounds):
        for side, found in results.items():
            done = subprocess.run(
                [sys.executable, __file__, "--shape", shape, "--side", side,
                 "--device", flags.device, "--seconds", str(flags.seconds)],
                stdout=subprocess.PIPE, text=True)
            check(done.returncode == 0, f"{side} failed")
            found.append(json.loads(done.stdout.splitlines()[-1]))
        ratio = found_ratio(results, turn)
        print(f"  turn {turn + 1}: ours {results['ours'][turn]['speed']:,.0f} "
              f"tok/s, plain {results['plain'][turn]['speed']:,.0f} tok/s: "
              f"{ratio:.2f} times", flush=True)
    ratios = [found_ratio(results, turn) for turn in range(flags.rounds)]
    ours, plain = (max(r["memory"] for r in results[side]) / 2**20
                   for side in ("ours", "plain"))
    print(f"  median: {statistics.median(ratios):.2f} times as fast; peak "
          f"memory {ours:,.0f} MiB beside {plain:,.0f} MiB")


def found_ratio(results, turn):
    return results["ours"][turn]["speed"] / results["plain"][turn]["speed"]


def main():
    flags = parse_flags(Flags)
    try:
        import transformers  # noqa: F401
    except ImportError:
        check(False, "this needs transformers: "
              "pip install -r benchmarks/requirements.txt")
    if flags.side:
        measure(flags)
        return
    for shape in SHAPES if flags.shape == "both" else [flags.shape]:
        compare(flags, shape)


if __name__ == "__main__":
    start(main)
