"""What the lesson about larger minibatches trains, and draws.

    python -m notebooks.experiments.batch eightfold FILE    the picture, as SVG
    python -m notebooks.experiments.batch noise FILE
    python -m notebooks.experiments.batch critical FILE
    python -m notebooks.experiments.batch published FILE

The model has the size of preset tiny, but two layers, and reads the letters of
the demo's text: on a CPU a step takes milliseconds, and learning shows soon.
The noise scale is measured on preset tiny itself.
"""

import math
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import LogFormatter
from torch import nn

from backstage import dataset
from backstage.errors import require, run_main
from backstage.flags import DEMO
from notebooks.experiments.sharding import std
from workshop.notebook.pictures import RANK_COLOURS
from workshop.results import plot
from workshop.results.arithmetic import critical_tokens

S, RATE, SAMPLES = 4, 3e-3, 12_800  # where "eightfold" begins
WARM_UP = 0.1  # of the samples
TARGET = 2.8  # nats for each letter
SIZES = (2, 8, 32, 128)
LETTERS = replace(std.MODELS["tiny"], vocab_size=128, n_layer=2)
KEEP = 0.99  # of the running means in each step: they remember some 100 steps
CPU = torch.device("cpu")


class NoiseScale:
    """Measures the gradient noise scale of a model while it is trained.

    McCandlish et al. (2018), arXiv:1812.06162, Appendix A.1: the gradient of
    B samples has on average the squared norm |G|^2 + tr(Sigma)/B, so two
    sizes of B tell signal and noise apart. Here they are a microbatch of B
    samples and the minibatch of S: nothing is computed twice.
    """

    def __init__(self, model, B, S):
        self.B, self.S = B, S
        self.squares = 0.0  # of the microbatches' gradients in this step
        self.signal = self.noise = 0.0  # running means of |G|^2, tr(Sigma)
        for weight in model.parameters():  # before gradients are added up
            weight.register_hook(self._add)

    def _add(self, gradient):
        self.squares += gradient.norm().item() ** 2

    def after_step(self, norm):
        """The noise scale in samples, or None if it is below 0.

        norm: that of the minibatch's gradient. The noise scale is the ratio
        of the means: a mean of ratios would be biased.
        """
        B, S, big = self.B, self.S, norm**2
        # each loss is divided by the number of microbatches, S / B
        small, self.squares = self.squares * S / B, 0.0
        signal = (S * big - B * small) / (S - B)
        noise = (small - big) / (1 / B - 1 / S)
        self.signal += (1 - KEEP) * (signal - self.signal)
        self.noise += (1 - KEEP) * (noise - self.noise)
        return self.noise / self.signal if self.signal > 0 else None


@dataclass
class Curve:
    """A training with S samples a step, and its result."""

    S: int
    rate: float  # the maximum of the learning rate
    losses: list = field(default_factory=list)  # of each step
    scales: list = field(default_factory=list)  # noise scale, or None

    @property
    def smooth(self):
        """The running mean of the losses, over some 400 samples."""
        keep, last, found = max(0, 1 - self.S / 400), self.losses[0], []
        for loss in self.losses:
            last = keep * last + (1 - keep) * loss
            found.append(last)
        return found


def letters(folder):
    """Write the letters of the demo's text as a dataset: its folder."""
    require(DEMO.is_dir(), f"{DEMO} is not there: run `source activate.sh`")
    encoding = dataset.load_vocabulary(DEMO)
    shards = std.get_shards(DEMO, "train")
    text = b"".join(encoding.decode_bytes(std.load_tokens(shard).tolist())
                    for shard in shards)
    ids = np.frombuffer(text, np.uint8)
    np.save(Path(folder, "letters_train_000001.npy"),
            ids[ids < 128].astype(np.uint16))
    return folder


