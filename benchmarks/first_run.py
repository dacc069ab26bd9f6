"""Recipes for the first run: bits per byte by step, and what a step costs.

    python benchmarks/first_run.py              # train, and print
    python benchmarks/first_run.py before nano --seeds 1337
    python benchmarks/first_run.py --time-only --precision fp32
    python benchmarks/first_run.py before nano --picture curves.svg

Each recipe trains std's model with several seeds, on one thread: bits per
byte after a number of steps do not depend on the machine. What a step costs
does: the recipes' steps alternate in one process. All results are added to a
file, and a recipe that is there with its seed is not trained again.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from backstage import ROOT, dataset
from backstage.errors import require, run_main
from backstage.files import write_atomically
from backstage.flags import DEMO
from backstage.process import prepare_process

from turns import processor, take_turns

sys.path += [str(ROOT / "solutions")]
import train_gpt2_std as std

TARGET = 1.89  # bits per byte of the validation split
VALIDATED = 32_768  # tokens: the first of the validation split
EVERY = 200  # steps from one validation to the next
SEEDS = (1337, 1338, 1339)
WARM, BLOCK = 5, 5  # steps before any is timed, and timed at once
FILE = ROOT / "runs" / "first_run.json"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recipe:
    """A model, and how it is trained. The defaults are those of preset nano.

    Attributes:
        n_layer: blocks of the model.
        n_head: heads of each attention.
        n_embd: how wide the model is.
        sequence_length: tokens in a sample.
        minibatch_size: samples in a step.
        max_steps: steps of the whole run.
        learning_rate: its maximum.
        warmup_steps: steps from 0 to the learning rate.
        weight_decay: of the matrices.
        beta2: AdamW's second beta.
        init: the matrices' initial values, over GPT-2's.
    """

    n_layer: int = 2
    n_head: int = 3
    n_embd: int = 144
    sequence_length: int = 128
    minibatch_size: int = 8
    max_steps: int = 2100
    learning_rate: float = 3e-3
    warmup_steps: int = 500
    weight_decay: float = 0.1
    beta2: float = 0.95
    init: float = 1.0


NANO = Recipe()
# preset nano until 30 November 2026
BEFORE = Recipe(n_layer=4, n_embd=192, max_steps=2000, learning_rate=2e-3,
                warmup_steps=800)
WIDER = Recipe(n_embd=192, max_steps=1600, warmup_steps=400)
NARROWER = Recipe(n_head=2, n_embd=128, max_steps=2400)
SHORT_SAMPLES = replace(WIDER, sequence_length=64, max_steps=3000,
                        warmup_steps=600)
RECIPES = {
    "before": BEFORE,
    "nano": NANO,
    "4 layers, 1,000 steps, 4e-3": replace(
        BEFORE, max_steps=1000, learning_rate=4e-3, warmup_steps=150),
    "2,000 steps, warm-up 400": replace(
        NANO, max_steps=2000, warmup_steps=400),
    "2,000 steps, warm-up 600": replace(
        NANO, max_steps=2000, warmup_steps=600),
    "width 128, 2,400 steps": NARROWER,
    "width 128, 2,000 steps, 4e-3": replace(
        NARROWER, max_steps=2000, learning_rate=4e-3, warmup_steps=400),
    "width 192, 1,800 steps": replace(WIDER, max_steps=1800),
    "width 192, 1,700 steps": replace(WIDER, max_steps=1700),
    "width 192, 4e-3": replace(WIDER, learning_rate=4e-3),
    "width 192, warm-up 200": replace(WIDER, warmup_steps=200),
    "width 192, warm-up 600": replace(WIDER, warmup_steps=600),
    "width 192, 6 heads": replace(WIDER, n_head=6),
    "width 192, 4 samples of 256": replace(
        WIDER, sequence_length=256, minibatch_size=4),
    "width 192, init 2": replace(WIDER, init=2.0),
    "width 192, beta2 0.99": replace(WIDER, beta2=0.99),
    "4 layers, width 128": replace(WIDER, n_layer=4, n_head=2, n_embd=128),
    "samples of 64": SHORT_SAMPLES,
    "samples of 64, 2e-3": replace(SHORT_SAMPLES, learning_rate=2e-3),
    "samples of 64, 4e-3": replace(SHORT_SAMPLES, learning_rate=4e-3),
}


@dataclass
class Curve:
    """What a run has shown.

    Attributes:
        name: of the recipe.
        recipe: its values.
        seed: of the initial weights.
        precision: "bf16" or "fp32".
        steps: after which it was validated.
        bits: bits per byte at these steps.
        cpu_seconds: of the steps, on one thread, in all.
    """

    name: str
    recipe: Recipe
    seed: int
    precision: str
    steps: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.steps[-1:] == [self.recipe.max_steps]

    def steps_to(self, target: float) -> float | None:
        """Return after how many steps it reaches so many bits per byte.

        Between two validations the curve is a straight line.

        Returns:
            None if it does not reach them.
        """
        before, above = 0, math.inf
        for step, bits in zip(self.steps, self.bits, strict=True):
            if bits <= target:
                if math.isinf(above):
                    return step
                share = (above - target) / (above - bits)
                return before + share * (step - before)
            before, above = step, bits
        return None


@dataclass(frozen=True)
class StepCost:
    """What a step took, in seconds.

    Attributes:
        clock: from its begin to its end.
        cpu: of all threads, which depends less on other programs.
    """

    clock: float
    cpu: float


class Training:
    """A recipe's model in training."""

    def __init__(self, recipe: Recipe, seed: int, precision: str) -> None:
        self.recipe, self.precision = recipe, precision
        self.hp = std.Hyperparameters(
            learning_rate=recipe.learning_rate,
            warmup_steps=recipe.warmup_steps,
            weight_decay=recipe.weight_decay)
        torch.manual_seed(seed)
        self.model = std.GPT(std.GPTConfig(
            block_size=recipe.sequence_length, n_layer=recipe.n_layer,
            n_head=recipe.n_head, n_embd=recipe.n_embd,
            vocab_size=dataset.vocabulary_size(DEMO)))
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.dim() == 2:
                    weight.mul_(recipe.init)
        self.optimizer = self.model.configure_optimizers(self.hp)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, recipe.beta2)
        B, T = recipe.minibatch_size, recipe.sequence_length
        self.train_data, self.val_data = (
            std.DataIterator(std.get_shards(DEMO, split), B, T)
            for split in ("train", "val"))
        self.validated = VALIDATED // (B * T)
        self.bytes_per_token = dataset.bytes_per_token(str(DEMO))
        self.step = 0

    def make_step(self) -> StepCost:
        """Make a step; return what it took."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        # an end is needed for the schedule, also if it is only timed
        step = min(self.step, self.recipe.max_steps - 1)
        lr = std.get_lr(step, self.recipe.max_steps, self.hp)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = std.training_step(
            self.model, next(self.train_data), CPU, self.precision)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        self.step += 1
        return StepCost(time.perf_counter() - begin,
                        time.process_time() - cpu_begin)

    def make_block(self) -> StepCost:
        """Make some steps; return the medians of what they took."""
        steps = [self.make_step() for _ in range(BLOCK)]
        return StepCost(statistics.median(step.clock for step in steps),
                        statistics.median(step.cpu for step in steps))

    def validate(self) -> float:
        """Return the bits per byte of the validation split."""
        loss = std.evaluate(self.model, self.val_data, self.validated, CPU,
                            self.precision)
        return loss / math.log(2) / self.bytes_per_token


def train(name: str, recipe: Recipe, seed: int, precision: str,
          last: int) -> Curve:
    """Train a recipe, and print its bits per byte.

    last: the step after which it is left, 0 for none.
    """
    torch.set_num_threads(1)
    training = Training(recipe, seed, precision)
    curve = Curve(name, recipe, seed, precision)
    for step in range(1, recipe.max_steps + 1):
        curve.cpu_seconds += training.make_step().cpu
        if step % EVERY == 0 or step in (recipe.max_steps, last):
            curve.steps.append(step)
            curve.bits.append(round(training.validate(), 4))
            print(f"{name}, seed {seed}, step {step:5d}: "
                  f"{curve.bits[-1]:.3f} bits/byte", flush=True)
        if step == last:
            break
    return curve


def time_steps(recipes: dict[str, Recipe], precision: str, rounds: int
               ) -> dict[str, list[StepCost]]:
    """Return what a step of each recipe takes in each round.

    On all cores, or as many threads as OMP_NUM_THREADS says.
    """
    trainings = {name: Training(recipe, SEEDS[0], precision)
                 for name, recipe in recipes.items()}
    for training in trainings.values():
        for _ in range(WARM):
            training.make_step()
    return take_turns({name: training.make_block
                       for name, training in trainings.items()}, rounds)


# -------------------------------------------------------------- the results


def read_curves(file: Path) -> list[Curve]:
    """Return the curves of a file, [] if it is not there."""
    if not file.exists():
        return []
    rows = json.loads(file.read_text())
    return [Curve(**{**row, "recipe": Recipe(**row["recipe"])})
            for row in rows]


def write_curves(file: Path, curves: Sequence[Curve]) -> None:
    text = json.dumps([asdict(curve) for curve in curves], indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda part: part.write(text.encode()))


def print_costs(costs: dict[str, list[StepCost]], precision: str) -> None:
    """Print what a step takes, and its ratios to the first recipe's."""
    base = next(iter(costs))
    print(f"\n{processor()}, {precision}, {torch.get_num_threads()} threads, "
          f"load {os.getloadavg()[0]:.1f}")
    print("| a step | CPU ms | ratio | clock ms | ratio |\n"
          "|---|---:|---:|---:|---:|")
    for name, rounds in costs.items():
        pairs = [*zip(rounds, costs[base], strict=True)]
        cpu = statistics.median(one.cpu for one in rounds)
        clock = statistics.median(one.clock for one in rounds)
        cpu_ratio = statistics.median(
            one.cpu / other.cpu for one, other in pairs)
        clock_ratio = statistics.median(
            one.clock / other.clock for one, other in pairs)
        print(f"| {name} | {1000 * cpu:.1f} | {cpu_ratio:.2f} "
              f"| {1000 * clock:.1f} | {clock_ratio:.2f} |")


