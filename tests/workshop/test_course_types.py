"""The course's modules are typed, and mypy finds nothing that does not fit."""

import subprocess
import sys

import pytest
from conftest import needs, python

from backstage import ROOT


@pytest.mark.whole
def test_mypy_finds_nothing():
    """As `mypy`: with its settings, and the cache of its last run.

    Without PYTHONPATH, too: mypy reports nothing in what that names.
    """
    needs("mypy")
    done = python(ROOT, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found" in done.stdout


@pytest.mark.whole
def test_mypy_names_wrong_calls_of_the_seams(tmp_path):
    """A text for a number, and a number for a text."""
    needs("mypy")
    script = tmp_path / "wrong.py"
    script.write_text("from backstage.flops import padded_vocab_size\n"
                      "from workshop.stages import find_stage\n"
                      "padded_vocab_size('257')\n"
                      "find_stage(3)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", script],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    for words in ('"padded_vocab_size" has incompatible type "str"',
                  '"find_stage" has incompatible type "int"'):
        assert words in done.stdout
