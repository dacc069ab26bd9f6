"""The picture of the results: python -m workshop plot.

    python -m workshop.results.plot PANEL [RUN ...] FILE    one panel, as SVG
"""

from __future__ import annotations

import argparse
import functools
import html
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "agg"  # a shell's may be none, or want a display

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from backstage.errors import require, run_main, visible
from backstage.files import write_atomically
from workshop.html import may_replace
from workshop.results import runs as results
from workshop.results.profile import list_traces, recorded_parts
from workshop.results.runs import RecordedRun
from workshop.stages import STAGES

STAGE_COLOURS = {name: stage.colour for name, stage in STAGES.items()}
DASHES = {1: "-", 2: "--", 4: "-.", 8: ":"}  # by world size
PART_COLOURS = {  # of workshop/results/profile.py
    "data": "#a457c4", "forward": "#8fb8ec", "backward": "#3b7dd8",
    "all-reduce": "#cf7a12", "waiting": "#f0cf9a", "optimizer": "#2b9a5f"}
PUBLISHED = ("#2166c0", "#a85500")  # of A100 and Max 1550
# In a picture
PLOT_MARK = "made by python -m workshop plot, which replaces it"
INK = "#010203"  # stands for the theme's text colour in a notebook's SVG

matplotlib.rcParams.update({
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "font.size": 9,
    "axes.titlesize": 10, "axes.titleweight": "bold",
    "legend.frameon": False, "legend.fontsize": 8,
    "svg.fonttype": "none", "svg.hashsalt": "workshop",
})
Panel = Callable[[Axes, list[RecordedRun]],
                 str]  # what the runs lack for it, or ""


# runs that differ in these part ways, though they train the same minibatches
SCHEDULE = ("seed", "learning_rate", "warmup_steps", "max_steps")


# ---------------------------------------- the panels: panel(axes, results)


