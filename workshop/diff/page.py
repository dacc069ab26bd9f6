"""Parts of what a notebook shows: the style, the scripts, links and code."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

from backstage import ROOT
from backstage.files import show_path
from workshop.html import BLUE, ORANGE, quote_text, scrolling
from workshop.stages import WORKING_COPY

# Half a laptop's screen has 72 columns, the scripts up to 79. Where JupyterLab
# wraps, End stops inside of a line, and Enter there splits it.
#
# JupyterLab's variables follow its theme; other pages keep their own colours.
# The numbers and signs are text, which cannot be selected: anyone who copies
# from the view copies only code. Where lines are removed there are stripes
# beside the colour.
PAGE_FOLDER = Path(__file__).with_name("page")

DiffSpan = tuple[str, bool]  # a part of a line, and whether it differs
# (line number, sign, the line): see workshop/diff/render.py's `change_rows`
DiffRow = tuple[int | None, str, list[DiffSpan]]


def read_page_script(name: str) -> str:
    """A script for the page, without the comment above it."""
    text = (PAGE_FOLDER / name).read_text("utf-8")
    text = re.sub("^//.*\n", "", text, flags=re.M).strip()
    return f"<script>{text}</script>"


STYLE = "<style>\n{}</style>".format(
    (PAGE_FOLDER / "view.css").read_text("utf-8").replace(
        "BLUE", BLUE).replace("ORANGE", ORANGE))
KEEP_IN_SIGHT = read_page_script("keep_in_sight.js")
BRING_LINE = read_page_script("bring_line.js")
KEEP_UNFOLDED = read_page_script("keep_unfolded.js")
TEXTS_SCRIPT = read_page_script("texts.js")
ANNOUNCE = read_page_script("announce.js")
NOT_FOLLOWED = """<p class="ask"><strong>This is how it was at TIME:
it does not follow your script any more.</strong> Run this cell again.</p
>"""
STALE = read_page_script("stale.js")


def texts(path: str) -> str:
    """A script for the page, which looks after what is not shown from here.

    path: as below.
    """
    there = Path(path).parents[2] / WORKING_COPY.relative_to(ROOT)
    return BRING_LINE + TEXTS_SCRIPT.replace(
        "WORKING_COPY", json.dumps(there.as_posix()))


def stale(path: str) -> str:
    """Return HTML that says when the view under it is no longer updated.

    path: in JupyterLab, of the file into which its kernel writes the time.
    """
    script = STALE.replace("PATH", json.dumps(path)).replace(
        "BORN", str(time.time()))
    notice = NOT_FOLLOWED.replace("TIME", time.strftime("%H:%M:%S"))
    return f'{STYLE}{texts(path)}<div class="ws">{notice}{script}</div>'


def ended(view: str, shown_at: str) -> str:
    """Return the HTML of a view that is no longer updated, which says so.

    view: its HTML; its scripts would scroll to it, and read it aloud.
    shown_at: the time when it was made.
    """
    view = re.sub("<script>.*?</script>", "", view, flags=re.S)
    notice = NOT_FOLLOWED.replace("TIME", shown_at)
    return f'{STYLE}<div class="ws">{notice}</div>{view}'


def link(text: str, line: str = "") -> str:
    """Return a link with which JupyterLab opens the script at the line."""
    path = f"../{show_path(WORKING_COPY)}{line and f'#line={int(line) - 1}'}"
    return f'<a href="{path}">{text}</a>'


def link_lines(text: str) -> str:
    """The text, in which each line of the attendee's script is a link."""
    return re.sub(r"(?<!\.py, )\bline (\d+)",
                  lambda it: link(it[0], it[1]), text)


def code_box(view: Iterable[DiffRow], about: str) -> str:
    """The HTML of rows of code; about: its name for those who listen."""
    kinds = {"-": ' class="del" role="deletion"',
             "+": ' class="add" role="insertion"', "": ' class="gap"',
             "@": ' class="title"'}
    lines = []
    for line, sign, parts in view:
        text = "".join(
            f"<mark>{html.escape(part)}</mark>" if differs
            else html.escape(part) for part, differs in parts)
        whole = "".join(part for part, _ in parts)
        hang = len(whole) - len(whole.lstrip()) + 4  # where it goes on
        # a line's end of its own: an export has no style sheet
        lines.append(f'<span{kinds.get(sign, "")} style="--hang: {hang}ch">'
                     f'<b>{line or "":>5} {sign or "⋯"} </b>{text}\n</span>')
    return scrolling(f'<code>{"".join(lines)}</code>', about,
                     'pre class="code"')


def quote(text: str) -> str:
    """HTML of a text, with calls in the place of terminal commands."""
    return quote_text(as_calls(text))


def as_calls(text: str) -> str:
    """The text with calls, for a cell, in the place of terminal commands."""
    def call(command: re.Match[str]) -> str:
        name, *arguments = command[1].split()
        if arguments == ["--undo"]:
            name, arguments = "undo", []
        named = {"--list": "", "--all": '"all"', "--no-hints": "hints=False"}
        arguments = [named.get(word, word if word.isdigit() and len(word) < 3
                               else f'"{word}"') for word in arguments]
        return f"`{name}({', '.join(arguments)})`"

    return re.sub(r"`python -m workshop ((?:apply|check|diff|reset)"
                  r" [^`]+)`", call, text)


def styled_box(text: str, status: str = "") -> str:
    """The style, and the HTML that it applies to.

    status: a line of text that is read aloud where someone listens.
    """
    if status:
        message = json.dumps(as_calls(status)).replace("<", "\\u003c")
        text += ANNOUNCE.replace("WORDS", message)
    if "#line=" in text:
        text += BRING_LINE
    return f'{STYLE}<div class="ws">{text}</div>'
