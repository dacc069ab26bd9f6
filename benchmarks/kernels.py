"""The kernels of train_gpt2_kernels.py beside PyTorch's own.

    python benchmarks/kernels.py    # writes runs/kernels.json, too

Forward and backward, at the size of gpt2 on a GPU. The sides take turns.
Without a GPU, Triton's interpreter runs them on small shapes, which only
shows that they run.
"""

import json
import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from backstage import ROOT
from backstage.errors import parse_flags, run_main
from backstage.files import show_path, write_atomically

from turns import make_way, processor

ROUNDS = 20
SCRIPT = ROOT / "solutions" / "train_gpt2_kernels.py"


@dataclass
class Flags:
    """Measure each kernel beside PyTorch's own."""

    output: Path = ROOT / "runs" / "kernels.json"  # the figures


def operations(B, T, C, V, heads, device, dtype):
    """Of each operation: its name, PyTorch's function, and the inputs.

    LayerNorm and the loss are computed in fp32, as under autocast.
    """
    def numbers(*shape, dtype=torch.float32):
        return torch.randn(
            shape, device=device, dtype=dtype, requires_grad=True)

    targets = torch.randint(V, (B * T,), device=device)
    qkv = [numbers(B, heads, T, C // heads, dtype=dtype) for _ in "qkv"]
    return (
        ("gelu", lambda x: F.gelu(x, approximate="tanh"),
         [numbers(B, T, 4 * C, dtype=dtype)]),
        ("layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b),
         [numbers(B, T, C), numbers(C), numbers(C)]),
        # the kernel overwrites its logits: both sides get a product
        ("cross_entropy", F.cross_entropy, [numbers(B * T, V), targets]),
        ("attention", lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True), qkv))


def seconds(function, inputs, device):
    """How long the forward and the backward pass take."""
    inputs = [x * 1 if x.requires_grad else x for x in inputs]
    wait(device)
    begin = time.perf_counter()
    output = function(*inputs)
    wait(device)
    forward = time.perf_counter() - begin
    # up to the inputs alone: no product, and no sum into a .grad
    inputs = [x for x in inputs if x.requires_grad]
    dy = torch.ones_like(output)
    wait(device)
    begin = time.perf_counter()
    torch.autograd.grad(output, inputs, dy)
    wait(device)
    return forward, time.perf_counter() - begin


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    flags, ours = parse_flags(Flags), runpy.run_path(str(SCRIPT))
    record = {"device": processor(), "torch": torch.__version__,
              "triton": ours["triton"].__version__,
              "date": time.strftime("%Y-%m-%d"), "milliseconds": {}}
    if torch.cuda.is_available():
        device, rounds = torch.device("cuda"), ROUNDS
        record["device"] = torch.cuda.get_device_name()
        print(f"{record['device']}, B = 16, T = 1024, gpt2")
        shape = (16, 1024, 768, 50304, 12, device, torch.bfloat16)
    else:
        device, rounds = torch.device("cpu"), 1
        print("no GPU: Triton's interpreter, small shapes; the times say "
              "nothing about the kernels")
        shape = (1, 32, 32, 384, 2, device, torch.float32)
    print(f"{'milliseconds':24}{'ours':>10}{'PyTorch':>10}{'ratio':>8}")
    for name, function, inputs in operations(*shape):
        sides = (ours[name], function)
        for side in sides:  # compiles it
            seconds(side, inputs, device)
        turns = [[seconds(side, inputs, device) for side in sides]
                 for _ in range(rounds)]
        for k, part in enumerate(("forward", "backward")):
            mine, theirs = (median(turn[side][k] for turn in turns)
                            for side in (0, 1))
            ratio = median(turn[0][k] / turn[1][k] for turn in turns)
            print(f"{name + ' ' + part:24}{1000 * mine:10.3f}"
                  f"{1000 * theirs:10.3f}{ratio:8.2f}", flush=True)
            record["milliseconds"][f"{name} {part}"] = {
                "ours": 1000 * mine, "PyTorch": 1000 * theirs,
                "ratio": ratio}
    make_way(flags.output)
    write_atomically(
        flags.output, json.dumps(record, indent=1).encode() + b"\n")
    print(f"written: {show_path(flags.output, Path.cwd())}")


if __name__ == "__main__":
    run_main(main)
