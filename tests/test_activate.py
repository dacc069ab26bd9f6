"""activate.sh in real shells: Python's venv and pip, on tiny packages."""

import fcntl
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import commit_all, git, needs, program
from packaging.specifiers import SpecifierSet
from shells import (
    CLOSED,
    PACKAGES,
    SHELLS,
    command,
    environment,
    killed,
    named,
    refused,
    source,
    tiny_clone,
    wheel,
    works,
)
from shells import mount as mount  # a fixture

ROOT = Path(__file__).resolve().parent.parent
NO_NETWORK = {"PIP_FIND_LINKS": "", "PIP_NO_INDEX": "0",
              "PIP_INDEX_URL": CLOSED, "PIP_RETRIES": "0"}
YES = {"WORKSHOP_INSTALL": "yes"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory, set_up):
    """A clone that is set up; a test that changes it puts it back."""
    return set_up(tmp_path_factory.mktemp("desk"))[0]


def beside(venv):
    """The names of what begins with this path."""
    return sorted(path.name for path in venv.parent.iterdir()
                  if path.name.startswith(venv.name))


def needing(repo, *packages):
    (repo / "requirements.txt").write_text("\n".join([*packages, ""]))


def imports(venv, *packages):
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


# ---------------------------------------------------------------- the shell


@pytest.mark.whole
@pytest.mark.parametrize(("words", "said"), [
    *(([*how, "activate.sh"], r"activate\.sh.*source.*\n") for how in (
        ["bash"], ["zsh"], ["sh"], ["env", "PATH=.:/usr/bin:/bin"])),
    *(([how, "-c", "source activate.sh"], r"(?s).*start bash or zsh first.*")
      for how in ("fish", "tcsh"))], ids=str)
def test_only_bash_and_zsh_source_it(desk, words, said):
    needs(words[0])
    ran = subprocess.run(words, cwd=desk, capture_output=True, text=True)
    assert ran.returncode and re.fullmatch(said, ran.stdout + ran.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_again_it_changes_nothing_and_leaves_the_shell_as_it_was(
        desk, shell, tmp_path):
    """By another way to it, without a network."""
    made = (desk / ".venv/workshop-base").stat().st_mtime_ns
    link = tmp_path / "another way to it"
    link.symlink_to(desk)
    listing = {"bash": "set -o; compgen -v; compgen -A function",
               "zsh": "setopt; print -l ${(k)parameters} ${(k)functions}"}
    again = f"source {shlex.quote(str(desk / 'activate.sh'))} >/dev/null\n"
    out = works(
        link, f"{PACKAGES}; python -c 'import sys; print(sys.prefix)'\n"
        f"{again} echo PATH=$PATH:; echo PYTHONPATH=$PYTHONPATH\n"
        f"{shell} -c {shlex.quote(again + 'echo INNER=$PATH:')}\n"
        f"deactivate; echo AFTER=$PATH; {listing[shell]}",
        before=f"set -u; {listing[shell]}; echo BEFORE=$PATH",
        shell=shell, **NO_NETWORK,
        PYTHONPATH=f"{desk}/rankcheck/why/hook:/else where")  # of earlier days
    assert "installing" not in out and f"{desk}\n{desk / '.venv'}\n" in out
    assert (desk / ".venv/workshop-base").stat().st_mtime_ns == made
    bin_ = f"{desk / '.venv/bin'}:"
    assert re.search(r"^PYTHONPATH=(.*)", out, re.M)[1] == (
        f"{desk}:/else where")
    for name in ("PATH", "INNER"):
        assert re.search(f"^{name}=(.*)", out, re.M)[1].count(bin_) == 1
    before, after = (re.search(f"^{name}=(.*)", out, re.M)
                     for name in ("BEFORE", "AFTER"))
    assert before[1] == after[1]
    new = set(out[after.end():].split()) - set(out[:before.start()].split())
    assert new <= {"PYTHONPATH", "TIKTOKEN_CACHE_DIR", "deactivate", "PS1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "GOMP_SPINCOUNT",
                   "WORKSHOP",
                   # shells' own
                   "PIPESTATUS", "BASH_REMATCH", "FUNCNAME", "VIRTUAL_ENV",
                   "match", "mbegin", "mend", "_OLD_VIRTUAL_PATH"}, new


def test_it_is_found_where_cd_looks_elsewhere(desk, tmp_path):
    (tmp_path / desk.name).mkdir()
    out = works(desk, f"source {shlex.quote(desk.name)}/activate.sh\necho $?",
                before=f"CDPATH={tmp_path}")
    assert out.endswith("\n0\n"), out


def test_functions_of_the_shell_do_not_reach_what_it_starts(desk):
    """As in many a .bashrc; they are exported to every bash."""
    out = works(desk, "echo $?", before='cd() { builtin cd "$@" && ls; }; '
                "ls() { echo mine; }; export -f cd ls")
    assert out.endswith("\n0\n") and "not complete" not in out, out


def test_a_module_added_later_is_found(desk):
    site, again = desk / "site.sh", shlex.quote(str(desk / "activate.sh"))
    try:
        out, _ = source(desk, f"""\
            echo 'PATH="/some/module:$PATH"' >{shlex.quote(str(site))}
            source {again}; echo $PATH""")
        assert out.split("\n")[-2].startswith(
            f"{desk}/.venv/bin:/some/module:")
        for text, words in ("false || return\n", "site.sh failed"), (
                "export SBATCH_ACCOUNT=a\r\n", "dos2unix"):
            site.write_bytes(text.encode())
            for shell in SHELLS:
                refused(source(desk, shell=shell), words)
    finally:
        site.unlink()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("before", ["", "set -eu"])
def test_a_site_file_with_options_and_names_of_its_own(desk, shell, before):
    site = desk / "site.sh"
    show = "echo $-; set -o | grep -E '^(pipefail|noclobber|errexit) '"
    try:
        site.write_text(
            "set -euo pipefail\nset -o noclobber\nset +e -e\n"
            "root=/oops code=/oops venv=/oops entries=/oops option=/oops\n")
        out = works(desk, f"{show}; {PACKAGES}", shell=shell,
                    before=f"{before}\n{show} || true; echo then")
    finally:
        site.unlink()
    options = out.partition("then\n")[0]
    assert out.endswith(f"{desk}\n") and f"status=0\n{options}" in out, out


OLD = "#!/bin/sh\nexit 1\n"
NEW = f"""#!/bin/sh
exec "{sys.executable}" -c 'import sys
sys.version_info = (3, 15)
exec(sys.argv[1])' "$2"
"""


@pytest.mark.parametrize("python", [OLD, NEW])
def test_needs_a_python(tmp_path, python):
    repo = tiny_clone(tmp_path / "clone")
    tools = tmp_path / "tools"  # all there is, but for that Python
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "find", "ls"):
        (tools / name).symlink_to(shutil.which(name))
    program(tools / "python3", python)
    refused(source(repo, PATH=str(tools)), r"Python 3\.10")
    assert not (repo / ".venv").exists()


