"""Runs programs of the course with this Python, and this clone's modules."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from backstage import ROOT
from rankcheck.engine.exits import ERROR_LINE
from rankcheck.system.errors import KILLED
from workshop import SOURCES

COURSE_PACKAGES = ("torch", "numpy", "tiktoken", "tyro", "matplotlib")


def archive() -> str:
    """The archive from which this Python's environment was unpacked, or ""."""
    marker = Path(sys.prefix, "workshop-base")
    text = marker.read_text() if marker.exists() else ""
    return next(iter(re.findall("^archive=(.*)$", text, re.M)), "")


def variables() -> dict[str, str]:
    """Environment variables: as in activate.sh, without a kernel's.

    A kernel asks for colours, and a cell of ours shows their codes.
    """
    env = {name: value for name, value in os.environ.items()
           if name not in ("PYTHONHOME", "MPLBACKEND", "FORCE_COLOR",
                           "CLICOLOR_FORCE")}
    env["PYTHONPATH"] = os.pathsep.join(
        [*SOURCES, *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TIKTOKEN_CACHE_DIR",
                   str(ROOT / "fineweb" / ".cache" / "tiktoken"))
    return env


def site_variables() -> dict[str, str]:
    """The environment, with what site.sh exports."""
    if not (ROOT / "site.sh").exists() or not shutil.which("bash"):
        return dict(os.environ)
    printed = subprocess.run(
        ["bash", "-lc", "[ ! -f site.sh ] || . ./site.sh >&2\n"
         r"printf '\0\0'; env -0"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, check=False).stdout.decode()
    # what comes before is a profile's, such as a greeting
    printed = printed.partition("\0\0")[2]
    pairs = (item.partition("=") for item in printed.split("\0"))
    return {name: value for name, _, value in sorted(pairs)}


def sbatch_variables() -> dict[str, str]:
    """What `sbatch` passes on, as after activate.sh.

    That is this clone, and what site.sh sets: account, partition and so on.
    """
    return {name: value for name, value in site_variables().items()
            if name.startswith("SBATCH_")} | {"WORKSHOP": str(ROOT)}


def run_python(*arguments: object, on_line: Callable[[str], object]) -> int:
    """Run `python arguments...`; returns its exit status.

    on_line: a function that gets each line that it prints, as it comes.
    """
    with start_python(*arguments, stdin=subprocess.DEVNULL,
                      alone=False) as process:
        printed = process.stdout
        assert printed is not None  # `start_python` makes a pipe
        try:
            for line in printed:
                on_line(line)
        except KeyboardInterrupt:  # the kernel's stop button
            process.terminate()
            for line in printed:
                on_line(line)  # a run saves a checkpoint, says how to go on
            print("interrupted")
    if process.returncode == -signal.SIGKILL:
        on_line(f"error: {KILLED}")
    return process.returncode


def start_python(*arguments: object, stdin: int = subprocess.PIPE,
                 alone: bool = True) -> subprocess.Popen[str]:
    """Start `python arguments...`: a process with pipes, for a dialogue.

    alone: in a session of its own, Ctrl-C, or a kernel's stop button, does not
    reach it; it must exit when its input is closed.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=variables(),
        text=True, errors="replace", stdin=stdin, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=alone)


def last_line(output: str, silent: str = "no message") -> str:
    """Return the script's own first error, or its last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    own = [found[1] for found in map(ERROR_LINE.match, lines) if found]
    return (own[:1] or lines[-1:] or [silent])[0]
