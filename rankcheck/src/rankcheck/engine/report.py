"""Prints what verify does and finds, as text or JSON.

It reports events, dictionaries that JSON can hold:

    finding   [verdict, text, fix]; the verdict is "ok", "warn" or "FAIL", or
              "" for what was not seen
    say       a line of text
    right     whether the script is right, at the end
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Any

from rankcheck.engine.findings import LABELS


class Quiet:
    """Reports nothing.

    Attributes:
        interrupted: what is written when the program is interrupted.
    """

    interrupted = b"\ninterrupted\n"

    def report(self, **event: Any) -> None:
        """Report an event, one argument: see above."""

    def say(self, text: str = "") -> None:
        """Print a line of text."""
        self.report(say=text)


class Terminal(Quiet):
    """Prints what is said and found."""

    def __init__(self) -> None:
        self.printed_fixes: set[str] = set()  # each is printed once
        self.tty = sys.stdout.isatty()
        self.width = shutil.get_terminal_size().columns if self.tty else 79

    def report(self, **event: Any) -> None:
        (kind, value), = event.items()
        if kind == "say":
            self.print(value)
        if kind == "finding":
            self.tell(*value)

    def tell(self, verdict: str, text: str, fix: str) -> None:
        """Print a finding, and what to do unless that was printed before."""
        label = LABELS.get(verdict, verdict)
        self.print(f"  {label:7}  {text}", 11)
        if fix and fix not in self.printed_fixes:
            self.print(f"           fix: {fix}", 16)
        self.printed_fixes.add(fix)

    def print(self, text: str, indent: int | None = None) -> None:
        """Print lines; in a terminal a long one is wrapped between words.

        indent: of what follows in a long line; None: that of the line.
        """
        for line in text.split("\n"):
            if self.tty:
                spaces = indent
                if spaces is None:
                    spaces = len(line) - len(line.lstrip())
                line = textwrap.fill(
                    line, self.width, subsequent_indent=" " * spaces,
                    break_long_words=False, break_on_hyphens=False)
            print(line, flush=True)


class Events(Quiet):
    """Prints events, a line of JSON for each."""

    interrupted = b""

    def report(self, **event: Any) -> None:
        print(json.dumps(event), flush=True)
