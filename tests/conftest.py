"""What the tests share."""

import os
import shutil

import pytest


def needs(*programs):
    """Skip a test that needs a program which is not installed here.

    In CI, which installs all of them, a missing one is a failure instead.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"not installed: {', '.join(missing)}")
