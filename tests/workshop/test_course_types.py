"""The course's modules are typed, and mypy finds nothing that does not fit."""

import subprocess
import sys

import pytest
from conftest import needs

from backstage import ROOT


@pytest.mark.whole
def test_mypy_finds_nothing(tmp_path):
    """As `mypy` does it here, with the settings in pyproject.toml."""
    needs("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found" in done.stdout


@pytest.mark.whole
def test_mypy_names_a_wrong_call_of_a_seam(tmp_path):
    """A text where a public function of backstage takes a number."""
    needs("mypy")
    script = tmp_path / "wrong.py"
    script.write_text("from backstage.flops import padded_vocab_size\n"
                      "padded_vocab_size('257')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, script],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert '"padded_vocab_size" has incompatible type "str"' in done.stdout
