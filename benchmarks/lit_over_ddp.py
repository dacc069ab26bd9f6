"""What Lightning's Trainer costs: its tokens/s over the DDP stage's.

    python benchmarks/lit_over_ddp.py                   # nano
    python benchmarks/lit_over_ddp.py --preset gpt2     # 124M parameters

Both stages train on the same minibatches, so they do the same arithmetic; only
the loop around it differs. They take turns, so that a busy machine slows both
down. Each process has one thread, because on a busy machine several threads
wait for one another. The ratio is the median over the turns. The goal is 0.97
with 124M parameters on a GPU.
"""

import csv
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from backstage import ROOT
from backstage.command_line import parse_flags
from backstage.errors import require, run_main
from workshop.processes import launch


@dataclass
class Flags:
    """Measure Lightning against the plain loop."""

    preset: Literal["nano", "gpt2"] = "nano"  # which model
    rounds: int = 5  # turns of each side
    steps: int = 30  # in each turn; the first five do not count
    processes: int = 0  # one per device (0: all GPUs, or one on a CPU)


def measure(stage, folder, flags, processes, cpu):
    """Tokens/s, the median over the steps after the first five."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    never = flags.steps + 1
    sizes = ()
    if flags.preset == "gpt2":
        sizes = ("--data", folder, "--minibatch-size",
                 4 * processes if cpu else 64 * processes)
        if cpu:
            sizes += ("--microbatch-size", 1, "--sequence-length", 128)
    ranks = launch(
        ROOT / "solutions" / f"train_gpt2_{stage}.py", "--preset",
        flags.preset, "--device", "cpu" if cpu else "auto", "--run", run,
        "--max-steps", flags.steps, "--eval-every", never, "--generate-every",
        never, "--eval-minibatches", 1, *sizes, world_size=processes,
        timeout=3600)
    require(all(rank.status == 0 for rank in ranks), ranks[0].err)
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))[5:]
    return (statistics.median(float(row["tokens_per_second"]) for row in rows),
            float(rows[-1]["loss"]))


def main():
    flags = parse_flags(Flags)
    require(flags.steps > 5, "--steps must be more than 5")
    cpu = not torch.accelerator.is_available()
    processes = flags.processes or (
        1 if cpu else torch.accelerator.device_count())
    where = "CPU" if cpu else torch.accelerator.current_accelerator().type
    print(f"{flags.preset} on {processes} process(es), {where}", flush=True)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(50257, size=1_000_000)
        for split, number in (("val", 0), ("train", 1)):
            np.save(f"{folder}/random_{split}_{number:06d}.npy",
                    tokens.astype(np.uint16))
        for turn in range(flags.rounds):
            (ddp, loss), (lit, same) = (
                measure(stage, folder, flags, processes, cpu)
                for stage in ("ddp", "lit"))
            require(abs(same / loss - 1) < 1e-2, f"the last losses are {loss} "
                    f"and {same}: the two did not train the same")
            ratios.append(lit / ddp)
            print(f"turn {turn + 1}: ddp {ddp:9,.0f} tok/s, lit {lit:9,.0f} "
                  f"tok/s, {lit / ddp:.3f}", flush=True)
    print(f"lit over ddp: {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    run_main(main)
