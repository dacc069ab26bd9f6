"""Measures this machine: prints tables, and writes JSON beside them.

    python benchmarks/run.py                     # how fast one device trains
    python benchmarks/run.py speed scaling growth

    speed       std, ddp and lit, at nano and at 124M parameters, beside
                transformers' GPT-2 and nanoGPT's model in their own loops
    scaling     more processes: strong, weak, the exposed all-reduce
    growth      more shards, more steps, larger checkpoints

The figures are medians over the rounds. README.md beside this file says what
was measured, and on what.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from backstage import ROOT
from backstage.device import device_name, find_device
from backstage.errors import parse_flags, run_main
from backstage.files import show_path, write_atomically
from backstage.process import count_cores

from turns import make_way, processor

sys.path += [str(ROOT / "solutions"), str(ROOT / "fineweb")]

Part = Literal["speed", "scaling", "growth"]


@dataclass
class Flags:
    """Measure this machine."""

    parts: tyro.conf.Positional[tuple[Part, ...]] = ("speed",)
    """What to measure."""
    rounds: int = 3
    """Turns of each side."""
    quick: bool = False
    """A tiny model and few steps: to see that everything works."""
    device: str = "auto"
    """cpu, cuda, xpu, mps (auto: an accelerator, if any)."""
    output: Path = ROOT / "runs" / "benchmark.json"
    """The file for the figures."""


def main():
    flags = parse_flags(Flags)
    device = find_device(flags.device)
    record = {
        "device": device_name(device), "processor": processor(),
        "cores": count_cores(), "torch": torch.__version__,
        "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d %H:%M")}
    print(", ".join(f"{key} {value}" for key, value in record.items()))
    make_way(flags.output)
    for part in flags.parts:
        record[part] = importlib.import_module(part).measure(flags, device)
        write_atomically(
            flags.output, json.dumps(record, indent=1).encode() + b"\n")
    print(f"written: {show_path(flags.output, Path.cwd())}")


if __name__ == "__main__":
    run_main(main)
