"""Which files run on which Python: 3.9 for a few, 3.10 and later for all."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import copy_clone, find_python, git

from backstage import ROOT
from workshop import SOURCES

# What any Python from 3.9 on starts: a portal's kernel, a process of a job, a
# program in a sandbox, and a command, which then says that it is too old.
ROOTS = [
    "notebooks/lesson.py",
    "rankcheck/src/rankcheck/why/watcher.py",
    "rankcheck/src/rankcheck/engine/sandbox.py",
    "rankcheck/src/rankcheck/__main__.py",
    "workshop/__init__.py"]
FOLDERS = [ROOT / "notebooks", *map(Path, SOURCES)]  # where modules are


def find_module(name: str) -> Path | None:
    """Return the file of a module of ours."""
    inside = Path(*name.split("."))
    for folder in FOLDERS:
        for path in (folder / inside.with_suffix(".py"),
                     folder / inside / "__init__.py"):
            if path.exists():
                return path
    return None


def names_imported(path: Path) -> set[str]:
    """Return the modules that Python imports when it imports this file."""
    package = []
    for folder in FOLDERS:
        if path.is_relative_to(folder):
            package = path.relative_to(folder).parts[:-1]
    names = set()
    for node in walk_at_import(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = []
            if node.level:
                parts += package[:len(package) + 1 - node.level]
            if node.module:
                parts.append(node.module)
            module = ".".join(parts)
            names |= {module}
            names |= {f"{module}.{alias.name}" for alias in node.names}
    parents = set()
    for name in names:
        parts = name.split(".")
        parents |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return names | parents


def walk_at_import(node: ast.AST):
    """Yield what is executed on import: no function, nothing for types."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.Lambda)
        is_for_types = (isinstance(child, ast.If)
                        and ast.unparse(child.test) == "TYPE_CHECKING")
        if not is_function and not is_for_types:
            yield child
            yield from walk_at_import(child)


@functools.cache
def find_old_files() -> frozenset[str]:
    """Return the files that have to run on Python 3.9."""
    system = ROOT / "rankcheck" / "src" / "rankcheck" / "system"
    left = [*(ROOT / name for name in ROOTS), *system.rglob("*.py")]
    found = set()
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        names = names_imported(path)
        for folder in FOLDERS:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                names |= {".".join(parts[:end])
                          for end in range(1, len(parts))}
        for name in names:
            module = find_module(name)
            if module is not None:
                left.append(module)
    return frozenset(str(path.relative_to(ROOT)) for path in found)


def expand(pattern: str) -> list[str]:
    """Return the patterns that one with {a,b} stands for."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if found is None:
        return [pattern]
    expanded = []
    for choice in found[1].split(","):
        expanded += expand(pattern[:found.start()] + choice
                           + pattern[found.end():])
    return expanded


def find_listed_files() -> set[str]:
    """Return the files that ruff checks for Python 3.9."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[tool.ruff.per-file-target-version]\n")[1]
    table = table.split("\n[")[0]
    listed = set()
    for pattern in re.findall(r'^"(.*)" = "py39"$', table, re.M):
        for one in expand(pattern):
            paths = list(ROOT.glob(one))
            assert paths, one
            listed |= {str(path.relative_to(ROOT)) for path in paths}
    return listed


def test_a_few_files_run_on_python_3_9():
    """Those that a kernel or a job's process imports, and no others."""
    assert find_listed_files() == find_old_files()
    assert len(find_old_files()) < 25


def test_a_kernel_imports_nothing_of_the_course():
    """Whatever a cell needs is asked of the course's own Python."""
    for path in FOLDERS[0].glob("*.py"):
        if str(path.relative_to(ROOT)) in find_old_files():
            text = path.read_text()
            assert not re.search(
                r"^ *(from|import) (backstage|workshop|rankcheck|notebooks)\b",
                text.split('BOOT = f"""')[0], re.M), path


def test_no_other_file_speaks_of_python_3_9():
    for name in git(ROOT, "ls-files", "*.py").split():
        if name.startswith("tests/") or name in find_old_files():
            continue
        text = (ROOT / name).read_text()
        assert not re.search(r"Python 3\.9", text), name


@pytest.fixture(scope="session")
def old_python():
    """The command of Python 3.9."""
    command = find_python(9)
    if command is None:
        pytest.skip("there is no Python 3.9")
    return command


