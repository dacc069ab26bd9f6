"""The slides' figures: SVG, from the code of the notebooks' pictures.

`draw(name)` draws one of `FIGURES`. Each has a title and a description, for
people who cannot see it.
"""

import ast
import html
import random
import re
import textwrap
from functools import cache

import matplotlib

from slides.schedules import GPIPE, ONE_F_ONE_B, events
from workshop.notebook import pictures
from workshop.notebook.pictures import (
    COLOURS,
    GREY,
    arrow,
    box,
    line,
    middle,
    svg,
    text,
)
from workshop.results import arithmetic, plot, runs
from workshop.stages import STAGES

BLUE, ORANGE = COLOURS[:2]
LARGE = 13  # points of a plot's words, which can be read from the last row
FIGURES = {}


def figure(draw):
    """Register a figure under its function's name."""
    FIGURES[draw.__name__.replace("_", "-")] = draw
    return draw


@cache
def draw(name):
    """The figure, a file's text: black on white, wherever it is shown."""
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


def across(x, end, y, words=""):
    """An arrow to the right, from x to end, with words above it."""
    return (line(x, y, end - 4, y, 1.5) + '<path d="M'
            f'{end - 7:g},{y - 4:g} L{end - 7:g},{y + 4:g} L{end:g},{y:g}z"/>'
            + middle((x + end) / 2, y - 6, words))


# ------------------------------------------------------ the data-parallel step


@figure
def forward():
    return step(0, "Forward", "Each of four GPUs sends its own samples "
                "through its copy of the whole model, and gets the loss of "
                "its samples.")


@figure
def backward():
    return step(1, "Backward", "Each GPU computes the gradients of its own "
                "samples; an all-reduce replaces them by the mean of all "
                "gradients.")


@figure
def update():
    return step(2, "Update", "Each GPU makes the same update with the same "
                "mean gradients, so that the copies of the model stay equal.")


def step(phase, title, about, ranks=4):
    """One of the three phases of a step; what was before it is grey."""
    wide, gap, left = 118, 14, 96
    whole = ranks * wide + (ranks - 1) * gap
    rows = ((0, "samples", 6, ""), (0, "model", 50, "the whole model"),
            (0, "loss", 106, "its loss"),
            (1, "gradients", 158, "its gradients"),
            (1, "all-reduce", 210, "the mean of all gradients, for everyone"),
            (2, "update", 262, "the same update"))
    out = []
    for number, name, y, words in rows:
        if number > phase:
            continue
        now = number == phase
        out.append(f'<g fill="{"#000" if now else "#595959"}">'
                   + text(0, y + 21, name, "bold"))
        for rank in range(ranks):
            x, colour = left + rank * (wide + gap), COLOURS[rank]
            colour = colour if now else "#b0b0b0"
            if name == "samples":
                out += [box(x + 12 + 24 * k, y, 22, 28, colour,
                            str(4 * rank + k)) for k in range(4)]
                continue
            out.append(arrow(x + wide / 2, y - 14, y - 2))
            if name != "all-reduce":
                out.append(box(x, y, wide, 36 if name == "model" else 32,
                               colour, words))
        if name == "all-reduce":
            out.append(box(left, y, whole, 32, GREY, words, 0.12))
        out.append("</g>")
    return svg(left + whole + 4, 300, out, f"Data parallelism: {title}",
               about)


@figure
def words():
    return pictures.words()


@figure
def one_process():
    return alike(pictures.cadence((1,)), pictures.cadence((4,)))


@figure
def two_processes():
    return alike(pictures.cadence((2,)), pictures.cadence((4,)))


@figure
def four_processes():
    return pictures.cadence((4,))


def alike(drawing, other):
    """The drawing, in as much room as the other: so both have one scale."""
    return re.sub('viewBox="[^"]*"', re.search('viewBox="[^"]*"', other)[0],
                  drawing, count=1)


