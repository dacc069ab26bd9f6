"""What a check has seen, as pictures: who read what, how far losses differ."""

import math

from workshop.notebook.pictures import (
    CELL,
    COLOURS,
    LINE,
    cell,
    label,
    line,
    middle,
    plural,
    sample_box,
    svg,
    text,
)


def draw(board):
    """The pictures below the table of a check, as HTML."""
    last = [*board.pictures.values()][-1:]
    drawn = [reads(seen["expected"], seen["read"], seen["readers"])
             for seen in last if any(seen["read"])]
    losses = {name: seen["loss"] for name, seen in board.pictures.items()
              if seen["loss"]}
    if losses:
        drawn.append(errors(last[0]["single"], losses))
    return f"<div>{''.join(drawn)}</div>" if drawn else ""


def reads(expected, read, readers):
    """Which ranks read which sample, a row for each step.

    expected: the samples of each step; read: for each rank, those it read in
    each step; readers: for each rank a number, the same for ranks that have to
    read the same. A sample that others read, too, or not all of them, has a
    frame, and the colours of all.
    """
    left, most = 52, max(map(len, expected))
    groups = [[rank for rank, own in enumerate(readers) if own == number]
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
        samples_read = [steps[step] if step < len(steps) else []
                        for steps in read]
        for k, sample in enumerate(samples):
            owners = [i for i, ranks in enumerate(groups)
                      if any(sample in samples_read[rank] for rank in ranks)]
            by_all = all(sample in samples_read[rank] for i in owners
                         for rank in groups[i])
            out.append(sample_box(left + k * CELL, y, sample, owners, by_all))
            framed |= not by_all or len(owners) != 1
        others = sum(sample not in samples for part in samples_read
                     for sample in part)
        if others:
            framed = True
            out.append(text(left + most * CELL + 4, y + 15, f"+ {others}"))
        told.append(f"step {step}: " + ", ".join(
            f"rank {rank} read {' '.join(map(str, numbers)) or 'nothing'}"
            for rank, numbers in enumerate(samples_read)) + ".")
        y += LINE
    if framed:
        legend = ("a frame: several ranks read it, or none; "
                  "+ n: samples of other steps")
        out.append(text(0, y + 12, legend))
        x, y = max(x, 7 * len(legend)), y + LINE
    return svg(max(left + most * CELL + 34, x), y, out,
               "Which rank read which sample", " ".join(told))


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
        known = [(x, abs(loss - expected)) for x, loss, expected in zip(
            xs, values, single) if None not in (loss, expected)]
        points = [(x, place(error)) for x, error in known]
        out.append(f'<polyline points="'
                   f'{" ".join(f"{x:g},{y:g}" for x, y in points)}" '
                   f'fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [marker(k, x, y, colour) for x, y in points]
        x, y = left + 110 * (k % 3), top + height + 32 + 18 * (k // 3)
        out += [marker(k, x + 6, y, colour), text(x + 16, y + 4, plural(
            int(name), "process", "es") if name.isdigit() else name)]
        told.append(f"{name}: " + " ".join(
            f"{error:.0e}" for _, error in known) + ".")
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
