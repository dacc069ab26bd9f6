"""The check's table: in a terminal and in a notebook, and its pictures."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cluster import wait_for
from stages import edited

from workshop.board import MEANING, Board, CheckTerminal
from workshop.check.command import check_script
from workshop.diff import render
from workshop.instructor import classroom
from workshop.notebook import pictures


@pytest.mark.whole
def test_a_table_of_a_wrong_script(tmp_path, capsys, monkeypatch, snapshot):
    """And what is drawn beside it: the losses, and the samples. The class is
    told what is wrong, if somebody takes part. The words are a page of text.
    """
    shared = tmp_path / "class"
    shared.mkdir()
    monkeypatch.setenv("WORKSHOP_CLASS", str(shared))
    board, script = Board(), edited(tmp_path, "ddp", (
        "loss = training_step(model, ", "loss = training_step(raw_model, "))
    report = check_script("ddp", script, events=True)
    events = [*map(json.loads, capsys.readouterr().out.splitlines())]
    terminal = CheckTerminal(verbose=False)
    for event in events:
        board.update(event)
        terminal.report(**event)
    said = re.sub(" *still .* after .*\n", "", capsys.readouterr().out)
    said = re.sub(r"last saved.*?,", "last saved then,", re.sub(
        r"\d+\.\d+ s\b", "some s", said))
    snapshot("check.txt", re.sub(r"relative error of \S+", "relative error of "
                                 "some", said))
    assert board.right is report.ok is False
    wait_for(lambda: classroom.read_people(shared))
    (person,) = classroom.read_people(shared)
    assert person.right is False
    assert person.mistake == "gradients match the single device's"
    assert board.columns == [
        "1", "2", "4", "uneven", "resumed", "stopped"]
    gradients = board.answers["gradients match the single device's"]
    assert gradients == {"1": "ok", "2": "FAIL"}
    assert board.answers["losses agree at every step"]["2"] == "and"
    assert [verdict for verdict, *_ in board.findings].count("FAIL") == 1

    ElementTree.fromstring(f"<div>{board.to_html()}</div>")

    seen = board.pictures["2"]  # each on its own, rounding the first only
    off = [abs(mine - good) for mine, good in zip(
        seen["loss"], seen["single"], strict=True)]
    assert off[0] < 1e-5 < min(off[1:])
    cells = re.findall("<td>(.*?)</td>", pictures.errors(
        seen["single"], {"2": seen["loss"]}))
    assert [cell[-1] == "✗" for cell in cells] == [False] + 5 * [True]

    expected, read, readers = (seen[what] for what in (
        "expected", "read", "readers"))
    about = ElementTree.fromstring(pictures.reads(
        expected, read, readers)).find("desc").text
    assert about.startswith("step 0: rank 0 read 0 1 4 5 8 9 12 13, rank 1 ")
    assert about.endswith(
        ". after sample 39 the dataset begins again: it has 40.")


NOISE = ("/x/torch/cuda.py:1: UserWarning: CUDA is not there\n",
         "  warnings.warn(\n", "\n", "[]\n", "{\n", "17\n")


def board_after(*lines):
    board = Board()
    for line in lines:
        board.read(line)
    board.end()
    return board


def test_what_libraries_print_is_no_finding():
    for right in ("true", "false"):
        board = board_after('{"say": "it is so"}\n', *NOISE,
                            f'{{"right": {right}}}\n', *NOISE)
        assert board.right is (right == "true") and not board.findings
        assert board.last == "it is so"
    # an error after the verdict says why there is none
    board = board_after('{"say": "this is no verdict"}\n',
                        '{"right": false}\n',
                        "error: rankcheck itself failed: odd\n")
    assert board.findings == [["warn", "rankcheck itself failed: odd", ""]]
    assert "rankcheck itself failed: odd" in board.to_html()
    # nor is what they print before the last words
    for line, words in (("error: the folder is full", "the folder is full"),
                        ("interrupted", "interrupted")):
        board = board_after(*NOISE, f"{line}\n")
        assert board.right is False
        assert board.findings == [["FAIL", words, ""]]
    assert "did not finish" in board.to_html()
    board = board_after('{"right": true}\n', "warning: not recorded\n")
    assert board.right and board.findings == [["warn", "not recorded", ""]]


@pytest.fixture
def board():
    """A check of a wrong script, which has each verdict."""
    board = Board()
    for event in (
            {"columns": ["1", "2", "4", "2x1x2", "stopped"]},
            {"about": "2x1x2: pipeline x data."},
            *(event for run, verdict in zip(("1", "2", "4", "2x1x2"),
                                            MEANING, strict=True)
              for event in ({"run": run},
                            {"answer": ["it is <right>", verdict]},
                            {"answer": [f"a signal to one rank ends {run}, "
                                        "after a checkpoint", verdict]})),
            {"finding": ["FAIL", "it is off", "look"]},
            {"finding": ["and", "that is off, too", ""]},
            {"cause": ["The error is in change 3 (Wrap `it`), line 7", "Why.",
                       ""]},
            {"cause": ["The error is in change 5", "The `line`.",
                       "Which of two?"]},
            {"say": "Not correct yet."}, {"right": False}):
        board.update(event)
    return board


def test_the_views_of_a_check(board, snapshot):
    """In words, too, for those who listen; what is right is one row."""
    snapshot("board.html", board.to_html())
    snapshot("board.txt", board.to_text(width=60))


@pytest.mark.parametrize("width", [44, 60, 79, 120])
def test_no_word_is_broken(board, width):
    whole = board.to_text(width=width)
    assert max(map(len, whole.splitlines())) <= width
    assert whole.split() == board.to_text(width=200).split()
    painted = board.to_text(colour=True, width=width)
    assert re.sub(r"\033\[[\d;]+m", "", painted).split() == whole.split()
    assert f"\033[{render.TERMINAL_ORANGE}m" in painted


@pytest.mark.parametrize("losses", [[None, 5.0], [5.0, 5.0], []])
def test_losses_that_are_missing_are_shown(losses):
    drawn = pictures.errors([5.0, 4.0], {"1": losses})
    ElementTree.fromstring(f"<div>{drawn}</div>")
    cells = re.findall("<td>(.*?)</td>", drawn)
    assert list(map(bool, cells)) == ([
        loss is not None for loss in losses] + [False] * 2)[:2]


def test_every_picture_has_a_title_and_a_description():
    shown = [[["a", [1, 10], 1, 1]], [["a", [1, 10], 0, 0]]]
    drawn = [*(pictures.read_drawing(file.stem) for file in
               Path(pictures.__file__).with_name("svg").glob("*.svg")),
             pictures.tensors(shown),
             pictures.reads([[0, 1]], [[[0, 1]]], [0])]
    assert len(drawn) == 9
    for svg in drawn:
        title, about, *_ = ElementTree.fromstring(svg)
        assert (title.tag, about.tag) == ("title", "desc")
        assert title.text and about.text
        assert 'role="img"' in svg[:200]


def test_those_that_read_the_same_have_one_colour():
    """On a mesh of 2 x 2 x 2: ranks 0, 1, 4, 5 and ranks 2, 3, 6, 7."""
    readers = [0, 0, 1, 1] * 2
    read = [[[0, 1]] if number == 0 else [[2, 3]] for number in readers]
    drawn = pictures.reads([[0, 1, 2, 3]], read, readers)
    assert "stroke-dasharray" not in drawn
    assert "ranks 0, 1, 4, 5" in drawn and "ranks 2, 3, 6, 7" in drawn
    read[7] = [[0, 3]]  # one of them reads another sample
    drawn = pictures.reads([[0, 1, 2, 3]], read, readers)
    assert drawn.count("stroke-dasharray") == 2
    assert "begins again" not in drawn
