"""Ends what a pytest that was killed has left: python cleanup.py PID FOLDER

pytest starts it and ends its own processes itself; a signal leaves it no time
for that. This one waits until that process has ended, and then looks for the
folder of its temporary files: whatever names it was started by a test, for no
other process knows this name. Only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KEPT = "kept"  # a file in the folder: a test has failed, let it be looked at
PATIENCE = 30  # seconds in which killed processes have to be gone


def find_begin(pid: int) -> str:
    """When a process began, as Linux counts it; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    state, begin = fields[0], fields[19]
    return "" if state in "XZ" else begin


def find_processes(folder: Path) -> Iterator[int]:
    """Those with the folder's name in their command or their variables."""
    name = os.fsencode(folder)
    for place in Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        if pid in (os.getpid(), os.getppid()):
            continue
        with contextlib.suppress(OSError):  # ended, or somebody else's
            texts = [(place / file).read_bytes()
                     for file in ("cmdline", "environ")]
            if any(name in text for text in texts):
                yield pid


def end_processes(folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while (pids := [*find_processes(folder)]) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def unmount(folder: Path) -> None:
    """Undo the mounts in the folder, the innermost first."""
    with contextlib.suppress(OSError):
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for line in reversed(mounts):
            place = line.split()[1]
            if Path(place).is_relative_to(folder):
                subprocess.run(["umount", "-l", place], check=False,
                               stderr=subprocess.DEVNULL)


def clean_up(pid: int, begin: str, folder: Path) -> None:
    """Wait for the end of this process, then end and remove what it left."""
    while find_begin(pid) == begin:
        time.sleep(0.3)
    end_processes(folder)
    unmount(folder)
    if not (folder / KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)


def watch(pid: int, folder: str) -> None:
    """Start this beside a process, which it does not hold up."""
    begin = find_begin(pid)
    if not begin:  # no /proc: macOS
        return
    subprocess.Popen(
        [sys.executable, __file__, str(pid), begin, folder], env={},
        cwd="/", start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    clean_up(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
