"""What the tests share."""

import importlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

from backstage import ROOT
from rankcheck_testing.cleanup import all_processes  # noqa: F401
from rankcheck_testing.support import (  # noqa: F401 tests import them here
    edit,
    link_package,
    needs,
    program,
    python,
)
from workshop import SOURCES
from workshop.jobs.requirements import find_unmet

# Also the tests of rankcheck have it: folders, processes and --whole.
pytest_plugins = ["rankcheck_testing.isolation"]

CLONE_PATH = os.pathsep.join(SOURCES)  # as activate.sh sets PYTHONPATH

# The tests that use these are marked `whole` by that.
NEED_A_PROGRAM = {"browser", "enter", "mount", "mpich", "portal", "slurm"}

MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")  # Debian's
ENVIRONMENT = (  # what activate.sh needs
    "activate.sh", "setup.sh", "requirements.txt", "constraints.txt",
    "pyproject.toml",
    "fineweb", "tests/requirements.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Stop in one line where the tests' packages are not installed."""
    if hasattr(config, "workerinput"):  # of pytest-xdist: it has been asked
        return
    missing = [unmet.package for unmet in find_unmet("tests")
               if not unmet.installed]
    if missing:
        raise pytest.UsageError(
            f"the tests need {', '.join(missing)}: fix: source activate.sh "
            "tests")


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items):
    for item in items:
        if NEED_A_PROGRAM & {*item.fixturenames}:
            item.add_marker("whole")


def copy_course(clone, *names):
    """Copy these folders and files of the course, without what is made, and
    without rankcheck's tests.
    """
    made = shutil.ignore_patterns("__pycache__", "demo", "edu_*", ".cache",
                                  ".checked.json", ".originals.json", "tests")
    needed = []
    if "workshop" in names:
        needed = ["rankcheck", "notebooks/course_messages.py"]
    for name in (*names, *needed):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=made)
        else:
            shutil.copy(ROOT / name, clone / name)


def copy_clone(clone, *more, stage="std"):
    """Copy what the tools work on, with this stage as the working copy.

    Returns the clone.
    """
    copy_course(clone, "backstage", "workshop", "solutions", *more)
    (clone / "code").mkdir(exist_ok=True)
    shutil.copy(clone / "solutions" / f"train_gpt2_{stage}.py",
                clone / "code" / "train_gpt2.py")
    return clone


def find_python(minor: int) -> "str | None":
    """Return the command of this machine's Python 3.MINOR, if there is one."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # not that of the suite
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python"))
    for name in (f"python3.{minor}", *map(str, installed)):
        try:
            end = subprocess.run([name, "-c", ""], check=False,
                                 capture_output=True)
        except OSError:
            continue
        if end.returncode == 0:
            return name
    return None


def read_book(path):
    """nbformat is imported late: that takes two seconds of every process."""
    import nbformat

    return nbformat.read(path, as_version=4)


def calls(cell):
    """The code of a cell, without what it imports for itself."""
    return re.sub("^from lesson import .*\n", "", cell.source, flags=re.M)


def workshop(repo, *arguments, status=0, **variables):
    """What `python -m workshop arguments...` prints there."""
    end = python(repo, "-m", "workshop", *arguments, **variables)
    assert end.returncode == status, end.stdout + end.stderr
    if status:  # one line
        assert re.fullmatch(r"error: [^\n]+\n", end.stderr), end.stderr
    return end.stdout + end.stderr


def git(folder, *arguments, **variables):
    """Return what git prints in a folder, for any user."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True,
                          env=os.environ | variables, capture_output=True,
                          text=True).stdout


def tracked(*patterns):
    """The names of the clone's files that match, or of all of them."""
    return [name for name in git(ROOT, "ls-files", "-z", *patterns).split("\0")
            if (ROOT / name).is_file()]


def commit_all(folder):
    """Make a repository of a folder, with all that is in it."""
    for arguments in ("init -q", "add -A", "commit -qm all"):
        git(folder, *arguments.split())


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

    def parsed(*arguments, script=ddp):
        monkeypatch.setattr(sys, "argv", [
            "x", *map(str, ("--data", data, *arguments))])
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


@pytest.fixture(scope="session")
def own_cluster():
    """A SLURM of three nodes with four simulated GPUs each, for all tests."""
    from cluster import start_cluster  # which imports this file

    with start_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm(own_cluster):
    """That SLURM, and a clone that submits to it."""
    from cluster import clone_beside  # which imports this file

    with clone_beside(own_cluster) as slurm:
        yield slurm


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
            env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(
                [str(leave_out_live_content(tmp_path / "portal")),
                 str(ROOT / "workshop" / "notebook")])
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


def leave_out_live_content(folder: Path) -> Path:
    """Write settings of a JupyterLab whose editor does not follow the disk."""
    for name, settings in (
            ("labconfig/page_config.json", {"disabledExtensions": {
                "@jupyter-ai-contrib/live-content": True}}),
            ("jupyter_server_config.json", {"ServerApp": {
                "jpserver_extensions": {"jupyter_live_content": False}}})):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    return folder


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


def make_old_portal(folder: Path) -> bool:
    """Make an environment of Python 3.9 with ipykernel; returns if it can.

    With uv, or else with pip, which takes 20 times as long. Its files are
    copies: uv would link them to those in its cache, and `portal` writes one.
    """
    old = find_python(9)
    if old is None:
        return False
    python = folder / "bin" / "python"

    def succeeds(*command: str | Path) -> bool:
        return subprocess.run(command, check=False).returncode == 0

    if shutil.which("uv") and (
            succeeds(old, "-m", "venv", "--without-pip", folder)
            and succeeds("uv", "pip", "install", "-q", "--link-mode", "copy",
                         "--python", python, "ipykernel")):
        return True
    return (succeeds(old, "-m", "venv", "--clear", folder)
            and succeeds(python, "-m", "pip", "install", "-q", "ipykernel"))


@pytest.fixture(scope="session")
def portal(tmp_path_factory):
    """A Python with ipykernel but no torch, like a portal's kernel.

    It is Python 3.9 if there is one, and ipykernel can be installed.
    """
    folder = tmp_path_factory.mktemp("portal")
    if not make_old_portal(folder):
        subprocess.run([sys.executable, "-m", "venv", "--clear",
                        "--without-pip", folder], check=True)
        site, = folder.glob("lib/python*/site-packages")
        link_package("ipykernel", site)
    kernel = folder / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True, exist_ok=True)
    python, file = folder / "bin" / "python", kernel / "kernel.json"
    assert not file.exists() or file.stat().st_nlink == 1
    file.write_text(json.dumps({
        "argv": [str(python), "-m", "ipykernel_launcher", "-f",
                 "{connection_file}"],
        "display_name": "Python 3 (ipykernel)", "language": "python"}))
    missing = subprocess.run([python, "-c", "import torch"],
                             capture_output=True, env={}, text=True)
    assert "No module named 'torch'" in missing.stderr
    return folder