def run(*command, folder=ROOT, **variables):
    """Run a command there, with these variables and PATH alone."""
    return subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", **variables})


def test_python_3_9_imports_them(old_python):
    modules = []
    for name in sorted(find_old_files() - {"notebooks/lesson.py"}):
        for folder in FOLDERS[1:]:
            path = ROOT / name
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if module.split(".")[0] == "rankcheck" and path.stem not in (
                "__main__", "sitecustomize"):
            modules.append(module)
    assert "rankcheck.why.watcher" in modules
    end = run(old_python, "-S", "-c", f"import {', '.join(modules)}",
              PYTHONPATH=SOURCES[1])
    assert end.returncode == 0, end.stderr


def test_a_cell_in_a_python_3_9_without_packages(old_python, tmp_path):
    """Where IPython is missing, too, it prints."""
    code = ("import lesson\nprint(lesson.cadence(), lesson.bills('x'))\n"
            "print(lesson.diff.__doc__)")
    repo = copy_clone(tmp_path, "notebooks")
    end = run(old_python, "-S", "-c", code, folder=repo / "notebooks",
              VIRTUAL_ENV=sys.prefix)
    assert end.stdout.startswith(
        "(a picture) the loss is a number, in nats per token"), end.stderr
    assert "diff(stage, hints=None, all=False)\n\n" in end.stdout


@pytest.mark.parametrize("words, status", [
    ("workshop diff ddp", 1), ("workshop doctor", 1), ("workshop", 1),
    ("rankcheck verify train.py", 2), ("rankcheck why", 2)])
def test_a_command_says_that_a_python_is_too_old(old_python, words, status):
    end = run(old_python, "-S", "-m", *words.split(),
              PYTHONPATH=SOURCES[1])
    assert end.returncode == status and not end.stdout
    assert re.fullmatch(
        r"error: \S+ is Python 3\.9\.\d+, and \w+ ?\w* needs 3\.10 or later; "
        r".+\n", end.stderr), end.stderr


# ----------------------------------------------------- without any package


@functools.cache
def oldest_python():
    """The oldest Python of this machine from 3.10 on, or ours."""
    for minor in range(10, sys.version_info[1]):
        command = find_python(minor)
        if command is not None:
            return command
    return sys.executable


CELLS = """from workshop.notebook import cells
cells.diff('ddp')._repr_html_()
cells.cadence()._repr_html_()"""

# Whatever it needs: an old Python also sees what no grammar tells, such as a
# parameter that a function of Python's had not yet.
IMPORTS = """import importlib, pathlib
for path in [*pathlib.Path().glob("workshop/**/*.py"),
             *pathlib.Path().glob("backstage/*.py")]:
    try:
        if path.stem != "sitecustomize":
            importlib.import_module(".".join(path.with_suffix("").parts))
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] not in ("workshop", "backstage")
    except SystemExit:
        pass"""


@pytest.mark.parametrize("words", [
    ["-m", "workshop", "diff", "ddp"], ["-c", CELLS], ["-c", IMPORTS]])
def test_runs_with_the_standard_library_alone(words):
    end = subprocess.run([oldest_python(), "-S", *words], cwd=ROOT,
                         capture_output=True, text=True)
    assert end.returncode == 0, end.stderr


@pytest.mark.parametrize("words", [
    "check ddp 3", "verify starter/train.py", "plot"])
def test_what_needs_a_package_says_so_in_a_line(words):
    end = subprocess.run(
        [oldest_python(), "-S", "-m", "workshop", *words.split()], cwd=ROOT,
        capture_output=True, text=True)
    assert end.returncode == 1
    assert re.fullmatch(r"error: \S+ has no \w+; fix: run `source "
                        r"activate\.sh`\n", end.stderr), end.stderr


@pytest.mark.whole
@pytest.mark.parametrize("words", [
    "answers ddp", "apply ddp 3", "class no", "doctor", "doctor --ranks",
    "lab", "launch ddp", "profile no", "progress no", "reset --list",
    "script ddp", "update", "why no"])
def test_no_command_ends_in_a_traceback(words, tmp_path):
    end = subprocess.run(
        [oldest_python(), "-S", "-m", "workshop", *words.split()],
        cwd=copy_clone(tmp_path), capture_output=True, text=True)
    assert end.stdout or re.fullmatch("error: [^\n]+\n", end.stderr)
    assert "Traceback" not in end.stderr and "mpirun does" not in end.stdout
