"""activate.sh in real shells: Python's venv and pip, on tiny packages."""

import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import needs
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
CLOSED = "http://127.0.0.1:9"  # a port where nothing listens
SHELLS = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f"]}

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
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


def clone(folder):
    """A copy of the repository, in a folder whose name has spaces."""
    repo = folder / "my own clone"
    ignore = shutil.ignore_patterns(".*", "demo", "edu_*", "__pycache__")
    for name in "backstage", "environment", "fineweb", "workshop":
        shutil.copytree(ROOT / name, repo / name, ignore=ignore)
    (repo / "tests").mkdir()
    for name in ("activate.sh", "requirements.txt", "constraints.txt",
                 "tests/requirements.txt"):
        shutil.copy(ROOT / name, repo / name)
    return repo


def tiny_clone(folder):
    """The same, but it needs two tiny packages, and has its dataset."""
    repo = clone(folder)
    (repo / "pyproject.toml").write_text(PROJECT)
    (repo / "backend.py").write_text(BACKEND)
    for name in "requirements.txt", "constraints.txt":
        (repo / name).write_text("one==1.0\n")
    (repo / "tests/requirements.txt").write_text("two\n")
    (repo / "wheels").mkdir()
    for name in "one", "two", "three":
        wheel(repo / "wheels", name, {f"{name}.py": f"name = '{name}'\n"})
    (repo / "fineweb/demo").mkdir()
    (repo / "fineweb/demo/manifest.json").touch()
    return repo


def environment(repo, **changes):
    """The variables of a user who has not set anything up."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("PIP_", "PYTHON", "WORKSHOP_", "TIKTOKEN_",
                                   "VIRTUAL_ENV", "TORCH_DISABLE_", "OMP_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": (repo / "wheels").as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "https_proxy": CLOSED}
    return env | changes


def command(repo, then="", before="", shell="bash"):
    return [*SHELLS[shell], "-c", f"{before}\n"
            f"source {shlex.quote(str(repo / 'activate.sh'))}\n"
            f"echo status=$?\n{then}"]


def source(repo, then="", before="", shell="bash", **changes):
    """Source activate.sh from elsewhere; what it printed, and its errors.

    The shell has to survive, and says `status=…`.
    """
    needs(shell)
    ran = subprocess.run(
        command(repo, then, before, shell), cwd=repo.parent,
        env=environment(repo, **changes), stdin=subprocess.DEVNULL,
        capture_output=True, text=True)
    assert "status=" in ran.stdout, ran
    return ran.stdout, ran.stderr


def refused(ran, what):
    """Check that it failed, with a single line that says `what`."""
    out, err = ran
    assert "status=1" in out, ran
    assert err.startswith("activate.sh: ") and err.count("\n") == 1, err
    assert re.search(what, err), err


PACKAGES = "python -c 'import one, two, backstage; print(backstage.ROOT)'"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A clone that is set up; whoever changes it puts it back."""
    repo = tiny_clone(tmp_path_factory.mktemp("desk"))
    out, err = source(repo, PACKAGES)
    assert "status=0" in out and str(repo) in out, out + err
    return repo


@pytest.mark.parametrize("how", ["bash", "zsh", "sh", None])
def test_refuses_to_be_executed(tmp_path, how):
    needs(*[how] if how else [])
    repo = tiny_clone(tmp_path)
    ran = subprocess.run([how, "activate.sh"] if how else ["./activate.sh"],
                         cwd=repo, capture_output=True, text=True)
    assert ran.returncode and not ran.stdout
    assert ran.stderr.count("\n") == 1 and "source" in ran.stderr
    assert not (repo / ".venv").exists()


@pytest.mark.whole
@pytest.mark.parametrize("shell", SHELLS)
def test_again_it_needs_no_network_and_changes_nothing(desk, shell, tmp_path):
    made = (desk / ".venv/workshop-base").stat().st_mtime_ns
    link = tmp_path / "another way to it"
    link.symlink_to(desk)
    out, err = source(
        link, PACKAGES + "; python -c 'import sys; print(sys.prefix)'",
        shell=shell, PIP_FIND_LINKS="", PIP_INDEX_URL=CLOSED)
    assert "status=0" in out and "installing" not in out and not err
    assert out.endswith(f"{desk}\n{desk / '.venv'}\n")
    assert (desk / ".venv/workshop-base").stat().st_mtime_ns == made


