"""What a cell shows: HTML in a notebook, and text in a terminal."""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import io
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backstage.errors import UserError, require
from notebooks.course_messages import ARGUMENTS_FIX, COMPLAINT
from workshop.diff import page
from workshop.html import paragraph, scrolling
from workshop.jobs import interpreter
from workshop.notebook import frontend


class Shown:
    """Something that a notebook shows as HTML, and a terminal as text.

    more: what else the notebook keeps of it, by the kind.
    """

    def __init__(self, html: str, text: str, **more: str) -> None:
        self.html, self.text, self.more = html, text, more

    def bundle(self) -> dict[str, str]:
        """What a frontend shows, by MIME type."""
        return {"text/html": self.html, "text/plain": self.text, **self.more}

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def complaint(error: object) -> Shown:
    """Show an error in one line."""
    line = paragraph(page.quote(str(error)), "bad")
    text = page.as_calls(str(error))
    return Shown(page.styled_box(line, str(error)), text, **{COMPLAINT: text})


def show_text(text: str) -> Shown:
    """Sentences of ours, a paragraph for each line."""
    lines = map(page.quote, text.splitlines())
    return Shown(page.styled_box("".join(map(paragraph, lines))),
                 page.as_calls(text))


def show_output(text: str, status: str = "", above: str = "",
                most: int = 600) -> Shown:
    """What a program prints, as it prints it, in a box that scrolls.

    above: HTML that stands over it. most: how many of its first lines, and
    of its last, are shown of a long text.
    """
    text = text.rstrip()
    lines = text.split("\n")
    if len(lines) > 2 * most:
        lines[most:-most] = ["..."]
    return Shown(page.styled_box(above + printed("\n".join(lines)), status),
                 page.as_calls(text))


def printed(text: str) -> str:
    """HTML of a text in a box that scrolls, and begins at its end."""
    text = html.escape(page.as_calls(text), quote=False)
    return scrolling(f"<pre>{text}</pre>", "What was printed",
                     'div class="said"')


def table(rows: Iterable[Iterable[object]], kind: str = "numbers") -> str:
    """An HTML table of rows of cells; the first row is its head.

    kind: of what most cells hold; "words" begin at the left.
    """
    head, *body = [[html.escape(str(cell)) for cell in row] for row in rows]
    lines = ["".join(f'<th scope="col">{name}</th>' for name in head)]
    lines += [f'<th scope="row">{name}</th>' + "".join(
        f"<td>{cell}</td>" for cell in cells) for name, *cells in body]
    body_rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return scrolling(f'<table class="{kind}">{body_rows}</table>',
                     f"Table: {', '.join(head)}")


def as_table(rows: Sequence[Sequence[object]], kind: str = "numbers",
             notes: Sequence[str] = ()) -> Shown:
    """Rows as a table; notes: lines that stand below it."""
    lines = [paragraph(page.quote(note)) for note in notes]
    return Shown(
        page.styled_box(table(rows, kind) + "".join(lines)),
        "\n".join([*notes, *("  ".join(map(str, row)) for row in rows)]))


def output_of(function: Callable[..., object], *args: object) -> Shown:
    """What the function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return show_output(out.getvalue())


def run_and_show(*arguments: object,
                 view: Callable[[str, str], Shown] = show_output) -> int:
    """Run `python arguments...`, and show what it prints as it comes.

    view: of the text, and of its last line. Returns its exit status.
    """
    lines: list[str] = []
    show = live(lambda: view("".join(lines), "".join(lines[-1:]).strip()))

    def on_line(line: str) -> None:
        lines.append(line)
        show()

    status = interpreter.run_python(*arguments, on_line=on_line)
    if lines:
        show(now=True)
    return status


# of what a cell gives
ARGUMENT_TYPES = str, os.PathLike, int, float, type(None)


def in_one_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a cell show what the user can fix, instead of a traceback.

    That is also a call with other arguments than the function has.
    """
    takes = inspect.signature(function, follow_wrapped=False)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            for value in (*args, *options.values()):
                require(isinstance(value, ARGUMENT_TYPES) and not re.search(
                    "[\0\ud800-\udfff]", str(value)),
                    f"{function.__name__}() {ARGUMENTS_FIX}")
            try:
                takes.bind(*args, **options)
            except TypeError as error:
                raise UserError(f"{error}: write {function.__name__}{takes}"
                                ) from None
            return function(*args, **options)
        except UserError as error:
            return complaint(error)

    vars(call)["is_cell"] = True  # which server.py looks for
    return call


def split_arguments(text: object) -> list[str]:
    """The arguments of a command line; raises `UserError`."""
    try:
        return shlex.split(str(text))
    except ValueError as error:  # a quote that is not closed
        raise UserError(f"{text}: {error}") from error


def live(make: Callable[[], Shown]) -> Callable[..., None]:
    """A function that shows make() in the cell, each time in its own place.

    It does so a few times a second at most, but always with now=True.
    """
    output, last = None, 0.0

    def show(now: bool = False) -> None:
        nonlocal output, last
        if not now and time.monotonic() - last < 0.3:
            return
        last = time.monotonic()
        if output is None:
            output = frontend.LiveOutput(make().bundle())
        else:
            output.update(make().bundle())

    return show


def picture(svg: str) -> Shown:
    return Shown(page.styled_box(svg + page.KEEP_IN_SIGHT), "(a picture)")
