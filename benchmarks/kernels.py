"""The kernels of train_gpt2_kernels.py beside PyTorch's own.

    python benchmarks/kernels.py    # writes runs/kernels.json, too

Forward and backward, at the size of gpt2 on a GPU. The sides take turns.
"of copy" is how fast ours goes through memory, as a share of the speed of the
device's own copies. Without a GPU, Triton's interpreter runs them on small
shapes, which only shows that they run.
"""

import json
import runpy
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from backstage import ROOT
from backstage.errors import parse_flags, run_main
from backstage.files import show_path, write_atomically

from turns import make_way, processor

ROUNDS, CALLS = 5, 50
SCRIPT = ROOT / "solutions" / "train_gpt2_kernels.py"


@dataclass
class Flags:
    """Measure each kernel beside PyTorch's own."""

    output: Path = ROOT / "runs" / "kernels.json"  # the figures


def operations(B, T, C, V, heads, device, dtype):
    """Of each operation: its name, PyTorch's function, the inputs, and how
    often the forward and the backward pass go through the first one's size.

    LayerNorm and the loss are computed in fp32, as under autocast.
    """
    def numbers(*shape, dtype=torch.float32):
        return torch.randn(
            shape, device=device, dtype=dtype, requires_grad=True)

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    targets = torch.randint(V, (B * T,), device=device)
    qkv = [numbers(B, heads, T, C // heads, dtype=dtype) for _ in "qkv"]
    rows = [
        ("gelu", lambda x: F.gelu(x, approximate="tanh"),
         [numbers(B, T, 4 * C, dtype=dtype)], (2, 3)),
        ("layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b),
         [numbers(B, T, C), numbers(C), numbers(C)], (2, 3)),
        # each call of the kernel overwrites the logits
        ("cross_entropy", F.cross_entropy, [numbers(B * T, V), targets],
         (1, 2)),
        ("attention", attention, qkv, None)]
    for kind in ("flash", "cudnn") if device.type == "cuda" else ():
        backend = getattr(SDPBackend, f"{kind.upper()}_ATTENTION")
        fast = sdpa_kernel(backend)(attention)
        with suppress(RuntimeError):  # this GPU has no such kernel
            fast(*qkv)
            rows.append((f"attention, {kind}", fast, qkv, None))
    return rows


def seconds(function, inputs, calls):
    """How long the forward and the backward pass take, each the mean of calls
    that follow one another: to start one is not part of what is compared.
    """
    # a product, as the kernel writes to its logits
    inputs = [x * 1 if x.requires_grad else x for x in inputs]
    output = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    dy = torch.ones_like(output)
    return [Timer("call()", globals={"call": call}).timeit(calls).mean
            for call in (
                lambda: function(*inputs),
                # up to the inputs alone: no product, no sum into a .grad
                lambda: torch.autograd.grad(
                    output, wanted, dy, retain_graph=True))]


def copy_speed(x, calls):
    """Bytes per second, read and written."""
    timer = Timer("y.copy_(x)", globals={"x": x, "y": torch.empty_like(x)})
    return 2 * x.nbytes / timer.timeit(calls).mean


def main():
    flags, ours = parse_flags(Flags), runpy.run_path(str(SCRIPT))
    record = {"device": processor(), "torch": torch.__version__,
              "triton": ours["triton"].__version__,
              "date": time.strftime("%Y-%m-%d"), "milliseconds": {}}
    if torch.cuda.is_available():
        device, rounds, calls = torch.device("cuda"), ROUNDS, CALLS
        record["device"] = torch.cuda.get_device_name()
        print(f"{record['device']}, B = 16, T = 1024, gpt2")
        shape = (16, 1024, 768, 50304, 12, device, torch.bfloat16)
    else:
        device, rounds, calls = torch.device("cpu"), 1, 1
        print("no GPU: Triton's interpreter, small shapes; the times say "
              "nothing about the kernels")
        shape = (1, 32, 32, 384, 2, device, torch.float32)
    print(f"{'milliseconds':28}{'ours':>10}{'PyTorch':>10}{'ratio':>8}"
          f"{'of copy':>9}")
    for name, function, inputs, passes in operations(*shape):
        x, mine = inputs[0].detach(), ours[name.partition(",")[0]]
        turns = [(seconds(mine, inputs, calls),
                  seconds(function, inputs, calls), copy_speed(x, calls))
                 for _ in range(rounds)]
        for k, part in enumerate(("forward", "backward")):
            row = {"ours": median(1000 * a[k] for a, _, _ in turns),
                   "PyTorch": median(1000 * b[k] for _, b, _ in turns),
                   "ratio": median(a[k] / b[k] for a, b, _ in turns),
                   "of copy": passes and median(
                       passes[k] * x.nbytes / a[k] / copy
                       for a, _, copy in turns)}
            record["milliseconds"][f"{name} {part}"] = row
            print(f"{name + ' ' + part:28}{row['ours']:10.3f}"
                  f"{row['PyTorch']:10.3f}{row['ratio']:8.2f}"
                  + (f"{row['of copy']:9.0%}" if passes else ""), flush=True)
    make_way(flags.output)
    write_atomically(
        flags.output, json.dumps(record, indent=1).encode() + b"\n")
    print(f"written: {show_path(flags.output, Path.cwd())}")


if __name__ == "__main__":
    run_main(main)
