"""What a program prints, as HTML that is read beside a script.

Half a page is narrower than a terminal, and breaks long lines: what stands in
columns there is a table here.
"""

import html
import re
from itertools import groupby

from workshop.lesson import render
from workshop.notebook.pictures import plural

STEPS, TEXT = "steps", "text"  # kinds of lines
# what is printed after a text that a model has written, where a line begins
AFTER_TEXT = re.compile(r"\| step|[a-z]+: |stopped by|interrupted")


def to_html(text, most=None):
    """The lines; steps and columns as tables, a model's texts folded.

    most: how many of the other lines are shown before a gap, and twice as
    many after it.
    """
    out = []
    for kind, lines in groupby(kinds(text.rstrip().splitlines()),
                               lambda pair: pair[0]):
        lines = [line for _, line in lines]
        if kind == STEPS:
            out.append(steps(lines))
        elif kind == TEXT:
            count = sum(line.startswith("> ") for line in lines)
            out.append(render.folded(plural(count, "invented text", "s"),
                                     pre(lines, html.escape)))
        elif kind == 2 and len(lines) > 1:  # names, and what they have
            out.append('<table class="words">'
                       f"{body(map(columns, lines), render.quote)}</table>")
        elif kind and len(lines) > 1:
            out.append(table([*map(columns, lines)]))
        else:
            if most and len(lines) > 3 * most:
                lines[most:-2 * most] = ["..."]
            out.append(pre(lines))
    return "".join(out)


def kinds(lines):
    """(kind, line) for each; where it has columns, the kind is their number.
    """
    kind = 0
    for line in lines:
        if line.startswith("| step") or (
                kind == STEPS and line.startswith("saved ")):
            kind = STEPS
        elif line.startswith("> ") or (
                kind == TEXT and not AFTER_TEXT.match(line)):
            kind = TEXT
        else:
            first, *others = columns(line)
            kind = 1 + len(others) if (first and others) or others[2:] else 0
        yield kind, line


def columns(line):
    return re.split(r"\s{2,}", line.rstrip())


def pre(lines, quote=render.quote):
    return '<pre class="said">{}</pre>'.format(quote("\n".join(lines)))


def whole(cell):
    """HTML of a cell; 1e-05 and --flags would be broken at their signs."""
    return re.sub(r"\S*e-\d+|--[\w-]+", r'<span class="whole">\g<0></span>',
                  html.escape(str(cell)))


def steps(lines):
    """A table of the first steps, ever fewer of those that follow, the last.

    One that is shown stays while more of them come.
    """
    saved = [line for line in lines if line.startswith("saved ")]
    lines = [line for line in lines if line not in saved]
    rows = [dict(re.findall(r"([^\s|]+) +([^|]*[^| ])", line))
            for i, line in enumerate(lines)
            if i & (i - 1) == 0 or i >= len(lines) - 2]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    head = [name for name in names  # that of a validation has few rows
            if 2 * sum(name in row for row in rows) > len(rows)]
    notes = [f"step {row['step']}: " + ", ".join(
        f"{name} {row[name]}" for name in row if name not in head)
        for row in rows if row.keys() - head]
    if len(rows) < len(lines):
        notes.append(f"{len(rows)} of {len(lines)} steps; the run's "
                     "metrics.csv has all.")
    notes += saved[-1:]
    return table([[name.rstrip(":") for name in head],
                  *([row.get(name, "") for name in head] for row in rows)]
                 ) + "".join(render.paragraph(html.escape(note), "legend")
                             for note in notes)


def table(rows, kind="numbers"):
    """An HTML table of rows of cells; the first row is its head.

    kind: of what most cells hold; "words" begin at the left.
    """
    head, *rest = rows
    about = html.escape(f"Table: {', '.join(map(str, head))}")
    head = "".join(f'<th scope="col">{whole(name)}</th>' for name in head)
    return render.scrolling(f'<table class="{kind}"><tr>{head}</tr>'
                            f"{body(rest)}</table>", about)


def body(rows, quote=whole):
    return "".join(f'<tr><th scope="row">{quote(name)}</th>' + "".join(
        f"<td>{quote(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows)
