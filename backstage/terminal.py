"""The line of a terminal that is written again and again: how far a run is."""

import contextlib
import os
import shutil
import sys

BEGIN = "\r\x1b[K"  # go to the line's beginning, and erase it
shown = ""  # the line as a whole; the terminal shows what it has room for


def is_terminal():
    """Whether the output goes to a terminal that can erase a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def update(line):
    """Show this line in the place of the one before."""
    global shown
    # a longer one would go on in the next row, and could not be erased
    width = shutil.get_terminal_size().columns - 1
    print(BEGIN + line[:width], end="", flush=True)
    shown = line


def keep():
    """Let the line that is shown stay, as a whole, and end it.

    Called before anything else is printed.
    """
    global shown
    if shown:
        with contextlib.suppress(OSError):  # the terminal was closed
            print(BEGIN + shown, flush=True)
        shown = ""