@figure
def cluster(hosts=("node1", "node2"), gpus=4, cores=8):
    """Ranks and local ranks on named nodes, each with cores and a GPU."""
    wide, out = 73, []
    whole = gpus * wide + 16
    for node, host in enumerate(hosts):
        left = node * (whole + 24) + 1
        out += [box(left, 1, whole, 196, GREY, opacity=0.08),
                text(left + 10, 20, f"host {host}", "bold")]
        for local in range(gpus):
            rank, x = node * gpus + local, left + 10 + local * wide
            colour, at = COLOURS[local], left + 6 + (local + 0.5) * wide
            out += [box(x, 30, wide - 8, 30, colour, f"GPU {local}", 0.4),
                    box(x, 68, wide - 8, 26, GREY, f"{cores} cores", 0.12),
                    middle(at, 116, "a process"),
                    f'<g font-weight="bold">{middle(at, 138, f"rank {rank}")}'
                    "</g>", middle(at, 160, "local rank"),
                    middle(at, 178, str(local))]
        out.append(line(left + whole / 2, 197, left + whole / 2, 214, 3))
    total = len(hosts) * whole + 24 * (len(hosts) - 1)
    out += [box(1, 214, total, 28, GREY, "the network between the nodes"),
            text(2, 264, f"world size = {len(hosts)} nodes x {gpus} GPUs = "
                 f"{len(hosts) * gpus} processes. A process reads its samples "
                 "on its CPU cores.")]
    return svg(total + 2, 272, out, "Nodes, ranks and local ranks", "; ".join(
        f"{host}, GPU {local}, with {cores} CPU cores: rank "
        f"{node * gpus + local}, local rank {local}"
        for node, host in enumerate(hosts) for local in range(gpus)) + ".")


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
        out.append(text(0, 62 * k + 16, title, "bold"))
        out += [pictures.sample_box(34 * i, 62 * k + 26, i, [
            rank for rank in range(ranks) if i in read[rank]])
            for i in range(samples)]
        told.append(f"{title[0].upper()}{title[1:]}.")
    y = 62 * len(told)
    for rank in range(ranks):
        out += [box(110 * rank, y + 4, 20, 20, COLOURS[rank], opacity=1),
                text(110 * rank + 26, y + 19, f"rank {rank}")]
    return svg(34 * samples, y + 30, out, f"Who reads which of a step's "
               f"{samples} samples", f"{ranks} ranks with microbatches of "
               f"{B} samples; what both have read has the colours of both. "
               + " ".join(told))


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
        out.append(text(0, y + 16, f"{title}: {missed} of {samples} "
                        "are not read", "bold"))
        for i in range(samples):
            owners = [rank for rank in range(ranks) if i in read[rank]]
            out.append(pictures.sample_box(22 * i, y + 26, i, owners))
        told.append(f"{title}: {missed} of {samples} samples are not read "
                    "in an epoch; what two ranks have read has the colours "
                    "of both.")
        y += 66
    for rank in range(ranks):
        out += [box(110 * rank, y + 4, 20, 20, COLOURS[rank], opacity=1),
                text(110 * rank + 26, y + 19, f"rank {rank}")]
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
    out, told = [text(right, 14, "GPT-2 XL", "bold")], []
    for k, (name, size) in enumerate(kinds):
        out += [box(left + 157 * k, 2, 18, 18, fills[k], opacity=0.75),
                text(left + 24 + 157 * k, 15, f"{name}: {size} bytes")]
    for sharded, name in enumerate(names):
        y = 34 + 54 * sharded
        out.append(text(0, y + 23, name, "bold"))
        for gpu in range(gpus):
            x = left + gpu * (bar + gap)
            for k, (_, size) in enumerate(kinds):
                width = size * unit
                out.append(box(x, y, width, 36, GREY, opacity=0))
                whole = k < len(kinds) - sharded
                part = width if whole else width / gpus
                begin = x if whole else x + gpu * part
                out.append(box(begin, y, part, 36, fills[k], opacity=0.75))
                x += width
        each = arithmetic.state(arithmetic.XL, gpus, [
            kind for kind, _ in kinds[len(kinds) - sharded:]]) / 1e9
        out.append(text(right, y + 23, f"{each:.1f} GB", "bold"))
        told.append(f"{name}: {each:.1f} GB")
    return svg(right + 78, 34 + 54 * 4, out, "What each GPU keeps",
               "DDP keeps parameters, gradients and moments whole on each of "
               f"{gpus} GPUs. ZeRO-1 divides the moments, ZeRO-2 the "
               "gradients, too, ZeRO-3 and FSDP all three. For GPT-2 XL: "
               f"{', '.join(told)} on each.")


