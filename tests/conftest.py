"""What the tests share."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement


def needs(*programs):
    """Skip a test that needs a program which is not installed here.

    In CI, which installs all of them, a missing one is a failure instead.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"not installed: {', '.join(missing)}")


def edit(text, *pairs):
    """The text with each old string, which is there once, made new."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="session")
def portal(tmp_path_factory):
    """A Python with ipykernel and nothing that trains: a portal's kernel."""
    folder = tmp_path_factory.mktemp("portal")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder],
                   check=True)
    site, = folder.glob("lib/python*/site-packages")
    todo, done = ["ipykernel"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files} - {
                "..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
        for text in package.requires or []:
            needed = Requirement(text)
            if not needed.marker or needed.marker.evaluate({"extra": ""}):
                todo.append(needed.name)
    kernel = folder / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    python = folder / "bin" / "python"
    (kernel / "kernel.json").write_text(json.dumps({
        "argv": [str(python), "-m", "ipykernel_launcher", "-f",
                 "{connection_file}"],
        "display_name": "Python 3", "language": "python"}))
    missing = subprocess.run([python, "-c", "import torch"],
                             capture_output=True, env={}, text=True)
    assert "No module named 'torch'" in missing.stderr
    return folder
