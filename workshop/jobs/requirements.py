"""The requirements of the course, or of a part of it, and which are not met.

setup.sh runs this file by itself, also where no package is installed:

    requirements.py list PART...           the requirements, one a line
    requirements.py [--own] unmet PART...  those that are not met: status 1

A part is `course` (requirements.txt), a folder with a requirements.txt, or an
optional dependency in pyproject.toml. --own: the commands and the packages of
this clone have to be installed, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CLONE = Path(__file__).resolve().parents[2]
COURSE = "course"


@dataclass(frozen=True)
class Unmet:
    """A requirement whose package is missing, or has another version."""

    package: str
    wanted: str  # as the file writes it: name and versions
    installed: str = ""  # the version, or "" if it is missing

    def __str__(self) -> str:
        if self.installed:
            return f"{self.wanted} (installed: {self.installed})"
        return self.wanted


def read_project(clone: Path = CLONE) -> dict[str, Any]:
    """Read pyproject.toml."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore
    with open(clone / "pyproject.toml", "rb") as file:
        content: dict[str, Any] = tomllib.load(file)
    return content


def read_file(path: Path) -> list[str]:
    """Read a file of requirements, and those that it names with -r."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        text = f" {line}".partition(" #")[0].strip()
        if text.startswith("-r "):
            lines += read_file(path.parent / text[2:].strip())
        elif text and not text.startswith("-"):  # not an option of pip
            lines.append(text)
    return lines


def read_part(part: str, clone: Path = CLONE) -> list[str]:
    """List the requirements of a part of the course, as they are written.

    Raises:
        KeyError: There is no such part.
    """
    if part == COURSE:
        return read_file(clone / "requirements.txt")
    file = clone / part / "requirements.txt"
    if file.is_file():
        return read_file(file)
    optional = read_project(clone)["project"]["optional-dependencies"]
    return [str(line) for line in optional[part]]


def parse_requirement(line: str) -> Requirement:
    """Parse a requirement, also where only pip is installed."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import (  # type: ignore
            Requirement,
        )
    return Requirement(line)


def find_unmet(part: str, clone: Path = CLONE) -> list[Unmet]:
    """Find the packages of a part that are missing, or of another version.

    What they need in turn is not looked at: an installer has seen to that.
    """
    unmet = []
    for line in read_part(part, clone):
        requirement = parse_requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(Unmet(requirement.name, wanted))
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(Unmet(requirement.name, wanted, installed))
    return unmet


def find_own_unmet(clone: Path = CLONE) -> list[str]:
    """Find the clone's commands and packages that are not installed.

    The interpreter must not see PYTHONPATH, which names the packages, too.
    """
    content = read_project(clone)
    project = content.get("project", {})
    commands = {
        entry.name: entry.value
        for entry in importlib.metadata.entry_points(group="console_scripts")}
    unmet = []
    for name, target in project.get("scripts", {}).items():
        if commands.get(name) != target:
            unmet.append(name)
    packages = content.get("tool", {}).get("setuptools", {}).get(
        "packages", [])
    for name in packages:
        if "." not in name and importlib.util.find_spec(name) is None:
            unmet.append(name)
    return unmet


def main() -> int:
    """Print what is asked for; return 1 if something does not fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question", choices=("list", "unmet"))
    parser.add_argument("--own", action="store_true")
    parser.add_argument("parts", nargs="*")
    args = parser.parse_args()
    lines: list[str] = []
    if args.own:
        lines += find_own_unmet()
    for part in args.parts:
        if args.question == "list":
            lines += read_part(part)
        else:
            lines += map(str, find_unmet(part))
    for line in lines:
        print(line)
    return int(args.question == "unmet" and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
