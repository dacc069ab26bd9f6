"""Makes the HTML that a notebook shows, of texts and parts of a page."""

from __future__ import annotations

import html
import os
import re

from backstage.files import StrPath
from rankcheck.system.errors import read_regular

# They differ for every eye
BLUE, ORANGE = "33, 102, 192", "207, 112, 0"
# The same in a terminal's 256 colours, for a light and for a dark ground
TERMINAL_BLUE, TERMINAL_ORANGE = "38;5;32", "38;5;166"


def folded(summary: str, content: str, attributes: str = "") -> str:
    """HTML that a click unfolds."""
    return (f"<details{attributes}><summary>{summary}</summary>{content}"
            "</details>")


def scrolling(content: str, about: str, tag: str = 'div class="wide"') -> str:
    """Return HTML that scrolls, also by keyboard."""
    return (f'<{tag} tabindex="0" role="region" aria-label="{about}">'
            f'{content}</{tag.split()[0]}>')


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of HTML; kind: "good", "bad" or ""."""
    return f'<p class="{kind}">{text}</p>'


def quote_text(text: str) -> str:
    """HTML for a notebook: of `code`, **strong** and *emphasised* words."""
    parts = html.escape(text, quote=False).split("`")
    if len(parts) % 2 == 0:  # one that closes nothing
        parts[-2:] = ["`".join(parts[-2:])]
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"<code>{part}</code>"
            continue
        part = re.sub(r"\*\*(\S[^*]*)\*\*", r"<strong>\1</strong>", part)
        parts[i] = re.sub(r"\*(\S[^*]*\S|\S)\*(?!\w)", r"<em>\1</em>", part)
    return "".join(parts)


def may_replace(path: StrPath, mark: str) -> bool:
    """Whether a page or a picture is not there, or carries our mark, a
    text inside it.
    """
    try:
        return mark.encode() in read_regular(path, flags=os.O_NOFOLLOW)
    except OSError:  # else it is somebody's link, folder, FIFO, or secret
        return not os.path.lexists(path)
