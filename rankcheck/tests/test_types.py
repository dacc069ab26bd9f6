"""rankcheck is typed, and mypy finds nothing that does not fit."""

import subprocess
import sys

import pytest

from rankcheck_testing.support import HOUSE, needs


@pytest.mark.whole
def test_mypy_finds_nothing(tmp_path):
    """As `cd rankcheck && mypy` does it, with the settings in pyproject.toml.
    """
    needs("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path],
        cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found" in done.stdout
