"""Pictures for the lessons: SVG, for the light and the dark theme."""

import ast
import html
import math
import re

# one a process; white words can be read on them, they are seen in both themes,
# and red-green blind people tell them apart
COLOURS = ("#2166c0", "#a85500", "#198080", "#6c2cfe")
CELL, LINE = 22, 26  # of a microbatch: its width, and from row to row


def cadence(worlds=(1, 2, 4)):
    """Who takes which microbatch, and when, for each world size."""
    microbatches, steps = 4, 3  # in a minibatch; and so many are drawn
    right = 64 + (microbatches + 1) * CELL  # where the time begins
    width = right + steps * microbatches * CELL + 36
    out, y = dataset(width, steps), 138
    for world in worlds:
        turns = microbatches // world
        out.append(text(0, y, plural(world, "process", "es"), "bold"))
        out.append(text(right, y, f"{plural(turns, 'microbatch', 'es')} in "
                                  "turn, then an update"))
        y += 10
        for i in range(steps * microbatches):
            step, k = divmod(i, microbatches)
            rank, turn = k % world, step * turns + k // world
            out.append(cell(64 + k * CELL, y + step * LINE, i, rank))
            out.append(cell(right + turn * CELL + 4 * step,
                            y + rank * LINE, i, rank))
        for step in range(steps):
            out.append(text(0, y + step * LINE + 15, f"step {step}"))
            x = right + (step + 1) * turns * CELL + 4 * step
            out.append(line(x + 1, y - 2, x + 1, y + world * LINE - 4, 2))
        y += max(world, steps) * LINE + 26
    return svg(width, y - 26, out, "Who takes which microbatch, and when",
               f"{steps} steps of {microbatches} microbatches. "
               + " ".join(f"{plural(world, 'process', 'es')}: "
                          f"{plural(microbatches // world, 'turn', 's')} in "
                          "each step, side by side, then an update."
                          for world in worlds), 100)


def dataset(width, steps):
    """The dataset, the epoch, and the steps that are drawn below."""
    left, shards, minibatches = 64, 3, 18
    out = [text(0, 15, "dataset"), text(0, 51, "epoch")]
    length = (width - left - 2) / shards
    for shard in range(shards):
        out.append(frame(left + shard * length, 0, length))
        out.append(text(left + shard * length + 6, 15,
                        f"shard {shard + 1}: tokens"))
    length = (width - left - 2) / minibatches
    for step in range(minibatches):
        out.append(frame(left + step * length, 36, length, step < steps))
    out.append(text(left, 76, "each box a minibatch, trained on in one step;"
                              " the filled ones below,"))
    out.append(text(left, 92, "cut into microbatches; one colour a process "
                              "(its GPU)"))
    out.append(text(left, 116, "by number", "bold"))
    out.append(text(64 + 5 * CELL, 116, "in time: processes side by side",
                    "bold"))
    return out


