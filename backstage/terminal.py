"""The output of a run: in a terminal one line, and where nobody reads it.

In a terminal, the line of a step is written in the place of the one before.
"""

import contextlib
import errno
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


def drop():
    """Drop what is printed from now on, and what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Output:
    """The standard output, which may end before the program does.

    As where `tee` has ended, or the terminal was closed. Then all that is
    printed is dropped, and `on_end` is called.
    """

    def __init__(self, stream, on_end):
        self.stream, self.on_end = stream, on_end

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        return self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, do, *arguments):
        try:
            return do(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            drop()
            self.on_end()
