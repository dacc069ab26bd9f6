"""What the tests share."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import cleanup
import pytest
from cleanup import all_processes
from packaging.requirements import Requirement

from backstage import ROOT
from workshop import SOURCES

CLONE_PATH = os.pathsep.join(SOURCES)  # as activate.sh sets PYTHONPATH

# Python keeps what it has compiled, also where a container's image says not
# to: else each process would compile torch's modules anew, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Processes that wait for one another should sleep: no test may depend on
# how busy the machine is. A second thread for models as small as the tests'
# nearly doubles their CPU time. These have to be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take long, in the order in which they begin; the others follow by
# name: a long one at the end would run alone.
LONG = [f"test_{name}.py" for name in (
    "slurm_ends", "lab", "why", "verify", "notebooks", "contract", "activate",
    "slurm", "check", "rehearse", "benchmarks", "questions", "predictions",
    "ladder", "pbs", "std", "lit", "launch", "slides", "starter", "meshes",
    "kernels", "take_home", "stages")]

# The tests that use these are marked `whole` by that.
NEED_A_PROGRAM = {"browser", "enter", "mount", "mpich", "portal", "slurm"}

MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")  # Debian's
OF_THE_USER = (  # of the home folder: where packages are from, caches
    ".cache/matplotlib", ".cache/pip", ".cache/uv", ".config/pip")
ENVIRONMENT = (  # what activate.sh needs
    "activate.sh", "setup.sh", "requirements.txt", "constraints.txt",
    "pyproject.toml",
    "fineweb", "tests/requirements.txt")


def is_worker(config):
    """Whether this process runs the tests for another (pytest-xdist)."""
    return hasattr(config, "workerinput")


def is_plain(config):
    """Whether no file and no test is named."""
    return config.args_source is not pytest.Config.ArgsSource.ARGS


def is_quick(config):
    """Whether the tests that are marked `whole` are left out."""
    return is_plain(config) and not config.option.whole


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads them
def pytest_cmdline_main(config):
    """All tests: three files at a time, as most wait for processes."""
    option = config.option
    if is_plain(config) and option.numprocesses is None and not (
            is_worker(config) or option.usepdb):
        option.numprocesses, option.dist = 3, "loadfile"


@pytest.hookimpl(tryfirst=True)  # before tmp_path's folder is chosen
def pytest_configure(config):
    if not is_worker(config):  # all that tests start inherit them
        os.environ["WORKSHOP_TESTS"] = str(os.getpid())
        os.environ["TMPDIR"] = tempfile.tempdir = make_temporary()
        os.environ["HOME"] = make_home(Path(tempfile.tempdir, "home"))
        cleanup.watch(os.getpid(), tempfile.tempdir)
        config.option.basetemp = (
            config.option.basetemp or f"{tempfile.tempdir}/t")


def make_temporary():
    """A folder for temporary files; it goes with what tests leave in it.

    Not in /tmp, if the user has named no other: a trial of verify or check
    gets a link to all that lies beside the folders of its script. Where
    thousands of files were in /tmp, it took three times as long. The path is
    short, for Unix sockets.
    """
    cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)  # stays warm
    place = os.environ.get("TMPDIR", "/var/tmp")
    folder = tempfile.mkdtemp(
        prefix="t", dir=place if os.access(place, os.W_OK) else None)
    os.chmod(folder, 0o755)  # some tests are nobody
    return folder


def make_home(folder):
    """A home folder without the profile and the settings of the user.

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


def pytest_addoption(parser):
    parser.addoption(
        "--whole", action="store_true", help="run the whole suite: also what "
        "takes long or needs programs such as SLURM, MPI, a browser")
    parser.addoption(
        "--tables", action="store_true", help="run all of the tables, too: "
        "scripts and jobs with mistakes that the tools have to name; hours")
    parser.addoption(
        "--update", action="store_true", help="write the snapshots of views "
        "anew, in the folders snapshots/: look at what git says has changed")


def pytest_collection_modifyitems(config, items):
    """`pytest` alone leaves out marked tests; naming a file runs all of it."""
    for item in items:
        if NEED_A_PROGRAM & {*item.fixturenames}:
            item.add_marker("whole")
    items.sort(key=lambda item: [*LONG, item.path.name].index(item.path.name))
    if is_quick(config):
        leave_out("whole", config, items)
    if not config.option.tables:
        leave_out("table", config, items)


def leave_out(marker, config, items):
    """Take the tests with this marker out."""
    some = [item for item in items if item.get_closest_marker(marker)]
    items[:] = [item for item in items if not item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=some)


