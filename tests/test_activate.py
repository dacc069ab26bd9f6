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
NO_NETWORK = {"PIP_FIND_LINKS": "", "PIP_NO_INDEX": "0",
              "PIP_INDEX_URL": CLOSED, "PIP_RETRIES": "0"}
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
def set_up(tmp_path_factory):
    """A function that sets a tiny clone up, at once: it copies one."""
    model = tiny_clone(tmp_path_factory.mktemp("model"))
    out, err = source(model, PACKAGES)
    assert "status=0" in out and str(model) in out, out + err

    def call(folder, shared=False):
        """The clone and its environment: its own, or folder/shared/venv."""
        repo = tiny_clone(folder)
        venv = folder / "shared/venv" if shared else repo / ".venv"
        if shared:
            (repo / "site.sh").write_text(f"WORKSHOP_VENV='{venv}'\n")
        shutil.copytree(model / ".venv", venv, symlinks=True)
        for path in (*venv.glob("*"), *venv.glob("bin/*"),
                     *venv.glob("lib/python*/site-packages/*.pth")):
            if path.is_file() and not path.is_symlink():
                path.write_text(path.read_text().replace(
                    str(model / ".venv"), str(venv)).replace(
                    str(model), str(repo)))
        return repo, venv
    return call


@pytest.fixture(scope="module")
def desk(tmp_path_factory, set_up):
    """A clone that is set up; a test that changes it puts it back."""
    return set_up(tmp_path_factory.mktemp("desk"))[0]


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
        f"{shell} -c {shlex.quote(again + 'echo INNER=$PATH:')}\n"
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
def test_two_shells_at_once(tmp_path):
    """In a folder with a space and an apostrophe."""
    (tmp_path / "it's mine").mkdir()
    repo = tiny_clone(tmp_path / "it's mine")
    shells = [subprocess.Popen(
        command(repo, PACKAGES), cwd=tmp_path, env=environment(repo),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for _ in range(2)]
    outs = [shell.communicate()[0] for shell in shells]
    for out in outs:
        assert "status=0" in out and out.endswith(f"{repo}\n"), out
    assert "".join(outs).count("installing") == 1
    assert "".join(outs).count("waiting") == 1
    needing(repo, "one", "three")
    out, err = source(repo, "pip --version; python -c 'import three'")
    assert f"from {repo}/.venv/lib" in out and not err, out + err


@pytest.mark.whole
def test_killed_or_without_a_network_the_next_attempt_works(tmp_path):
    repo = tiny_clone(tmp_path)
    killed(repo, lambda new: (new / "pyvenv.cfg").exists())
    assert not (repo / ".venv").exists()
    refused(source(repo, **NO_NETWORK), "network")
    assert beside(repo / ".venv") == [".venv.lock"]
    out, err = source(repo, f"{PACKAGES}; python -m pip check")
    assert "status=0" in out and f"{repo}\nNo broken" in out, out + err
    assert beside(repo / ".venv") == [".venv", ".venv.lock"]


def killed(repo, moment, **changes):
    """Kill a set-up at this moment of the environment that it builds."""
    new = repo / ".venv.workshop-new"
    shell = subprocess.Popen(
        command(repo), env=environment(repo, **changes),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True)
    try:
        while not moment(new):
            assert shell.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def beside(venv):
    """The names of what begins with this path."""
    return sorted(path.name for path in venv.parent.iterdir()
                  if path.name.startswith(venv.name))


def needing(repo, *packages):
    """Let the clone need these."""
    (repo / "requirements.txt").write_text("\n".join([*packages, ""]))


def imports(venv, *packages):
    """Whether this environment can import these."""
    return not subprocess.run(
        [venv / "bin/python", "-Ic", f"import {','.join(packages)}"],
        capture_output=True, check=False).returncode


def plant(venv):
    """Somebody else's files in an environment: a check that they stay."""
    (venv / "notes").mkdir()
    (venv / "notes/theirs").write_text("theirs")
    (venv / "theirs").write_text("theirs")

    def stays(where=venv):
        assert (where / "theirs").read_text() == "theirs"
        assert (where / "notes/theirs").read_text() == "theirs"
    return stays


YES = {"WORKSHOP_INSTALL": "yes"}


@pytest.mark.whole
def test_a_shared_environment_of_ones_own(tmp_path):
    """An instructor's: made in an empty folder, and changed at their word."""
    repo, shared = tiny_clone(tmp_path), tmp_path / "venv"
    shared.mkdir()
    (repo / "site.sh").write_text(f"WORKSHOP_VENV='{shared}'\n")
    for _ in range(2):
        out, err = source(repo, f"{PACKAGES}; echo $VIRTUAL_ENV")
        assert out.endswith(f"status=0\n{repo}\n{shared}\n"), out + err
    assert "setting up" not in out
    stays = plant(shared)
    needing(repo, "one", "three")
    out, err = source(repo)
    assert "status=0" in out and "INSTALL=yes" in out and not err, out + err
    assert not imports(shared, "three")
    for shell in SHELLS:
        if not shutil.which(shell):
            continue
        again = shlex.quote(str(repo / "activate.sh"))
        out, err = source(repo, f"WORKSHOP_INSTALL=yes source {again}; "
                          "pip --version", shell=shell)  # a script's path
        assert f"from {shared}/lib" in out and not err, out + err
    assert imports(shared, "one", "two", "three")
    stays()
    assert beside(shared) == ["venv", "venv.lock"]
    assert not (repo / ".venv").exists()


# How else a site may write the path /…/shared/venv.
SPELLINGS = {
    "slashes": "//{venv}/.././venv/.///", "link above": "{top}/above/venv",
    "odd link": "{top}/it's \"a:b`c` $d", "relative": "../shared/venv",
    "tilde": "~/shared/venv", "bind mount": "{top}/mount",
    "bind mount above": "{top}/mount above/venv", "case": "{top}/shared/VENV"}


@pytest.fixture(scope="module")
def course(tmp_path_factory, set_up):
    """A clone and its shared environment; every test leaves it as it is."""
    return set_up(tmp_path_factory.mktemp("course"), shared=True)


@pytest.fixture
def mount():
    """Mount file systems for a test, if this user may."""
    places = []

    def call(*words):
        needs("mount")
        if subprocess.run(["mount", *words], capture_output=True,
                          check=False).returncode:
            pytest.skip("this user cannot mount")
        places.append(words[-1])
    yield call
    for place in reversed(places):
        subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.whole
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_environment(
        course, spelling, tmp_path, mount):
    """For its maker and for a clone with other requirements."""
    maker, venv = course
    top = venv.parents[1]
    other = tiny_clone(tmp_path)
    if spelling == "relative":  # to the clone, wherever the shell is
        other = shutil.copytree(other, top / "other")
    needing(other, "one", "three")
    path = SPELLINGS[spelling].format(venv=venv, top=top)
    if "link" in spelling:
        link = Path(path.removesuffix("/venv"))
        link.symlink_to(venv if link.name in path[-len(link.name):]
                        else venv.parent)
    elif "mount" in spelling:
        place = Path(path.removesuffix("/venv"))
        place.mkdir()
        mount("--bind", venv.parent if path.endswith("/venv") else venv, place)
    site = maker / "site.sh"
    before, inode = site.read_text(), venv.stat().st_ino
    stays = plant(venv)
    listing = {*top.rglob("*")}
    try:
        for repo, said in (maker, "active"), (other, "INSTALL=yes"):
            (repo / "site.sh").write_text(
                f"WORKSHOP_VENV={shlex.quote(path)}\n")
            ran = source(repo, "echo $VIRTUAL_ENV; which python",
                         HOME=str(top))
            if spelling == "case":
                refused(ran, "VENV is not complete")
            else:
                out, err = ran
                assert "status=0" in out and said in out and not err, ran
                assert out.endswith(f"{venv}\n{venv}/bin/python\n"), ran
                assert "setting up" not in out
            stays()
    finally:
        site.write_text(before)
        shutil.rmtree(venv / "notes")
        (venv / "theirs").unlink()
    new = {path for path in {*top.rglob("*")} ^ listing
           if not {"__pycache__", "other", "notes", "theirs"} & {*path.parts}}
    assert not new and venv.stat().st_ino == inode


@pytest.mark.whole
def test_a_change_by_another_spelling(set_up, tmp_path, mount):
    """The environment is renamed where it is, not where a link is."""
    repo, venv = set_up(tmp_path, shared=True)
    stays = plant(venv)
    link, place = tmp_path / "link", tmp_path / "mount"
    link.symlink_to(venv)
    place.mkdir()
    for path, package in ((f"{venv}/", "three"), (link, "one"),
                          (place, "three")):
        needing(repo, package)
        (repo / "site.sh").write_text(f"WORKSHOP_VENV={path}\n")
        if path == place:
            mount("--bind", venv, place)
            refused(source(repo, **YES), f"{place} .* mount it again")
        else:
            out, err = source(repo, **YES)
            assert "installing" in out and "status=0" in out and not err, err
        stays()
    assert link.is_symlink() and imports(venv, "one", "two", "three")
    assert beside(venv) == ["venv", "venv.lock"]


@pytest.mark.parametrize("name", ["a:b", 'a"b', "a`b`", "a$b", "a\\b"])
def test_a_path_that_no_environment_may_have(tmp_path, name):
    """Python's venv refuses a colon, and its script runs what is in ``."""
    folder = tmp_path / name
    folder.mkdir()
    repo = tiny_clone(tmp_path)
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={shlex.quote(str(folder))}")
    refused(source(repo), "its path must not have")
    assert not list(folder.iterdir()) and beside(folder) == [name]
    refused(source(tiny_clone(folder)), "its path must not have")


def commit(repo, date):
    """Make the clone one of this date."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    if not (repo / ".git").exists():
        subprocess.run([*git, "init", "-q"], cwd=repo, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "new"],
                   cwd=repo, check=True, env={
                       **os.environ, "GIT_COMMITTER_DATE": f"{date} +0000"})


@pytest.mark.whole
def test_clones_with_other_requirements(set_up, tmp_path):
    """Only a word changes what they share, and only from a newer clone."""
    needs("git")
    maker, venv = set_up(tmp_path / "maker", shared=True)
    stays = plant(venv)
    older, newer = (tiny_clone(tmp_path / name) for name in ("older", "newer"))
    for repo, billions in (maker, 2), (older, 1), (newer, 3):
        commit(repo, billions * 10 ** 9)
        (repo / "site.sh").write_text(f"WORKSHOP_VENV={venv}\n")
    needing(maker, "one", "one==1.0")
    assert "status=0" in source(maker, **YES)[0]
    for repo in older, newer:
        needing(repo, "one", "three")
        assert "INSTALL=yes" in source(repo)[0]
    refused(source(older, **YES), "newer clone .*/maker/my own clone has")
    assert not imports(venv, "three")
    stays()

    out, err = source(newer, **YES)
    assert "status=0" in out and "workshop-old" in out and not err, out + err
    assert imports(venv, "one", "two", "three")
    old = venv.with_name("venv.workshop-old")
    assert imports(old, "one", "two") and not imports(old, "three")
    stays()
    stays(old)
    refused(source(maker, **YES), "newer clone")
    needing(newer, "one")  # its maker alone could remove the old one
    refused(source(newer, **YES), "workshop-old is in the way")
    shutil.rmtree(old)
    out, err = source(newer, **YES)
    assert "status=0" in out and not err, out + err
    assert beside(venv) == ["venv", "venv.lock"]
    stays()


@pytest.mark.whole
def test_one_clone_in_the_place_of_another(set_up, tmp_path):
    """From then on they share it: nobody's is deleted without a word."""
    (repo, venv), other = set_up(tmp_path), tiny_clone(tmp_path / "other")
    stays = plant(venv)
    (other / "site.sh").write_text(f"WORKSHOP_VENV='{venv}'\n")
    needing(other, "one", "three")
    assert "workshop-old is the previous env" in source(other, **YES)[0]
    out, err = source(repo)
    assert "INSTALL=yes" in out and "status=0" in out and not err, out + err
    assert imports(venv, "three")
    stays()
    stays(venv.with_name(".venv.workshop-old"))


@pytest.mark.whole
def test_two_clones_at_once(tmp_path):
    """In one empty folder: the second uses what the first has made."""
    shared = tmp_path / "venv"
    shared.mkdir()
    repos = [tiny_clone(tmp_path / name) for name in ("a", "b")]
    needing(repos[1], "one", "three")
    shells = []
    for repo in repos:
        (repo / "site.sh").write_text(f"WORKSHOP_VENV={shared}\n")
        shells.append(subprocess.Popen(
            command(repo, PACKAGES), cwd=tmp_path, env=environment(repo),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
    outs = [shell.communicate()[0] for shell in shells]
    for repo, out in zip(repos, outs, strict=True):
        assert "status=0" in out and out.endswith(f"{repo}\n"), out
    assert "".join(outs).count("installing") == 1
    assert "".join(outs).count("INSTALL=yes") == 1
    assert beside(shared) == ["venv", "venv.lock"]


@pytest.mark.whole
@pytest.mark.parametrize("python", ["same Python", "another Python"])
def test_an_interrupted_change_leaves_the_old_one(set_up, tmp_path, python):
    """No network, and kill -9 at several moments."""
    repo, venv = set_up(tmp_path)
    old = repo / ".venv.workshop-old"
    stays = plant(venv)
    needing(repo, "one", "three")
    marker = venv / "workshop-base"
    if python == "another Python":
        marker.write_text(re.sub("(?m)^base=.*", "base=3 9",
                                 marker.read_text()))
    made = marker.read_text()
    if python == "same Python":
        moments = "workshop-base", "lib/python*/site-packages/three.py"
        refused(source(repo, **NO_NETWORK), "network")
        assert beside(venv) == [".venv", ".venv.lock"]
    else:
        moments = "notes", "lib/python*/site-packages/pip"
    for moment in moments:
        killed(repo, lambda new: list(new.glob(moment)))  # noqa: B023
        if old.exists() and not venv.exists():
            break  # between the two renames: below
        if imports(venv, "three"):
            break  # it was faster than this loop
        assert marker.read_text() == made and imports(venv, "one", "two")
        stays()
    if venv.exists() and not old.exists():
        venv.rename(old)  # as it is between the two renames
    out, err = source(repo, "python -c 'import one, two, three'")
    assert "status=0" in out and not err, out + err
    stays()
    assert beside(venv) == [".venv", ".venv.lock"]


@pytest.mark.whole
def test_a_shared_environment_killed_between_two_names(set_up, tmp_path):
    repo, venv = set_up(tmp_path, shared=True)
    stays = plant(venv)
    venv.rename(venv.with_name("venv.workshop-old"))
    refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    out, err = source(repo, PACKAGES)
    assert "status=0" in out and "installing" not in out and not err, err
    stays()


@pytest.mark.whole
@pytest.mark.parametrize("python", ["same Python", "another Python"])
def test_a_full_disk(set_up, tmp_path, mount, python):
    """The old one works, and nothing new is left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=200m", "none", disk)
    repo, venv = set_up(disk, shared=True)
    stays = plant(venv)
    wheel(repo / "wheels", "big", {
        "big.py": "", "data": "0123456789abcdef" * 2 ** 20})  # 16 MB
    needing(repo, "one", "big")
    marker = venv / "workshop-base"
    if python == "another Python":
        marker.write_text(re.sub("(?m)^base=.*", "base=3 9",
                                 marker.read_text()))
    size = shutil.disk_usage(disk).used + 2 ** 22  # 4 MB more
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
    refused(source(repo, **YES), "No space left|no space left|cannot make")
    assert imports(venv, "one", "two") and not imports(venv, "big")
    assert beside(venv) == ["venv", "venv.lock"]
    stays()
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    out, err = source(repo, **YES)
    assert "status=0" in out and imports(venv, "big") and not err, out + err
    stays()


@pytest.mark.whole
def test_a_folder_that_cannot_have_neighbours(tmp_path, mount):
    """It is a mount, and the folder around it can only be read."""
    top, venv = tmp_path / "shared", tmp_path / "shared" / "venv"
    top.mkdir()
    mount("-t", "tmpfs", "none", top)
    venv.mkdir()
    mount("-t", "tmpfs", "none", venv)
    subprocess.run(["mount", "-o", "remount,ro", top], check=True)
    repo = tiny_clone(tmp_path)
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={venv}\n")
    for moment in "pyvenv.cfg", None:
        if moment:  # the next attempt goes on in the same folder
            killed(repo, lambda new: (
                venv / ".workshop-new/pyvenv.cfg").exists())
            assert not (venv / "bin").exists()
        else:
            out, err = source(repo, f"{PACKAGES}; pip --version")
            assert f"from {venv}/lib" in out and not err, out + err
    stays = plant(venv)
    needing(repo, "one", "three")
    refused(source(repo, **YES), "shared is not writable")
    stays()
    subprocess.run(["mount", "-o", "remount,ro", venv], check=True)
    out, err = source(repo, PACKAGES)  # a file system that can only be read
    assert "status=0" in out and out.endswith(f"{repo}\n") and not err, err
    refused(source(repo, **YES), "not writable")
    stays()


@pytest.mark.whole
def test_what_this_clone_has_not_made_stays(tmp_path):
    """In the clone's own place, and beside it."""
    repo = tiny_clone(tmp_path)
    venv, new = repo / ".venv", repo / ".venv.workshop-new"
    venv.mkdir()
    stays = plant(venv)
    refused(source(repo, **YES), "has not made it: rename it")
    stays()
    shutil.rmtree(venv)
    venv.symlink_to(tmp_path / "nowhere")
    refused(source(repo), "has not made it: rename it")
    venv.unlink()
    new.mkdir()
    stays = plant(new)
    refused(source(repo), "workshop-new is in the way")
    stays()
    new.rename(tmp_path / "new")

    # A link is the clone's own as long as no other clone has made it there.
    (tmp_path / "far").mkdir()
    venv.symlink_to(tmp_path / "far")
    other = tiny_clone(tmp_path / "other")
    (other / ".venv").symlink_to(tmp_path / "far")
    for repo_, package in (repo, "one"), (repo, "three"), (other, "one"):
        needing(repo_, package)
        out, err = source(repo_)
        assert "status=0" in out and not err, out + err
        assert ("installing" in out) == (repo_ is repo)
    assert venv.is_symlink()


@pytest.mark.whole
def test_a_copy_of_a_clone_makes_its_own(set_up, tmp_path):
    repo, venv = set_up(tmp_path / "a")
    stays = plant(venv)
    copy = shutil.copytree(repo, tmp_path / "b", symlinks=True)
    out, err = source(copy, "pip --version")
    assert f"from {copy}/.venv/lib" in out and not err, out + err
    stays()
    stays(copy / ".venv")
    assert beside(copy / ".venv") == [".venv", ".venv.lock"]
    out, err = source(repo, "pip --version")
    assert f"from {repo}/.venv/lib" in out and "setting up" not in out, err


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("before", ["", "set -eu"])
def test_a_site_file_with_options_and_names_of_its_own(desk, shell, before):
    site = desk / "site.sh"
    show = "echo $-; set -o | grep -E '^(pipefail|noclobber|errexit) '"
    try:
        site.write_text(
            "set -euo pipefail\nset -o noclobber\nset +e -e\n"
            "root=/oops code=/oops venv=/oops entries=/oops option=/oops\n")
        out, err = source(desk, f"{show}; {PACKAGES}", shell=shell,
                          before=f"{before}\n{show} || true; echo then")
    finally:
        site.unlink()
    assert out.endswith(f"{desk}\n") and "status=0" in out and not err, err
    options = out.partition("then\n")[0]
    assert f"status=0\n{options}" in out, out


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
    made = re.compile(r"batch-(?!ddp|doctor|fineweb)")  # as those of ddp are
    scripts = [name for name in tracked() if name == ".ci/run"
               or (name.endswith(".sh") and not made.search(name))]
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