@figure
def fsdp_step(blocks=3):
    """Gather, compute, free, reduce-scatter: in time, for a few blocks."""
    rows = ("gather", "compute", "free", "reduce-scatter")
    fills = (BLUE, ORANGE, GREY, BLUE)
    left, wide, pitch, last = 108, 52, 40, blocks - 1
    boxes = []  # (row, time, words)
    for k in range(blocks):
        boxes += [(0, k, f"block {k}"), (1, k + 1, f"F {k}"),
                  (2, k + 2, f"block {k}")]
    for j, k in enumerate(reversed(range(blocks))):
        begin = blocks + 1 + j  # the last block is gathered again at once
        boxes += [(0, begin, f"block {k}"), (1, begin + 1, f"B {k}"),
                  (2, begin + 2, f"block {k}"), (3, begin + 2, f"grad. {k}")]
    end = 2 * blocks + 3
    boxes.append((1, end, "update"))
    out = [text(0, 30 + pitch * row + 22, name, "bold")
           for row, name in enumerate(rows)]
    out += [text(left, 16, "forward"),
            text(left + (blocks + 1) * wide, 16, "backward"),
            text(left + end * wide, 16, "its part")]
    out += [f'<rect x="{left}" y="{28 + pitch * row}" '
            f'width="{(end + 1) * wide}" height="{pitch - 4}" fill="#000" '
            'fill-opacity="0.05"/>' for row in range(len(rows))]
    out += [box(left + time * wide + 2, 30 + pitch * row, wide - 4, pitch - 8,
                fills[row], words, 0.3) for row, time, words in boxes]
    y = 30 + pitch * len(rows) + 14
    out.append(text(left, y, "time, from left to right: while a block "
                    "computes, the next one is gathered"))
    return svg(left + (end + 1) * wide + 2, y + 10, out, "A step of FSDP",
               "Forward, each block's weights are gathered while the block "
               "before it computes, and are dropped after use. Only what is "
               "in no block stays. Backward, "
               f"from block {last} to block 0, they are gathered again, the "
               "block computes its gradients, a reduce-scatter leaves each "
               "GPU the mean of its own part, and the weights are dropped. "
               "Then each GPU updates its own part.")


# ---------------------------------------------- tensor parallel, pipeline, 3D


