"""What a check has seen: who read what, how far the losses differ."""

from workshop.html import paragraph
from workshop.notebook.pictures import (
    CELL,
    COLOURS,
    LINE,
    cell,
    plural,
    sample_box,
    svg,
    text,
)
from workshop.notebook.shown import table


def draw(board):
    """What stands below the table of a check, as HTML."""
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
    """A table of |loss - that of the single device|, with a cross where it is
    more than rounding makes of it.

    single: the single device's losses; losses: {number of processes: losses};
    allowed: what rounding may make of it, relatively. None is a missing loss.
    """
    most = allowed * max(value or 0 for value in single)
    rows = [("off by", *(f"step {step}" for step in range(len(single))))]
    for name, values in losses.items():
        off = [None if None in pair else abs(pair[0] - pair[1])
               for pair in zip(values, single)]
        cells = ["" if error is None else
                 f"{error:.0e}{' ✗' if error > most else ''}" for error in off]
        rows.append((plural(int(name), "process", "es") if name.isdigit()
                     else name, *cells, *[""] * (len(single) - len(cells))))
    return (paragraph("<strong>|loss - single device|</strong>, of which "
                      f"rounding makes {most:.0e} at most") + table(rows))
