"""Views that follow the script: updated whenever it is saved.

If the page was reloaded or this process died, the view marks itself as stale.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from backstage import ROOT
from workshop.diff import page, passed_checks
from workshop.notebook import frontend
from workshop.notebook.output import Shown
from workshop.stages import WORKING_COPY

Saved = list[tuple[Path, int, int, int]]  # see `saved_at`

# the view that is shown anew; there is one at a time
followed: Callable[[], Shown] | None = None


def follow_script(view: Callable[[], Shown]) -> Shown | None:
    """Show view() in the cell, and again whenever the script is saved.

    Once another view follows the script, such as the same cell's in a second
    window, this one says that it does not any more. If its own cell was run
    again, it is not there any more.

    Returns view() where nothing can be shown again, outside of a notebook.
    """
    global followed
    followed, seen = view, saved_state()
    if not frontend.current.is_notebook:
        return view()
    shown, shown_at = view(), time.strftime("%H:%M:%S")
    output = frontend.LiveOutput(alive(shown).bundle())

    def follow() -> None:
        nonlocal shown, shown_at
        for is_new in saves(seen):
            if followed is not view:
                old = page.ended(shown.html, shown_at)
                output.update(Shown(old, shown.text).bundle())
                return
            if is_new:
                shown, shown_at = view(), time.strftime("%H:%M:%S")
                output.update(alive(shown).bundle())

    threading.Thread(target=follow, daemon=True).start()
    return None


def alive(shown: Shown) -> Shown:
    """The same, with words that appear when it is not shown anew any more."""
    path = pulse()
    if not path:
        return shown
    return Shown(page.stale(path) + shown.html, shown.text)


@functools.lru_cache(1)
def pulse() -> str:
    """Begin to write the time into a file, for the views that are shown anew.

    Returns its path in JupyterLab, or "" if it can have none.
    """
    file = ROOT / "notebooks" / "__pycache__" / f"alive-{os.getpid()}"

    ends = threading.Event()

    def beat() -> None:
        while not ends.wait(0.5):
            with contextlib.suppress(OSError):
                file.write_text(str(time.time()))

    def end() -> None:
        ends.set()
        writer.join()  # else it makes the file again
        file.unlink(missing_ok=True)

    try:
        path = file.resolve().relative_to(server_root() or "").as_posix()
        file.parent.mkdir(exist_ok=True)
        file.write_text(str(time.time()))
    except (OSError, ValueError):
        return ""
    writer = threading.Thread(target=beat, daemon=True)
    writer.start()
    atexit.register(end)
    return path


def server_root() -> Path | None:
    """The folder whose files JupyterLab shows, or None if nothing tells."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir

        record = Path(jupyter_runtime_dir(),
                      f"jpserver-{os.environ['JPY_PARENT_PID']}.json")
        return Path(json.loads(record.read_text())["root_dir"]).resolve()
    except (ImportError, KeyError, OSError, ValueError):
        return None


def saves(seen: Saved) -> Iterator[bool]:
    """Looks again and again, and yields whether the script was saved.

    seen: `saved_at()` of what was shown last.
    """
    before = seen
    while True:
        now = saved_state()
        # Seen twice: an editor empties a file before it writes it.
        yield now == before != seen
        if now == before:
            seen = now
        before = now
        time.sleep(0.15)


def saved_state() -> Saved:
    """What changes whenever the script is saved, or has passed a check."""
    states = []
    for path in (WORKING_COPY, passed_checks.PASSED_FILE):
        with contextlib.suppress(OSError):
            it = path.stat()
            states.append((path, it.st_mtime_ns, it.st_size, it.st_ino))
    return states
