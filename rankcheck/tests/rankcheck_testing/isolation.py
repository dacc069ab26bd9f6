"""A pytest plugin: nothing of the user's is changed, nothing stays behind.

It gives pytest a home folder and a folder for temporary files, ends what
tests have left running, compares pages with stored ones, and chooses which
tests run:

    pytest           without those that are marked `whole` or `table`
    pytest --whole   with those that are marked `whole`
    pytest --tables  with those that are marked `table`
    pytest FILE      all of the file, but what is marked `table`

With pytest-xdist it runs three files at a time, with pytest-timeout it ends a
test that hangs; it needs neither. A conftest.py names it in pytest_plugins.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankcheck_testing import cleanup

# Python keeps what it has compiled, also where a container's image says not
# to: else each process would compile torch's modules anew, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Processes that wait for one another should sleep: no test may depend on
# how busy the machine is. A second thread for models as small as the tests'
# nearly doubles their CPU time. These have to be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

OWNER = "PYTEST_OWNER"  # a variable: the pytest that has started a process
TIMEOUT = 1800  # seconds for each test: on a busy machine
FILES_AT_ONCE = 3  # most tests wait for processes
PATIENCE = 20  # seconds for what tests have started to end
# Of Python's collector of garbage: the modules of torch are a million objects,
# which it would look through for a tenth of a test process's time.
GARBAGE_THRESHOLDS = (50_000, 20, 50)
OF_THE_USER = (  # of the home folder: where packages are from, caches
    ".cache/matplotlib", ".cache/pip", ".cache/uv", ".config/pip")
MARKERS = (
    "whole: takes long or needs another program (pytest --whole)",
    "table: one script of many with mistakes (pytest --tables)")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs the tests for another (pytest-xdist)."""
    return hasattr(config, "workerinput")


def is_plain(config: pytest.Config) -> bool:
    """Whether no file and no test is named."""
    return config.args_source is not pytest.Config.ArgsSource.ARGS


def is_quick(config: pytest.Config) -> bool:
    """Whether the tests that are marked `whole` are left out."""
    return is_plain(config) and not config.option.whole


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="run the whole suite: also what "
        "takes long or needs other programs, such as MPI")
    parser.addoption(
        "--tables", action="store_true", help="run all of the tables, too: "
        "scripts and jobs with mistakes that the tools have to name; hours")
    parser.addoption(
        "--update", action="store_true", help="write the snapshots anew, in "
        "the folders snapshots/: look at what git says has changed")
    parser.addini(
        "long_files", "the test files that take long, in the order in which "
        "they begin: a long one at the end would run alone", type="args")


@pytest.hookimpl(tryfirst=True)  # before the plugins, which read them
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Set the options of the plugins that are installed."""
    option = config.option
    has_xdist = config.pluginmanager.hasplugin("xdist")
    has_timeout = config.pluginmanager.hasplugin("timeout")
    if has_timeout and option.timeout is None:
        option.timeout = TIMEOUT
    if not has_xdist:
        return
    option.loadscopereorder = False  # the order of the ini's long_files
    is_debugged = option.usepdb
    if option.numprocesses is None and is_plain(config) and not (
            is_worker(config) or is_debugged):
        option.numprocesses = FILES_AT_ONCE
        option.dist = "loadfile"


@pytest.hookimpl(tryfirst=True)  # before tmp_path's folder is chosen
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if is_worker(config):
        return
    folder = make_temporary()
    # all that tests start inherit these
    os.environ[OWNER] = str(os.getpid())
    os.environ["TMPDIR"] = folder
    os.environ["HOME"] = make_home(Path(folder, "home"))
    tempfile.tempdir = folder
    cleanup.watch(os.getpid(), folder)
    if not config.option.basetemp:
        config.option.basetemp = f"{folder}/t"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the garbage of the tests alone: what they import stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        gc.enable()


def pytest_unconfigure() -> None:
    """Let Python end as always: Triton's library prints what is left."""
    gc.unfreeze()


