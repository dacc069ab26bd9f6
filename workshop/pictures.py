"""Pictures for the lessons: SVG, for the light and the dark theme."""

COLOURS = ("#3b7dd8", "#cf7a12", "#2b9a5f", "#a457c4")  # one a process
CELL, LINE = 22, 26  # of a microbatch: its width, and from row to row


def cadence(worlds=(1, 2, 4), microbatches=4, steps=3):
    """Who takes which microbatch, and when, for each world size.

    microbatches: in a minibatch; steps: how many of them are drawn.
    """
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
    return (f'<svg viewBox="0 0 {width} {y - 26}" role="img" '
            f'style="width: 100%; max-width: {width + 100}px; '
            'font: 12px var(--jp-ui-font-family, sans-serif)" '
            f'fill="currentColor">{"".join(out)}</svg>')


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
                out.append(
                    f'<rect x="{begin + 1:g}" y="{y + 1:g}" '
                    f'width="{part - 2:g}" height="20" rx="2" '
                    f'fill="{COLOURS[gpu % len(COLOURS)]}"/>')
            y += LINE
        y += 24
    return (f'<svg viewBox="0 0 {width} {y - 24}" role="img" '
            f'style="width: 100%; max-width: {width + 60}px; '
            'font: 12px var(--jp-ui-font-family, sans-serif)" '
            f'fill="currentColor">{"".join(out)}</svg>')


def plural(count, word, ending):
    """The number and the word."""
    return f"{count} {word}{ending if count > 1 else ''}"


def text(x, y, words, weight="normal"):
    """Words that begin at x and stand on y."""
    return f'<text x="{x:g}" y="{y:g}" font-weight="{weight}">{words}</text>'


def cell(x, y, number, rank):
    """A microbatch in the colour of its process."""
    return (f'<rect x="{x:g}" y="{y:g}" width="{CELL - 2}" height="20" rx="3" '
            f'fill="{COLOURS[rank]}"/><text x="{x + CELL / 2 - 1:g}" '
            f'y="{y + 14:g}" fill="#fff" font-size="11" '
            f'text-anchor="middle">{number}</text>')


def frame(x, y, width, filled=False):
    """A box of the dataset or the epoch."""
    opacity = 0.35 if filled else 0
    return (f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{width - 2:g}" '
            f'height="20" rx="2" fill-opacity="{opacity}" '
            'stroke="currentColor" stroke-opacity="0.6"/>')


def line(x1, y1, x2, y2, width):
    """A line."""
    return (f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="currentColor" stroke-width="{width}"/>')
