"""Pictures for the lessons: SVG, for the light and the dark theme.

Those without a computed number are drawings, in svg/; the others are made of
the parts below.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.board import Board
from workshop.html import paragraph
from workshop.notebook.output import table

# one a process; white words can be read on them, they are seen in both themes,
# and red-green blind people tell them apart
RANK_COLOURS = ("#2166c0", "#a85500", "#198080", "#6c2cfe")
GREY = "#808080"
CELL, LINE = 22, 26  # of a microbatch: its width, and from row to row

# From JSON, so lists: [title, numbers, came, source], see `tensors`
RankState = Sequence[Any]
PictureEvent = Sequence[Any]  # [name, number, begin, end], in seconds


def read_drawing(name: str) -> str:
    """A drawing of svg/."""
    return Path(__file__).with_name("svg").joinpath(f"{name}.svg").read_text(
        "utf-8")


def plural(count: int, word: str, ending: str) -> str:
    return f"{count} {word}{ending if count > 1 else ''}"


def attributes(style: Mapping[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"'
                   for name, value in style.items())


def draw_label(x: float, y: float, content: object, **style: object) -> str:
    return f'<text x="{x:g}" y="{y:g}"{attributes(style)}>{content}</text>'


def draw_text(x: float, y: float, content: str, weight: str = "normal") -> str:
    """Words that begin at x and stand on y."""
    return draw_label(x, y, content, font_weight=weight)


def middle(x: float, y: float, content: object, **style: object) -> str:
    """Words around x."""
    return draw_label(x, y, content, **style, text_anchor="middle")


def rect(x: float, y: float, width: float, height: float = 20,
         **style: object) -> str:
    return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}"{attributes(style)}/>')


def stripes(x: float, y: float, width: float, height: float,
            colours: Sequence[str], **style: object) -> str:
    """A rectangle of so many equal parts, side by side."""
    part = width / max(len(colours), 1)
    return "".join(rect(x + i * part, y, part, height, fill=colour, **style)
                   for i, colour in enumerate(colours))


def cell(x: float, y: float, number: object, rank: int) -> str:
    """A microbatch in the colour of its process."""
    return rect(x, y, CELL - 2, rx=3, fill=RANK_COLOURS[rank]) + in_cell(
        x, y, number, fill="#fff")


def in_cell(x: float, y: float, number: object, **style: object) -> str:
    return middle(x + CELL / 2 - 1, y + 14, number, **style, font_size=11)


def line(x1: float, y1: float, x2: float, y2: float, width: float,
         **style: object) -> str:
    return (f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="currentColor" stroke-width="{width}"'
            f"{attributes(style)}/>")


def svg(width: float, height: float, parts: Iterable[str], title: str,
        about: str) -> str:
    """The picture of these parts, as wide as it needs, or as there is.

    title, about: for people who cannot see it: what it is, what it shows.
    """
    return (f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
            f'style="width: 100%; max-width: {width:g}px; '
            'font: 12px var(--jp-ui-font-family, sans-serif)" '
            f'fill="currentColor"><title>{html.escape(title)}</title>'
            f'<desc>{html.escape(about)}</desc>{"".join(parts)}</svg>')


def draw_box(x: float, y: float, width: float, height: float,
             colour: str = GREY, content: str = "",
             opacity: float = 0.25) -> str:
    return rect(x, y, width, height, rx=3, fill=colour, fill_opacity=opacity,
                stroke=colour) + middle(
                    x + width / 2, y + height / 2 + 4, content)


def arrow(x: float, y: float, end: float) -> str:
    """An arrow down, from y to end."""
    return (line(x, y, x, end - 4, 1.5) + '<path d="M'
            f'{x - 4:g},{end - 7:g} L{x + 4:g},{end - 7:g} L{x:g},{end:g}z"/>')


# ----------------------------------------------------------------- pictures


def tensors(shown: Sequence[Sequence[RankState]], width: float = 560,
            least: float = 36) -> str:
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
        len(shorten_number(value)) for _, numbers, *_ in states
        for value in numbers or ()), default=0))
    titled = max(len(title) for title, *_ in states)
    step = max(wide * max(longest, 1), 6.6 * titled) + 26
    pitch = 44 if any(came is not None for _, _, came, _ in states) else 30
    across = max(1, int((width - 54) // step))
    out, top, sentences = [], 0, []
    for begin in range(0, times, across):
        for k in range(begin, min(begin + across, times)):
            x = 54 + (k - begin) * step
            titles = [rank[k][0] for rank in shown if k < len(rank)]
            out.append(draw_text(x, top + 14, html.escape(titles[0]), "bold"))
            sentences.append(f"{titles[0]}:")
            for rank, mine in enumerate(shown):
                _, numbers, came, source = (
                    mine[k] if k < len(mine) else ("", None, None, None))
                y = top + 24 + pitch * rank + (pitch - 30)
                if k == begin:
                    out.append(draw_text(0, y + 16, f"rank {rank}"))
                if numbers is None:
                    out.append(draw_text(x + 4, y + 16, "-"))
                for i, value in enumerate(numbers or ()):
                    out.append(value_box(x + i * wide, y, wide - 3, value))
                held = " ".join(map(shorten_number, numbers or ()))
                held = held or "nothing"
                sentences.append(f"rank {rank} holds {held};")
                if came is not None:
                    out += passed(x + came * wide, y, wide - 3, source,
                                  rank - 1 if rank else None, pitch)
                    sentences.append(f"number {came} came from rank {source};")
        top += 24 + pitch * len(shown) + 14
    return svg(54 + min(across, times) * step, top, out,
               f"What each of {len(shown)} ranks holds", " ".join(sentences))


def passed(x: float, y: float, width: float, source: int | None,
           above: int | None, pitch: float) -> list[str]:
    """Mark a number that was just received, with the arrow of its way.

    above: the rank in the row above; an arrow from another rank has its name.
    """
    at = x + width / 2
    out = [rect(x - 1, y - 1, width + 2, 26, rx=4, fill="none",
                stroke="currentColor", stroke_width=2.5)]
    if source == above:
        return [*out, arrow(at, y - pitch + 25, y - 2)]
    return [*out, arrow(at, y - 12, y - 2),
            draw_label(at + 6, y - 4, f"from {source}", font_size=10)]


def shorten_number(value: float) -> str:
    """Return a number in its shortest form."""
    return f"{value:g}" if value < 10**6 else f"{value:.0e}"


def value_box(x: float, y: float, width: float, value: float) -> str:
    """A number, with a stripe in the colour of each rank that is in it."""
    digits = f"{int(abs(value)):d}"[::-1]
    colours = [colour for colour, digit in zip(
        RANK_COLOURS, digits, strict=False) if digit != "0"]
    return stripes(x, y, width, 24, colours, fill_opacity=0.45) + draw_box(
        x, y, width, 24, GREY, shorten_number(value), 0)


def sample_box(x: float, y: float, sample: int, owners: Sequence[int],
               whole: bool = True) -> str:
    """A sample, in the colours of those that read it.

    It has a frame where that is not one of them, or not the whole of one.
    """
    colours = [RANK_COLOURS[k % len(RANK_COLOURS)] for k in owners]
    if whole and len(owners) == 1:
        return cell(x, y, sample, owners[0] % len(RANK_COLOURS))
    style = {"fill": "#fff"} if colours else {}
    return (stripes(x, y, CELL - 2, 20, colours)
            + rect(x, y, CELL - 2, rx=3, fill="none", stroke="currentColor",
                   stroke_width=1.5, stroke_dasharray="3 2")
            + in_cell(x, y, sample, **style))


def timeline(
        ranks: Sequence[Sequence[PictureEvent]], width: float = 640,
        title: str = "When each process computed what", unit: str = " s",
        pitch: float = 30, heading: str = "") -> str:
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
        out.append(draw_text(left, 14, heading, "bold"))
    for rank, events in enumerate(ranks):
        y, high = top + pitch * rank, pitch - 6
        out += [draw_text(0, y + high / 2 + 4, f"rank {rank}"),
                rect(left, y, width - left, high, fill="currentColor",
                     fill_opacity=0.06)]
        for name, number, begin, end in events:
            wide = (end - begin) * scale
            out.append(draw_box(
                left + begin * scale, y + high / 2 * (name == "A"), wide,
                high / (1 + sends),
                RANK_COLOURS[2 if name == "A" else name == "B"],
                f"{name}{number}" * (not sends or wide > 18), 0.35))
    y = top + pitch * len(ranks) + (14 if unit else -6)
    if unit:
        out += [draw_text(left, y, f"0{unit}"),
                draw_text(width - 44, y, f"{last:.2f}{unit}")]
    busy = sum(end - begin for events in ranks
               for name, _, begin, end in events if name != "A")
    sentences = [
        f"{len(ranks)} ranks, each in a row, in time from left to right. "
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
        sentences.append(f"Rank {rank}: {', '.join(done)}.")
    return svg(width, y + 6, out, title, " ".join(sentences))


# ------------------------------------------------------ what a check has seen


def draw_check(board: Board) -> str:
    """What stands below the table of a check, as HTML."""
    last = [*board.pictures.values()][-1:]
    drawn = [reads(seen["expected"], seen["read"], seen["readers"])
             for seen in last if any(seen["read"])]
    losses = {name: seen["loss"] for name, seen in board.pictures.items()
              if seen["loss"]}
    if losses:
        drawn.append(errors(last[0]["single"], losses))
    return f"<div>{''.join(drawn)}</div>" if drawn else ""


def reads(
        expected: Sequence[Sequence[int]],
        read: Sequence[Sequence[Sequence[int]]],
        readers: Sequence[int]) -> str:
    """Which ranks read which sample, a row for each step.

    expected: the samples of each step; read: for each rank, those it read in
    each step; readers: for each rank a number, the same for ranks that have to
    read the same. A sample that others read, too, or not all of them, has a
    frame, and the colours of all.
    """
    left, most = 52, max(map(len, expected))
    groups = [[rank for rank, own in enumerate(readers) if own == number]
              for number in dict.fromkeys(readers)]
    out, x = [draw_text(0, 14, "who read which sample", "bold")], left
    for k, ranks in enumerate(groups):
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        out += [cell(x, 24, "", k % len(RANK_COLOURS)),
                draw_text(x + CELL + 2, 38, name)]
        x += CELL + 16 + 7 * len(name)
    y, sentences, framed = 54, [], False
    for step, samples in enumerate(expected):
        out.append(draw_text(0, y + 15, f"step {step}"))
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
            out.append(draw_text(left + most * CELL + 4, y
                                 + 15, f"+ {others}"))
        sentences.append(f"step {step}: " + ", ".join(
            f"rank {rank} read {' '.join(map(str, numbers)) or 'nothing'}"
            for rank, numbers in enumerate(samples_read)) + ".")
        y += LINE
    last = last_sample(expected)
    if last is not None:
        wraps = (f"after sample {last} the dataset begins again: it has "
                 f"{last + 1}")
        out.append(draw_text(0, y + 12, wraps))
        sentences.append(f"{wraps}.")
        x, y = max(x, 7 * len(wraps)), y + LINE
    if framed:
        legend = ("a frame: several ranks read it, or none; "
                  "+ n: samples of other steps")
        out.append(draw_text(0, y + 12, legend))
        x, y = max(x, 7 * len(legend)), y + LINE
    return svg(max(left + most * CELL + 34, x), y, out,
               "Which rank read which sample", " ".join(sentences))


def last_sample(expected: Sequence[Sequence[int]]) -> int | None:
    """Return the sample after which these begin with 0 again, or None."""
    samples = list(itertools.chain(*expected))
    for sample, following in itertools.pairwise(samples):
        if following == 0 < sample:
            return sample
    return None


def errors(single: Sequence[float | None],
           losses: Mapping[str, Sequence[float | None]]) -> str:
    """A table of |loss - that of the single device|, with a cross where it is
    more than rounding makes of it.

    single: the single device's losses; losses: {number of processes: losses}.
    None is a missing loss.
    """
    most = 1e-5 * max(value or 0 for value in single)
    rows = [("off by", *(f"step {step}" for step in range(len(single))))]
    for name, values in losses.items():
        off: list[float | None] = []
        for loss, expected in zip(values, single, strict=False):
            if loss is None or expected is None:
                off.append(None)
            else:
                off.append(abs(loss - expected))
        cells = ["" if error is None else
                 f"{error:.0e}{' ✗' if error > most else ''}" for error in off]
        rows.append((plural(int(name), "process", "es") if name.isdigit()
                     else name, *cells, *[""] * (len(single) - len(cells))))
    return (paragraph("<strong>|loss - single device|</strong>, of which "
                      f"rounding makes {most:.0e} at most") + table(rows))
