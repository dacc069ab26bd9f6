"""The structure: who imports whom, read from the code."""

import ast
import re
import shutil
import subprocess
import sys
import venv
from fnmatch import fnmatch

import pytest
from conftest import git, link_package, python

from backstage import ROOT

SOURCES = {  # where a package is
    "backstage": ROOT, "rankcheck": ROOT / "rankcheck" / "src",
    "workshop": ROOT}
OWN_TESTS = ROOT / "rankcheck" / "tests"  # rankcheck's
MODULES = {
    ".".join(path.relative_to(source).with_suffix("").parts): path
    for package, source in SOURCES.items()
    for path in (source / package).rglob("*.py")}

# rankcheck starts, watches and judges anybody's script; workshop is the
# course, which uses it. The rooms of each, from the ground up: a module
# imports from its own room and from those below it. A name without a star
# goes before a pattern.
HOUSES = {
    "rankcheck": {
        "system": "system.*",
        "record": "record.*",
        "engine": "engine.*",
        "verification": "verification.*",
        "why": "why.*",
        "bench": "bench.*",
        "commands": "__main__"},
    "workshop": {
        "stages": "board command_line errors html stages vocabulary",
        "results": "results.* why",
        "diff": "diff.*",
        "instructor":
            "instructor.plan instructor.answers instructor.classroom",
        "cluster": "cluster.*",
        "jobs": "jobs.* as_torchrun",
        "check": "check.*",
        "notebook": "notebook.*",
        "commands":
            "__main__ certificate dev diff.command instructor.update"}}
PACKAGES = {  # besides torch: the site's own
    "rankcheck.system.hook.sitecustomize": {"sitecustomize"}}
TOOLS = {
    name: path for name, path in MODULES.items()
    if not name.startswith("backstage") and path.name != "__init__.py"}


def find_source(path):
    """The folder that Python finds this module's package in."""
    own = SOURCES["rankcheck"]
    return own if path.is_relative_to(own) else ROOT


