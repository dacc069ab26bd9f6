"""What a second process gains on a CPU, and what no_sync() saves.

    python benchmarks/data_parallel.py

The DDP stage trains preset nano on two cores: as one process with two
threads, as two processes with one thread each, and as the latter without
no_sync(), so that gradients are reduced after every microbatch. The three
take turns, so that a busy machine slows all of them down. The figures are
medians.
"""

import csv
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from backstage import ROOT
from backstage.command_line import parse_flags
from backstage.errors import require, run_main
from workshop.processes import launch

SCRIPT = ROOT / "solutions" / "train_gpt2_ddp.py"
NO_SYNC = "with nullcontext() if reduce else model.no_sync():"


@dataclass
class Flags:
    """Measure data parallelism on a CPU."""

    rounds: int = 5  # turns of each side
    steps: int = 30  # in each turn; the first five do not count


def measure(script, folder, world_size, threads, steps):
    """Tokens/s, the median over the steps after the first five."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    ranks = launch(
        script, "--preset", "nano", "--device", "cpu", "--run", run,
        "--max-steps", steps, "--eval-minibatches", 1,
        world_size=world_size, threads=threads, timeout=600)
    require(all(rank.status == 0 for rank in ranks), ranks[0].err)
    with open(run / "metrics.csv", newline="") as file:
        speeds = [float(row["tokens_per_second"])
                  for row in csv.DictReader(file)]
    return statistics.median(speeds[5:])


def main():
    flags = parse_flags(Flags)
    text = SCRIPT.read_text()
    require(NO_SYNC in text, f"{SCRIPT} has no line {NO_SYNC}")
    with tempfile.TemporaryDirectory() as folder:
        always = Path(folder) / "train_gpt2.py"
        always.write_text(text.replace(NO_SYNC, "with nullcontext():"))
        sides = {
            "1 process x 2 threads": (SCRIPT, 1, 2),
            "2 processes x 1 thread": (SCRIPT, 2, 1),
            "2 processes, no no_sync()": (always, 2, 1),
        }
        speeds = {name: [] for name in sides}
        for turn in range(flags.rounds):
            for name, (script, world_size, threads) in sides.items():
                speeds[name].append(measure(
                    script, folder, world_size, threads, flags.steps))
            print(f"turn {turn + 1}: " + ", ".join(
                f"{found[-1]:,.0f}" for found in speeds.values())
                + " tok/s", flush=True)
    first = speeds["1 process x 2 threads"]
    for name, found in speeds.items():
        ratio = statistics.median(
            a / b for a, b in zip(found, first, strict=True))
        print(f"{name:26} {statistics.median(found):8,.0f} tok/s  "
              f"{ratio:.2f} times")


if __name__ == "__main__":
    run_main(main)
