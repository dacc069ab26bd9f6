"""The structure: who imports whom, read from the code."""

import ast
import re

from backstage import ROOT

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("backstage", "workshop")
    for path in (ROOT / package).rglob("*.py")}


def imported(path):
    """The modules of the course that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] + [
                f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name for name in names
                  if name.split(".")[0] in ("backstage", "workshop")}
    packages = {name for name in found if name not in MODULES}
    return {name for name in found if name in MODULES} | {
        f"{name}.__init__" for name in packages
        if f"{name}.__init__" in MODULES}


def test_the_backstage_does_not_know_the_tools():
    for name, path in MODULES.items():
        if name.startswith("backstage"):
            assert not {other for other in imported(path)
                        if other.startswith("workshop")}, name


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
    for file in (ROOT / "tests").glob("*.py"):
        assert not re.search(r"^ *(from|import) test_", file.read_text(),
                             re.M), file.name


def test_the_backstage_is_no_larger_than_it_was():
    """The goal is 1,700 lines, 16 modules and 4 floors: these only fall."""
    mine = {name: path for name, path in MODULES.items()
            if name.startswith("backstage.") and path.stem != "__init__"}
    lines = sum(path.read_text().count("\n") for path in mine.values())
    needs = {name: imported(path) & mine.keys() - {name}
             for name, path in mine.items()}
    floors, built = 0, set()
    while built < needs.keys():
        built |= {name for name in needs if needs[name] <= built}
        floors += 1
    assert lines <= 2817 and len(mine) <= 17 and floors <= 5, (
        lines, len(mine), floors)


def test_an_installed_clone_has_all_packages_and_what_they_read():
    text = (ROOT / "pyproject.toml").read_text()
    folders = {path.parent for path in MODULES.values()}
    for folder in folders:
        assert f'"{".".join(folder.relative_to(ROOT).parts)}"' in text, folder
    assert '"workshop.lesson" = ["page/*"]' in text


def test_the_map_has_a_line_for_each_module():
    text = (ROOT / "docs" / "map.md").read_text()
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            inside = path.relative_to(ROOT / name.split(".")[0])
            assert re.search(rf"^ +{re.escape(str(inside))} ", text,
                             re.M), inside
    for line in re.findall(r"^ +(\S+\.py) ", text, re.M):
        assert any(str(path).endswith(f"/{line}") for path in (
            *MODULES.values(), *ROOT.glob("slides/*.py"),
            *ROOT.glob("environment/*.py"))), line