def names_in(path):
    """The names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(find_source(path)).parts[
                :-node.level or None]
            module = ".".join([*base * bool(node.level), *filter(
                None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported(path):
    """The modules of the course that a file imports, anywhere in it."""
    found = {name for name in names_in(path)
             if name.split(".")[0] in HOUSES.keys() | {"backstage"}}
    packages = {name for name in found if name not in MODULES}
    return {name for name in found if name in MODULES} | {
        f"{name}.__init__" for name in packages
        if f"{name}.__init__" in MODULES}


def test_the_backstage_does_not_know_the_tools():
    for name, path in MODULES.items():
        if name.startswith("backstage"):
            assert not {other for other in imported(path)
                        if not other.startswith("backstage")}, name


def test_the_backstage_names_no_command_of_the_tools():
    """A copy of it that somebody has taken home has none of them."""
    for name, path in MODULES.items():
        if name.startswith("backstage"):
            found = re.search(r"-m workshop|workshop[./]", path.read_text())
            assert not found, name


# Words that rankcheck, which is for any script, does not know
OF_THE_COURSE = re.compile(
    r"workshop|backstage|blocking_mpi|lesson|attendee|/check-|\bcourse\b")


@pytest.mark.parametrize("tool", [
    tool for tool in TOOLS if tool.startswith("rankcheck.")])
def test_rankcheck_does_not_know_the_course(tool):
    found = OF_THE_COURSE.search(TOOLS[tool].read_text())
    assert not found, found[0]


def find_room(tool):
    """(its house, the number of its room from the ground up)."""
    house, _, inside = tool.partition(".")
    rooms = [(pattern, house, floor) for floor, patterns in enumerate(
                 HOUSES[house].values()) for pattern in patterns.split()]
    return next(room for pattern, *room in sorted(
        rooms, key=lambda room: "*" in room[0]) if fnmatch(inside, pattern))


def test_a_module_imports_from_the_rooms_below_it():
    above = set()
    for tool, path in TOOLS.items():
        house, floor = find_room(tool)
        for other in imported(path):
            if other.startswith("backstage"):
                wrong = house == "rankcheck"
            elif other in TOOLS:
                home, room = find_room(other)
                wrong = (room > floor if home == house
                         else house == "rankcheck")
            else:
                continue
            if wrong:
                above.add(f"{tool} {other}")
    assert not above


@pytest.mark.parametrize("tool", [
    tool for tool in TOOLS if find_room(tool)[0] == "rankcheck"])
def test_rankcheck_needs_torch_alone(tool):
    names = {name.split(".")[0] for name in names_in(TOOLS[tool])}
    assert names - sys.stdlib_module_names - {
        "torch", "rankcheck"} == PACKAGES.get(tool, set())


def test_no_module_imports_itself_in_a_circle():
    left = {name: imported(path) - {name} for name, path in MODULES.items()}
    while left:
        free = {name for name, needs in left.items()
                if not needs & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: needs for name, needs in left.items()
                if name not in free}


def test_tests_do_not_import_each_other():
    """What several of them need is in a module beside them."""
    for file in (*(ROOT / "tests").rglob("*.py"), *OWN_TESTS.rglob("*.py")):
        assert not re.search(r"^ *(from|import) test_", file.read_text(),
                             re.M), file.name


@pytest.mark.parametrize("path", [
    path.relative_to(OWN_TESTS) for path in sorted(OWN_TESTS.rglob("*.py"))
    if "tables" not in path.parts], ids=str)
def test_rankchecks_tests_need_torch_and_pytest_alone(path):
    """pytest brings packaging. The scripts of the table may need more."""
    names = {name.split(".")[0] for name in names_in(OWN_TESTS / path)}
    assert names - sys.stdlib_module_names <= {
        "torch", "pytest", "packaging", "rankcheck", "rankcheck_testing"}


@pytest.mark.whole
def test_rankchecks_tests_are_found_without_the_course(tmp_path):
    """In a copy of its folder, where torch and pytest are installed."""
    copy = tmp_path / "rankcheck"
    shutil.copytree(OWN_TESTS.parent, copy,
                    ignore=shutil.ignore_patterns("__pycache__", ".*"))
    venv.create(tmp_path / "venv")
    site, = tmp_path.glob("venv/lib/python*/site-packages")
    for package in "torch", "pytest":
        link_package(package, site)
    end = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pytest", "--collect-only",
         "--whole", "--tables", "-p", "no:cacheprovider"], cwd=copy,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, text=True,
        capture_output=True)
    assert end.returncode == 0, end.stdout + end.stderr
    for file in OWN_TESTS.glob("test_*.py"):
        assert f"tests/{file.name}::" in end.stdout, file.name


def test_the_backstage_has_no_more_floors_than_it_had():
    """A module imports from the floors below it: a reader comes from there."""
    mine = {name: path for name, path in MODULES.items()
            if name.startswith("backstage.") and path.stem != "__init__"}
    needs = {name: imported(path) & mine.keys() - {name}
             for name, path in mine.items()}
    floors, built = 0, set()
    while built < needs.keys():
        built |= {name for name in needs if needs[name] <= built}
        floors += 1
    assert floors <= 5


def test_an_installed_clone_has_all_packages_and_what_they_read():
    text = (ROOT / "pyproject.toml").read_text()
    own = (ROOT / "rankcheck" / "pyproject.toml").read_text()
    for folder in {path.parent for path in MODULES.values()}:
        name = ".".join(folder.relative_to(find_source(folder)).parts)
        assert f'"{name}"' in text, name
        assert (f'"{name}"' in own) == name.startswith("rankcheck"), name
    assert '"workshop.diff" = ["page/*"]' in text
    assert '"workshop.notebook" = ["svg/*"]' in text
    for name, module, function in re.findall(
            r'^(\w+) = "([\w.]+):(\w+)"$', text, re.M):
        end = python(ROOT, "-c", f"from {module} import {function}\n"
                     f"{function}()", "--help")
        assert end.returncode == 0 and name in end.stdout, end


def test_both_packages_have_the_licence():
    """A package can hold no file from outside its own folder."""
    assert (ROOT / "LICENSE").read_bytes() == (
        ROOT / "rankcheck" / "LICENSE").read_bytes()


def test_the_map_has_a_line_for_each_module():
    text = (ROOT / "docs" / "map.md").read_text()
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            inside = path.relative_to(
                find_source(path) / name.split(".")[0])
            assert re.search(rf"^ +{re.escape(str(inside))} ", text,
                             re.M), inside
    for house in HOUSES:  # a newcomer reads from the ground up
        lines = re.search(rf"^{house}/ .*\n((?: +\S.*\n)+)", text, re.M)[1]
        floors = [find_room(".".join((house, *name.split("/"))))[1]
                  for name in re.findall(r"^ +(\S+)\.py ", lines, re.M)
                  if not name.endswith("__init__")]
        assert floors == sorted(floors), house
    for line in re.findall(r"^ +(\S+\.py) ", text, re.M):
        assert any(str(path).endswith(f"/{line}") for path in (
            *MODULES.values(), *ROOT.glob("slides/*.py"),
            *ROOT.glob("code/*.py"), *ROOT.glob("notebooks/**/*.py"))), line


def test_git_keeps_nothing_that_attendees_make():
    """Such as a record, which would be taken for that of a new copy."""
    assert git(ROOT, "ls-files", "--cached", "--ignored",
               "--exclude-standard") == ""
