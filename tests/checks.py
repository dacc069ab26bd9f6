"""What the tests of the check share."""

import json

from conftest import all_processes

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
    return [pid for pid, _, variables in all_processes()
            if any(one.startswith(f"TMPDIR={temporary}") for one in variables)]
