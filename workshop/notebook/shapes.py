"""Parts of the pictures: SVG, for the light and the dark theme."""

import html

# one a process; white words can be read on them, they are seen in both themes,
# and red-green blind people tell them apart
COLOURS = ("#2166c0", "#a85500", "#198080", "#6c2cfe")
GREY = "#808080"
CELL, LINE = 22, 26  # of a microbatch: its width, and from row to row


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
