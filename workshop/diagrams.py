"""More pictures for the lessons, drawn as those in pictures.py."""

import ast
import html
import re

from workshop.pictures import COLOURS, cell, line, text

GREY = "#808080"


def svg(width, height, parts):
    """The picture of these parts, as wide as it needs, or as there is."""
    return (f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
            f'style="width: 100%; max-width: {width:g}px; '
            'font: 12px var(--jp-ui-font-family, sans-serif)" '
            f'fill="currentColor">{"".join(parts)}</svg>')


def box(x, y, width, height, colour=GREY, words="", opacity=0.25):
    """A coloured box with words in its middle."""
    out = (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
           f'rx="3" fill="{colour}" fill-opacity="{opacity}" '
           f'stroke="{colour}"/>')
    return out + middle(x + width / 2, y + height / 2 + 4, words)


def middle(x, y, words):
    """Words around x."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{words}</text>'


def arrow(x, y, end):
    """An arrow down, from y to end."""
    return (line(x, y, x, end - 4, 1.5) + '<path d="M'
            f'{x - 4:g},{end - 7:g} L{x + 4:g},{end - 7:g} L{x:g},{end:g}z"/>')


# -------------------------------------------------------------- start_here


def data_parallel(ranks=4):
    """A step: split the minibatch, reduce the gradients, update alike."""
    wide, gap, left = 116, 12, 4
    whole = ranks * wide + (ranks - 1) * gap
    out = [text(left, 14, "the samples of a minibatch, split", "bold")]
    for rank in range(ranks):
        x, colour = left + rank * (wide + gap), COLOURS[rank]
        for k in range(4):
            out.append(cell(x + 14 + 22 * k, 22, 4 * rank + k, rank))
        out += [arrow(x + wide / 2, 46, 66),
                middle(x + wide / 2, 82, f"GPU {rank}: rank {rank}"),
                box(x, 90, wide, 40, colour, "the whole model"),
                arrow(x + wide / 2, 134, 152),
                box(x, 154, wide, 26, colour, "its gradients"),
                arrow(x + wide / 2, 184, 202),
                arrow(x + wide / 2, 242, 260),
                box(x, 262, wide, 26, GREY, "the same update")]
    out.append(box(left, 204, whole, 34, GREY,
                   "all-reduce: everyone gets the mean of all gradients",
                   0.12))
    return svg(whole + 8, 294, out)


def words():
    """Epoch, minibatch, microbatch, sample and tokens, each a zoom."""
    left, width = 84, 430
    blue = COLOURS[0]
    rows = (
        ("epoch", 24, 4, "18,692 steps, one minibatch each"),
        ("minibatch", 16, 5, "512 samples of one step = 32 microbatches"),
        ("microbatch", 16, 6, "16 samples that a GPU takes at once"),
    )
    out, y = [], 6
    for name, number, chosen, about in rows:
        step = width / number
        out += [text(0, y + 35, name, "bold"), text(left, y + 12, about)]
        for i in range(number):
            out.append(box(left + i * step, y + 20, step - 3, 22, blue,
                           opacity=0.7 if i == chosen else 0.12))
        x = left + chosen * step  # the zoom into the chosen one
        out.append(f'<path d="M{x:g},{y + 42} L{x + step - 3:g},{y + 42} '
                   f'L{left + width - 3:g},{y + 64} L{left:g},{y + 64}z" '
                   f'fill="{blue}" fill-opacity="0.12"/>')
        y += 70
    y += 10
    tokens = ("The", " cat", " sat", " on", " the", " mat", ".")
    step = width / len(tokens)
    out.append(text(0, y + 17, "sample", "bold"))
    for k, label in ((0, "x: T tokens"), (1, "targets y")):
        out.append(text(0, y + 34 + 30 * k, label) if k == 0 else
                   text(0, y + 64, label))
        for i in range(len(tokens) - 1):
            out.append(box(left + i * step, y + 18 + 30 * k, step - 3, 24,
                           COLOURS[k], tokens[i + k].strip()))
    out.append(text(left, y + 10, "T = 1024 tokens in GPT-2; the targets are "
                                  "the same tokens, one later"))
    return svg(left + width, y + 80, out)


def nodes(number=2, gpus=4):
    """Ranks count on over the nodes, local ranks begin anew on each."""
    wide, out = 58, []
    whole = gpus * wide + 20
    for node in range(number):
        x = node * (whole + 34)
        out += [box(x + 1, 1, whole, 138, GREY, opacity=0.08),
                text(x + 12, 20, f"node {node}", "bold")]
        for local in range(gpus):
            rank, at = node * gpus + local, x + 12 + local * wide
            colour = COLOURS[local % len(COLOURS)]
            out += [box(at, 30, wide - 6, 34, colour, f"GPU {local}", 0.4),
                    middle(at + wide / 2 - 3, 86, "process"),
                    f'<g font-weight="bold">'
                    f'{middle(at + wide / 2 - 3, 106, f"rank {rank}")}</g>',
                    middle(at + wide / 2 - 3, 126, f"local {local}")]
        out.append(line(x + whole / 2, 139, x + whole / 2, 158, 3))
    total = number * whole + (number - 1) * 34
    out += [box(1, 158, total, 24, GREY, "the network between nodes: slower "
                "than the links within one"),
            text(2, 202, f"world size = {number} nodes x {gpus} GPUs = "
                         f"{number * gpus} processes. Rank 0 logs and saves.")]
    return svg(total + 4, 208, out)


def script_map(source):
    """Sections, classes and functions of a script, with their lines."""
    heads = [(number, match[1]) for number, row in
             enumerate(source.splitlines(), 1)
             if (match := re.fullmatch(r"# -{3,} (.+)", row))]
    heads = [(0, "beginning"), *heads, (source.count("\n") + 2, "")]
    items = [node for node in ast.parse(source).body
             if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    out = []
    for (begin, name), (end, _) in zip(heads, heads[1:]):
        rows = [describe(node) for node in items if begin < node.lineno < end]
        if rows:
            out.append(f"<h4>{html.escape(name)}</h4>{''.join(rows)}")
    return "".join(out)


def describe(node):
    """A class or function in a row: its line, name, methods, purpose."""
    kind = "class" if isinstance(node, ast.ClassDef) else "def"
    methods = [child.name for child in node.body
               if isinstance(child, ast.FunctionDef)
               and not child.name.startswith("__")]
    about = (ast.get_docstring(node) or "").split("\n")[0]
    inside = f": {', '.join(methods)}" if methods and kind == "class" else ""
    return (f'<p><span class="place">line {node.lineno}</span> {kind} '
            f"<strong>{node.name}</strong>{inside} "
            f'<span class="place">{html.escape(about)}</span></p>')


# ------------------------------------------------------------- collectives


def tensors(shown, width=560):
    """What each rank showed: a row for each rank, a column each time.

    shown: for each rank a list of [title, numbers]. Each number is coloured
    by the ranks that are in it: its digits say which (1, 10, 100, 1000).
    """
    times = max(map(len, shown))
    longest = max(len(numbers or ()) for rank in shown
                  for _, numbers in rank)
    wide = max(36, 6 + 9 * max((len(number(value)) for rank in shown
                            for _, numbers in rank
                            for value in numbers or ()), default=0))
    step = wide * max(longest, 1) + 26
    across = max(1, int((width - 54) // step))
    out, top = [], 0
    for begin in range(0, times, across):
        for k in range(begin, min(begin + across, times)):
            x = 54 + (k - begin) * step
            titles = [rank[k][0] for rank in shown if k < len(rank)]
            out.append(text(x, top + 14, html.escape(titles[0]), "bold"))
            for rank, states in enumerate(shown):
                numbers = states[k][1] if k < len(states) else None
                y = top + 24 + 30 * rank
                if k == begin:
                    out.append(text(0, y + 16, f"rank {rank}"))
                if numbers is None:
                    out.append(text(x + 4, y + 16, "-"))
                for i, value in enumerate(numbers or ()):
                    out.append(value_box(x + i * wide, y, wide - 3, value))
        top += 24 + 30 * len(shown) + 14
    return svg(54 + min(across, times) * step, top, out)


def number(value):
    """As short as it goes."""
    return f"{value:g}" if value < 10**6 else f"{value:.0e}"


def value_box(x, y, width, value):
    """A number, with a stripe in the colour of each rank that is in it."""
    digits = f"{int(abs(value)):d}"[::-1]
    owners = [rank for rank, digit in enumerate(digits)
              if digit != "0" and rank < len(COLOURS)]
    stripe = width / max(len(owners), 1)
    stripes = "".join(
        f'<rect x="{x + i * stripe:g}" y="{y:g}" width="{stripe:g}" '
        f'height="24" fill="{COLOURS[rank]}" fill-opacity="0.45"/>'
        for i, rank in enumerate(owners))
    return (f"{stripes}{box(x, y, width, 24, GREY, number(value), 0)}")
