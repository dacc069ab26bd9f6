"""activate.sh in real shells, for clones that need tiny packages."""

import ensurepip
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import ENVIRONMENT, copy_course, needs

from rankcheck_testing.isolation import OWNER

CLOSED = "http://127.0.0.1:9"  # a port where nothing listens
SHELLS = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f"]}

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "gpt2-workshop"
version = "1.0"

[project.optional-dependencies]
deepspeed = ["six>=1,<2", "one ; python_version > '3'"]
"""


def wheel(folder, name, files):
    """Make the package `name` 1.0 of the files; the name of its wheel."""
    info = f"{name}-1.0.dist-info"
    files = {**files, f"{info}/METADATA":
             f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                              "Tag: py3-none-any\n"}
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    path = Path(folder) / f"{name}-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path.name


# Stands in for setuptools, which pip would have to download each time.
BACKEND = f"""\
from pathlib import Path
from zipfile import ZipFile

{inspect.getsource(wheel)}
def build_editable(folder, settings=None, metadata=None):
    return wheel(folder, "gpt2_workshop", {{"workshop.pth": str(Path.cwd())}})
"""


def tiny_clone(folder):
    """A copy of the repository, in a folder whose name has spaces.

    It needs two tiny packages, its tests a third, and it has its dataset.
    """
    needs("uv")  # the packages are all that is at hand
    repo = folder / "my own clone"
    copy_course(repo, *ENVIRONMENT, "backstage", "workshop",
                "notebooks/course_process.py")
    (repo / "pyproject.toml").write_text(PROJECT)
    (repo / "backend.py").write_text(BACKEND)
    (repo / "constraints.txt").write_text("one==1.0\n")
    needing(repo, "one==1.0")
    (repo / "tests/requirements.txt").write_text("five  # for tests\n")
    (repo / "wheels").mkdir()
    for name in "one", "two", "three", "five", "six":
        wheel(repo / "wheels", name, {f"{name}.py": f"name = '{name}'\n"})
    for pip in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
        shutil.copy(pip, repo / "wheels")
    (repo / "fineweb/demo").mkdir()
    (repo / "fineweb/demo/manifest.json").touch()
    return repo


def needing(repo, *packages):
    """Let the clone require these packages, and `two`."""
    (repo / "requirements.txt").write_text("\n".join([*packages, "two", ""]))


def environment(repo, **changes):
    """The variables of a user who has not set anything up."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("PIP_", "PYTHON", "WORKSHOP_", "TIKTOKEN_",
                                   "VIRTUAL_ENV", "TORCH_DISABLE_", "OMP_",
                                   "UV_", OWNER))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": (repo / "wheels").as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "https_proxy": CLOSED}
    return env | changes


def command(repo, then="", before="", shell="bash", arguments=""):
    """What sources activate.sh with these arguments, as a command."""
    return [*SHELLS[shell], "-c", f"{before}\n"
            f"source {shlex.quote(str(repo / 'activate.sh'))} {arguments}\n"
            f"echo status=$?\n{then}"]


def killed(arguments, moment, env, number=signal.SIGKILL):
    """Start a shell, and send this signal to all that runs at a moment."""
    shell = subprocess.Popen(
        arguments, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
    try:
        while not moment():
            assert shell.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(shell.pid, number)
        shell.wait()


def source(repo, then="", before="", shell="bash", arguments="", **changes):
    """Source activate.sh from elsewhere; what it printed, and its errors.

    The shell has to survive, and says `status=…`.
    """
    needs(shell)
    ran = subprocess.run(
        command(repo, then, before, shell, arguments), cwd=repo.parent,
        env=environment(repo, **changes), stdin=subprocess.DEVNULL,
        capture_output=True, text=True)
    assert "status=" in ran.stdout, ran
    return ran.stdout, ran.stderr


def works(*args, **changes):
    """Check that sourcing it says nothing is wrong; what it printed."""
    out, err = source(*args, **changes)
    assert "status=0" in out and not err, out + err
    return out


def refused(ran, what):
    """Check that it failed, with a single line that says `what`."""
    out, err = ran
    assert "status=1" in out, ran
    assert err.startswith("activate.sh: ") and err.count("\n") == 1, err
    assert re.search(what, err), err


PACKAGES = "python -c 'import one, two, backstage; print(backstage.ROOT)'"


def named(repo, venv):
    """Let the clone's site name this environment."""
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={shlex.quote(str(venv))}\n")


def set_up_from(model):
    """A function that sets a tiny clone up, at once: it copies this model."""
    model = tiny_clone(model)
    said = works(model, f"{PACKAGES}; python -m pip check; pip --version")
    assert f"{model}\nNo broken" in said and f"from {model}/.venv/lib" in said

    def call(folder, shared=False):
        """The clone and its environment: its own, or folder/shared/venv."""
        repo = tiny_clone(folder)
        venv = folder / "shared/venv" if shared else repo / ".venv"
        if shared:
            named(repo, venv)
        shutil.copytree(model / ".venv", venv, symlinks=True)
        for path in (venv / "workshop-base",
                     *venv.glob("lib/python*/site-packages/*.pth")):
            path.write_text(path.read_text().replace(str(model), str(repo)))
        return repo, venv
    return call


@pytest.fixture
def mount():
    """Mount file systems for a test, if this user may."""
    places = []

    def call(*arguments):
        needs("mount")
        if subprocess.run(["mount", *arguments], capture_output=True,
                          check=False).returncode:
            pytest.skip("this user cannot mount")
        places.append(arguments[-1])
    yield call
    for place in reversed(places):
        subprocess.run(["umount", "-l", place], check=False)
