"""Ends what a killed pytest has left: python cleanup.py PID TICKS FOLDER

pytest ends its own processes; a signal leaves it no time for that. So it
starts this script, which waits until pytest has ended. It then ends each
process that has inherited the folder of pytest's temporary files in a
variable, as TMPDIR. An editor of a file in that folder has not.
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

from rankcheck.system import proc

# Where Python finds rankcheck. The script begins without the user's variables.
SOURCE_PATH = str(Path(__file__).resolve().parents[2] / "src")
KEPT = "kept"  # a file in the folder: a test has failed, let it be looked at
MOST_KEPT = 3  # of these folders: together they filled a disk
KEPT_TEXT = ("rankcheck's tests have kept this folder, as one of them has "
             "failed. The third that fails after it removes it.\n")
PLACES = "PWD=", "OLDPWD="  # where a shell is, and was
PATIENCE = 30  # seconds in which killed processes have to be gone


def all_processes() -> Iterator[tuple[int, list[str], list[str]]]:
    """The number, command and variables of each that this user may look at."""
    for pid in proc.list_processes():
        variables = proc.read_variables(pid)
        if variables is not None:  # else it has ended, or is another's
            yield pid, proc.read_command(pid), variables


def find_processes(folder: Path) -> Iterator[int]:
    """Those that have inherited the folder in a variable."""
    for pid, _, variables in all_processes():
        inherited = [text for text in variables
                     if not text.startswith(PLACES)]
        if any(str(folder) in text for text in inherited):
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


def remove_older(parent: Path) -> None:
    """Remove the folders of tests that have failed, but the last ones.

    Args:
        parent: where they are. Only what has our mark in it is removed, and
            only of this user's.
    """
    kept: list[tuple[float, Path]] = []
    for file in parent.glob(f"*/{KEPT}"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            status = file.stat()
            if status.st_uid == os.getuid() and file.read_text() == KEPT_TEXT:
                kept.append((status.st_mtime, file.parent))
    for _, folder in sorted(kept)[:-MOST_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def clean_up(pid: int, ticks: int, folder: Path) -> None:
    """Wait for the end of a process, then end and remove what it left.

    Args:
        ticks: when it began, as `proc.read_ticks` says.
    """
    while proc.read_ticks(pid) == ticks and proc.read_state(pid) != "Z":
        time.sleep(0.3)
    end_processes(folder)
    unmount(folder)
    if not (folder / KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)


def watch(pid: int, folder: str) -> None:
    """Start this beside a process, which it does not hold up."""
    ticks = proc.read_ticks(pid)
    if not ticks:  # no /proc: macOS
        return
    subprocess.Popen(
        [sys.executable, __file__, str(pid), str(ticks), folder],
        env={"PYTHONPATH": SOURCE_PATH},
        cwd="/", start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    clean_up(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