@pytest.mark.parametrize("shell", SHELLS)
def test_leaves_the_shell_as_it_was(desk, shell):
    listing = {"bash": "set -o; compgen -v; compgen -A function",
               "zsh": "setopt; print -l ${(k)parameters} ${(k)functions}"}
    again = f"source {shlex.quote(str(desk / 'activate.sh'))} >/dev/null\n"
    out, _ = source(
        desk, f"{again} echo PATH=$PATH:; echo PYTHONPATH=$PYTHONPATH\n"
        f"bash -c {shlex.quote(again + 'echo INNER=$PATH:')}\n"
        f"deactivate; echo AFTER=$PATH; {listing[shell]}",
        before=f"set -u; {listing[shell]}; echo BEFORE=$PATH",
        shell=shell, PYTHONPATH="/else where")
    bin_ = f"{desk / '.venv/bin'}:"
    assert re.search(r"^PYTHONPATH=(.*)", out, re.M)[1] == (
        f"{desk}:/else where")
    assert re.search(r"^PATH=(.*)", out, re.M)[1].count(bin_) == 1
    assert re.search(r"^INNER=(.*)", out, re.M)[1].count(bin_) == 1
    before, after = re.search(r"^BEFORE=(.*)", out, re.M), re.search(
        r"^AFTER=(.*)", out, re.M)
    assert before[1] == after[1]
    new = set(out[after.end():].split()) - set(out[:before.start()].split())
    assert not {name for name in new if "workshop" in name.lower()}
    assert new <= {"PYTHONPATH", "TIKTOKEN_CACHE_DIR", "deactivate", "PS1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                   # shells' own
                   "PIPESTATUS", "BASH_REMATCH", "FUNCNAME", "VIRTUAL_ENV",
                   "match", "mbegin", "mend", "_OLD_VIRTUAL_PATH"}, new


def test_a_strict_shell_goes_on(desk):
    """set -e and set -u neither end it nor get lost."""
    out, _ = source(desk, "echo $-", before="set -eu")
    assert {"e", "u"} <= set(out.splitlines()[-1])


def test_a_module_added_later_is_found(desk):
    site, again = desk / "site.sh", shlex.quote(str(desk / "activate.sh"))
    try:
        out, _ = source(desk, f"""\
            echo 'PATH="/some/module:$PATH"' >{shlex.quote(str(site))}
            source {again}; echo $PATH""")
    finally:
        site.unlink()
    assert out.split("\n")[-2].startswith(f"{desk}/.venv/bin:/some/module:")


@pytest.mark.whole
def test_installs_when_the_requirements_change(desk):
    plant = desk / ".venv/plant"
    plant.touch()
    names = desk / "requirements.txt"
    before = names.read_text()
    try:
        names.write_text(f"{before}nowhere-to-be-had\n")
        refused(source(desk), "nowhere-to-be-had.*network")
        names.write_text(f"{before}three\n")
        out, err = source(desk, "python -c 'import three; print(three.name)'")
        assert "status=0" in out and out.endswith("three\n"), out + err
    finally:
        names.write_text(before)
    source(desk)
    assert plant.exists()  # it was brought up to date, not made anew


def test_needs_a_python(tmp_path):
    repo = tiny_clone(tmp_path / "clone")
    tools = tmp_path / "tools"  # all there is, but for one old Python
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "find", "ls"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    refused(source(repo, PATH=str(tools)), r"Python 3\.10")
    assert not (repo / ".venv").exists()


@pytest.mark.whole
def test_without_a_network_the_next_attempt_works(tmp_path):
    repo = tiny_clone(tmp_path)
    refused(source(repo, PIP_FIND_LINKS="", PIP_NO_INDEX="0",
                   PIP_INDEX_URL=CLOSED, PIP_RETRIES="0"), "network")
    out, err = source(repo, PACKAGES)
    assert "status=0" in out and out.endswith(f"{repo}\n"), out + err


