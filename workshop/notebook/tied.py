"""The picture of the tied matrix, on one device and at a pipeline's ends."""

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
from workshop.notebook.shown import picture


def tied():
    """The picture of the tied matrix and its gradient."""
    return picture(draw())


def draw():
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