def samples_read():
    """Which rank reads which samples of a minibatch: offset and stride."""
    worlds, B, samples, left = (2, 4), 2, 16, 84
    right = left + samples * CELL + 12
    out, y, told = [], 14, []
    for world in worlds:
        size = world * B  # the samples of a round
        out.append(text(0, y, plural(world, "process", "es"), "bold"))
        for begin in range(0, samples, size):
            x = left + begin * CELL
            out += [middle(x + size * CELL / 2, y, f"round {begin // size}"),
                    line(x - 1, y + 4, x - 1, y + 12 + 44 * world, 1,
                         opacity=0.4)]
        for rank in range(world):
            x, top = left + rank * B * CELL, y + 12 + 44 * rank
            out.append(text(0, top + 14, f"rank {rank}"))
            mine = [i for i in range(samples) if i // B % world == rank]
            out += [cell(left + i * CELL, top, i, rank) for i in mine]
            out.append(text(right, top + 14, f"offset {rank} * {B} = "
                                             f"{rank * B}"))
            for x1, x2, height, words in (
                    (left, x, top + 10, ""),
                    (x, x + size * CELL, top + 26, f"stride {size}")):
                if x1 < x2:
                    out.append(line(x1, height, x2 - 5, height, 1.5)
                               + f'<path d="M{x2 - 1:g},{height:g} l-6,-4 v8z"'
                               f'/>{text(x1 + 4, height + 12, words)}')
            told.append(f"{plural(world, 'process', 'es')}, rank {rank}: "
                        f"offset {rank * B}, stride {size}, reads samples "
                        f"{' '.join(map(str, mine))}.")
        y += 40 + 44 * world
    return svg(right + 110, y - 26, out, "Which rank reads which samples",
               f"A minibatch of {samples} samples in microbatches of {B}. "
               + " ".join(told), 100)


def strategies(gpus=4):
    """What each GPU keeps of the model's state: all of it, or a shard."""
    rows = ("parameters", "gradients", "optimizer states")
    names = (("ddp", 0), ("deepspeed_stage_1", 1), ("deepspeed_stage_2", 2),
             ("fsdp2, fsdp, deepspeed_stage_3", 3))  # how many are sharded
    left, bar, gap = 130, 96, 14
    width, out, y = left + gpus * (bar + gap), [], 14
    for name, sharded in names:
        out.append(text(0, y, name, "bold"))
        y += 10
        for number, row in enumerate(rows):
            out.append(text(0, y + 15, row))
            whole = number < len(rows) - sharded
            for gpu in range(gpus):
                x = left + gpu * (bar + gap)
                out.append(frame(x, y, bar))
                part = bar if whole else bar / gpus
                begin = x if whole else x + gpu * part
                out.append(rect(begin + 1, y + 1, part - 2, rx=2,
                                fill=COLOURS[gpu % len(COLOURS)]))
            y += LINE
        y += 24
    return svg(width, y - 24, out, f"What each of {gpus} GPUs keeps",
               " ".join(f"{name}: "
                        f"{', '.join(rows[len(rows) - sharded:]) or 'nothing'}"
                        " sharded, the rest whole on each GPU."
                        for name, sharded in names), 60)


def plural(count, word, ending):
    return f"{count} {word}{ending if count > 1 else ''}"


def attributes(style):
    return "".join(f' {name.replace("_", "-")}="{value}"'
                   for name, value in style.items())


def label(x, y, words, **style):
    return f'<text x="{x:g}" y="{y:g}"{attributes(style)}>{words}</text>'


def text(x, y, words, weight="normal"):
    """Words that begin at x and stand on y."""
    return label(x, y, words, font_weight=weight)


def middle(x, y, words, **style):
    """Words around x."""
    return label(x, y, words, **style, text_anchor="middle")


def rect(x, y, width, height=20, **style):
    return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}"{attributes(style)}/>')


def stripes(x, y, width, height, colours, **style):
    """A rectangle of so many equal parts, side by side."""
    part = width / max(len(colours), 1)
    return "".join(rect(x + i * part, y, part, height, fill=colour, **style)
                   for i, colour in enumerate(colours))


def cell(x, y, number, rank):
    """A microbatch in the colour of its process."""
    return rect(x, y, CELL - 2, rx=3, fill=COLOURS[rank]) + in_cell(
        x, y, number, fill="#fff")


def in_cell(x, y, number, **style):
    return middle(x + CELL / 2 - 1, y + 14, number, **style, font_size=11)


def frame(x, y, width, filled=False):
    return rect(x + 1, y + 1, width - 2, rx=2,
                fill_opacity=0.35 if filled else 0, stroke="currentColor",
                stroke_opacity=0.6)


def line(x1, y1, x2, y2, width, **style):
    return (f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="currentColor" stroke-width="{width}"'
            f"{attributes(style)}/>")


GREY = "#808080"


def svg(width, height, parts, title, about, more=0):
    """The picture of these parts, as wide as it needs, or as there is.

    title, about: for people who cannot see it: what it is, what it shows.
    more: how much wider it may be.
    """
    return (f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
            f'style="width: 100%; max-width: {width + more:g}px; '
            'font: 12px var(--jp-ui-font-family, sans-serif)" '
            f'fill="currentColor"><title>{html.escape(title)}</title>'
            f'<desc>{html.escape(about)}</desc>{"".join(parts)}</svg>')


def box(x, y, width, height, colour=GREY, words="", opacity=0.25):
    return rect(x, y, width, height, rx=3, fill=colour, fill_opacity=opacity,
                stroke=colour) + middle(
                    x + width / 2, y + height / 2 + 4, words)


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
    return svg(whole + 8, 294, out, "A step of data parallelism",
               f"The samples of a minibatch are split among {ranks} GPUs. "
               "Each has the whole model and computes gradients of its own. "
               "An all-reduce gives everyone their mean, and all make the "
               "same update.")


