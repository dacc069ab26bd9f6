"""How fast one device trains, beside other people's loops.

One side at a time is in memory, and each trains as training does: it
accumulates microbatches, and clips and updates once a step.
"""

import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import replace
from statistics import median

import train_gpt2_std as std

from backstage import dataset
from backstage import flags as stage_flags
from backstage.device import has_bf16
from backstage.errors import require
from backstage.flops import flops_per_token, peak_flops
from workshop.stages import find_stage

from turns import (
    SIDE,
    column,
    random_tokens,
    show,
    summary,
    take_turns,
    train,
)

BASE = "transformers, fp32"
NOTE = ("transformers is not installed (pip install transformers): ratios are "
        "those to nanoGPT's loop")


def sides_of(preset, device, data):
    """{name: (script, flags, steps that do not count)}."""
    quick, gpu = preset == "tiny", device.type != "cpu"
    sizes = ["--preset", preset, "--device", device.type, "--data", data]
    skip = 2
    if quick:
        sizes += ["--max-steps", 6]
    elif preset == "nano":
        skip = 5
        sizes += ["--max-steps", 40]
    elif gpu:
        skip = 3
        sizes += ["--max-steps", 8]
    else:  # accumulation, in half a minute
        skip = 1
        sizes += ["--max-steps", 3, "--minibatch-size", 2,
                  "--microbatch-size", 1]
    fast = "bf16" if not quick and has_bf16(device) else "fp32"
    ours = [*sizes, "--precision", fast]
    sides = {f"{name}, {fast}": (find_stage(name).solution, ours, skip)
             for name in ("std", "ddp", "lit")}
    if not gpu and not quick:
        sides[f"std, {fast}, compiled"] = (
            find_stage("std").solution, [*ours, "--compile"], max(2, skip))
    theirs = fast if device.type == "cuda" else "fp32"
    sides[f"nanoGPT, {theirs}"] = (
        "nanogpt", [*sizes, "--precision", theirs], skip)
    if importlib.util.find_spec("transformers"):
        sides[BASE] = ("transformers", [*sizes, "--precision", "fp32"], skip)
    return sides


def run_once(side):
    script, options, skip = side
    return train(script, *options, skip=skip)


def matmul(precision, device):
    """FLOP/s of products of large matrices, in a process of its own."""
    end = subprocess.run(
        [sys.executable, SIDE, "matmul", precision, device.type],
        capture_output=True, text=True)
    require(end.returncode == 0, f"matmul failed:\n{end.stderr}")
    return float(end.stdout.split()[1])


def check(found):
    """Raise a `UserError` unless all train the same model on the same data.

    The first loss does not depend on the optimizer; that of nanoGPT is like
    ours, so in fp32 all losses are.
    """
    (first, ours), *others = found.items()
    for name, turns in others:
        exact = "fp32" in first and "fp32" in name
        pairs = list(zip(ours[0]["losses"], turns[0]["losses"], strict=True))
        same = 1e-2 if not exact else 1e-3 if name == BASE else 1e-4
        for a, b in pairs if same == 1e-4 else pairs[:1]:
            require(abs(a / b - 1) < same, f"{first} has the losses "
                    f"{ours[0]['losses']}, {name} {turns[0]['losses']}: they "
                    "do not train the same")


def measure(flags, device):
    """Tables for nano and 124M: {preset: {side: figures}}."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(folder)
        for preset in ("tiny",) if flags.quick else ("nano", "gpt2"):
            data = stage_flags.DEMO if preset == "nano" else folder
            require(preset != "nano" or data.is_dir(),
                    "the demo dataset is not there: source activate.sh")
            results[preset] = compare(preset, flags, device, data)
    return results


def compare(preset, flags, device, data):
    sides = {name: lambda side=side: run_once(side) for name, side in
             sides_of(preset, device, data).items()}
    precisions = sorted({name.split(", ")[1] for name in sides})
    peaks = {f"matmul, {precision}": lambda precision=precision: matmul(
        precision, device) for precision in precisions}
    found = take_turns(sides | peaks, flags.rounds)
    peaks = {name: median(found.pop(name)) for name in peaks}
    check(found)
    base = BASE if BASE in found else next(
        name for name in found if name.startswith("nanoGPT"))
    print(NOTE if base != BASE else f"ratio: over {base}; of matmul: of "
          "the FLOP/s that products of large matrices reach here; start, "
          "first step: from the command to the begin and the end of that step")
    config = replace(std.MODELS[preset],
                     vocab_size=dataset.vocabulary_size(data))
    flops = flops_per_token(config, std.PRESETS[preset].sequence_length)
    rows = {}
    for name, turns in found.items():
        precision = name.split(", ")[1]
        row = summary(column(turns, "tokens_per_second"),
                      column(found[base], "tokens_per_second"))
        speed = row["median"] * flops
        peak = peak_flops(device, precision)
        row |= {"of_matmul": speed / peaks[f"matmul, {precision}"],
                "mfu": speed / peak if peak else None,
                "memory": max(column(turns, "memory")),
                "losses": turns[0]["losses"]}
        if name.startswith(("std", "ddp", "lit")):  # the loops do more first
            row |= {"start": median(column(turns, "start")),
                    "first_step": median(column(turns, "first"))}
        rows[name] = row
    show((f"{preset}: tokens/s", "median", "least", "most", "ratio",
          "of matmul", "MFU", "MiB", "start", "first step"),
         *((name, *(f"{row[key]:,.0f}" for key in ("median", "least", "most")),
            f"{row['ratio']:.2f}",
            f"{row['of_matmul']:.0%}", row["mfu"] and f"{row['mfu']:.0%}",
            f"{row['memory'] / 2**20:,.0f}",
            *(f"{row[key]:.1f} s" if key in row else None
              for key in ("start", "first_step")))
           for name, row in rows.items()))
    return rows | peaks