def loss(ax: Axes, runs: list[RecordedRun]) -> str:
    """The loss curves on top of each other: wide below, narrow above."""
    schedules = {tuple(run.hyperparameters.get(key) for key in SCHEDULE)
                 for run in runs}
    title = "loss"
    if len(runs) > 1 == len(schedules):
        title += ": on top of each other"
    ax.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    for i, run in enumerate(runs):
        steps = [row["step"] for row in run.rows]
        ax.plot(steps, [row["loss"] for row in run.rows],
                DASHES.get(run.world_size, "-"), label=run.name,
                color=colour(run), linewidth=5 - 3.5 * (i + 1) / len(runs),
                alpha=0.8)
        evaluated = [row for row in run.rows if row["val_loss"] is not None]
        ax.plot([row["step"] for row in evaluated],
                [row["val_loss"] for row in evaluated], "o",
                color=colour(run), markersize=3)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(title="points: validation", title_fontsize=8,
              loc="upper right", ncols=1 + len(runs) // 6)
    if len(runs) == 1:
        return annotate(ax,
                        "train once more, on more processes, to compare",
                        y=0.04)
    return ""


def speed(ax: Axes, runs: list[RecordedRun]) -> str:
    """Tokens/s of all processes and of each, and the MFU if it is known."""
    ax.set(title="tokens/s (pale), tokens/s of each process (full)",
           xlabel="thousand tokens/s")
    for y, run in enumerate(runs):
        total = run.tokens_per_second / 1000
        ax.barh(y, total, color=colour(run), alpha=0.35)
        ax.barh(y, total / run.world_size, height=0.4, color=colour(run))
        text = f" {total:,.1f}"
        if run.mfu is not None:
            text += f", MFU {run.mfu:.0%}"
        ax.annotate(text, (total, y), va="center")
    ax.set_yticks(range(len(runs)), [run.name for run in runs])
    ax.invert_yaxis()
    ax.margins(x=0.2)
    unknown = sorted({run.device for run in runs if run.mfu is None})
    if unknown:
        ax.set_xlabel("thousand tokens/s (no MFU: the peak of "
                      f"{', '.join(unknown)} is not known)")
    return ""


def scaling(ax: Axes, runs: list[RecordedRun]) -> str:
    """Efficiency against the number of processes, with ideal and model."""
    ax.set(title="scaling efficiency", xlabel="processes",
           ylabel="tokens/s per process ÷ tokens/s of one alone")
    ax.axhline(1, color=INK, linestyle=":", label="ideal")
    most, found = 1, results.efficiency(runs)
    for kind, points in found.items():
        most = max(most, *points)
        mine = [run for run in runs if run.kind == kind]
        first = mine[0]
        ax.plot([*points], [*points.values()], "o-", label=kind,
                color=colour(first))
        model = results.fit_kind(runs, kind)
        if model:
            microbatches = first.accumulation * first.world_size
            on_node = math.inf if all(run.nodes == 1 for run in mine) else max(
                run.world_size // run.nodes for run in mine)
            xs = [n for n in powers_of_two(microbatches)
                  if n <= 4 * max(points)]
            one = model.seconds(1, microbatches)
            ax.plot(xs, [one / n / model.seconds(
                n, microbatches / n, 1 + (n - 1) // on_node) for n in xs],
                "--", color=colour(first), label=f"{kind}, the model")
            most = max(most, *xs)
    ax.set_ylim(0, 1.15)
    count_axis(ax, powers_of_two(most))
    ax.legend(loc="lower left")
    if not found:
        return annotate(ax,
                        "there is no run on one process\nto compare with")
    if most > 1:
        return ""
    return annotate(
        ax, "there are only runs on one process:\nalso run on 2 and 4")


def model(ax: Axes, runs: list[RecordedRun]) -> str:
    """Where a step's time goes: the fitted parts and the measured total."""
    ax.set(title="a step: A·t_microbatch + t_optimizer + t_exposed",
           xlabel="ms per step")
    fitted = None
    for stage in STAGES:
        fitted = results.fit_kind(runs, stage)
        if fitted:
            break
    if fitted is None:
        ax.set_axis_off()
        return annotate(ax, "this needs one stage on three numbers\n"
                        "of processes, for example 1, 2 and 4")
    if not fitted.microbatch:
        ax.set_axis_off()
        return annotate(ax, "these times do not fit the model: it finds "
                        "that a\nmicrobatch takes no time, as where "
                        "processes\nshare the cores of a CPU")
    runs = [run for run in runs if run.kind == stage]
    names: tuple[str, ...] = (
        "A microbatches", "optimizer", "exposed all-reduce")
    parts: list[tuple[float, ...]] = [
        fitted.parts(run.world_size, run.accumulation, run.nodes)
        for run in runs]
    if not fitted.told_apart:
        names = (names[0], "optimizer and exposed all-reduce")
        parts = [(first, sum(others)) for first, *others in parts]
    stack(ax, [f"{run.name}\nA = {run.accumulation}" for run in runs],
          zip(names, zip(*parts, strict=True),
              ("#3b7dd8", "#2b9a5f", "#cf7a12"), strict=False), alpha=0.7)
    ax.plot([1000 * run.seconds for run in runs], range(len(runs)), "D",
            color=INK, markersize=5, label="measured")
    ax.set_ylim(len(runs) + 0.4, -0.5)  # room for the legend below
    ax.legend(loc="lower left", ncols=2)
    if runs[0].device == "cpu":
        ax.set_xlabel("ms per step (processes share this CPU's cores, so "
                      "the model does not hold)")
    return ""


def parts(ax: Axes, runs: list[RecordedRun]) -> str:
    """Where each rank's time goes in a step, as --profile recorded it."""
    ax.set(title="where a step's time goes, recorded", xlabel="ms per step")
    rows = [(f"{run.name}, rank {rank}", seconds) for run in runs
            for rank, seconds in enumerate(recorded_parts(run.folder))]
    if not rows:
        ax.set_axis_off()
        return annotate(ax, "no step of these runs was recorded:\n"
                        "train with --profile 10")
    stack_parts(ax, rows)
    return ""


def published(ax: Axes, runs: list[RecordedRun]) -> str:
    """Another course's scaling: ten curves, in the order of their ends."""
    ax.set(title="measured by another course",
           xlabel="GPUs", ylabel="speed of each,\nrelative to one alone",
           ylim=(0.3, 1.05))
    given = results.read_given()
    curves: list[tuple[float, Line2D]] = []  # by their ends
    for (device, sizes), color in zip(given["published"].items(), PUBLISHED,
                                      strict=True):
        for size, marker in zip(sizes, "os^vD", strict=True):
            kept = results.published_efficiency(device, size)
            line, = ax.plot(
                [*kept], [*kept.values()], marker + "-", color=color,
                label=f"{device}, {size}: {kept[16]:.0%}", markersize=5,
                linewidth=1)
            curves.append(([*kept.values()][-1], line))
    curves.sort(key=lambda curve: -curve[0])
    ax.legend(handles=[line for _, line in curves],
              title="device, batch size: on 16",
              loc="center left", bbox_to_anchor=(1, 0.5))
    count_axis(ax, given["published_gpus"])
    ax.set_xlim(0.9, 17)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    return ""


def gpus(ax: Axes, runs: list[RecordedRun]) -> str:
    """How busy the GPUs were, in the run with the most processes."""
    ax.set(title="GPU utilisation", xlabel="seconds, a sample every 10",
           ylabel="% of the time busy", ylim=(0, 105))
    for run in sorted(runs, key=lambda run: -run.world_size):
        samples = results.utilisation(run.folder)
        if samples:
            ax.set_title(f"GPU utilisation: {run.name}")
            for gpu, values in samples.items():
                ax.plot(range(0, 10 * len(values), 10), values, label=gpu)
            ax.legend()
            return ""
    ax.set_axis_off()
    return annotate(ax, "no GPU metrics in these runs:\n"
                    "the batch files record them (gpus-*.txt)")


def ladder(ax: Axes, runs: list[RecordedRun],
           record: dict[str, Any] | None = None) -> str:
    """Seconds for 50 epochs and for texts, theirs and those of each rung."""
    record = record or results.read_ladder()
    ax.set_title("50 epochs of a small GPT-2, and four texts", pad=30)
    ax.set(xlabel="seconds", xscale="log")
    if record["rungs"]:
        ax.set_xlabel(f"seconds\n({record['hardware']},\nload average "
                      f"{record['load']:.1f})")
    rows: list[tuple[str, str | None, float, float, float | None]] = [
        (f"theirs: {name}", INK, training, texts, None)
        for name, (training, texts) in
        results.read_given()["university"].items()]
    rows += [(rung["name"], STAGE_COLOURS.get(rung["stage"]), rung["training"],
              rung["plain"], rung["cached"]) for rung in record["rungs"]
             if "interpreted" not in rung["name"]]  # their time says nothing
    for y, (_, color, training, texts, cached) in enumerate(rows):
        ax.plot(training, y, "o", color=color)
        ax.annotate(f"{training:,.0f}", (training, y), (7, 0), va="center",
                    textcoords="offset points")
        for seconds, fill in (texts, "none"), (cached, "full"):
            if seconds is not None:
                ax.plot(seconds, y, ">", color=color, fillstyle=fill)
    for marker, fill, name in (
            ("o", "full", "50 epochs"), (">", "none", "texts"),
            *[(">", "full", "with key-value cache")] * bool(record["rungs"])):
        ax.plot([], [], marker, color=INK, fillstyle=fill, label=name)
    ax.set_yticks(range(len(rows)), [row[0] for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.margins(x=0.15)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3,
              columnspacing=1, handletextpad=0, frameon=False)
    return ""


PANELS: dict[str, Panel] = {
    panel.__name__: panel
    for panel in (loss, speed, scaling, model, parts, published, gpus)}
IN_NOTEBOOK = {**PANELS, "ladder": ladder}  # which is not about the runs


# ----------------------------------------------------------------- helpers


def stack(
        ax: Axes, names: Sequence[str],
        parts: Iterable[tuple[str, Iterable[float], str]],
        **style: Any) -> None:
    """A bar for each name, of parts: (part, seconds of each bar, colour)."""
    left = [0.0] * len(names)
    for part, seconds, color in parts:
        widths = [1000 * value for value in seconds]
        ax.barh(range(len(names)), widths, left=left, label=part, color=color,
                **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(names)), names)


def stack_parts(ax: Axes, rows: Sequence[tuple[str, dict[str, float]]],
                parts: Iterable[str] = PART_COLOURS) -> None:
    """A bar for each row, (name, its seconds by part), and the legend."""
    stack(ax, [name for name, _ in rows], [
        (part, [seconds[part] for _, seconds in rows], PART_COLOURS[part])
        for part in parts])
    ax.set_ylim(len(rows) + 0.6 + len(rows) / 8, -0.6)  # room for the legend
    ax.legend(loc="lower left", ncols=4)


def colour(run: RecordedRun) -> str:
    """The colour of the run's stage; another strategy has its own."""
    return STAGE_COLOURS.get(run.kind, "#a457c4")


def annotate(ax: Axes, text: str, y: float = 0.5) -> str:
    """Write what is missing into the panel at that height; return it."""
    ax.annotate(text, (0.5, y), xycoords="axes fraction", alpha=0.8,
                ha="center", va="center")
    return text.replace("\n", " ")


def powers_of_two(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def count_axis(ax: Axes, ticks: Sequence[int]) -> None:
    """Label the x axis with these numbers of devices."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])


def themed(panel: Callable[[Axes], object],
           size: tuple[float, float] = (6.2, 3.6)) -> str:
    """panel(axes) as SVG, in a notebook's text colour and width.

    Its title and description, for people who cannot see it, are the axes'.
    """
    inks: Any = dict.fromkeys((  # matplotlib types each key
        "text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor",
        "xtick.color", "ytick.color"), INK)
    file = io.StringIO()
    with matplotlib.rc_context(inks):
        figure = Figure(size, layout="constrained")
        ax = figure.subplots()
        panel(ax)
        figure.savefig(file, format="svg", transparent=True,
                       metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg"):].replace(INK, "currentColor").replace(
        "<svg ", '<svg role="img" style="max-width: 100%; height: auto" ', 1)
    end = svg.index(">") + 1
    return f"{svg[:end]}{about(ax)}{svg[end:]}"


def as_svg(draw: Callable[..., object]) -> Callable[..., str]:
    """Let draw(axes, ...) return its picture, as `themed` makes it."""
    @functools.wraps(draw)
    def drawn(*what: Any) -> str:
        return themed(lambda ax: draw(ax, *what))

    return drawn


def about(ax: Axes) -> str:
    """<title> and <desc> of a panel: its axes, and what is drawn there."""
    title = ax.get_title() or ax.get_ylabel()
    parts = [f"{ax.get_ylabel() or 'bars'} by {ax.get_xlabel() or 'number'}"]
    parts += [text.get_text().replace("\n", " ") for text in ax.texts]
    for line in ax.get_lines():
        name = str(line.get_label())
        drawn: Any = line.get_ydata()  # a list or an array
        ys = list(drawn)
        if ys and not name.startswith("_"):
            parts.append(f"{name}: from {ys[0]:.4g} to {ys[-1]:.4g}")
    return (f"<title>{html.escape(title)}</title>"
            f"<desc>{html.escape('; '.join(parts))}.</desc>")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", metavar="run",
                        help="folders of runs (default: the newest in runs/ "
                        "and those like it)")
    parser.add_argument("-o", "--output", default="results.png",
                        help="the file, .png, .svg or .pdf (results.png)")


def main(args: argparse.Namespace) -> None:
    """Draw all panels in one picture, and print which runs it shows."""
    output = args.output
    kind = Path(output).suffix.lower()[1:]
    require(kind in ("png", "svg", "pdf"), f"{output}: unknown format; fix: "
            "end the name with .png, .svg or .pdf")
    require(may_replace(output, PLOT_MARK), f"{output} exists and was not "
            "made by plot; fix: choose another file with -o")
    runs, notes = results.find_runs(args.folders)
    panels = [panel for panel in PANELS.values() if panel is not parts
              or any(list_traces(run.folder) for run in runs)]
    columns = math.ceil(len(panels) / 2)
    figure = Figure((4.7 * columns, 8), layout="constrained")
    devices = ", ".join(sorted({run.device for run in runs}))
    presets = ", ".join(sorted({run.preset for run in runs}))
    figure.suptitle(f"preset {presets} on {devices}")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(2, columns, number), runs)
    write_atomically(output, lambda file: figure.savefig(
        file, format=kind, dpi=110, metadata={"Creator": PLOT_MARK}))
    for text in notes:
        print(visible(text))
    names = ", ".join(run.name for run in runs)
    print(f"{output}: {visible(names)}")


@dataclass(frozen=True)
class Drawn:
    """A panel's picture, and what the runs lack for it."""

    svg: str
    lacks: str
    is_blank: bool


def write_panel() -> None:
    """For a notebook: write one panel to a file, as SVG.

    Where the runs in runs/ are too few for it, it shows the examples; where
    these are, too, the file says what is missing.
    """
    name, *folders, output = sys.argv[1:]
    require(name in IN_NOTEBOOK, f"no such picture: {name}; fix: choose from "
            f"{', '.join(IN_NOTEBOOK)}")

    def draw(runs: list[RecordedRun], more: str = "") -> Drawn:
        lacks, is_blank = "", False

        def panel(ax: Axes) -> None:
            nonlocal lacks, is_blank
            lacks = IN_NOTEBOOK[name](ax, runs)
            is_blank = not ax.axison
            if more:
                ax.set_title(ax.get_title() + more)

        svg = themed(panel)
        return Drawn(svg, lacks, is_blank)

    drawn = draw(results.find_runs(folders)[0])
    shown = drawn.lacks if drawn.is_blank else drawn.svg
    if drawn.lacks and not folders:
        examples = results.read_runs(results.list_folders(results.EXAMPLES))
        other = draw(results.select_comparable(*examples)[0],
                     "\n(examples: yours are too few)")
        if not other.lacks:
            shown = other.svg
    write_new(output, shown)


def write_new(output: str, text: str) -> None:
    """For a notebook, too: write a file, which must not be there yet."""
    with open(output, "x", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    run_main(write_panel)