def words():
    """Epoch, minibatch, microbatch, sample and tokens, each a zoom."""
    left, width = 84, 430
    blue = COLOURS[0]
    rows = (  # the boxes of which there are more than can be drawn
        ("epoch", 24, 4, "18,692 steps, one minibatch each", 18_692),
        ("minibatch", 32, 5, "512 samples of one step = 32 microbatches", 32),
        ("microbatch", 16, 6, "16 samples that a GPU takes at once", 16),
    )
    out, y = [], 0
    for name, number, chosen, about, all_of_them in rows:
        step = width / number
        out += [text(0, y + 35, name, "bold"), text(left, y + 12, about)]
        for i in range(number):
            if i == number - 2 and all_of_them > number:
                out.append(middle(left + (i + 0.5) * step, y + 34, "…"))
                continue
            out.append(box(left + i * step, y + 20, step - 3, 22, blue,
                           opacity=0.7 if i == chosen else 0.12))
        x = left + chosen * step  # the zoom into the chosen one
        out.append(f'<path d="M{x:g},{y + 42} L{x + step - 3:g},{y + 42} '
                   f'L{left + width - 3:g},{y + 54} L{left:g},{y + 54}z" '
                   f'fill="{blue}" fill-opacity="0.12"/>')
        y += 60
    y += 8
    tokens = ("The", " cat", " sat", " on", " the", " mat", ".")
    step = width / len(tokens)
    out.append(text(0, y + 17, "sample", "bold"))
    for k, about in ((0, "x: T tokens"), (1, "targets y")):
        out.append(text(0, y + 34 + 30 * k, about))
        for i in range(len(tokens) - 1):
            out.append(box(left + i * step, y + 18 + 30 * k, step - 3, 24,
                           COLOURS[k], tokens[i + k].strip()))
    out.append(text(left, y + 10, "T = 1024 tokens in GPT-2; the targets are "
                                  "the same tokens, one later"))
    return svg(left + width, y + 74, out, "What an epoch is made of",
               "; ".join(f"{row[0]}: {row[3]}" for row in rows)
               + "; sample: T tokens and, one later, its targets.")


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
                    middle(at + wide / 2 - 3, 106, f"rank {rank}",
                           font_weight="bold"),
                    middle(at + wide / 2 - 3, 126, f"local {local}")]
        out.append(line(x + whole / 2, 139, x + whole / 2, 158, 3))
    total = number * whole + (number - 1) * 34
    out += [box(1, 158, total, 24, GREY, "the network between nodes: slower "
                "than the links within one"),
            text(2, 202, f"world size = {number} nodes x {gpus} GPUs = "
                         f"{number * gpus} processes. Rank 0 logs and saves.")]
    return svg(total + 4, 208, out, "Ranks and local ranks",
               "Ranks count on over the nodes, local ranks begin at 0 on "
               "each: " + "; ".join(
                   f"node {rank // gpus}, GPU {rank % gpus}: rank {rank}, "
                   f"local rank {rank % gpus}"
                   for rank in range(number * gpus)))


def tied():
    """The tied matrix: one parameter, or a copy at each end. SVG."""
    device, first, second = 84, 270, 446  # where each column begins
    wide, end = 132, 298
    out = [text(0, 41, "forwards"), text(0, 191, "gradient"),
           text(0, end - 9, "update")]
    for x, name, blocks, term in (
            (device, "one device", "blocks 0 to 3", "a + b"),
            (first, "pipeline stage 0", "blocks 0, 1", "a, of embedding"),
            (second, "pipeline stage 1", "blocks 2, 3", "b, of the logits")):
        centre = x + wide / 2
        out += [text(x, 14, name, "bold"), box(x, 74, wide, 26, GREY, blocks),
                box(x, 174, wide, 26, COLOURS[1], term),
                box(x, end - 26, wide, 26, COLOURS[0], "W")]
        if x != second:
            out += [box(x, 24, wide, 26, COLOURS[0], "wte: embeds"),
                    arrow(centre, 54, 72)]
        if x != first:
            out += [arrow(centre, 104, 122), arrow(centre, 154, 172),
                    box(x, 124, wide, 26, COLOURS[0], "lm_head: logits")]
        else:
            out.append(arrow(centre, 104, 172))
        if x == device:
            out.append(arrow(centre, 204, end - 28))
        else:
            out += [arrow(centre, 204, 220), arrow(centre, 254, end - 28)]
    # on one device both are one matrix
    out += [line(device - 8, 37, device - 8, 137, 2),
            line(device - 8, 37, device - 1, 37, 2),
            line(device - 8, 137, device - 1, 137, 2),
            f'<g transform="rotate(-90 {device - 14} 87)">',
            middle(device - 14, 87, "one W"), "</g>"]
    # from one pipeline stage to the next
    out += [line(first + wide + 4, 87, second - 8, 87, 1.5),
            f'<path d="M{second - 11},83 L{second - 11},91 '
            f'L{second - 4},87z"/>',
            box(first, 222, second + wide - first, 28, COLOURS[1],
                "all-reduce of the two ends: a + b", 0.12)]
    return svg(second + wide + 2, end + 2, out, "The tied matrix",
               "On one device the embedding and the logits use one matrix W, "
               "whose gradient is the sum a + b of what both uses add. In a "
               "pipeline the first pipeline stage has a copy for the "
               "embedding and computes a, and the last one has a copy for "
               "the logits and computes b. An all-reduce of these two gives "
               "both a + b, so their copies get the same update.")