# ------------------------------------------------------- a clone's own place


PIP_CONF = """\
[global]
quiet = 3
no-index = true
find-links =
    /nowhere
    {links}
[install]
user = true
target = {elsewhere}
"""


def misled(repo, folder):
    """What may tell pip to put packages elsewhere: into this folder.

    A module has one of them, which is there only while it is loaded.
    """
    module, config = folder / "module", folder / "pip.conf"
    module.mkdir(parents=True)
    ZipFile(repo / "wheels/three-1.0-py3-none-any.whl").extractall(module)
    config.write_text(PIP_CONF.format(
        links=shlex.quote((repo / "wheels").as_uri()), elsewhere=folder))
    return {"PIP_CONFIG_FILE": str(config), "PIP_NO_INDEX": "",
            "PIP_FIND_LINKS": "", "PIP_PREFIX": str(folder),
            "PIP_DRY_RUN": "1", "PIP_ROOT": str(folder),
            "PIP_PYTHON": "/nowhere", "PIP_NO_DEPS": "1",
            "PYTHONHOME": "/nowhere", "PYTHONPATH": str(module)}


def test_a_lock_that_another_holds(tmp_path):
    repo = tiny_clone(tmp_path)
    with open(repo / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("process 7 of activate.sh (alice on login1, since 10:31:05)",
              file=lock, flush=True)
        shell = subprocess.Popen(
            command(repo), env=environment(repo), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            said = [shell.stdout.readline() for _ in range(2)][1]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
    assert said == (f"activate.sh: waiting for {lock.name}, which process 7 "
                    "of activate.sh (alice on login1, since 10:31:05) has "
                    "locked\n")


def test_without_locks_what_another_shell_makes_stays(tmp_path):
    new = tmp_path / ".venv.workshop-new"
    new.mkdir()
    (new / "workshop-base").write_text(f"clone={tmp_path}\n")
    stays = plant(new)
    ran = subprocess.run(  # no lock: file descriptor 9 is not open
        [sys.executable, ROOT / "environment/build.py", tmp_path / ".venv",
         "", ""], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode and "if no other shell" in ran.stderr, ran
    stays()


PIP_SAID = """\
Collecting torch
ERROR: Exception:
Traceback (most recent call last):
  File "/.venv/lib/python3.11/site-packages/pip/main.py", line 180, in _main
TimeoutError: The read operation timed out

Traceback (most recent call last):
  File "/.venv/lib/python3.11/site-packages/pip/main.py", line 247, in _main
pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool: timed out

[notice] A new release of pip is available
"""


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "environment")
    return importlib.import_module("build")


def test_the_line_of_pip_that_says_most(build):
    said = build.reason(PIP_SAID.splitlines(keepends=True))
    assert said.endswith("ReadTimeoutError: HTTPSConnectionPool: timed out")
    assert build.reason(["a\n", "ERROR: b\n", "ERROR: c\n"]) == "ERROR: b"
    assert build.reason(["", "said nothing\n"]) == "said nothing"


def test_a_path_is_replaced_and_no_file_beside_it(build, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/old/python\n")
    (tmp_path / "bin/tool~").write_text("theirs")
    build.correct(tmp_path, "/old", "/new")
    assert (tmp_path / "bin/tool").read_text() == "#!/new/python\n"
    assert (tmp_path / "bin/tool~").read_text() == "theirs"


@pytest.mark.whole
def test_an_interrupted_change_leaves_the_old_one(set_up, tmp_path):
    """No network, and kill -9 at several moments.

    What pip is told does not send the new packages elsewhere.
    """
    (repo, venv), elsewhere = set_up(tmp_path), tmp_path / "elsewhere"
    stays = plant(venv)
    old, new = (repo / f".venv.workshop-{name}" for name in ("old", "new"))
    needing(repo, "one", "nowhere-to-be-had")
    ran = source(repo, **NO_NETWORK | {"PIP_RETRIES": "1"})
    refused(ran, "nowhere-to-be-had.*network")
    assert "WARNING: Retrying after connection broken" in ran[0]
    assert beside(venv) == [".venv", ".venv.lock"]
    needing(repo, "one", "three")
    made = (venv / "workshop-base").read_text()
    for moment in "workshop-base", "lib/python*/site-packages/three.py":
        killed(command(repo), lambda: list(new.glob(moment)),  # noqa: B023
               environment(repo))
        if not venv.exists() or imports(venv, "three"):
            break  # it was faster than this loop
        assert (venv / "workshop-base").read_text() == made
        assert imports(venv, "one", "two")
        stays()
    if venv.exists() and not old.exists():
        venv.rename(old)  # as it is between the two renames
    refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    works(repo, PACKAGES, **misled(repo, elsewhere))
    assert imports(venv, "one", "two", "three")
    assert {*os.listdir(elsewhere)} == {"module", "pip.conf"}
    stays()
    assert beside(venv) == [".venv", ".venv.lock"]


@pytest.mark.whole
def test_what_this_clone_has_not_made_stays(set_up, tmp_path):
    """In the clone's own place, and beside it."""
    repo, venv = set_up(tmp_path)
    far = venv.rename(tmp_path / "far")
    new = repo / ".venv.workshop-new"
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
    venv.symlink_to(far)
    other = tiny_clone(tmp_path / "other")
    (other / ".venv").symlink_to(far)
    for repo_ in repo, other:
        needing(repo_, "one" if repo_ is other else "three")
        assert ("installing" in works(repo_)) == (repo_ is repo)
    assert venv.is_symlink()


def test_the_filter_of_notebooks_goes_into_no_other_repository(
        set_up, tmp_path):
    """One that the shell's git is told, or one around a clone without git.

    A clone's first status, which the doctor asks for, runs it for none: that
    took a second of CPU time for each notebook.
    """
    needs("git")
    repo, venv = set_up(tmp_path)
    called = venv / "bin/nbstripout.called"
    program(venv / "bin/nbstripout", '#!/bin/sh\ntouch "$0.called"; cat\n')
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(tmp_path, "init", "-q")
    (repo / ".git").mkdir()

    def has_it(folder):
        return "nbstripout" in (folder / ".git/config").read_text()
    works(repo)
    assert not has_it(tmp_path)
    (repo / ".gitattributes").write_text("*.ipynb filter=nbstripout\n")
    (repo / "one.ipynb").write_text("{}")
    commit_all(repo)
    os.utime(repo / "one.ipynb", (1, 1))  # as if git did not know the time
    ask = (f"unset GIT_DIR GIT_WORK_TREE; cd '{repo}'; "
           "git describe --always --dirty")
    out = works(repo, ask, GIT_DIR=str(other / ".git"),
                GIT_WORK_TREE=str(other))
    assert re.search(r"status=0\n[0-9a-f]+\n$", out), out
    assert has_it(repo) and not has_it(other) and not called.exists()
    (repo / "one.ipynb").write_text("[]")
    assert works(repo, ask).endswith("-dirty\n") and called.exists()


# ------------------------------------------------------ one that is shared

# How a site may write the path /…/shared/venv.
SPELLINGS = {
    "slashes": "//{venv}/.././venv/.///", "link above": "{top}/above/venv",
    "odd link": "{top}/it's \"a:b`c` $d", "relative": "../shared/venv",
    "tilde": "~/shared/venv", "bind mount": "{top}/mount",
    "bind mount above": "{top}/mount above/venv", "case": "{top}/shared/VENV"}


def test_every_spelling_is_the_same_environment(set_up, tmp_path, mount):
    top = tmp_path
    maker, venv = set_up(top, shared=True)
    (top / "above").symlink_to(venv.parent)
    (top / "it's \"a:b`c` $d").symlink_to(venv)
    for place, of in ("mount", venv), ("mount above", venv.parent):
        (top / place).mkdir()
        mount("--bind", of, top / place)
    stays, inode = plant(venv), venv.stat().st_ino
    names = beside(venv)
    for spelling, path in SPELLINGS.items():
        named(maker, path.format(venv=venv, top=top))
        ran = source(maker, "echo $VIRTUAL_ENV; which python", HOME=str(top))
        if spelling == "case":
            refused(ran, "VENV is not complete")
            continue
        out, err = ran
        assert "active" in out and "setting up" not in out and not err, ran
        assert out.endswith(f"{venv}\n{venv}/bin/python\n"), ran
        stays()
        assert venv.stat().st_ino == inode and beside(venv) == names
    assert not (maker / ".venv").exists()

    # it is renamed where it is, not where a link is
    for place, package in ("bind mount", "three"), ("odd link", "one"):
        needing(maker, package)
        named(maker, SPELLINGS[place].format(top=top))
        ran = source(maker, **YES)
        assert "installing" in ran[0] and imports(venv, "one", "three")
        if place == "bind mount":
            refused(ran, "mount .* mount it again")
        stays()
    assert beside(venv) == ["venv", "venv.lock"]


def test_a_path_that_no_environment_may_have(tmp_path):
    """Python's venv refuses a colon, and its script runs what is in ``."""
    repo = tiny_clone(tmp_path / "clone")
    for name in ("a:b", 'a"b', "a`b`", "a$b", "a\\b"):
        folder = tmp_path / name
        folder.mkdir()
        named(repo, folder)
        refused(source(repo), "its path must not have")
        assert not list(folder.iterdir()) and beside(folder) == [name]
    refused(source(tiny_clone(folder)), "its path must not have")
    # the clone's own path, where it shares an environment
    repo = tiny_clone(tmp_path / "a:b")
    named(repo, tmp_path)
    refused(source(repo), "colon")


def commit(repo, date):
    git(repo, "init", "-q")
    git(repo, "commit", "-q", "--allow-empty", "-m", "new",
        GIT_COMMITTER_DATE=f"{date} +0000")


@pytest.mark.whole
def test_clones_with_other_requirements(set_up, tmp_path):
    """Only a word changes what they share, and only from a newer clone."""
    needs("git")
    maker, venv = set_up(tmp_path / "maker", shared=True)
    stays = plant(venv)
    older, newer = (tiny_clone(tmp_path / name) for name in ("older", "newer"))
    for repo, billions in (maker, 2), (older, 1), (newer, 3):
        commit(repo, billions * 10 ** 9)
        named(repo, venv)
    needing(maker, "one", "one==1.0")
    works(maker, **YES)
    for repo in older, newer:
        needing(repo, "one", "three")
        assert "INSTALL=yes" in works(repo)
    refused(source(older, **YES), "newer clone .*/maker/my own clone has")
    assert not imports(venv, "three")
    stays()

    out = works(newer, "pip --version", **YES)
    assert "workshop-old" in out
    assert f"from {venv}/lib" in out and imports(venv, "one", "two", "three")
    old = venv.with_name("venv.workshop-old")
    assert imports(old, "one", "two") and not imports(old, "three")
    stays()
    stays(old)
    refused(source(maker, **YES), "newer clone")
    needing(newer, "one")  # its maker alone could remove the old one
    refused(source(newer, **YES), "workshop-old is in the way")
    stays()


@pytest.mark.whole
def test_two_clones_at_once(set_up, tmp_path):
    """The second uses what the first has made."""
    maker, venv = set_up(tmp_path, shared=True)
    repos, shells = [maker, tiny_clone(tmp_path / "b")], []
    for repo in repos:
        named(repo, venv)
        needing(repo, "one", "three")
    for repo in repos:
        shells.append(subprocess.Popen(
            command(repo, f"python -c 'import three'; {PACKAGES}"),
            cwd=tmp_path, env=environment(repo, **YES),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
    outs = [shell.communicate()[0] for shell in shells]
    for repo, out in zip(repos, outs, strict=True):
        assert "status=0" in out and out.endswith(f"{repo}\n"), out
    assert "".join(outs).count("installing") == 1
    left = {"venv.workshop-old"} & {*beside(venv)}  # the other clone's
    assert beside(venv) == ["venv", "venv.lock", *left]


def test_a_full_disk(set_up, tmp_path, mount):
    """The old one works, and nothing new is left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=200m", "none", disk)
    repo, venv = set_up(disk, shared=True)
    stays = plant(venv)
    wheel(repo / "wheels", "big", {
        "big.py": "", "data": "0123456789abcdef" * 2 ** 20})  # 16 MB
    needing(repo, "one", "big")
    size = shutil.disk_usage(disk).used + 2 ** 22  # 4 MB more
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
    refused(source(repo, **YES), "No space left|no space left")
    assert imports(venv, "one", "two") and not imports(venv, "big")
    assert beside(venv) == ["venv", "venv.lock"]
    stays()
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    works(repo, **YES)
    assert imports(venv, "big")
    stays()


def test_a_folder_that_cannot_have_neighbours(tmp_path, mount):
    """It is a mount, and the folder around it can only be read."""
    top, venv = tmp_path / "shared", tmp_path / "shared" / "venv"
    top.mkdir()
    mount("-t", "tmpfs", "none", top)
    venv.mkdir()
    mount("-t", "tmpfs", "none", venv)
    subprocess.run(["mount", "-o", "remount,ro", top], check=True)
    repo = tiny_clone(tmp_path)
    named(repo, venv)
    killed(command(repo), (venv / ".workshop-new/pyvenv.cfg").exists,
           environment(repo))
    assert not (venv / "bin").exists()
    out = works(repo, f"{PACKAGES}; pip --version")
    assert f"from {venv}/lib" in out
    stays = plant(venv)
    needing(repo, "one", "three")
    refused(source(repo, **YES), "shared is not writable")
    stays()
    subprocess.run(["mount", "-o", "remount,ro", venv], check=True)
    # a file system that can only be read
    assert works(repo, PACKAGES).endswith(f"{repo}\n")
    refused(source(repo, **YES), "not writable")
    stays()


def test_a_shared_environment_of_another(desk, tmp_path):
    """It is used as it is."""
    if os.getuid():
        pytest.skip("only root can give a folder to somebody else")
    repo, shared = tiny_clone(tmp_path), desk / ".venv"
    named(repo, shared)
    with open(repo / "site.sh", "a") as site:
        site.write("export WORKSHOP_DATA=/some/data\n")
    os.chown(shared, 65534, -1)
    try:
        # each their own `workshop`
        out = works(repo, f"{PACKAGES}; echo $WORKSHOP_DATA")
        assert out.endswith(f"{repo}\n/some/data\n"), out
        needing(repo, "one", "three")
        out = works(repo)
        assert "ask its owner" in out and "installing" not in out
        base = shared / "workshop-base"
        whole = base.read_text()
        base.write_text("unfinished\n")
        refused(source(repo), "not complete")
        base.write_text(whole)
    finally:
        os.chown(shared, os.getuid(), -1)
    named(repo, tmp_path / "none")
    refused(source(repo), "not complete")
    assert not (repo / ".venv").exists()


# ------------------------------------------------------- real packages, pins


@pytest.mark.whole
def test_an_environment_made_by_hand_is_left_alone(tmp_path):
    repo = tiny_clone(tmp_path)
    venv = tmp_path / "by hand"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv],
                   check=True)
    site, = venv.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    named(repo, venv)
    made = set(venv.iterdir())
    out, err = source(repo, "echo $TIKTOKEN_CACHE_DIR")
    assert out.endswith(f"status=0\n{repo}/fineweb/.cache/tiktoken\n"), err
    assert set(venv.iterdir()) == made


@pytest.mark.whole
def test_a_copy_of_a_clone_with_the_sites_own_pytorch(set_up, tmp_path):
    """It makes all of its environment anew, as with another Python.

    In a folder with a space and an apostrophe. A module brings PyTorch by
    PYTHONPATH, in a version of its own.
    """
    original, venv = set_up(tmp_path / "a")
    stays = plant(venv)
    repo = shutil.copytree(original, tmp_path / "it's mine", symlinks=True)
    refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    needing(repo, "one", "torch")
    (repo / "environment/constraints.txt").write_text("torch==2.13.0\n")
    (repo / "site.sh").write_text("WORKSHOP_SITE_PACKAGES=yes\n")
    module = tmp_path / "module"
    module.mkdir()
    ZipFile(module / wheel(module, "torch", {"torch.py": ""})
            ).extractall(module)
    (module / "torch.py").write_text("raise OSError('no libcudart.so')")
    home = tmp_path / "home"  # where its maker has another package
    local = home / ".local/lib/python{}.{}/site-packages".format(
        *sys.version_info)
    local.mkdir(parents=True)
    ZipFile(repo / "wheels/one-1.0-py3-none-any.whl").extractall(local)
    out, err = source(repo, PYTHONPATH=str(module), HOME=str(home))
    assert imports(repo / ".venv", "one")
    assert "status=0" in out and err.count("\n") == 1, out + err
    assert "cannot be loaded here (OSError: no libcudart.so)" in err
    (module / "torch.py").write_text("")
    out = works(repo, "python -c 'import torch; print(torch.__file__)'",
                PYTHONPATH=str(module))
    assert out.endswith(f"{module}/torch.py\n"), out
    for clone in repo, original:
        out = works(clone, "pip --version", PYTHONPATH=str(module))
        assert f"from {clone}/.venv/lib" in out and "setting up" not in out
        stays(clone / ".venv")
    marker = venv / "workshop-base"
    marker.write_text(re.sub("(?m)^base=.*", "base=3 9", marker.read_text()))
    refused(source(original, WORKSHOP_INSTALL="no"), "not up to date")
    # whatever sends packages elsewhere: that they are not here is seen
    (module / "sitecustomize.py").write_text(
        f"import os\nos.environ['PIP_PREFIX'] = {str(tmp_path / 'else')!r}\n")
    needing(repo, "one", "torch", "three")
    refused(source(repo, PYTHONPATH=str(module)), "elsewhere.*three")
    assert "three" not in (repo / ".venv/workshop-base").read_text()


def test_the_pins_are_for_any_patch_release_of_python():
    """Debian 12 has 3.11.2, Ubuntu 24.04 has 3.12.3: here may be a later."""
    first = "{}.{}.0".format(*sys.version_info)
    pins = (ROOT / "environment/constraints.txt").read_text().split()
    for package in distributions():
        if f"{package.name}=={package.version}" in pins:
            needed = package.metadata.get("Requires-Python", "")
            assert first in SpecifierSet(needed), (package.name, needed)


def tracked():
    return [name for name in git(ROOT, "ls-files").split("\n")
            if (ROOT / name).is_file()]


@pytest.mark.whole
def test_shellcheck():
    needs("shellcheck", "git")
    # those that differ only in their comments are one
    scripts = {re.sub("(?m)^#[^!].*", "", (ROOT / name).read_text()): name
               for name in tracked()
               if name == ".ci/run" or name.endswith(".sh")}.values()
    assert {"activate.sh", "batchfiles/job.sh"} <= {*scripts}
    subprocess.run(["shellcheck", *scripts], cwd=ROOT, check=True)


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check", *(
        name for name in tracked() if name.endswith((".py", ".ipynb")))],
        cwd=ROOT, check=True)