@figure
def cuts(layers=6):
    """A model cut between its layers, and through each of them."""
    out, wide = [], 250
    for k, title in enumerate(("between the layers: a pipeline",
                               "through each layer: tensor parallel")):
        left = 4 + k * (wide + 70)
        out.append(text(left, 16, title, "bold"))
        for i in range(layers):
            y = 234 - 34 * i - (8 if k == 0 and i >= layers // 2 else 0)
            parts = ((left, wide, BLUE if i < layers // 2 else ORANGE,
                      f"layer {i}"),) if k == 0 else (
                (left, wide / 2 - 4, BLUE, f"half of layer {i}"),
                (left + wide / 2 + 4, wide / 2 - 4, ORANGE,
                 f"half of layer {i}"))
            out += [box(x, y, width, 28, colour, name)
                    for x, width, colour, name in parts]
    for k, name in enumerate(("GPU 0", "GPU 1")):
        out += [box(4 + 100 * k, 278, 20, 20, (BLUE, ORANGE)[k], opacity=0.6),
                text(30 + 100 * k, 293, name)]
    return svg(2 * wide + 78, 302, out, "Two ways to cut a model",
               f"Left, {layers} layers in two groups: GPU 0 has the first "
               "half of the layers, GPU 1 the second. Right, each layer is "
               "cut in two, and each GPU has one half of every layer.")


@figure
def columns_then_rows():
    """GeLU(XA)B on two GPUs: A by columns, B by rows, one all-reduce."""
    out = [box(2, 92, 62, 60, GREY, "X", 0.12), middle(33, 174, "on both")]
    for gpu, colour in enumerate((BLUE, ORANGE)):
        y = 14 + 128 * gpu
        n = gpu + 1
        out += [across(74, 106, y + 46),
                box(110, y, 46, 92, colour, f"A{n}"),
                across(160, 192, y + 46),
                box(196, y + 16, 104, 60, colour, f"GeLU(X A{n})"),
                across(304, 336, y + 46),
                box(340, y + 23, 80, 46, colour, f"B{n}"),
                across(424, 456, y + 46),
                box(460, y + 16, 62, 60, colour, f"Y{n}")]
    out += [text(110, 272, "columns of A: nothing is sent"),
            text(340, 272, "rows of B: a term of Y each"),
            middle(491, 136, "+"), across(538, 566, 124),
            line(64, 122, 74, 122, 1.5), line(74, 60, 74, 188, 1.5),
            *(line(522, y, 538, y, 1.5) for y in (60, 188)),
            line(538, 60, 538, 188, 1.5),
            box(570, 94, 62, 60, GREY, "Y", 0.12),
            middle(601, 174, "all-reduce")]
    return svg(640, 280, out, "By columns, then by rows: Y = GeLU(XA)B",
               "Both GPUs have X. GPU 0 multiplies it by the first columns "
               "of A, GPU 1 by the others, and each applies GeLU to its own "
               "result. Then each multiplies by the rows of B that belong to "
               "it, and has a term of Y. One all-reduce adds the terms up.")


@figure
def sum_of_products(parts=3):
    """y = sum of x_i W_i: each process has a part of x and rows of W."""
    out = []
    for i in range(parts):
        y, colour = 6 + 66 * i, COLOURS[i]
        out += [text(0, y + 30, f"process {i}", "bold"),
                box(92, y + 6, 80, 40, colour, f"x{i}"),
                middle(190, y + 31, "·"),
                box(208, y + 6, 130, 40, colour, f"W{i}: its rows"),
                across(346, 396, y + 26),
                box(402, y + 6, 100, 40, colour, f"x{i} W{i}")]
        if i:
            out += [arrow(452, y - 20, y + 4), text(462, y - 3, "+")]
    y = 6 + 66 * (parts - 1)
    out += [across(508, 560, y + 26),
            box(566, y + 6, 60, 40, GREY, "y", 0.12)]
    return svg(632, y + 56, out, "A sum of products: y = sum of x_i W_i",
               f"Each of {parts} processes has a part of x and the rows of W "
               "that belong to it, and computes a term of y. The terms are "
               "added up from process to process; the last one has y.")


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


@figure
def grid():
    """The mesh (pipeline, data, tensor) = (2, 2, 2) on two nodes."""
    out, told = [], []
    for pp in range(2):
        left = 4 + pp * 345
        out += [box(left, 2, 290, 232, GREY, opacity=0.08),
                text(left + 10, 22, f"node {pp}: pipeline stage {pp}",
                     "bold")]
        for dp in range(2):
            y = 40 + 104 * dp
            for tp in range(2):
                rank, x = 4 * pp + 2 * dp + tp, left + 14 + 160 * tp
                out.append(box(x, y, 100, 64, COLOURS[tp], ""))
                out += [middle(x + 50, y + 27, f"rank {rank}"),
                        middle(x + 50, y + 48, f"({pp}, {dp}, {tp})")]
                told.append(f"rank {rank}: ({pp}, {dp}, {tp})")
            out += [line(left + 114, y + 32, left + 174, y + 32, 5),
                    middle(left + 144, y + 22, "tensor")]
        for tp in range(2):
            x = left + 64 + 160 * tp
            out += [line(x, 104, x, 144, 3), text(x + 8, 128, "data")]
    out += [across(288, 355, 72), across(288, 355, 176),
            middle(321, 128, "pipeline")]
    return svg(643, 240, out, "A mesh of 2 x 2 x 2",
               "Eight ranks and their places (pipeline, data, tensor). Two "
               "nodes are the two pipeline stages. On each, two TP groups of "
               "two GPUs: a group shares each matrix, and reads samples of "
               f"its own. {'; '.join(told)}.")


# --------------------------------------------------------------- results


def large(draw, size=(7.2, 3.3)):
    """draw(axes) as SVG, with words that can be read from the last row."""
    with matplotlib.rc_context(dict.fromkeys((
            "font.size", "axes.titlesize", "axes.labelsize",
            "legend.fontsize"), LARGE)):
        return plot.themed(draw, size)


@figure
def architecture(layers=6):
    """GPT-2, from tokens to logits; what is drawn once is repeated."""
    rows = (("tokens", GREY), ("embedding of tokens, and of positions", BLUE),
            ("LayerNorm, causal self-attention", ORANGE),
            ("LayerNorm, MLP: 4 times as wide, GELU", ORANGE),
            ("LayerNorm", GREY),
            ("logits: the embedding of tokens again", BLUE))
    out = []
    for k, (words, colour) in enumerate(rows):
        y = 250 - 48 * k
        out.append(box(150, y, 360, 34, colour, words))
        if k:
            out.append(line(330, y + 34, 330, y + 48, 1.5))
    out += ['<rect x="138" y="98" width="384" height="98" fill="none" '
            'stroke="#000" stroke-dasharray="5 4"/>',
            text(534, 150, f"{layers} blocks", "bold"),
            text(0, 150, "each adds to", "bold"),
            text(0, 168, "the stream")]
    return svg(640, 290, out, "The architecture: GPT-2",
               "From the bottom to the top: tokens; their embedding and that "
               f"of their positions; {layers} blocks, each with a LayerNorm "
               "and causal self-attention, then a LayerNorm and an MLP, both "
               "added to the stream; a last LayerNorm; the logits, by the "
               "embedding's matrix.")


@figure
def version_serial():
    return version("Serial: one process does all", 1, "")


@figure
def version_mpi():
    return version("MPI: a message for each gradient, after the backward pass",
                   4, "Allreduce, one message for each parameter")


@figure
def version_kernels():
    return version("Kernels: one process, operations of our own", 1, "",
                   kernels=True)


@figure
def version_mpi_kernels():
    return version("MPI with kernels: what each of them changes, at once", 4,
                   "Allreduce, one message for each parameter", kernels=True)


@figure
def version_nccl(parts=3):
    """When a rank sends its gradients: after the backward pass, or in it."""
    left, wide, out = 124, 51, [text(124, 14, "time, from left to right")]
    for k, (name, sends) in enumerate((
            ("by hand", range(2 * parts, 3 * parts)),
            ("DDP", range(parts + 1, 2 * parts + 1)))):
        computed = [(f"F {i}", BLUE, i) for i in range(parts)]
        computed += [(f"B {parts - 1 - i}", ORANGE, parts + i)
                     for i in range(parts)]
        computed.append(("update", GREY, sends[-1] + 1))
        sent = [(f"grad. {parts - 1 - i}", GREY, time)
                for i, time in enumerate(sends)]
        out.append(text(0, 44 + 72 * k, name, "bold"))
        for row, boxes in enumerate((computed, sent)):
            y = 24 + 72 * k + 34 * row
            out.append(text(62, y + 20, ("compute", "send")[row]))
            out += [box(left + time * wide, y, wide - 4, 30, colour, words,
                        0.3) for words, colour, time in boxes]
    return svg(left + (3 * parts + 1) * wide, 24 + 2 * 72, out,
               "When the gradients are sent: MPI and DDP",
               f"A rank computes forwards (F) and backwards (B), in {parts} "
               "parts. By hand, with MPI, it sends the gradients after the "
               "backward pass, and then makes the update. DDP sends those of "
               "each part while the next part of the backward pass is "
               "computed, so that only the last message delays the update.")


def version(title, ranks, message, kernels=False):
    """What each process does in a step, and what is sent after it.

    kernels: whether its operations are our own.
    """
    wide, out, left, pitch = 129, [], 96, 42
    ops = "our kernels" if kernels else "PyTorch's kernels"
    words = {"samples": "all", "forward": ops, "backward": ops,
             "update": "the same" if message else "of all weights"}
    for k, name in enumerate(words):
        y = 4 + pitch * (k + bool(message and k == 3))
        out.append(text(0, y + 20, name, "bold"))
        for rank in range(ranks):
            out.append(box(left + rank * (wide + 10), y, wide, 30,
                           COLOURS[rank], f"those of rank {rank}"
                           if message and not k else words[name]))
    whole = ranks * (wide + 10) - 10
    if message:
        out.append(box(left, 4 + 3 * pitch, whole, 30, GREY, message, 0.12))
    return svg(max(left + whole, 560) + 2, pitch * (4 + bool(message)), out,
               title, f"{pictures.plural(ranks, 'process', 'es')} in a step: "
               "read samples, forward, backward"
               + " (by kernels of our own)" * kernels + ", "
               + (f"then {message}, " if message else "") + "then the update"
               + (", the same on all ranks." if ranks > 1 else "."))


@figure
def skipped_collective(ranks=3):
    """The calls of each rank by number; the last rank has left out one."""
    left, wide, out = 66, 128, []
    for k in range(2):
        out.append(middle(left + (k + 0.5) * wide, 16, f"call {40 + k}"))
    for rank in range(ranks):
        y, odd = 26 + 44 * rank, rank == ranks - 1
        out += [text(4, y + 23, f"rank {rank}", "bold"),
                box(left + 3, y, wide - 6, 36, BLUE, "all_reduce", 0.3),
                box(left + wide + 3, y, wide - 6, 36, (BLUE, ORANGE)[odd],
                    ("all_reduce", "all_gather")[odd], (0.3, 0.6)[odd]),
                text(left + 2 * wide + 8, y + 23, "has left out an all_reduce"
                     if odd else "waits for all ranks to reduce")]
    return svg(left + 2 * wide + 200, 26 + 44 * ranks, out,
               "A rank that has left out a collective",
               f"Rank {ranks - 1} has left out the all_reduce that is call 41 "
               "of the others. Its next call, an all_gather, meets theirs "
               "under the same number: neither can end.")


@figure
def assisted(proposed=4, right=2):
    """A round of assisted generation: proposed, checked, and what stays."""
    left, wide = 190, 76
    rows = ([f"p{i}" for i in range(1, proposed + 1)],
            [f"p{i}" for i in range(1, right + 1)]
            + [f"m{i}" for i in range(right + 1, proposed + 2)])
    out = [text(0, 23, "small model", "bold"),
           text(0, 39, f"{proposed} calls, a token each"),
           text(0, 89, "large model", "bold"),
           text(0, 105, f"1 call, {proposed + 1} tokens"),
           text(0, 165, "stays", "bold")]
    for i in range(proposed + 1):
        x, kept = left + i * wide, i <= right
        if i < proposed:
            out += [box(x, 8, wide - 10, 36, BLUE, rows[0][i], 0.3),
                    middle(x + wide / 2 - 5, 65, "=" if i < right else
                           "≠" if i == right else "")]
        out.append(box(x, 74, wide - 10, 36, ORANGE, rows[1][i],
                       0.6 if kept else 0.1))
        if kept:
            out += [arrow(x + wide / 2 - 5, 112, 136),
                    box(x, 140, wide - 10, 36, ORANGE, rows[1][i], 0.6)]
    return svg(left + (proposed + 1) * wide, 180, out,
               "Assisted generation: a round",
               f"A small model proposes {proposed} tokens, in as many calls. "
               "In one call the large model computes which token it would "
               f"write at each of these places, and after them. The first "
               f"{right} are the same, so they stay, and so does the large "
               "model's own next token. The others depend on a token that "
               "was not kept, and are dropped.")


@figure
def rungs():
    """The panel of the notebook: the project's figures, and the examples."""
    return large(lambda ax: plot.ladder(
        ax, [], runs.read_ladder(example=True)), (8.4, 4.1))


@figure
def loss():
    """The panel of the notebook's results, with larger words."""
    found, _ = runs.read_all(sorted(runs.EXAMPLES.glob("*-[0-9]")))
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
        out.append(text(160 * k, 14, head.split(" and ")[-1], "bold"))
        out += [box(160 * k, 24 + 34 * i, 150, 28,
                    ORANGE if name in changed else GREY, name,
                    0.5 if name in changed else 0.12)
                for i, name in enumerate(names)]
        told.append(f"{head}: {', '.join(names)}")
    for k, words in enumerate(("DDP changes lines in it", "it stays")):
        out += [box(190 * k, 240, 20, 20, (ORANGE, GREY)[k],
                    opacity=(0.5, 0.12)[k]), text(190 * k + 26, 255, words)]
    return svg(160 * len(heads) - 10, 264, out, "The script's map",
               f"Its sections, in their order. {'; '.join(told)}. DDP "
               f"changes {', '.join(changed)}.")


@figure
def launchers(nodes=2, gpus=4):
    """sbatch, srun, torchrun, the processes: who starts whom, and where."""
    wide = 62
    whole = gpus * wide + 10
    total = nodes * whole + 20 * (nodes - 1)
    out = [box(0, 0, total, 30, GREY, "sbatch: asks for nodes and GPUs, and "
               "runs the batch file once, on the first node", 0.12),
           arrow(total / 2, 30, 46),
           box(0, 48, total, 30, GREY, "srun: starts one task on each node",
               0.12)]
    for node in range(nodes):
        left = node * (whole + 20)
        out += [arrow(left + whole / 2, 78, 94),
                box(left, 96, whole, 30, BLUE, f"torchrun on node {node}")]
        for local in range(gpus):
            x = left + 5 + local * wide
            out += [arrow(x + wide / 2, 126, 142),
                    box(x + 2, 144, wide - 4, 44, COLOURS[local], "", 0.4),
                    middle(x + wide / 2, 162, "RANK"),
                    middle(x + wide / 2, 179, f"{node * gpus + local}")]
    out.append(text(0, 208, f"LOCAL_RANK counts from 0 on each node; "
                    f"WORLD_SIZE is {nodes * gpus} for all."))
    return svg(total, 214, out, "From sbatch to the processes",
               "sbatch asks for nodes and runs the batch file once, on the "
               "first. srun starts a task on each node, which is torchrun. "
               f"Each torchrun starts {gpus} processes and tells them RANK, "
               "LOCAL_RANK and WORLD_SIZE.")


TRAINER = (  # the loop's lines, and the argument that stands for them
    ("for step in range(first_step, max_steps):", "max_steps="),
    ("for microbatch in range(accumulation_steps):",
     "accumulate_grad_batches="),
    ("with torch.autocast(", "precision="),
    ("DistributedDataParallel(model", "strategy="),
    ("clip_grad_norm_(", "gradient_clip_val="),
    ("evaluate(", "val_check_interval="))


@figure
def trainer():
    """Which argument of the Trainer stands for which line of the loop."""
    out = [text(0, 14, "the loop of DDP", "bold"),
           text(392, 14, "Trainer(...)", "bold")]
    for k, (row, argument) in enumerate(TRAINER):
        y = 24 + 36 * k
        out += [box(0, y, 320, 28, GREY, "", 0.12),
                text(8, y + 18, row if row[-1] == ":" else row + "...)"),
                across(326, 386, y + 14),
                box(392, y, 200, 28, BLUE, "", 0.25),
                text(400, y + 18, argument + "...")]
    return svg(594, 24 + 36 * len(TRAINER), out, "The Trainer's arguments",
               "; ".join(f"{argument[:-1]} stands for {row}"
                         for row, argument in TRAINER) + ".")


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
        words = re.sub(r"(dt|tok/s):.*", r"\1: ...", " ".join(part.split()))
        out += [box(108 * k, 0, 104, 28, BLUE if k < 4 else ORANGE, words),
                arrow(108 * k + 52, 30, 46),
                *(middle(108 * k + 52, 60 + 15 * i, about[k][i])
                  for i in range(2))]
        told.append(f"{words}: {' '.join(about[k])}")
    return svg(108 * len(told) - 4, 84, out, "What to see in the log",
               f"{'; '.join(told)}.")


# -------------------------------------------- messages, one device, a bill


@figure
def send_receive():
    return messages(("Send", "Recv"), 3)


@figure
def deadlock():
    return messages(("Send: waits for Recv", "Recv: never reached"), 2)


@figure
def begin_then_wait():
    return messages(("Isend", "Irecv", "compute", "Waitall"), 2)


def messages(calls, ranks):
    """The calls of each rank, which sends to the next, in their order."""
    wide, out = 500 / len(calls), []
    for rank in range(ranks):
        y = 44 * rank
        out += [text(0, y + 22, f"rank {rank}", "bold"),
                text(562, y + 22, f"to rank {(rank + 1) % ranks}")]
        out += [box(54 + k * wide, y, wide - 6, 34,
                    ORANGE if "waits" in words else BLUE, words,
                    0 if "never" in words else 0.3)
                for k, words in enumerate(calls)]
    return svg(630, 44 * ranks - 8, out, f"{ranks} ranks send to each other",
               f"Each rank calls {', then '.join(calls)}; it sends to the "
               "next rank, and the last one to the first.")


KARPATHY = {"fp32": 1000, "TF32": 333, "bf16": 300, "torch.compile": 130,
            "flash attention": 96, "padded vocabulary": 93, "fused AdamW": 90}


@figure
def one_gpu():
    """What Karpathy (2024) measured: a bar a change, on top of the others."""
    out = []
    for k, (name, ms) in enumerate(KARPATHY.items()):
        y, wide = 28 * k, 0.42 * ms
        out += [text(0, y + 16, name), box(124, y, wide, 22, BLUE),
                text(130 + wide, y + 16, f"{ms:,} ms", "bold")]
    return svg(630, 28 * len(KARPATHY), out, "One device, made fast",
               "Milliseconds for 16 samples of GPT-2 on an A100, each change "
               "added to those before it: " + "; ".join(
                   f"{name} {ms:,}" for name, ms in KARPATHY.items()) + ".")


@figure
def bills(loss=3.3):
    """Minutes against GPU-hours, for more and more GPUs."""
    rows = [[float(str(cell).replace(",", "")) for cell in row]
            for row in arithmetic.bills(loss)]

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


@figure
def generation():
    """The forward pass gives one token; generating calls it again."""
    left, out = 96, []
    steps = (("tokens", ("The", "cat", "sat", "on")),
             ("vectors", ["x"] * 4))
    for row, (name, words) in enumerate(steps):
        y = 44 * row
        out.append(text(0, y + 20, name, "bold"))
        out += [box(left + 84 * i, y, 76, 30, BLUE, word, 0.25 - 0.1 * row)
                for i, word in enumerate(words)]
        out += [arrow(left + 84 * i + 38, y + 30, y + 44) for i in range(4)]
    out += [box(left, 88, 328, 44, ORANGE, "in blocks, each token sees those "
                "before it"),
            text(0, 114, "the model", "bold"),
            arrow(left + 290, 132, 148),
            box(left + 200, 150, 200, 30, BLUE, "a probability for each "
                "token", 0.25),
            arrow(left + 290, 180, 196),
            box(left + 252, 198, 76, 30, ORANGE, "the", 0.6),
            text(left + 336, 218, "drawn"),
            text(0, 218, "append it, and begin again", "bold")]
    out += [line(left + 390, 213, left + 420, 213, 1.5),
            line(left + 420, 213, left + 420, 15, 1.5),
            line(left + 420, 15, left + 416, 15, 1.5),
            box(left + 336, 0, 76, 30, ORANGE, "the", 0.3)]
    return svg(left + 424, 232, out, "The forward pass, and generation",
               "Each token becomes a vector; the blocks change the vectors, "
               "each with those before it; the last one becomes a probability "
               "for each token of the vocabulary. One is drawn, appended to "
               "the tokens, and the model is called again.")


@figure
def offload():
    """Where the state is, and what moves in a step."""
    out = [box(0, 0, 240, 110, BLUE, "", 0.12), text(10, 20, "GPU", "bold"),
           box(14, 32, 212, 28, BLUE, "activations, gathered blocks"),
           box(14, 68, 212, 28, BLUE, "forward and backward"),
           box(400, 0, 240, 110, ORANGE, "", 0.12),
           text(410, 20, "CPU", "bold"),
           box(414, 32, 212, 28, ORANGE, "its part of the state"),
           box(414, 68, 212, 28, ORANGE, "the update"),
           across(240, 400, 84, "gradients"),
           line(400, 40, 246, 40, 1.5), middle(320, 34, "parameters"),
           '<path d="M247,36 L247,44 L240,40z"/>']
    return svg(640, 112, out, "Offload", "The GPU computes; the CPU's memory "
               "holds the process's part of the state, and the CPU makes the "
               "update. In a step the gradients move down, and the parameters "
               "up.")
