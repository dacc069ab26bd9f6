"""The slides' figures: SVG, drawn where a number is computed for them.

`draw(name)` draws one of `FIGURES`, with the code of the notebooks' pictures,
or reads source/figures/<name>.svg, which people draw. Each has a title and a
description, for people who cannot see it.
"""

import ast
import html
import random
import re
import textwrap
from functools import cache
from pathlib import Path

import matplotlib

from slides.schedules import GPIPE, ONE_F_ONE_B, events
from workshop.notebook import pictures
from workshop.notebook.pictures import (
    GREY,
    RANK_COLOURS,
    arrow,
    draw_box,
    draw_text,
    middle,
    svg,
)
from workshop.results import arithmetic, plot, runs
from workshop.stages import STAGES

BLUE, ORANGE = RANK_COLOURS[:2]
LARGE = 13  # points of a plot's words, which can be read from the last row
SOURCES = Path(__file__).parent / "source" / "figures"
FIGURES = {}


def figure(draw):
    """Register a figure under its function's name."""
    FIGURES[draw.__name__.replace("_", "-")] = draw
    return draw


@cache
def draw(name):
    """The figure, a file's text: black on white, wherever it is shown."""
    if name not in FIGURES:
        return (SOURCES / f"{name}.svg").read_text("utf-8")
    drawing = FIGURES[name]()
    end = drawing.index(">") + 1
    head = drawing[:end]
    if "xmlns=" not in head:
        head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"',
                            1)
    head = re.sub(r"max-width: [^;]*;|height: auto", "", head)
    return (f'{head}<rect width="100%" height="100%" fill="#fff"/>'
            f"{drawing[end:]}\n")


def describe(drawing):
    """(title, description) of a figure."""
    return tuple(html.unescape(re.search(
        rf"<{tag}>(.*?)</{tag}>", drawing, re.DOTALL)[1])
        for tag in ("title", "desc"))


# ----------------------------------------------------------- collectives

TENS = [10**rank for rank in range(4)]
TOTAL = sum(TENS)
BEFORE = [[value] * 4 for value in TENS]
COLLECTIVES = {  # name: (what each rank holds before, and after)
    "all-reduce": (BEFORE, [[TOTAL] * 4] * 4),
    "reduce": (BEFORE, [[TOTAL] * 4, None, None, None]),
    "broadcast": (BEFORE, [BEFORE[0]] * 4),
    "all-gather": ([[value] for value in TENS], [TENS] * 4),
    "scatter": ([[1, 2, 3, 4], None, None, None],
                [[i] for i in (1, 2, 3, 4)]),
    "reduce-scatter": (BEFORE, [[TOTAL]] * 4),
}


def collective(name):
    """What each rank holds before and after it: all of them on one scale."""
    before, after = COLLECTIVES[name]
    drawing = pictures.tensors([
        [["before", held, None, None], [f"after {name}", then, None, None]]
        for held, then in zip(before, after, strict=True)], least=42)
    drawing = re.sub('viewBox="[^"]*"', 'viewBox="0 0 480 142"', drawing,
                     count=1)
    return drawing.replace("<title>What", f"<title>{name}: what", 1)


for NAME in COLLECTIVES:
    FIGURES[NAME] = lambda name=NAME: collective(name)


RING = 3  # ranks of the ring that is drawn


def ring(ranks=RING):
    """[title, numbers, came, source] of each rank, at each turn of a ring."""
    held = [[10**rank] * ranks for rank in range(ranks)]
    shown = [[["at the start", list(row), None, None]] for row in held]

    def turn(title, first, add):
        sent = [(rank, (first + rank) % ranks, held[rank]
                 [(first + rank) % ranks]) for rank in range(ranks)]
        for rank, chunk, value in sent:
            to = (rank + 1) % ranks
            held[to][chunk] = value + held[to][chunk] * add
            shown[to].append([title, list(held[to]), chunk, rank])

    for k in range(ranks - 1):
        turn(f"turn {k + 1}: add", -k, True)
    for k in range(ranks - 1):
        turn(f"turn {ranks + k}: pass on", 1 - k, False)
    return shown


@figure
def ring_sum():
    return pictures.tensors([states[:3] for states in ring()])


@figure
def ring_hand_around():
    return pictures.tensors([states[2:] for states in ring()])