def train(data, S, rate, samples, warm_up=WARM_UP, target=None,
          config=LETTERS, microbatches=2):
    """Train on so many samples, or until the loss is the target: a `Curve`.

    On the way to a target, the learning rate stays where the warm-up ends.
    """
    B = S // microbatches
    hp = replace(std.PRESETS["tiny"], learning_rate=rate,
                 warmup_steps=round(warm_up * SAMPLES / S))
    batches = std.DataIterator(
        std.get_shards(data, "train"), B, hp.sequence_length)
    torch.manual_seed(hp.seed)
    model = std.GPT(config)
    optimizer = model.configure_optimizers(hp)
    noise, curve = NoiseScale(model, B, S), Curve(S, rate)
    for step in range(samples // S):
        lr = (std.get_lr(step, samples // S, hp) if target is None
              else rate * min(1, (step + 1) / max(1, hp.warmup_steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        mean_loss = 0.0
        for _ in range(microbatches):
            loss = std.training_step(model, next(batches), CPU, "fp32")
            loss = loss / microbatches
            loss.backward()
            mean_loss += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(mean_loss)
        curve.scales.append(noise.after_step(norm.item()))
        if target and step % 10 == 9 and curve.smooth[-1] < target:
            break
    return curve


def eightfold(data, samples=SAMPLES):
    """{name: curve}: S samples a step, and eight times as many."""
    found = {}
    for name, k, factor, warm_up in (
            ("one GPU", 1, 1, WARM_UP), ("the same rate", 8, 1, WARM_UP),
            ("times the root of 8", 8, 8**0.5, WARM_UP),
            ("times 8", 8, 8, WARM_UP), ("times 8, no warm-up", 8, 8, 0)):
        curve = train(data, k * S, factor * RATE, samples, warm_up)
        found[name] = curve
        print(f"{name}: {len(curve.losses)} steps of {curve.S} samples, "
              f"learning rate {curve.rate:.4f}: the loss ends at "
              f"{curve.smooth[-1]:.3f}", flush=True)
    return found


def noise(data, steps=600, warm_up=50):
    """Preset tiny, with the noise scale of each step."""
    hp = std.PRESETS["tiny"]
    S = hp.minibatch_size
    config = replace(std.MODELS["tiny"],
                     vocab_size=dataset.vocabulary_size(data))
    return train(data, S, hp.learning_rate, steps * S, warm_up * S / SAMPLES,
                 config=config, microbatches=S // hp.microbatch_size)


def critical(data, sizes=SIZES, target=TARGET, samples=8 * SAMPLES):
    """For each size the learning rate, of three, that is at the target first.

    Returns curves. A `UserError` if there is a size with which none arrives.
    """
    found = []
    for size in sizes:
        best, most = None, samples
        for rate in RATE, 3 * RATE, RATE / 3:
            curve = train(data, size, rate, most, target=target)
            if curve.smooth[-1] < target:
                best, most = curve, size * len(curve.losses)
        require(best, f"with {size} samples a step, none is at {target}")
        found.append(best)
        scale = best.scales[-1]
        scale = "?" if scale is None else f"{scale:.0f}"
        print(f"{size} samples a step: {len(best.losses)} steps, {most:,} "
              f"samples, learning rate {best.rate:.3f}, noise scale {scale}",
              flush=True)
    return found


def fit(points):
    """(fewest steps, critical minibatch) of {minibatch: steps}.

    steps = fewest * (1 + critical / minibatch), with the least squares of the
    relative errors: McCandlish et al. (2018), equation 2.11.
    """
    steps = np.array([*points.values()], float)
    matrix = np.array([[1, 1 / size] for size in points]) / steps[:, None]
    (fewest, product), *_ = np.linalg.lstsq(matrix, np.ones(len(steps)))
    return fewest, product / fewest


# ---------------------------------------------------------------- pictures


@plot.as_svg
def draw_eightfold(ax, curves):
    ax.set(title="eight times the minibatch, the same samples",
           xlabel="samples", ylabel="loss (nats per letter)")
    lines = ("-", "-", "--", ":", "-.")
    for (name, curve), dash, colour in zip(
            curves.items(), lines, (plot.INK, *RANK_COLOURS), strict=True):
        smooth = curve.smooth
        ax.plot([curve.S * (step + 1) for step in range(len(smooth))],
                smooth, dash, color=colour, label=f"{curve.S} a step: {name}")
    ax.legend()


@plot.as_svg
def draw_critical(ax, curves):
    points = {curve.S: len(curve.losses) for curve in curves}
    fewest, size = fit(points)
    print(f"the fit: never fewer than {fewest:.0f} steps or "
          f"{fewest * size:,.0f} samples; critical minibatch {size:.0f} "
          "samples")

    ax.set(title=f"the way to a loss of {TARGET}: time or samples",
           xlabel="samples (what it costs)", xscale="log",
           ylabel="steps (how long it takes)", yscale="log")
    xs = np.geomspace(min(points), max(points), 50)
    ax.plot(fewest * (xs + size), fewest * (1 + size / xs), "--",
            color=RANK_COLOURS[1],
            label="fewest steps x (1 + critical / minibatch)")
    ax.plot([S * steps for S, steps in points.items()], points.values(),
            "o", color=RANK_COLOURS[0], label="measured")
    for S, steps in points.items():
        ax.annotate(f"{S}", (S * steps, steps), (6, 4),
                    textcoords="offset points")
    ax.plot(2 * fewest * size, 2 * fewest, "D", color=plot.INK,
            label=f"the critical minibatch: {size:.0f} samples")
    ax.legend()


@plot.as_svg
def draw_noise(ax, curve):
    ax.set(title="gradient noise scale", xlabel="step", ylabel="samples",
           yscale="log")
    for set_formatter in (ax.yaxis.set_major_formatter,
                          ax.yaxis.set_minor_formatter):
        set_formatter(LogFormatter())  # 6, not 6 x 10^0
    ax.plot([math.nan if scale is None else scale
             for scale in curve.scales], color=RANK_COLOURS[0],
            label="the noise scale")
    ax.axhline(curve.S, color=plot.INK, linestyle=":", linewidth=0.8,
               label="the minibatch")
    ax.legend()


@plot.as_svg
def draw_published(ax, curve):
    T = std.PRESETS["tiny"].sequence_length
    ax.set(title="how large a minibatch pays, as the loss falls",
           xlabel="loss (nats a token)", ylabel="tokens in a minibatch",
           yscale="log", xlim=(8, 2))
    losses = [2 + k / 10 for k in range(61)]
    ax.plot(losses, [critical_tokens(loss) for loss in losses], "--",
            color=plot.INK, label="critical minibatch of language models\n"
                                  "(Kaplan et al., 2020)")
    ax.plot(*zip(*((loss, T * scale) for loss, scale in zip(
        curve.losses, curve.scales, strict=True) if scale), strict=True),
        ".", color=RANK_COLOURS[0], label="preset tiny: its noise scale")
    ax.legend()


DRAW = {"eightfold": (eightfold, draw_eightfold),
        "noise": (noise, draw_noise), "published": (noise, draw_published),
        "critical": (critical, draw_critical)}


def main():
    name, output = sys.argv[1:]
    require(name in DRAW, f"there is no experiment {name}: choose from "
            f"{', '.join(DRAW)}")
    measure, draw = DRAW[name]
    require(DEMO.is_dir(), f"{DEMO} is not there: run `source activate.sh`")
    torch.set_num_threads(1)  # such small matrices gain nothing by a second
    with tempfile.TemporaryDirectory() as folder:
        data = DEMO if measure is noise else letters(folder)
        plot.write_new(output, draw(measure(data)))


if __name__ == "__main__":
    run_main(main)