def pytest_terminal_summary(terminalreporter, config):
    if is_quick(config):
        terminalreporter.write_line(
            "Left out is what takes long or needs SLURM, MPI, a compiler or a "
            "browser: `pytest --whole` runs it, too")


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session):
    """No test may leave a process or a file behind."""
    end, left = time.monotonic() + 20, []
    if "rankcheck.engine.fork_server" in sys.modules:
        sys.modules["rankcheck.engine.fork_server"].end_all()
    if is_worker(session.config):
        return
    while (left := list(left_behind())) and time.monotonic() < end:
        time.sleep(0.2)
    for pid, words in left:
        print(f"\nleft behind by a test: process {pid}, {' '.join(words)}")
        os.kill(pid, signal.SIGKILL)
    if left and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    folder = Path(os.environ["TMPDIR"])
    if session.exitstatus in (pytest.ExitCode.TESTS_FAILED,
                              pytest.ExitCode.INTERNAL_ERROR):
        (folder / cleanup.KEPT).touch()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def left_behind():
    """(process, its words) of those that tests have started."""
    return ((pid, words) for pid, words, variables in all_processes()
            if f"WORKSHOP_TESTS={os.getpid()}" in variables
            and any(words) and pid != os.getpid())


def needs(*names):
    """Skip a test if a program or package that it needs is not installed.

    In CI, which installs all of them, a missing one is a failure instead.
    """
    missing = [name for name in names
               if not shutil.which(name) and not find_spec(name)]
    if missing:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"not installed: {', '.join(missing)}")


def copy_course(clone, *names):
    """Copy these folders and files of the course, without what is made."""
    made = shutil.ignore_patterns("__pycache__", "demo", "edu_*", ".cache",
                                  ".checked.json", ".originals.json")
    for name in (*names, *["rankcheck"] * ("workshop" in names)):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=made)
        else:
            shutil.copy(ROOT / name, clone / name)


def copy_desk(clone, *more, stage="std"):
    """Copy what the tools work on, with this stage on the desk; the clone."""
    copy_course(clone, "backstage", "workshop", "solutions", *more)
    (clone / "code").mkdir(exist_ok=True)
    shutil.copy(clone / "solutions" / f"train_gpt2_{stage}.py",
                clone / "code" / "train_gpt2.py")
    return clone


def link_package(name, site):
    """Put a package of ours, and those that it needs, into a site-packages."""
    names = [name]
    for name in names:  # which grows
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files} - {
                "..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
        needed = map(Requirement, package.requires or [])
        names += {one.name for one in needed if not one.marker
                  or one.marker.evaluate({"extra": ""})} - {*names}


def read_book(path):
    """nbformat is imported late: that takes two seconds of every process."""
    import nbformat

    return nbformat.read(path, as_version=4)


def calls(cell):
    """The code of a cell, without what it imports for itself."""
    return re.sub("^from lesson import .*\n", "", cell.source, flags=re.M)


def python(folder, *words, **variables):
    """A Python that has ended there; without PYTHONPATH, if none is given."""
    env = {key: value for key, value in os.environ.items()
           if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, *map(str, words)], cwd=folder,
                          env=env | variables, capture_output=True, text=True)


def workshop(repo, *words, status=0, **variables):
    """What `python -m workshop words...` prints there."""
    end = python(repo, "-m", "workshop", *words, **variables)
    assert end.returncode == status, end.stdout + end.stderr
    if status:  # one line
        assert re.fullmatch(r"error: [^\n]+\n", end.stderr), end.stderr
    return end.stdout + end.stderr


def program(path, text):
    """Write a script that can be run; its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def git(folder, *words, **variables):
    """Return what git prints in a folder, for any user."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True,
                          env=os.environ | variables, capture_output=True,
                          text=True).stdout


def tracked(*patterns):
    """The names of the clone's files that match, or of all of them."""
    return [name for name in git(ROOT, "ls-files", "-z", *patterns).split("\0")
            if (ROOT / name).is_file()]


def commit_all(folder):
    """Make a repository of a folder, with all that is in it."""
    for words in ("init -q", "add -A", "commit -qm all"):
        git(folder, *words.split())


def edit(text, *pairs):
    """The text with each old string, which occurs once, replaced by a new."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def snapshot(request):
    """A function that compares a view with what is kept of it.

    Of a page's HTML without its style and programs, a line for each block.
    """
    def snapshot(name, view):
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
            f"{file}: if that is right, run pytest --update")
    return snapshot


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small dataset, which no test changes."""
    from stages import make_dataset  # which imports this file

    return make_dataset(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="session")
def single(data, tmp_path_factory):
    """The single-device run that others are compared with."""
    from stages import train

    return train("std", tmp_path_factory.mktemp("single") / "run", data=data,
                 texts=True)


@pytest.fixture
def parsed(data, monkeypatch):
    """A function: the hyperparameters that a script reads from its flags."""
    import train_gpt2_ddp as ddp

    from backstage import flags

    def parsed(*words, script=ddp):
        monkeypatch.setattr(sys, "argv", [
            "x", *map(str, ("--data", data, *words))])
        hp, _ = flags.parse(
            script.Hyperparameters, script.PRESETS, script.MODELS)
        return hp
    return parsed


