"""What is in the distributions: the tests in the source, not in the wheel."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from rankcheck_testing.support import HOUSE, needs, python

BUILD = """\
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which building changes
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def find_files(folder):
    """The names of the files in a folder, and in those inside."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")
            if path.is_file()}


@pytest.mark.whole
def test_what_the_distributions_hold(tmp_path):
    needs("setuptools")
    source, built = tmp_path / "source", tmp_path / "built"
    built.mkdir()
    shutil.copytree(HOUSE, source, ignore=shutil.ignore_patterns(
        "__pycache__", ".*", "build", "dist", "*.egg-info"))
    before = find_files(source)
    end = python(source, "-c", BUILD, built)
    assert end.returncode == 0, end.stderr
    assert find_files(source) == before
    archive, = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert before <= packed, before - packed
    wheel, = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {Path(name).parts[0] for name in names}
    assert "rankcheck/py.typed" in names
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "rankcheck"}
