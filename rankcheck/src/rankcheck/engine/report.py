"""Tells what verify does and finds, in text or in JSON.

It reports events, dictionaries that JSON can hold:

    finding   [verdict, text, hint]; the verdict is "ok", "warn" or "FAIL", or
              "" for what was not seen
    say       a line of text
    right     whether the script is right, at the end

Only the standard library, from Python 3.9 on: a notebook's kernel imports it.
"""

import json
import shutil
import sys
import textwrap


class Quiet:
    """Reports nothing."""

    interrupted = b"\ninterrupted\n"

    def report(self, **event):
        """Tell of an event: see above."""

    def say(self, text=""):
        self.report(say=text)


class Terminal(Quiet):
    """Prints what is said and found."""

    def __init__(self):
        self.told = set()
        self.tty = sys.stdout.isatty()
        self.width = shutil.get_terminal_size().columns if self.tty else 79

    def report(self, **event):
        (kind, value), = event.items()
        if kind == "say":
            self.print(value)
        if kind == "finding":
            self.tell(*value)

    def tell(self, verdict, text, hint):
        self.print(f"  {verdict:4}  {text}", 8)
        if hint and hint not in self.told:
            self.print(f"        -> {hint}")
        self.told.add(hint)

    def print(self, text, indent=None):
        """Print lines; in a terminal a long one is wrapped between words."""
        for line in text.split("\n"):
            if self.tty:
                line = textwrap.fill(
                    line, self.width, subsequent_indent=" " * (
                        len(line) - len(line.lstrip())
                        if indent is None else indent),
                    break_long_words=False, break_on_hyphens=False)
            print(line, flush=True)


class Events(Quiet):
    """Prints events, a line of JSON for each."""

    interrupted = b""

    def report(self, **event):
        print(json.dumps(event), flush=True)
