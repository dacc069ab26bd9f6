"""Stop a run on a signal, or when its output is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from backstage.errors import FULL, silence

Result = TypeVar("Result")


class Signals:
    """Records in `last` the last signal, None if there was none.

    Only the second Ctrl-C stops the program at once. An output that ends, as
    of a stopped `tee`, counts as SIGPIPE; what is printed then is dropped. So
    is what has no room there: the run's folder may have some, and it goes on.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: int | None = None
        self.stream = sys.stdout
        sys.stdout = self
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT,
                   signal.SIGXCPU]  # the time of `ulimit -t` is over
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's
            numbers.append(signal.SIGHUP)  # the terminal was closed
        for number in numbers:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.last == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.last = number
        if number == signal.SIGINT and self.rank == 0:
            # print() fails where the signal has interrupted another one
            with contextlib.suppress(OSError):
                os.write(1, b"\nCtrl-C: stopping after this step (press it "
                         b"again to stop at once, without a checkpoint)\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int | None:
        return self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Callable[..., Result],
             *arguments: str) -> Result | None:
        try:
            return do(*arguments)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                silence()
                self.last = self.last or signal.SIGPIPE
            elif error.errno not in FULL:
                raise
            return None
