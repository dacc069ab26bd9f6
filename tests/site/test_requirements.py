"""What is required, the tested versions of it, and what is missing."""

import re
import subprocess
import sys
import venv as virtual
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import link_package
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backstage import ROOT
from workshop.jobs import requirements
from workshop.jobs.requirements import Unmet

PINS = ROOT / "constraints.txt"
INPUTS = ("pyproject.toml", "requirements.txt", "tests/requirements.txt",
          "fineweb/requirements.txt")
SYSTEMS = [
    {"python_version": python.rpartition(".")[0],
     "python_full_version": python, "sys_platform": system,
     "platform_machine": machine}
    for python in ("3.10.4", "3.11.2", "3.12.3", "3.14.0")
    for system, machine in (("linux", "x86_64"), ("darwin", "arm64"))]


def applies(requirement: Requirement, system: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(system)


def read_parts() -> list[str]:
    """Read the names of the parts from setup.sh."""
    found = re.search('(?m)^parts="(.*)"$', (ROOT / "setup.sh").read_text())
    assert found is not None
    return found[1].split()


def find_unpinned(
        wanted: list[str], pins: list[Requirement]) -> list[str]:
    """Find what no pin covers, on a system that it is for."""
    unpinned = []
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        for system in SYSTEMS:
            versions = [
                pin.specifier for pin in pins if applies(pin, system)
                and canonicalize_name(pin.name) == name]
            covered = len(versions) == 1 and all(
                requirement.specifier.contains(version.version)
                for version in versions[0])
            if applies(requirement, system) and not covered:
                unpinned.append(f"{name} on Python "
                                f"{system['python_version']}")
                break
    return unpinned


def read_pins() -> list[Requirement]:
    return [Requirement(line) for line in requirements.read_file(PINS)]


def test_the_first_line_of_the_pins_is_the_command_that_wrote_them():
    """It is what .ci/constraints runs, and names each file and extra."""
    first = PINS.read_text().splitlines()[0]
    assert first.startswith("# uv pip compile --universal ")
    script = (ROOT / ".ci" / "constraints").read_text()
    assert first.removeprefix("# ") in " ".join(script.split())
    words = first.split()
    assert {*INPUTS} <= {*words} and words[-1] == "constraints.txt"
    extras = requirements.read_project()["project"]["optional-dependencies"]
    named = [word for before, word in pairwise(words) if before == "--extra"]
    assert sorted(named) == sorted(extras)


def test_each_requirement_is_pinned_and_has_a_range():
    """But what a build of PyTorch brings, in its own versions."""
    content = requirements.read_project()
    left_out = content["tool"]["uv"]["pip"]["no-emit-package"]
    wanted = [*content["dependency-groups"]["setup"]]
    for part in (requirements.COURSE, *read_parts()):
        wanted += requirements.read_part(part)
    for line in wanted:
        bounds = {each.operator for each in Requirement(line).specifier}
        assert bounds == {">=", "<"}, line
    pins = read_pins()
    assert not find_unpinned(
        [line for line in wanted
         if Requirement(line).name not in left_out], pins)
    for pin in pins:
        assert not re.match("(nvidia|cuda)[-_]|triton", pin.name), pin
        assert [each.operator for each in pin.specifier] == ["=="], pin


def test_what_is_not_pinned_is_found():
    pins = [Requirement(line) for line in (
        "one==1.5 ; python_full_version < '3.11'",
        "one==2.1 ; python_full_version >= '3.11'", "Two_b==1.0",
        "three==1 ; sys_platform == 'linux'")]
    for line in "one>=1,<3", "two-b<2", "three ; sys_platform == 'linux'":
        assert find_unpinned([line], pins) == [], line
    for line in "one>=2,<3", "three", "four":
        name = Requirement(line).name
        assert find_unpinned([line], pins) == [f"{name} on Python 3.10"]


def test_the_parts_are_those_that_have_requirements():
    folders = {path.parent.name for path in ROOT.glob("*/requirements.txt")}
    extras = requirements.read_project()["project"]["optional-dependencies"]
    assert {*read_parts()} == folders | {*extras}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for part in read_parts():
        assert f"\n| `{part}` |" in text, part


def test_pre_commit_runs_the_tested_ruff():
    """An older one has rules that this code does not follow."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    version, = re.findall(r"/ruff-pre-commit\n    rev: v(\S+)", hooks)
    assert f"\nruff=={version}\n" in (ROOT / "constraints.txt").read_text()


def test_the_version_that_is_cited_is_the_projects():
    version = requirements.read_project()["project"]["version"]
    assert f'\nversion: "{version}"\n' in (ROOT / "CITATION.cff").read_text()


def test_no_package_is_required_twice():
    """By attendees and for the tests, too: then only the first is read."""
    names = [Requirement(line).name for part in (requirements.COURSE, "tests")
             for line in requirements.read_part(part)]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"tiktoken"}  # fineweb/ can be used by itself


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone that requires what is here, and what is not."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "requirements.txt").write_text(
        "# a comment\npytest>=8 # and a comment\nnowhere<2\n"
        "absent ; sys_platform == 'plan9'\n-r tests/more.txt\n--pre\n")
    (tmp_path / "tests/more.txt").write_text("packaging>=999\n")
    command, = metadata.entry_points(group="console_scripts", name="pytest")
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nscripts = {{ pytest = "{command.value}",'
        ' pip9 = "pip:main", pygmentize = "theirs:main" }\n'
        'optional-dependencies = { more = ["nowhere[all]>=1"] }\n'
        '[tool.setuptools]\npackages = ["pytest", "nowhere", "pytest.no"]\n')
    return tmp_path


def test_what_is_not_met_is_named(clone):
    version = metadata.version("packaging")
    assert requirements.find_unmet("course", clone) == [
        Unmet("nowhere", "nowhere<2"),
        Unmet("packaging", "packaging>=999", version)]
    assert requirements.find_unmet("more", clone) == [
        Unmet("nowhere", "nowhere>=1")]
    assert str(Unmet("a", "a>=2", "1")) == "a>=2 (installed: 1)"
    with pytest.raises(KeyError):
        requirements.find_unmet("less", clone)


def test_a_clones_own_commands_and_packages_are_named(clone):
    assert requirements.find_own_unmet(clone) == [
        "pip9", "pygmentize", "nowhere"]


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A Python that has pytest, but not all that the tests need."""
    folder = tmp_path_factory.mktemp("without")
    virtual.create(folder)
    site, = folder.glob("lib/python*/site-packages")
    for package in "pytest", "hypothesis":
        link_package(package, site)
    return folder / "bin" / "python"


def test_it_runs_by_itself(without):
    """As setup.sh does it, in an environment without the course."""
    file = ROOT / "workshop" / "jobs" / "requirements.py"
    done = subprocess.run([without, "-I", file, "unmet", "tests", "course"],
                          capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and not done.stderr, done
    assert {"transformers<6,>=5", "torch<2.16,>=2.11"} <= {*lines}
    assert not [line for line in lines if line.startswith("pytest<")]
    done = subprocess.run([without, "-I", file, "list", "deepspeed"],
                          capture_output=True, text=True)
    assert re.fullmatch(r"deepspeed>=\S+\n", done.stdout), done
    assert done.returncode == 0


def test_pytest_says_in_a_line_what_it_needs(without):
    done = subprocess.run(
        [without, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stdout.strip() == ""
    line, = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: the tests need ")
    assert line.endswith(": fix: source activate.sh tests")
    assert "transformers" in line and "hypothesis" not in line
    assert sys.executable != str(without)