def make_temporary() -> str:
    """Make a folder for temporary files; it goes with what tests leave in it.

    Not in /tmp, if the user has named no other: a run that is watched gets a
    link to all that lies beside the folders of its script. Where thousands of
    files were in /tmp, it took three times as long. The path is short, for
    Unix sockets.
    """
    cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)  # stays warm
    place = os.environ.get("TMPDIR", "/var/tmp")
    parent = place if os.access(place, os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="t", dir=parent)
    os.chmod(folder, 0o755)  # some tests are nobody
    return folder


def make_home(folder: Path) -> str:
    """Make a home folder without the profile and the settings of the user.

    A job's shell is a login shell, which reads the profile, and tests kill
    jobs. One that was killed in the middle left the lock of a program behind
    (pyenv's): each later shell waited a minute for it, and said so in the log.
    """
    user = Path.home()
    for name in OF_THE_USER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (user / name).exists():
            (folder / name).symlink_to(user / name)
    return str(folder)


def pytest_collection_modifyitems(
        config: pytest.Config, items: list[pytest.Item]) -> None:
    """`pytest` alone leaves out marked tests; naming a file runs all of it."""
    long_files: list[str] = config.getini("long_files")

    def position(item: pytest.Item) -> int:
        if item.path.name in long_files:
            return long_files.index(item.path.name)
        return len(long_files)

    items.sort(key=position)
    if is_quick(config):
        leave_out("whole", config, items)
    if not config.option.tables:
        leave_out("table", config, items)


def leave_out(marker: str, config: pytest.Config,
              items: list[pytest.Item]) -> None:
    """Take the tests with this marker out."""
    some = [item for item in items if item.get_closest_marker(marker)]
    items[:] = [item for item in items if not item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=some)


def pytest_terminal_summary(
        terminalreporter: Any, config: pytest.Config) -> None:
    if is_quick(config):
        terminalreporter.write_line(
            "Left out is what takes long or needs another program: "
            "`pytest --whole` runs it, too")


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """No test may leave a process or a file behind."""
    if "rankcheck.engine.fork_server" in sys.modules:
        sys.modules["rankcheck.engine.fork_server"].end_all()
    if is_worker(session.config):
        return
    end = time.monotonic() + PATIENCE
    left = list(find_left_behind())
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left = list(find_left_behind())
    for process in left:
        print(f"\nleft behind by a test: process {process.pid}, "
              f"{' '.join(process.command)}")
        os.kill(process.pid, signal.SIGKILL)
    if left and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    folder = Path(os.environ["TMPDIR"])
    if session.exitstatus in (pytest.ExitCode.TESTS_FAILED,
                              pytest.ExitCode.INTERNAL_ERROR):
        (folder / cleanup.KEPT).write_text(cleanup.KEPT_TEXT)
        cleanup.remove_older(folder.parent)
    else:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class LeftBehind:
    """A process that tests have started, and that still runs."""

    pid: int
    command: list[str]


def find_left_behind() -> Iterator[LeftBehind]:
    """Yield the processes that tests have started."""
    mark = f"{OWNER}={os.getpid()}"
    for pid, command, variables in cleanup.all_processes():
        if mark in variables and any(command) and pid != os.getpid():
            yield LeftBehind(pid, command)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a page with what is stored of it.

    Of a page's HTML without its style and programs, a line for each block.
    """
    def compare(name: str, view: str) -> None:
        file = request.path.parent / "snapshots" / name
        if file.suffix == ".html":
            view = re.sub(r"<(style|script)>.*?</\1>", "", view, flags=re.S)
            view = re.sub(
                r"(?<=[^\n])(?=<(a class|details|div|h\d|p|pre|table|tr)\b)",
                "\n", view)
        view = f"{view.rstrip()}\n"
        if request.config.option.update:
            file.parent.mkdir(exist_ok=True)
            file.write_text(view, "utf-8")
        assert view == file.read_text("utf-8"), (
            f"{file}: if that is right, run pytest --update "
            f"{shlex.quote(request.node.nodeid)}")

    return compare
