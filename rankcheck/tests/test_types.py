"""rankcheck is typed, and mypy finds nothing that does not fit."""

import subprocess
import sys

import pytest

from rankcheck_testing.support import HOUSE, needs


@pytest.mark.whole
def test_mypy_finds_nothing():
    """As `cd rankcheck && mypy`: with its settings, and its last run's cache.
    """
    needs("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found" in done.stdout