@figure
def offset_and_stride(samples=16, B=2, ranks=2):
    """Which samples of a step are read, and with what left out."""
    whole, out, told = ranks * B, [], []
    for k, (title, offset, stride) in enumerate((
            ("offset rank * B, stride world_size * B", B, whole),
            ("without the offset", 0, whole), ("without the stride", B, B))):
        read = [{rank * offset + stride * turn + i
                 for turn in range(samples // whole) for i in range(B)}
                for rank in range(ranks)]
        missed = samples - len(set.union(*read))
        title += f": {missed} of {samples} are not read"
        out.append(draw_text(0, 62 * k + 16, title, "bold"))
        out += [pictures.sample_box(34 * i, 62 * k + 26, i, [
            rank for rank in range(ranks) if i in read[rank]])
            for i in range(samples)]
        told.append(f"{title[0].upper()}{title[1:]}.")
    y = 62 * len(told)
    for rank in range(ranks):
        out += [draw_box(110 * rank, y + 4, 20, 20, RANK_COLOURS[rank],
                         opacity=1),
                draw_text(110 * rank + 26, y + 19, f"rank {rank}")]
    return svg(34 * samples, y + 30, out, f"Who reads which of a step's "
               f"{samples} samples", f"{ranks} ranks with microbatches of "
               f"{B} samples; what both have read has the colours of both. "
               + " ".join(told))


@figure
def four_alike(processes: int = 4) -> str:
    """Processes that do not ask for their rank, and what they write to."""
    out = []
    wide = 140
    for k in range(processes):
        x = 150 * k
        out += [draw_box(x, 0, wide, 24, BLUE, "rank = 0", 0.4),
                draw_box(x, 28, wide, 24, GREY, "the whole model"),
                draw_box(x, 56, wide, 24, GREY, "all samples"),
                arrow(x + wide / 2, 82, 108)]
    whole = 150 * processes - 10
    out.append(draw_box(0, 110, whole, 26, ORANGE,
                        "one folder: the log, the checkpoint", 0.4))
    return svg(whole, 138, out, "Processes that do not ask for their rank",
               f"{processes} processes. Each takes itself for rank 0, has the "
               "whole model, reads all samples, and writes to the same "
               "folder.")


@figure
def all_read_all(samples: int = 16, ranks: int = 4) -> str:
    """What the ranks read of a step if nobody has divided its samples."""
    out = []
    for rank in range(ranks):
        y = 30 * rank
        out.append(draw_text(0, y + 15, f"rank {rank}"))
        out += [pictures.sample_box(54 + 34 * i, y, i, [rank])
                for i in range(samples)]
    return svg(54 + 34 * samples, 30 * ranks, out, "All read all samples",
               f"A step's {samples} samples, and {ranks} ranks without an "
               "offset and a stride: each rank reads all of them.")


@figure
def partition(samples=24, ranks=4):
    """Who reads which sample of an epoch: divided, or by random seeds."""
    draws = [random.Random(rank).sample(range(samples), samples // ranks)
             for rank in range(ranks)]
    turns = [[i for i in range(samples) if i % ranks == rank]
             for rank in range(ranks)]
    out, told, y = [], [], 0
    for title, read in (("divided: the ranks take turns", turns),
                        ("each rank shuffles by a seed of its own", draws)):
        missed = samples - len({i for part in read for i in part})
        out.append(draw_text(0, y + 16, f"{title}: {missed} of {samples} "
                             "are not read", "bold"))
        for i in range(samples):
            owners = [rank for rank in range(ranks) if i in read[rank]]
            out.append(pictures.sample_box(22 * i, y + 26, i, owners))
        told.append(f"{title}: {missed} of {samples} samples are not read "
                    "in an epoch; what two ranks have read has the colours "
                    "of both.")
        y += 66
    for rank in range(ranks):
        out += [draw_box(110 * rank, y + 4, 20, 20, RANK_COLOURS[rank],
                         opacity=1),
                draw_text(110 * rank + 26, y + 19, f"rank {rank}")]
    return svg(22 * samples, y + 30, out, "Who reads which sample",
               " ".join(told))


# --------------------------------------------------------- ZeRO and FSDP


@figure
def zero(gpus=8):
    """What each GPU keeps of the state: 4, 4 and 8 bytes a parameter."""
    kinds = [*arithmetic.STATE.items()]
    names = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")
    left, unit, gap = 104, 3.1, 8
    bar, fills = 16 * unit, (ORANGE, "#6b6b6b", BLUE)
    right = left + gpus * (bar + gap)
    out, told = [draw_text(right, 14, "GPT-2 XL", "bold")], []
    for k, (name, size) in enumerate(kinds):
        out += [draw_box(left + 157 * k, 2, 18, 18, fills[k], opacity=0.75),
                draw_text(left + 24 + 157 * k, 15, f"{name}: {size} bytes")]
    for sharded, name in enumerate(names):
        y = 34 + 54 * sharded
        out.append(draw_text(0, y + 23, name, "bold"))
        for gpu in range(gpus):
            x = left + gpu * (bar + gap)
            for k, (_, size) in enumerate(kinds):
                width = size * unit
                out.append(draw_box(x, y, width, 36, GREY, opacity=0))
                whole = k < len(kinds) - sharded
                part = width if whole else width / gpus
                begin = x if whole else x + gpu * part
                out.append(draw_box(begin, y, part, 36, fills[k],
                                    opacity=0.75))
                x += width
        each = arithmetic.state(arithmetic.XL, gpus, [
            kind for kind, _ in kinds[len(kinds) - sharded:]]) / 1e9
        out.append(draw_text(right, y + 23, f"{each:.1f} GB", "bold"))
        told.append(f"{name}: {each:.1f} GB")
    return svg(right + 78, 34 + 54 * 4, out, "What each GPU keeps",
               "DDP keeps parameters, gradients and moments whole on each of "
               f"{gpus} GPUs. ZeRO-1 divides the moments, ZeRO-2 the "
               "gradients, too, ZeRO-3 and FSDP all three. For GPT-2 XL: "
               f"{', '.join(told)} on each.")


# ---------------------------------------------- tensor parallel, pipeline, 3D


@figure
def gpipe():
    return pipeline(GPIPE, "GPipe")


@figure
def one_forward_one_backward():
    return pipeline(ONE_F_ONE_B, "1F1B")


def pipeline(order, name, stages=4, microbatches=8):
    """The schedule of a pipeline: a backward pass takes twice a forward one.
    """
    return pictures.timeline(
        events(order, stages, microbatches), 640, unit="", pitch=22,
        heading=name, title=f"{name}: {order.__doc__.rstrip('.').lower()}")


# --------------------------------------------------------------- results


def large(draw, size=(7.2, 3.3)):
    """draw(axes) as SVG, with words that can be read from the last row."""
    with matplotlib.rc_context(dict.fromkeys((
            "font.size", "axes.titlesize", "axes.labelsize",
            "legend.fontsize"), LARGE)):
        return plot.themed(draw, size)


@figure
def rungs():
    """The panel of the notebook: the project's figures, and the examples."""
    return large(lambda ax: plot.ladder(
        ax, [], runs.read_ladder(example=True)), (8.4, 4.1))


@figure
def loss():
    """The panel of the notebook's results, with larger words."""
    found, _ = runs.read_runs(sorted(runs.EXAMPLES.glob("*-[0-9]")))
    order = list(plot.STAGES)
    found.sort(key=lambda run: (order.index(run.stage), run.world_size))

    def draw(ax):
        plot.loss(ax, found)
        ax.set_ylabel(textwrap.fill(ax.get_ylabel(), 32))
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), title_fontsize=
                  LARGE, title=ax.get_legend().get_title().get_text() or None)
    return large(draw)


@figure
def published():
    """The panel of the notebook's results: all that was published."""
    return large(lambda ax: plot.published(ax, []))


# ------------------------------------------- the script, launchers, Lightning


@figure
def script_map():
    """What the single-device script holds, and which of it DDP changes."""
    std, ddp = (STAGES[name].solution.read_text("utf-8")
                for name in ("std", "ddp"))
    found, then = ({node.name: node for node in ast.parse(source).body
                    if hasattr(node, "name")} for source in (std, ddp))
    heads = [(row, line.strip("# -")) for row, line in
             enumerate(std.splitlines(), 1) if line.startswith("# ---")]
    out, told, changed = [], [], [
        name for name, node in found.items()
        if ast.dump(node) != ast.dump(then[name])]
    for k, ((begin, head), (end, _)) in enumerate(
            zip(heads, [*heads[1:], (len(std), "")], strict=True)):
        names = [name for name, node in found.items()
                 if begin < node.lineno < end]
        out.append(draw_text(160 * k, 14, head.split(" and ")[-1], "bold"))
        out += [draw_box(160 * k, 24 + 34 * i, 150, 28,
                         ORANGE if name in changed else GREY, name,
                         0.5 if name in changed else 0.12)
                for i, name in enumerate(names)]
        told.append(f"{head}: {', '.join(names)}")
    for k, meaning in enumerate(("DDP changes lines in it", "it stays")):
        out += [draw_box(190 * k, 240, 20, 20, (ORANGE, GREY)[k],
                         opacity=(0.5, 0.12)[k]),
                draw_text(190 * k + 26, 255, meaning)]
    return svg(160 * len(heads) - 10, 264, out, "The script's map",
               f"Its sections, in their order. {'; '.join(told)}. DDP "
               f"changes {', '.join(changed)}.")


@figure
def observations():
    """A line of the log of four processes, and what to see in each part."""
    about = (("one line a step:", "rank 0 logs"),
             ("the mean over", "all ranks"), ("as on a", "single device"),
             ("of the mean", "gradient"), ("falls with", "more GPUs"),
             ("grows with", "more GPUs"))
    logged = re.search(r"^\| step.*", (runs.EXAMPLES / "ddp-4" / "log.txt")
                       .read_text("utf-8"), re.M)[0].split("|")[1:-1]
    out, told = [], []
    for k, part in enumerate(logged[:len(about)]):
        shown = re.sub(r"(dt|tok/s):.*", r"\1: ...", " ".join(part.split()))
        out += [draw_box(108 * k, 0, 104, 28, BLUE if k < 4 else ORANGE,
                         shown),
                arrow(108 * k + 52, 30, 46),
                *(middle(108 * k + 52, 60 + 15 * i, about[k][i])
                  for i in range(2))]
        told.append(f"{shown}: {' '.join(about[k])}")
    return svg(108 * len(told) - 4, 84, out, "What to see in the log",
               f"{'; '.join(told)}.")


# -------------------------------------------- messages, one device, a bill


KARPATHY = {"fp32": 1000, "TF32": 333, "bf16": 300, "torch.compile": 130,
            "flash attention": 96, "padded vocabulary": 93, "fused AdamW": 90}


def bars(title, rows, unit, kinds=("",)):
    """A horizontal bar for each row, with its sum; kinds: its parts' names.

    rows: [(name, [a number for each of the kinds])]
    """
    out, told, fills = [], [], (BLUE, ORANGE, RANK_COLOURS[2], GREY)
    largest = max(sum(parts) for _, parts in rows)
    left = 5 + 7 * max(len(name) for name, _ in rows)
    if len(kinds) > 1:
        for k, kind in enumerate(kinds):
            out += [draw_box(150 * k, 2, 18, 18, fills[k]),
                    draw_text(150 * k + 24, 16, kind)]
    for k, (name, parts) in enumerate(rows):
        x, y = left, 28 * (k + (len(kinds) > 1))
        out.append(draw_text(0, y + 16, name))
        for part, fill in zip(parts, fills, strict=False):
            wide = 420 * part / largest
            out.append(draw_box(x, y, wide, 22, fill))
            x += wide
        amount = f"{sum(parts):,.{int(sum(parts) < 10)}f} {unit}"
        out.append(draw_text(x + 6, y + 16, amount, "bold"))
        told.append(f"{name}: {amount}")
    return svg(left + 506, y + 28, out, title, f"{'; '.join(told)}.")


@figure
def one_gpu():
    """What Karpathy (2024) measured: a bar a change, on top of the others."""
    return bars("Milliseconds for 16 samples of GPT-2 on an A100",
                [(name, [ms]) for name, ms in KARPATHY.items()], "ms")


@figure
def many_gpus():
    """One epoch: on one A100, on several, and on the GPU that we measured."""
    from slides.text import facts  # which needs this module

    course = facts()
    hours = course["flop"] * course["tokens"] / 3600 / (
        course["share"] * course["peak"])
    measured = course["h200"]["tokens_per_second"]
    return bars("Hours for one epoch of FineWeb-Edu with GPT-2", [
        ("one A100", [hours]),
        (f"{course['gpus']} A100s, at best", [hours / course["gpus"]]),
        ("one H200", [course["tokens"] / measured / 3600])], "hours")


@figure
def gpu_memory():
    """A model's state, and the activations of some samples."""
    return bars("What fills a GPU", [
        ("recomputed" if again else f"{name}, B = {samples}", [
            *(size * arithmetic.num_parameters(model) / 1e9
              for size in arithmetic.STATE.values()),
            samples * arithmetic.activations(model, again) / 1e9])
        for name, model, samples in (("GPT-2", arithmetic.GPT2, 16),
                                     ("GPT-2 XL", arithmetic.XL, 4))
        for again in (False, True)], "GB", (*arithmetic.STATE, "activations"))


@figure
def bills(loss=3.3):
    """Minutes against GPU-hours, for more and more GPUs."""
    rows = [[float(str(cell).replace(",", "")) for cell in row]
            for row in arithmetic.cost_rows(loss)]

    def draw(ax):
        minutes, hours = ([row[k] for row in rows] for k in (3, 4))
        ax.plot(hours, minutes, "o-", color=BLUE)
        ax.set(title="what a run costs", xlabel="GPU-hours",
               ylabel="minutes", xscale="log", ylim=(0, 1.2 * minutes[0]))
        for gpus, *_, time, cost in rows:
            ax.annotate(f"{gpus:,.0f} A100s", (cost, time), (6, 8),
                        textcoords="offset points", fontsize=LARGE)
        ax.set_xticks(hours, [f"{cost:,.0f}" for cost in hours])
        ax.set_xlim(None, 2 * hours[-1])
        ax.minorticks_off()
    return large(draw)


