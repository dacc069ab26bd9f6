"""Git's filter of notebooks: what running one leaves is no difference."""

import copy
import importlib
import json
import subprocess
import sys
from functools import partial

import pytest
from conftest import git, program

from backstage import ROOT
from workshop.jobs import notebook_filter

FILE = ROOT / "workshop" / "jobs" / "notebook_filter.py"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VIEW = {"collapsed": True, "scrolled": True, "trusted": True, "hidden": True,
        "execution": {"iopub.status.busy": "2026-01-01T00:00:00Z"}}
KERNEL = {"codemirror_mode": {"name": "ipython", "version": 3},
          "file_extension": ".py", "mimetype": "text/x-python",
          "nbconvert_exporter": "python", "pygments_lexer": "ipython3",
          "version": "3.12.1"}


def filtered(data):
    """What git gets, from the filter as git starts it."""
    return subprocess.run([sys.executable, "-IS", FILE], input=data,
                          capture_output=True, check=True).stdout


@pytest.fixture
def nbformat():
    """Imported late: that takes two seconds of every process."""
    return importlib.import_module("nbformat")


@pytest.fixture
def run_all(nbformat):
    """A function: a notebook as JupyterLab leaves it that has run it."""
    return partial(run_and_look, nbformat)


def run_and_look(nbformat, book):
    """Give a notebook what JupyterLab leaves of running and looking at it."""
    book = copy.deepcopy(book)
    book.metadata.language_info.update(KERNEL)
    book.metadata["widgets"] = {"application/vnd.jupyter.widget-state": {}}
    for count, cell in enumerate(book.cells, 1):
        cell.metadata.update(VIEW)
        if cell.cell_type == "code":
            cell.execution_count = count
            cell.outputs = [
                nbformat.v4.new_output("stream", text="1\n2\n"),
                nbformat.v4.new_output("display_data", {"text/html": "<b>"})]
    return book


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_that_was_run_is_as_it_was(path, nbformat, run_all):
    was = path.read_bytes()
    assert notebook_filter.clean(was) == was
    ran = nbformat.writes(run_all(nbformat.reads(was, as_version=4)))
    assert ran.encode() != was
    assert notebook_filter.clean(ran.encode()) == was


def test_an_edit_stays_as_nbformat_writes_it(nbformat, run_all):
    """In text with characters that are ends of lines to Python alone."""
    book = nbformat.read(ROOT / "notebooks" / "diff_ddp.ipynb", as_version=4)
    book.cells[0].source = "é\r\n\x0b \u2028x\n\n"
    book.cells[1].metadata["tags"] = ["mine"]
    book.metadata["mine"] = {"b": 1.50, "a": None}
    edited = nbformat.writes(book).encode() + b"\n"
    assert filtered(nbformat.writes(run_all(book)).encode()) == edited
    assert filtered(json.dumps(run_all(book)).encode()) == edited


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b"{}", b"\xff", b"[" * 9999, b'{"nbformat": 3}',
    b'{"nbformat": 4, "metadata": {}}',
    b'{"nbformat": 4, "metadata": {"language_info": 3}, "cells": []}',
    b'{"nbformat": 4, "metadata": {}, "cells": [{"source": "a"}]}',
    b'{"nbformat": 4, "metadata": {}, "cells": ["a"]}',
    b'{"nbformat": 4, "metadata": {}, "cells": [{"metadata": {}, '
    b'"source": 1}]}'])
def test_what_it_does_not_understand_stays(data):
    assert filtered(data) == data


def test_git_sees_no_difference(tmp_path, nbformat, run_all):
    """And one where somebody has typed something."""
    git(tmp_path, "init", "-q")
    program(tmp_path / "filter", f"#!/bin/sh\nexec {sys.executable} -IS "
            f"{FILE}\n")
    git(tmp_path, "config", "filter.nbstripout.clean", "./filter")
    (tmp_path / ".gitattributes").write_text("*.ipynb filter=nbstripout\n")
    was = NOTEBOOKS[0].read_bytes()
    lesson = tmp_path / "lesson.ipynb"
    lesson.write_bytes(was)
    git(tmp_path, "add", "lesson.ipynb", ".gitattributes")
    book = run_all(nbformat.reads(was, as_version=4))
    nbformat.write(book, lesson)
    assert lesson.read_bytes() != was
    assert git(tmp_path, "diff", "--name-only") == ""
    book.cells[0].source += "\nmine"
    nbformat.write(book, lesson)
    assert git(tmp_path, "diff", "--name-only") == "lesson.ipynb\n"