def script_map(source, path):
    """Sections, classes and functions of a script, with links to their lines.
    """
    heads = [(number, match[1]) for number, row in
             enumerate(source.splitlines(), 1)
             if (match := re.fullmatch(r"# -{3,} (.+)", row))]
    heads = [(0, "beginning"), *heads, (source.count("\n") + 2, "")]
    items = [node for node in ast.parse(source).body
             if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    out = []
    for (begin, name), (end, _) in zip(heads, heads[1:]):
        rows = [describe(node, path) for node in items
                if begin < node.lineno < end]
        if rows:
            out.append(f"<h3>{html.escape(name)}</h3>{''.join(rows)}")
    return "".join(out)


def describe(node, path):
    """A class or function in a row: its line, name, methods, purpose."""
    kind = "class" if isinstance(node, ast.ClassDef) else "def"
    methods = [child.name for child in node.body
               if isinstance(child, ast.FunctionDef)
               and not child.name.startswith("__")]
    about = (ast.get_docstring(node) or "").split("\n")[0]
    inside = f": {', '.join(methods)}" if methods and kind == "class" else ""
    return (f'<p><a href="{path}#line={node.lineno - 1}">line '
            f"{node.lineno}</a> {kind} "
            f"<strong>{node.name}</strong>{inside} "
            f'<span class="place">{html.escape(about)}</span></p>')


# ------------------------------------------------------------- collectives


def tensors(shown, width=560, least=36):
    """What each rank showed: a row for each rank, a column each time.

    shown: for each rank a list of [title, numbers, came, source]. Each number
    is coloured by the ranks that are in it: its digits say which (1, 10, 100,
    1000). Where numbers[came] has come from rank `source` since the time
    before, it is marked, with an arrow from there; came is None elsewhere.
    least: how wide a number is, at least.
    """
    times = max(map(len, shown))
    states = [state for rank in shown for state in rank]
    longest = max(len(numbers or ()) for _, numbers, *_ in states)
    wide = max(least, 6 + 9 * max((
        len(number(value)) for _, numbers, *_ in states
        for value in numbers or ()), default=0))
    titled = max(len(title) for title, *_ in states)
    step = max(wide * max(longest, 1), 6.6 * titled) + 26
    pitch = 44 if any(came is not None for _, _, came, _ in states) else 30
    across = max(1, int((width - 54) // step))
    out, top, told = [], 0, []
    for begin in range(0, times, across):
        for k in range(begin, min(begin + across, times)):
            x = 54 + (k - begin) * step
            titles = [rank[k][0] for rank in shown if k < len(rank)]
            out.append(text(x, top + 14, html.escape(titles[0]), "bold"))
            told.append(f"{titles[0]}:")
            for rank, mine in enumerate(shown):
                _, numbers, came, source = (
                    mine[k] if k < len(mine) else ("", None, None, None))
                y = top + 24 + pitch * rank + (pitch - 30)
                if k == begin:
                    out.append(text(0, y + 16, f"rank {rank}"))
                if numbers is None:
                    out.append(text(x + 4, y + 16, "-"))
                for i, value in enumerate(numbers or ()):
                    out.append(value_box(x + i * wide, y, wide - 3, value))
                told.append(f"rank {rank} holds "
                            + (" ".join(map(number, numbers or ()))
                               or "nothing") + ";")
                if came is not None:
                    out += passed(x + came * wide, y, wide - 3, source,
                                  rank - 1 if rank else None, pitch)
                    told.append(f"number {came} came from rank {source};")
        top += 24 + pitch * len(shown) + 14
    return svg(54 + min(across, times) * step, top, out,
               f"What each of {len(shown)} ranks holds", " ".join(told))


def passed(x, y, width, source, above, pitch):
    """A mark around a number that has just come, and the arrow it came by.

    above: the rank in the row above; an arrow from another rank has its name.
    """
    at = x + width / 2
    out = [rect(x - 1, y - 1, width + 2, 26, rx=4, fill="none",
                stroke="currentColor", stroke_width=2.5)]
    if source == above:
        return [*out, arrow(at, y - pitch + 25, y - 2)]
    return [*out, arrow(at, y - 12, y - 2),
            label(at + 6, y - 4, f"from {source}", font_size=10)]


def number(value):
    """As short as it goes."""
    return f"{value:g}" if value < 10**6 else f"{value:.0e}"


def value_box(x, y, width, value):
    """A number, with a stripe in the colour of each rank that is in it."""
    digits = f"{int(abs(value)):d}"[::-1]
    colours = [colour for colour, digit in zip(COLOURS, digits)
               if digit != "0"]
    return stripes(x, y, width, 24, colours, fill_opacity=0.45) + box(
        x, y, width, 24, GREY, number(value), 0)


# ------------------------------------------------------------------- check


def reads(expected, read, readers):
    """Which ranks read which sample, a row for each step.

    expected: the samples of each step; read: for each rank, those it read in
    each step; readers: for each rank a number, the same for ranks that have to
    read the same. A sample that others read, too, or not all of them, has a
    frame, and the colours of all.
    """
    left, most = 52, max(map(len, expected))
    groups = [[rank for rank, one in enumerate(readers) if one == number]
              for number in dict.fromkeys(readers)]
    out, x = [text(0, 14, "who read which sample", "bold")], left
    for k, ranks in enumerate(groups):
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        out += [cell(x, 24, "", k % len(COLOURS)),
                text(x + CELL + 2, 38, name)]
        x += CELL + 16 + 7 * len(name)
    y, told, framed = 54, [], False
    for step, samples in enumerate(expected):
        out.append(text(0, y + 15, f"step {step}"))
        found = [part[step] if step < len(part) else [] for part in read]
        for k, sample in enumerate(samples):
            owners = [i for i, ranks in enumerate(groups)
                      if any(sample in found[rank] for rank in ranks)]
            whole = all(sample in found[rank] for i in owners
                        for rank in groups[i])
            out.append(sample_box(left + k * CELL, y, sample, owners, whole))
            framed |= not whole or len(owners) != 1
        others = sum(one not in samples for part in found for one in part)
        if others:
            framed = True
            out.append(text(left + most * CELL + 4, y + 15, f"+ {others}"))
        told.append(f"step {step}: " + ", ".join(
            f"rank {rank} read {' '.join(map(str, numbers)) or 'nothing'}"
            for rank, numbers in enumerate(found)) + ".")
        y += LINE
    if framed:
        legend = ("a frame: several ranks read it, or none; "
                  "+ n: samples of other steps")
        out.append(text(0, y + 12, legend))
        x, y = max(x, 7 * len(legend)), y + LINE
    return svg(max(left + most * CELL + 34, x), y, out,
               "Which rank read which sample", " ".join(told))


def sample_box(x, y, sample, owners, whole=True):
    """A sample, in the colours of those that read it.

    It has a frame where that is not one of them, or not the whole of one.
    """
    colours = [COLOURS[k % len(COLOURS)] for k in owners]
    if whole and len(owners) == 1:
        return cell(x, y, sample, owners[0] % len(COLOURS))
    style = {"fill": "#fff"} if colours else {}
    return (stripes(x, y, CELL - 2, 20, colours)
            + rect(x, y, CELL - 2, rx=3, fill="none", stroke="currentColor",
                   stroke_width=1.5, stroke_dasharray="3 2")
            + in_cell(x, y, sample, **style))


def errors(single, losses, allowed=1e-5):
    """|loss - that of the single device| by step, on a logarithmic axis.

    single: the single device's losses; losses: {number of processes: losses};
    allowed: what rounding may make of it, relatively. None is a missing loss.
    """
    left, top, width, height = 52, 30, 330, 150
    low, high = -9, 1  # powers of ten; equal ones are on the axis

    def place(error):
        power = math.log10(error) if error > 0 else low
        return top + height * (high - min(max(power, low), high)) / (
            high - low)

    out = [text(0, 14, "|loss - single device|, by step", "bold")]
    for power in range(low, high + 1, 2):
        y = place(10**power) if power > low else place(0)
        out += [text(0, y + 4, "equal" if power == low else f"1e{power:+d}"),
                line(left, y, left + width, y, 1, stroke_opacity=0.25)]
    steps = len(single)
    xs = [left + (step + 0.5) * width / steps for step in range(steps)]
    out += [middle(x, top + height + 16, str(step))
            for step, x in enumerate(xs)]
    bound = place(allowed * max(value or 0 for value in single))
    out += [line(left, bound, left + width, bound, 1.5,
                 stroke_dasharray="6 4"),
            label(left + width, bound - 5, "rounding, at most",
                  text_anchor="end")]
    told = []
    for k, (name, values) in enumerate(losses.items()):
        colour = COLOURS[k % len(COLOURS)]
        points = [(x, place(abs(mine - good))) for x, mine, good in zip(
            xs, values, single) if mine is not None and good is not None]
        out.append(f'<polyline points="'
                   f'{" ".join(f"{x:g},{y:g}" for x, y in points)}" '
                   f'fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [marker(k, x, y, colour) for x, y in points]
        x, y = left + 110 * (k % 3), top + height + 32 + 18 * (k // 3)
        out += [marker(k, x + 6, y, colour), text(x + 16, y + 4, plural(
            int(name), "process", "es") if name.isdigit() else name)]
        told.append(f"{name}: " + " ".join(
            f"{abs(mine - good):.0e}" for mine, good in zip(values, single)
            if mine is not None and good is not None) + ".")
    return svg(left + width + 4,
               top + height + 44 + 18 * ((len(losses) - 1) // 3), out,
               "How far the loss is from the single device's",
               "By step, on 1, 2 and more processes. " + " ".join(told))


def marker(k, x, y, colour):
    """A point of the k-th curve: curves differ in shape, too."""
    corners = ((), (-4, -4, 4, -4, 4, 4, -4, 4), (0, -5, 5, 4, -5, 4),
               (0, -5, 5, 0, 0, 5, -5, 0))[k % 4]
    if not corners:
        return f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/>'
    points = " ".join(f"{x + corners[i]:g},{y + corners[i + 1]:g}"
                      for i in range(0, len(corners), 2))
    return f'<polygon points="{points}" fill="{colour}"/>'


# ---------------------------------------------------------------- sharding


def timeline(ranks, width=640, title="When each process computed what",
             unit=" s", pitch=30, heading=""):
    """When each rank computed what; where nothing is drawn it waited.

    ranks: for each a list of [name, number, begin, end], in seconds. What
    goes backwards, "B", is drawn in another colour than what goes forwards,
    and what is sent meanwhile, "A", below what is computed.
    unit: of the times in the picture; with "" it has none. pitch: from row to
    row. heading: stands above them.
    """
    last = max(event[3] for events in ranks for event in events)
    left, top, out = 54, 22 if heading else 4, []
    scale = (width - left) / last
    sends = any(name == "A" for events in ranks for name, *_ in events)
    pitch += 24 * sends
    if heading:
        out.append(text(left, 14, heading, "bold"))
    for rank, events in enumerate(ranks):
        y, high = top + pitch * rank, pitch - 6
        out += [text(0, y + high / 2 + 4, f"rank {rank}"),
                rect(left, y, width - left, high, fill="currentColor",
                     fill_opacity=0.06)]
        for name, number, begin, end in events:
            wide = (end - begin) * scale
            out.append(box(
                left + begin * scale, y + high / 2 * (name == "A"), wide,
                high / (1 + sends), COLOURS[2 if name == "A" else name == "B"],
                f"{name}{number}" * (not sends or wide > 18), 0.35))
    y = top + pitch * len(ranks) + (14 if unit else -6)
    if unit:
        out += [text(left, y, f"0{unit}"),
                text(width - 44, y, f"{last:.2f}{unit}")]
    busy = sum(end - begin for events in ranks
               for name, _, begin, end in events if name != "A")
    told = [f"{len(ranks)} ranks, each in a row, in time from left to right. "
            "F: forwards, B: backwards" + ", A: sent" * sends
            + ", with the microbatch's number" * (not sends)
            + ". On average a rank waits "
            f"{1 - busy / len(ranks) / last:.0%} of the time."]
    for rank, events in enumerate(ranks):
        done, now = [], 0
        for name, number, begin, end in events:
            done += ["a wait"] * (begin - now > last / 100)
            done.append(f"{name}{number}")
            now = max(now, end)
        told.append(f"Rank {rank}: {', '.join(done)}.")
    return svg(width, y + 6, out, title, " ".join(told))
