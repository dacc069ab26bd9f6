"""Watches which files a process writes and reads."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rankcheck.record.recorder import Log, replace

PATH = (str, bytes, os.PathLike)  # and no number of an open file
# What opens a file for its caller, except what is installed within these
TORCH_FOLDER = os.path.dirname(torch.__file__) + "/"
HELPERS = (sysconfig.get_path("stdlib"), "<", str(Path(__file__).parents[1]))


def opened(log: Log, without: Sequence[str] = ()) -> None:
    """written: files that were opened to write them, and by whom: see
    `opener`. Those with nothing of `without` in their path.

    read: files that it has opened before its first step. results: those
    that it has written after that. Once it has saved something after its first
    step, there is a file saved-N in the log's folder, N being the number of
    its steps.
    """
    def wrote(path: str) -> None:
        if log.step:
            log.record.files_written.append(path)
        if log.is_own_process and path not in log.record.writers:
            log.record.writers[path] = opener(log.script)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event in ("fcntl.flock", "fcntl.lockf"):  # by turns, or a mere lock
            log.record.writers.pop(os.path.realpath(
                f"/proc/self/fd/{args[0]}"), None)
        if event == "open" and isinstance(args[0], PATH):
            path = os.path.abspath(os.fsdecode(args[0]))
            if not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                if not log.step:
                    log.record.files_read.append(path)
            elif not any(part in path for part in without):
                wrote(path)

    sys.addaudithook(on_event)

    @replace(torch, "save")
    def save(save: Callable[..., None], obj: Any, f: Any, *args: Any,
             **kwargs: Any) -> None:
        if isinstance(f, (str, Path)):  # not opened by Python
            wrote(os.path.abspath(f))
        save(obj, f, *args, **kwargs)
        # a storage is what pickle makes of a tensor that is sent, not saved
        is_sent = isinstance(obj, (torch.UntypedStorage, torch.TypedStorage))
        if log.step and not is_sent:
            # the other ranks may be a step behind
            Path(f"{log.folder}/saved-{log.step}").touch()


def opener(script: str) -> int | str:
    """Return who opens the file that is being opened.

    Returns:
        A line of the script; 0 for another file beside it; the name of a
        library; or "a thread".
    """
    here = os.path.dirname(script) + "/"
    frame: FrameType | None = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        installed = "-packages/" in file
        if file.startswith(here) and not installed:
            return frame.f_lineno if file == script else 0
        if not file.startswith(TORCH_FOLDER) and (
                installed or not file.startswith(HELPERS)):
            module: str = frame.f_globals["__name__"]
            return module.split(".")[0]
        frame = frame.f_back
    return "a thread"
