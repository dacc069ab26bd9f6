"""Functions that tests share: scripts, processes, packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
from packaging.requirements import Requirement

HOUSE = Path(__file__).resolve().parents[2]  # with rankcheck's pyproject.toml
SOURCE_PATH = str(HOUSE / "src")  # for PYTHONPATH

T = TypeVar("T")


def is_installed(name: str) -> bool:
    """Whether there is a program or a package with this name."""
    return bool(shutil.which(name) or find_spec(name))


def needs(*names: str) -> None:
    """Skip a test if a program or package that it needs is not installed.

    In CI, which installs all of them, a missing one is a failure instead.
    """
    missing = [name for name in names if not is_installed(name)]
    if missing:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"not installed: {', '.join(missing)}")


def edit(text: str, *pairs: tuple[str, str]) -> str:
    """Return the text with each old string, which occurs once, replaced."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def program(path: Path, text: str) -> Path:
    """Write a script that can be run; return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def python(folder: Path, *arguments: object, **variables: str
           ) -> subprocess.CompletedProcess[str]:
    """Return a Python that has ended in this folder.

    Args:
        variables: of the environment; without PYTHONPATH, it has none.
    """
    env = {key: value for key, value in os.environ.items()
           if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder,
                          env=env | variables, capture_output=True, text=True,
                          check=False)


def wait_for(condition: Callable[[], T], timeout: float = 500,
             explain: Callable[[], str] = lambda: "") -> T:
    """Wait until it is fulfilled; return what it says then."""
    end, pause = time.monotonic() + timeout, 0.05
    while not (said := condition()):
        assert time.monotonic() < end, explain()
        time.sleep(pause)
        pause = min(1.2 * pause, 1)  # what it asks takes CPU time, too
    return said


def link_package(name: str, site: Path) -> None:
    """Link a package, and those that it needs, into a site-packages."""
    names = [name]
    for one in names:  # which grows
        package = metadata.distribution(one)
        tops = {file.parts[0] for file in package.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))
        for text in package.requires or []:
            needed = Requirement(text)
            marker = needed.marker
            applies = marker is None or marker.evaluate({"extra": ""})
            if applies and needed.name not in names:
                names.append(needed.name)
