"""What the tests of the check share."""

import json
import os

from workshop.check.board import Board
from workshop.check.command import main


def board_of(script, capsys):
    """A check's `Board`, from its events."""
    board = Board()
    right = main("ddp", script, events=True)
    for line in capsys.readouterr().out.splitlines():
        board.update(json.loads(line))
    assert board.right == right
    return board


FORWARD = ("loss = training_step(model, ", "loss = training_step(raw_model, ")


def left_in(temporary):
    """The folders of ours in this folder for temporary files."""
    return [file for file in temporary.iterdir()
            if file.name.startswith(("check-", "ranks-", "pymp-"))]


def left_by(temporary):
    """The processes that have this folder for temporary files."""
    mark, found = f"TMPDIR={temporary}".encode(), []
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                with open(f"/proc/{folder}/environ", "rb") as file:
                    if mark in file.read():
                        found.append(folder)
            except OSError:
                pass
    return found