@pytest.mark.whole
def test_two_shells_at_once(tmp_path):
    repo = tiny_clone(tmp_path)
    shells = [subprocess.Popen(
        command(repo, PACKAGES), cwd=tmp_path, env=environment(repo),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for _ in range(2)]
    outs = [shell.communicate()[0] for shell in shells]
    for out in outs:
        assert "status=0" in out and out.endswith(f"{repo}\n"), out
    assert "".join(outs).count("installing") == 1
    assert "".join(outs).count("waiting") == 1


@pytest.mark.whole
def test_killed_and_sourced_again(tmp_path):
    """While the environment is made, and while pip installs."""
    repo = tiny_clone(tmp_path)
    for moment in "pyvenv.cfg", "install.log":
        shell = subprocess.Popen(
            command(repo), env=environment(repo), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            while not (repo / ".venv" / moment).exists():
                assert shell.poll() is None
                time.sleep(0.01)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        assert (repo / ".venv/workshop-base").read_text() == "unfinished\n"
    out, err = source(repo, f"{PACKAGES}; python -m pip check")
    assert "status=0" in out and f"{repo}\nNo broken" in out, out + err


@pytest.mark.whole
def test_a_shared_environment_of_ones_own(tmp_path):
    """An instructor's: made in an empty folder, and kept up to date."""
    repo, shared = tiny_clone(tmp_path), tmp_path / "shared"
    shared.mkdir()
    (repo / "site.sh").write_text(f"WORKSHOP_VENV='{shared}'\n")
    out, err = source(repo, f"{PACKAGES}; echo $VIRTUAL_ENV")
    assert out.endswith(f"status=0\n{repo}\n{shared}\n"), out + err
    (repo / "requirements.txt").write_text("one\nthree\n")
    out, err = source(repo, "python -c 'import three; print(three.name)'")
    assert out.endswith("status=0\nthree\n"), out + err
    assert not (repo / ".venv").exists()


def test_a_shared_environment_of_another(desk, tmp_path):
    """It is used as it is."""
    if os.getuid():
        pytest.skip("only root can give a folder to somebody else")
    repo = tiny_clone(tmp_path)
    shared = desk / ".venv"
    (repo / "site.sh").write_text(f"WORKSHOP_VENV='{shared}'\n"
                                  "export WORKSHOP_DATA=/some/data\n")
    os.chown(shared, 65534, -1)
    try:
        # each their own `workshop`
        out, err = source(repo, f"{PACKAGES}; echo $WORKSHOP_DATA")
        assert out.endswith(f"{repo}\n/some/data\n"), out + err
        (repo / "requirements.txt").write_text("one\nthree\n")
        out, err = source(repo)
        assert "status=0" in out and "ask its owner" in out, out + err
        assert "installing" not in out
        base = (shared / "workshop-base")
        whole = base.read_text()
        base.write_text("unfinished\n")
        refused(source(repo), "not complete")
        base.write_text(whole)
    finally:
        os.chown(shared, os.getuid(), -1)
    (repo / "site.sh").write_text(f"WORKSHOP_VENV='{tmp_path / 'none'}'\n")
    refused(source(repo), "not complete")
    assert not (repo / ".venv").exists()


@pytest.mark.whole
def test_an_environment_made_by_hand_is_left_alone(tmp_path):
    """With the real packages, so that the demo dataset is built."""
    repo = clone(tmp_path)
    venv = tmp_path / "by hand"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv],
                   check=True)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (venv / "lib" / python / "site-packages/packages.pth").write_text(
        sysconfig.get_path("purelib"))
    (repo / "site.sh").write_text(f"WORKSHOP_VENV='{venv}'\n")
    made = set(venv.iterdir())
    out, err = source(repo, "echo $TIKTOKEN_CACHE_DIR")
    assert out.endswith(f"status=0\n{repo}/fineweb/.cache/tiktoken\n"), err
    assert "Traceback" not in err  # there was no network
    assert list((repo / "fineweb/demo").glob("demo_train_*.npy"))
    out, _ = source(repo)
    assert "documents" not in out  # it was there
    assert set(venv.iterdir()) == made


@pytest.mark.whole
def test_the_sites_own_pytorch_stays(tmp_path):
    """A module brings it by PYTHONPATH, in a version of its own."""
    repo = tiny_clone(tmp_path)
    (repo / "requirements.txt").write_text("one\ntorch\n")
    (repo / "constraints.txt").write_text("torch==2.13.0\n")
    (repo / "site.sh").write_text("WORKSHOP_SITE_PACKAGES=yes\n")
    module = tmp_path / "module"
    module.mkdir()
    ZipFile(module / wheel(module, "torch", {"torch.py": ""})
            ).extractall(module)
    out, err = source(repo, "python -c 'import torch; print(torch.__file__)'",
                      PYTHONPATH=str(module))
    assert "status=0" in out and out.endswith(f"{module}/torch.py\n"), err


def test_a_site_file_that_fails(tmp_path):
    repo = tiny_clone(tmp_path)
    (repo / "site.sh").write_text("false || return\n")
    refused(source(repo), "site.sh")


def test_the_pins_are_for_any_patch_release_of_python():
    """Debian 12 has 3.11.2, Ubuntu 24.04 has 3.12.3: here may be a later."""
    first = "{}.{}.0".format(*sys.version_info)
    pins = re.findall(r"^\w[^\s;]+", (ROOT / "constraints.txt").read_text(),
                      re.MULTILINE)
    assert len(pins) > 100
    for package in distributions():
        if f"{package.name}=={package.version}" in pins:
            needed = package.metadata.get("Requires-Python", "")
            assert first in SpecifierSet(needed), (package.name, needed)


@pytest.mark.whole
def test_shellcheck():
    needs("shellcheck", "git")
    scripts = [name for name in tracked()
               if name.endswith(".sh") or name == ".ci/run"]
    assert {"activate.sh", "batchfiles/job.sh"} <= set(scripts)
    subprocess.run(["shellcheck", *scripts], cwd=ROOT, check=True)


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check", *(
        name for name in tracked() if name.endswith((".py", ".ipynb")))],
        cwd=ROOT, check=True)


def tracked():
    ran = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True,
                         capture_output=True, text=True)
    return [name for name in ran.stdout.split("\n")
            if (ROOT / name).is_file()]