def print_curves(curves: Sequence[Curve]) -> None:
    """Print the bits per byte at the end, and the steps to the target."""
    print(f"\n| recipe | seed | steps | bits/byte | steps to {TARGET} |\n"
          "|---|---:|---:|---:|---:|")
    for curve in curves:
        reached = curve.steps_to(TARGET)
        steps = "-" if reached is None else f"{reached:,.0f}"
        print(f"| {curve.name} | {curve.seed} | {curve.steps[-1]:,} "
              f"| {curve.bits[-1]:.3f} | {steps} |")


def draw(file: Path, curves: Sequence[Curve]) -> None:
    """Draw bits per byte over the CPU time of one thread, all seeds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colors: dict[str, str] = {}
    for curve in curves:
        label = "" if curve.name in colors else curve.name
        color = colors.setdefault(curve.name, f"C{len(colors)}")
        seconds = [step / curve.steps[-1] * curve.cpu_seconds
                   for step in curve.steps]
        axes.plot(seconds, curve.bits, ".-", color=color, label=label)
    axes.axhline(TARGET, color="gray", linestyle=":")
    axes.set(xlabel="CPU seconds, on one thread",
             ylabel="bits per byte, validation")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="recipe",
                        help=f"which of: {'; '.join(RECIPES)} (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--precision", choices=("bf16", "fp32"),
                        default="bf16")
    parser.add_argument("--time-only", action="store_true",
                        help="train nothing")
    parser.add_argument("--rounds", type=int, default=12,
                        help="in which steps are timed (12)")
    parser.add_argument("--steps", type=int, default=0,
                        help="leave a run after so many steps")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--picture", type=Path, metavar="FILE",
                        help="draw the curves of these recipes")
    args = parser.parse_args()
    prepare_process()
    unknown = [name for name in args.names if name not in RECIPES]
    known = "; ".join(RECIPES)
    require(not unknown, f"there is no recipe {'; '.join(unknown)}; fix: name "
            f"one of these: {known}")
    recipes = {name: RECIPES[name] for name in args.names or RECIPES}
    # as the script does on a CPU
    torch.backends.cuda.enable_flash_sdp(args.precision == "fp32")
    if args.precision == "bf16":
        torch.set_float32_matmul_precision("high")
    if args.time_only:
        print_costs(time_steps(recipes, args.precision, args.rounds),
                    args.precision)
        return
    for name, recipe in recipes.items():
        for seed in args.seeds:
            trained = {(curve.recipe, curve.seed, curve.precision)
                       for curve in read_curves(args.output)
                       if curve.is_whole}
            if (recipe, seed, args.precision) in trained:
                continue
            curve = train(name, recipe, seed, args.precision, args.steps)
            write_curves(args.output, [*read_curves(args.output), curve])
    curves = [curve for curve in read_curves(args.output)
              if curve.name in recipes]
    print_curves(curves)
    if args.picture:
        draw(args.picture, curves)


if __name__ == "__main__":
    run_main(main)
