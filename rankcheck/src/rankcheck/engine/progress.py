"""Says how far it is, while something takes long, as on a busy machine."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FIRST = 5.0  # seconds until it says something: an idle machine takes fewer
REPEATED = 10.0  # seconds from then on
LOADING = "loading PyTorch"


@dataclass
class Reminder:
    """When to say again that something still lasts.

    Attributes:
        begin: in seconds of time.monotonic().
        due: when to say something, in the same seconds.
    """

    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.due = self.begin + FIRST

    def is_due(self, now: float) -> bool:
        """Return whether to say something now, once for each time."""
        if now < self.due:
            return False
        self.due = now + REPEATED
        return True


@contextlib.contextmanager
def saying_that_it_lasts(say: Callable[[str], None], what: str
                         ) -> Iterator[None]:
    """Say, while the body runs, that something still lasts.

    Args:
        say: is told, from another thread.
        what: as in "loading PyTorch".
    """
    over = threading.Event()
    reminder = Reminder()

    def remind() -> None:
        while not over.wait(reminder.due - time.monotonic()):
            now = time.monotonic()
            if reminder.is_due(now):
                say(f"        still {what} after {now - reminder.begin:.0f} s")

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause garbage collection for imports, which leave nothing to collect.

    It would take a quarter of the time in which torch is imported.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
