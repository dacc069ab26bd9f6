"""Watches which files a process writes and reads."""

import os
import sys
from pathlib import Path

import torch

from rankcheck.probes.recorder import replace

PATH = (str, bytes, os.PathLike)  # and no number of an open file


def place(path):
    """The same, whole: TensorBoard's are bytes."""
    return os.path.abspath(os.fsdecode(path))


def opened(log, within="", without=(), finished=str):
    """written: files that were opened to write them.

    Those with `within` in their path, and nothing of `without`. finished: a
    function that gives the name that a file has once it is written.
    """
    written = log.seen["written"] = []

    def wrote(path):
        log.tell("wrote", path)
        folder, name = os.path.split(path)
        path = os.path.join(folder, finished(name))
        if log.here and path not in written:
            written.append(path)

    def on_event(event, args):
        if event == "open" and isinstance(args[0], PATH) and (
                (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            path = place(args[0])
            if within in path and not any(part in path for part in without):
                wrote(path)

    sys.addaudithook(on_event)

    @replace(torch, "save")
    def save(save, obj, f, *args, **kwargs):
        if isinstance(f, (str, Path)):  # not opened by Python
            wrote(place(f))
        save(obj, f, *args, **kwargs)


def results(log):
    """read: files that it has opened before its first update.
    results: those that it has written after that.

    Once it has saved something after its first update, there is a file
    saved-N in the log's folder, N being the number of its updates.
    """
    log.seen |= {"read": [], "results": []}

    def on_event(event, args):
        if event == "open" and isinstance(args[0], PATH) and not (
                log.seen["updates"]
                or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            log.seen["read"].append(place(args[0]))

    def wrote(path):
        if log.seen["updates"]:
            log.seen["results"].append(path)

    sys.addaudithook(on_event)
    log.on("wrote", wrote)

    @replace(torch, "save")
    def save(save, obj, f, *args, **kwargs):
        save(obj, f, *args, **kwargs)
        if log.seen["updates"]:
            # the other ranks may be an update behind
            Path(f"{log.folder}/saved-{len(log.seen['updates'])}").touch()