@pytest.fixture
def tool(monkeypatch, capsys):
    """A function: what a tool of fineweb/ prints here, and its error or ""."""
    from backstage.errors import UserError

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(ROOT / "fineweb"))

    def call(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        try:
            importlib.import_module(name).main()
            error = ""
        except UserError as reason:
            error = str(reason)
        return capsys.readouterr().out, error
    yield call
    resource_tracker._resource_tracker._stop()  # else it is left behind


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch take this machine for one with GPUs, as it is told."""
    import torch

    def fake(count=4, name="NVIDIA A100-SXM4-40GB", gibibytes=39.4,
             bf16=True):
        accelerator = torch.device("cuda")
        for owner, attribute, value in (
                (torch.accelerator, "current_accelerator",
                 lambda check_available=False: accelerator),
                (torch.accelerator, "device_count", lambda: count),
                (torch.accelerator, "set_device_index", lambda index: None),
                (torch.cuda, "get_device_name", lambda device: name),
                (torch.cuda, "is_bf16_supported",
                 lambda including_emulation=True: bf16 or including_emulation),
                (torch.cuda, "get_device_properties",
                 lambda device: SimpleNamespace(
                     total_memory=int(gibibytes * 2**30)))):
            monkeypatch.setattr(owner, attribute, value)
    return fake


@pytest.fixture(scope="module")
def slurm():
    """A SLURM of two nodes with four fake GPUs each, and a clone."""
    from cluster import start  # which imports this file

    with start() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def set_up(tmp_path_factory):
    """A function that sets a tiny clone up: it and its environment."""
    from shells import set_up_from  # which imports this file

    return set_up_from(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def browser():
    needs("chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=(
                "--headless=new --no-sandbox --disable-gpu --disable-quic "
                "--no-first-run --disable-background-networking "
                "--disable-component-update --disable-sync").split())
        yield browser
        browser.close()


@pytest.fixture
def lab(tmp_path):
    """Start JupyterLab, or a command that becomes one; returns its address.

    root: the folder that it shows, and where a command runs. all_cells: it
    draws not only those in sight.
    """
    from rankcheck.engine import ranks

    servers = []

    def lab(root, *command, all_cells=False, **variables):
        home = tmp_path / "home"
        if all_cells:
            file = home / (".jupyter/lab/user-settings/@jupyterlab/notebook-"
                           "extension/tracker.jupyterlab-settings")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text('{"windowingMode": "none"}')
        env = {key: value for key, value in os.environ.items()
               if not key.startswith("JUPYTER") and key not in (
                   "PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV")}
        env |= {"HOME": str(home), "JUPYTER_PREFER_ENV_PATH": "0",
                **variables}
        if not command:  # a portal's: it asks nobody about news
            env["JUPYTER_CONFIG_PATH"] = str(ROOT / "workshop" / "notebook")
        port = ranks.free_port()
        command = command or ("jupyterlab", "--no-browser",
                              f"--ServerApp.root_dir={root}")
        log = tmp_path / "lab.log"
        with open(log, "w") as file:
            servers.append(subprocess.Popen(
                [sys.executable, "-m", *command, "--allow-root",
                 "--ip=127.0.0.1", f"--port={port}",
                 "--ServerApp.port_retries=0", "--IdentityProvider.token="],
                cwd=root, env=env, stdout=file, stderr=subprocess.STDOUT))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert servers[-1].poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/api/status", timeout=1)
                return url
            except OSError:
                time.sleep(0.1)
        raise AssertionError(log.read_text())

    yield lab
    for server in servers:
        server.terminate()  # shuts its kernels down, too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def page(browser):
    """A page of a browser, as wide as a laptop."""
    from playwright.sync_api import expect

    expect.set_options(timeout=180_000)  # on a busy machine
    context = browser.new_context(
        viewport={"width": 1280, "height": 720},
        permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(120_000)
    context.add_init_script(path=Path(__file__).with_name("lab.js"))
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def mpich(tmp_path_factory):
    """The variables with which mpi4py takes MPICH."""
    needs("mpiexec.mpich")
    if not MPICH.exists():
        pytest.skip(f"not there: {MPICH}")
    folder = tmp_path_factory.mktemp("mpich")
    (folder / "libmpi.so.12").symlink_to(MPICH)  # as the README says
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="session")
def portal(tmp_path_factory):
    """A Python with ipykernel but no torch, like a portal's kernel."""
    folder = tmp_path_factory.mktemp("portal")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder],
                   check=True)
    site, = folder.glob("lib/python*/site-packages")
    link_package("ipykernel", site)
    kernel = folder / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    python = folder / "bin" / "python"
    (kernel / "kernel.json").write_text(json.dumps({
        "argv": [str(python), "-m", "ipykernel_launcher", "-f",
                 "{connection_file}"],
        "display_name": "Python 3 (ipykernel)", "language": "python"}))
    missing = subprocess.run([python, "-c", "import torch"],
                             capture_output=True, env={}, text=True)
    assert "No module named 'torch'" in missing.stderr
    return folder
