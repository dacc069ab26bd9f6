"""activate.sh in real shells: uv, on tiny packages."""

import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import sysconfig
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import commit_all, git, needs, program, tracked
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from shells import (
    CLOSED,
    PACKAGES,
    SHELLS,
    command,
    environment,
    killed,
    named,
    needing,
    refused,
    source,
    tiny_clone,
    wheel,
    works,
)
from shells import mount as mount  # a fixture

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = {"PIP_FIND_LINKS": "", "PIP_NO_INDEX": "0",
              "PIP_INDEX_URL": CLOSED, "PIP_RETRIES": "0"}
YES = {"WORKSHOP_INSTALL": "yes"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory, set_up):
    """A clone that is set up; a test that changes it puts it back."""
    return set_up(tmp_path_factory.mktemp("desk"))[0]


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


@pytest.mark.parametrize(("words", "said"), [
    *(([*how, "activate.sh"], r"activate\.sh.*source.*\n") for how in (
        ["bash"], ["zsh"], ["sh"], ["env", "PATH=.:/usr/bin:/bin"])),
    *(([how, "-c", "source activate.sh"], r"(?s).*bash or zsh.*")
      for how in ("fish", "tcsh"))], ids=str)
def test_only_bash_and_zsh_source_it(clone, words, said):
    needs(words[0])
    ran = subprocess.run(words, cwd=clone, capture_output=True, text=True)
    assert ran.returncode and re.fullmatch(said, ran.stdout + ran.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_again_it_changes_nothing_and_leaves_the_shell_as_it_was(
        clone, shell, tmp_path):
    """By another way to it, without a network."""
    made = (clone / ".venv/workshop-base").stat().st_mtime_ns
    link = tmp_path / "another way to it"
    link.symlink_to(clone)
    listing = {"bash": "set -o; compgen -v; compgen -A function",
               "zsh": "setopt; print -l ${(k)parameters} ${(k)functions}"}
    again = f"source {shlex.quote(str(clone / 'activate.sh'))} >/dev/null\n"
    out = works(
        link, f"{PACKAGES}; python -c 'import sys; print(sys.prefix)'\n"
        f"{again} echo PATH=$PATH:; echo PYTHONPATH=$PYTHONPATH\n"
        f"{shell} -c {shlex.quote(again + 'echo INNER=$PATH:')}\n"
        f"deactivate; echo AFTER=$PATH; {listing[shell]}",
        before=f"set -u; {listing[shell]}; echo BEFORE=$PATH",
        shell=shell, **NO_NETWORK,
        # of earlier days, and of a job in which somebody types
        PYTHONPATH=f"{clone}/rankcheck/why/hook:"
        f"{clone}/rankcheck/src/rankcheck/system/hook:/else where")
    assert "installing" not in out and f"{clone}\n{clone / '.venv'}\n" in out
    assert (clone / ".venv/workshop-base").stat().st_mtime_ns == made
    bin_ = f"{clone / '.venv/bin'}:"
    assert re.search(r"^PYTHONPATH=(.*)", out, re.M)[1] == (
        f"{clone}:{clone}/rankcheck/src:/else where")
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


@pytest.mark.parametrize("before", [
    "CDPATH={}", "cd() { builtin cd \"$@\" && ls; }; ls() { echo mine; }; "
    "export -f cd ls"])  # as in many a .bashrc: every bash gets them
def test_it_is_found_whatever_cd_does(clone, tmp_path, before):
    (tmp_path / clone.name).mkdir()
    out = works(clone,
                f"source {shlex.quote(clone.name)}/activate.sh\necho $?",
                before=before.replace("{}", str(tmp_path)))
    assert out.endswith("\n0\n") and "is incomplete" not in out, out


def test_a_module_added_later_is_found(clone):
    site, again = clone / "site.sh", shlex.quote(str(clone / "activate.sh"))
    try:
        out, _ = source(clone, f"""\
            echo 'PATH="/some/module:$PATH"' >{shlex.quote(str(site))}
            source {again}; echo $PATH""")
        assert out.split("\n")[-2].startswith(
            f"{clone}/.venv/bin:/some/module:")
        for text, words in ("false || return\n", "site.sh failed"), (
                "export SBATCH_ACCOUNT=a\r\n", "dos2unix"):
            site.write_bytes(text.encode())
            for shell in SHELLS:
                refused(source(clone, shell=shell), words)
    finally:
        site.unlink()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("before", ["", "set -eu"])
def test_a_site_file_with_options_and_names_of_its_own(clone, shell, before):
    site = clone / "site.sh"
    show = ("echo $-; set -o | grep -E '^(pipefail|noclobber|errexit) '; "
            "printf '%q\\n' \"$IFS\"")
    try:
        site.write_text(
            "set -euo pipefail\nset -o noclobber\nset +e -e\n"
            "root=/oops code=/oops venv=/oops entries=/oops option=/oops\n"
            "IFS=:\n")
        out = works(clone, f"{show}; {PACKAGES}", shell=shell,
                    before=f"{before}\n{show} || true; echo then")
    finally:
        site.unlink()
    options = out.partition("then\n")[0]
    assert out.endswith(f"{clone}\n") and f"status=0\n{options}" in out, out


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
index-url = {index}
find-links =
    /nowhere
    {links}
[install]
user = true
target = {elsewhere}
"""


@pytest.fixture
def index(tmp_path):
    """The address of an index of this folder's packages; one by https."""
    needs("openssl")
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes",
                    "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", key],
                   capture_output=True, check=True)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "index")
    with (ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
          ThreadingHTTPServer(("127.0.0.1", 0), handler) as secure):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(key)
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        for each in server, secure:
            threading.Thread(target=each.serve_forever).start()
        yield (f"http://127.0.0.1:{server.server_port}",
               f"https://127.0.0.1:{secure.server_port}")
        for each in server, secure:
            each.shutdown()


def test_packages_come_from_where_pip_has_them(set_up, tmp_path, index):
    """A mirror and a folder, by pip.conf; no setting puts them elsewhere."""
    (repo, venv), elsewhere = set_up(tmp_path), tmp_path / "elsewhere"
    module = elsewhere / "module"  # a module's, while it is loaded
    module.mkdir(parents=True)
    for name, folder in ("three", repo / "wheels"), ("four", None):
        folder = folder or tmp_path / "index/four"
        folder.mkdir(parents=True, exist_ok=True)
        ZipFile(folder / wheel(folder, name, {f"{name}.py": ""})
                ).extractall(module)
    (elsewhere / "pip.conf").write_text(PIP_CONF.format(
        links=(repo / "wheels").as_uri(), elsewhere=elsewhere, index=index[0]))
    needing(repo, "one", "three", "four")
    works(repo, PACKAGES, PIP_CONFIG_FILE=str(elsewhere / "pip.conf"),
          PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_PREFIX=str(elsewhere),
          PIP_DRY_RUN="1", PIP_ROOT=str(elsewhere), PIP_PYTHON="/nowhere",
          PIP_NO_DEPS="1", PYTHONHOME="/nowhere", PYTHONPATH=str(module))
    assert imports(venv, "one", "two", "three", "four")
    assert {*os.listdir(elsewhere)} == {"module", "pip.conf"}


UV_ELSEWHERE = """\
{head}
target = "{elsewhere}/target"
no-deps = true
link-mode = "symlink"
exclude-newer = "2001-01-01"
"""


@pytest.mark.parametrize("place", ["above", "workspace", "user", "variable",
                                   "variables"])
def test_no_setting_of_uv_puts_packages_elsewhere(set_up, tmp_path, place):
    """Of a project above the clone, of the user, or of a variable."""
    repo, venv = set_up(tmp_path / "projects")
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    text = UV_ELSEWHERE.format(head="[pip]", elsewhere=elsewhere)
    (home / ".config" / "uv").mkdir(parents=True)
    changes = {"HOME": str(home)}
    if place == "above":
        (repo.parent / "uv.toml").write_text(text)
    elif place == "workspace":
        head = ('[tool.uv.workspace]\nmembers = ["*"]\n[tool.uv.sources]\n'
                f'three = {{ path = "{elsewhere}" }}\n[tool.uv.pip]')
        (repo.parent / "pyproject.toml").write_text(UV_ELSEWHERE.format(
            head=head, elsewhere=elsewhere))
    elif place == "user":
        (home / ".config" / "uv" / "uv.toml").write_text(text)
    elif place == "variable":
        (home / "uv.toml").write_text(text)
        changes["UV_CONFIG_FILE"] = str(home / "uv.toml")
    else:
        changes |= {"UV_LINK_MODE": "symlink", "UV_REQUIRE_HASHES": "1",
                    "UV_OVERRIDE": "/nowhere", "UV_NO_EDITABLE": "1",
                    "UV_EXCLUDE_NEWER": "2001-01-01", "UV_WORKING_DIR": "/"}
    needing(repo, "one", "three")
    assert works(repo, PACKAGES, **changes).endswith(f"{repo}\n")
    assert imports(venv, "one", "two", "three") and not elsewhere.exists()
    site, = venv.glob("lib/python*/site-packages")
    assert not (site / "three.py").is_symlink()


@pytest.mark.parametrize("place", ["user", "variable", "UV_DEFAULT_INDEX",
                                   "UV_INDEX_URL", "UV_FIND_LINKS"])
def test_packages_come_from_where_uv_has_them(set_up, tmp_path, index, place):
    """A mirror or a folder that a user or a site has chosen on purpose."""
    (repo, venv), home = set_up(tmp_path), tmp_path / "home"
    (tmp_path / "index/four").mkdir(parents=True)
    wheel(tmp_path / "index/four", "four", {"four.py": ""})
    needing(repo, "four")
    (home / ".config" / "uv").mkdir(parents=True)
    own = home / ".config" / "uv" / "uv.toml"
    own.write_text(f'[[index]]\nurl = "{index[0]}"\ndefault = true\n'
                   f'[pip]\nfind-links = ["{(repo / "wheels").as_uri()}"]\n')
    changes = {"HOME": str(home), "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
    if place == "variable":
        changes["UV_CONFIG_FILE"] = str(own.rename(home / "site.toml"))
    elif place == "UV_FIND_LINKS":
        own.unlink()
        changes |= {"PIP_NO_INDEX": "1", "UV_FIND_LINKS": ",".join(
            folder.as_uri() for folder in (repo / "wheels",
                                           tmp_path / "index/four"))}
    elif place != "user":
        own.unlink()
        changes |= {place: index[0],
                    "UV_FIND_LINKS": (repo / "wheels").as_uri()}
    works(repo, PACKAGES, **changes)
    assert imports(venv, "one", "two", "four")


@pytest.mark.parametrize(("settings", "said"), [
    ({"PIP_INDEX_URL": CLOSED}, "Connection refused.*name a mirror"),
    ({"PIP_INDEX_URL": "http://nowhere.invalid"}, "lookup.*name a mirror"),
    ({"PIP_INDEX_URL": "http://pypi.org/simple", "PIP_PROXY": CLOSED},
     "refused.*name a mirror"),
    ({"PIP_NO_INDEX": "1"}, "nowhere-to-be-had was not found"),
    ({"PIP_INDEX_URL": "{index[0]}"}, "nowhere-to-be-had was not found"),
    ({"PIP_INDEX_URL": "{index[1]}", "https_proxy": ""},
     "certificate.*PIP_CERT"),
], ids=str)
def test_without_packages_it_stays_as_it_is(set_up, tmp_path, settings, said,
                                            index):
    """In a line; jobs install nothing, and go on where nothing is new."""
    (repo, venv) = set_up(tmp_path)
    (tmp_path / "index").mkdir()
    made = (venv / "workshop-base").read_text()
    needing(repo, "one", "nowhere-to-be-had")
    settings = {name: value.format(index=index)
                for name, value in settings.items()}
    refused(source(repo, **NO_NETWORK | settings), said)
    assert (venv / "workshop-base").read_text() == made
    refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    needing(repo, "one==1.0")


def test_an_interrupted_set_up_goes_on(tmp_path):
    """After kill -9 at any moment, in a folder that others share."""
    repo, venv = tiny_clone(tmp_path), tmp_path / "shared/venv"
    venv.mkdir(parents=True)
    named(repo, venv)
    other = tiny_clone(tmp_path / "other")
    named(other, venv)
    for moment in ("workshop-base", "bin/python", "bin/pip",
                   ".workshop-[0-9]*/*",
                   "lib/python*/site-packages/one*"):
        killed(command(repo), lambda: list(venv.glob(moment)),  # noqa: B023
               environment(repo))
        refused(source(other), "is incomplete")
        refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    site, = venv.glob("lib/python*/site-packages")
    (site / "one.py").unlink(missing_ok=True)
    stays = plant(venv)
    for clone in repo, other:
        out = works(clone, f"{PACKAGES}; pip --version")
        assert f"from {venv}/lib" in out and imports(venv, "one", "two")
    stays()
    assert not [*venv.glob(".workshop-[0-9]*")]
    assert not (repo / ".venv").exists()


# ------------------------------------------------- parts, such as the tests


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tests_packages_come_with_a_word(set_up, tmp_path, shell):
    """Without them a line says so; once they are there, they stay."""
    repo, venv = set_up(tmp_path)
    (repo / "fineweb/requirements.txt").write_text("three\n")
    hint = "For pytest: source activate.sh tests\n"
    assert hint in works(repo, shell=shell) and not imports(venv, "five")
    out = works(repo, 'echo "left: $*"', arguments="tests fineweb",
                shell=shell, before="set -- of the shell")
    assert "those of tests fineweb" in out and hint not in out, out
    assert out.endswith("left: of the shell\n"), out
    assert imports(venv, "one", "two", "three", "five")
    for arguments in "", "tests", "fineweb tests":
        out = works(repo, arguments=arguments, shell=shell, **NO_NETWORK)
        assert "installing" not in out and hint not in out, out
    (repo / "tests/requirements.txt").write_text("five\nsix\n")
    out = works(repo, **NO_NETWORK)
    assert "installing" not in out and hint in out, out
    needing(repo, "one<2")  # nothing to do, but for the tests
    assert "installing" in works(repo, arguments="tests")
    assert imports(venv, "six")


def test_a_new_environment_with_parts(tmp_path):
    """Also of pyproject.toml; an interrupted one keeps them."""
    repo = tiny_clone(tmp_path)
    venv = repo / ".venv"
    killed(command(repo, arguments="tests deepspeed"),
           lambda: list(venv.glob(".workshop-[0-9]*/*")), environment(repo))
    assert "those of tests deepspeed" in works(repo, PACKAGES)
    assert imports(venv, "one", "two", "five", "six")
    assert not imports(venv, "three")


def test_words_that_are_not_for_it(set_up, tmp_path):
    """Those of a script that sources it, and of a job; a wrong one is named.

    Such a script's are all that it sees, if it is sourced without arguments.
    """
    repo, venv = set_up(tmp_path)
    (repo / "fineweb/requirements.txt").write_text("three\n")
    for before in "set -- --preset tiny tests", "set -- tests else":
        assert "installing" not in works(repo, PACKAGES, before=before)
    works(repo, arguments="tests", WORKSHOP_INSTALL="no")
    assert not imports(venv, "five")
    (repo / "site.sh").write_text('echo "site.sh: $#"; set -- tests\n')
    for shell in SHELLS:
        out = works(repo, 'echo "left: $*"', arguments="fineweb", shell=shell,
                    before="set -u -- the shells")
        assert "site.sh: 0\n" in out and out.endswith("left: the shells\n")
    assert imports(venv, "three") and not imports(venv, "five")
    said = subprocess.run(
        ["bash", repo / "setup.sh", "make", venv, "", "himBH", "tests",
         "test"], env=environment(repo) | {"TIKTOKEN_CACHE_DIR": str(repo)},
        capture_output=True, text=True)
    assert said.returncode == 0 and not imports(venv, "five")
    assert said.stderr == ("activate.sh: no such part: test; fix: choose from "
                           "tests, fineweb, transformers, deepspeed\n")


def make_former(venv):
    """Let an environment be that of an activate.sh before there were parts."""
    marker = venv / "workshop-base"
    text = re.sub("(?m)^parts=.*\n", "", marker.read_text())
    marker.write_text(re.sub("(?m)^requirements=.*", "requirements=1 1", text))


@pytest.mark.parametrize("shared", [False, True])
def test_a_former_environment_is_used_while_it_fits(set_up, tmp_path, shared):
    """Without an installation and without a word, also for the tests."""
    repo, venv = set_up(tmp_path, shared=shared)
    works(repo, arguments="tests", **YES)
    make_former(venv)
    before = (venv / "workshop-base").read_text()
    other = tiny_clone(tmp_path / "other")
    if shared:
        named(other, venv)
    for clone in {repo, other if shared else repo}:
        for arguments in "", "tests":
            out = works(clone, PACKAGES, arguments=arguments, **NO_NETWORK)
            assert out.count("\n") == 4, out  # its two lines, and ours
    works(repo, WORKSHOP_INSTALL="no")
    assert (venv / "workshop-base").read_text() == before
    needing(repo, "one>=2")
    if shared:
        assert "if something is missing" in works(repo, **NO_NETWORK)
    else:
        refused(source(repo, **NO_NETWORK), "cannot set up")
        refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")


def test_the_clones_own_commands_have_to_be_there(set_up, tmp_path):
    """An environment of before they had another name is made anew."""
    repo, venv = set_up(tmp_path)
    make_former(venv)
    assert "installing" not in works(repo)
    with open(repo / "pyproject.toml", "a") as file:
        file.write('[project.scripts]\nrankcheck = "rankcheck:start"\n')
    assert "installing" in works(repo)
    assert "installing" not in works(repo)


def test_parts_of_a_shared_environment(set_up, tmp_path):
    """Only its owner's word adds them; what others can do is said."""
    maker, venv = set_up(tmp_path, shared=True)
    other = tiny_clone(tmp_path / "other")
    named(other, venv)
    advice = "WORKSHOP_INSTALL=yes source activate.sh tests"
    for repo in maker, other:
        out = works(repo)
        assert f"the owner of {venv} runs: {advice}\n" in out, out
        out = works(repo, arguments="tests")
        assert f"ask its owner to run `{advice}`\n" in out, out
        assert out.count("pytest") == 0 and not imports(venv, "five")
    assert "installing" in works(maker, arguments="tests", **YES)
    for repo in maker, other:
        assert "source activate.sh" not in works(repo, arguments="tests")
    assert imports(venv, "five")


# ------------------------------------------------- whose environment it is


def test_what_this_clone_has_not_made_stays(set_up, tmp_path):
    """In the clone's own place; a link is its own if it has made it there."""
    repo, venv = set_up(tmp_path)
    far = venv.rename(tmp_path / "far")
    venv.mkdir()
    stays = plant(venv)
    for word in {}, YES:
        refused(source(repo, **word), "did not make it")
    stays()
    shutil.rmtree(venv)
    venv.symlink_to(tmp_path / "nowhere")
    refused(source(repo), "did not make it")
    venv.unlink()
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
    repo, _ = set_up(tmp_path)
    called = repo / "called"
    script = repo / "workshop/jobs/notebook_filter.py"
    with open(script, "a") as file:
        file.write(f"open({str(called)!r}, 'w').close()\n")
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(tmp_path, "init", "-q")
    (repo / ".git").mkdir()

    def has_it(folder):
        return "notebook_filter" in (folder / ".git/config").read_text()
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
    script.unlink()  # as where somebody looks at an older commit
    commit_all(repo)
    assert not works(repo, ask).endswith("-dirty\n")


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
    stays = plant(venv)
    for number, (spelling, path) in enumerate(SPELLINGS.items()):
        named(maker, path.format(venv=venv, top=top))
        needing(maker, ("three", "one")[number % 2])
        ran = source(maker, HOME=str(top), **YES)
        if spelling == "case":
            refused(ran, "VENV is unchanged: it is incomplete")
        else:
            assert "installing" in ran[0] and not ran[1], ran
        stays()
    assert imports(venv, "one", "three")
    assert not (maker / ".venv").exists()


def test_a_path_that_no_environment_may_have(tmp_path):
    """No PATH has a colon in a name, and no PYTHONPATH."""
    repo = tiny_clone(tmp_path / "clone")
    folder = tmp_path / "a:b"
    folder.mkdir()
    named(repo, folder)
    refused(source(repo), "colon|PATH separator")
    assert not (folder / "bin").exists()
    repo = tiny_clone(folder)
    named(repo, tmp_path)
    refused(source(repo), "colon")


def test_a_path_that_is_odd(tmp_path):
    name = 'a"b `b` $d \\b it\'s ä'
    repo = tiny_clone(tmp_path / name)
    assert works(repo, f"{PACKAGES}; pip --version").count(name) > 2


def commit(repo, date):
    git(repo, "init", "-q")
    git(repo, "commit", "-q", "--allow-empty", "-m", "new",
        GIT_COMMITTER_DATE=f"{date} +0000")


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
    refused(source(older, **YES), "newer clone .*/maker/my own clone made it")
    assert not imports(venv, "three")
    works(newer, PACKAGES, **YES)
    assert imports(venv, "one", "two", "three")
    refused(source(maker, **YES), "newer clone")
    stays()


@pytest.mark.parametrize("made", [True, False])
def test_two_clones_at_once(set_up, tmp_path, made):
    """The second waits, says so, and uses what the first has made."""
    maker, venv = set_up(tmp_path, shared=True)
    repos = [maker, tiny_clone(tmp_path / "b")]
    for repo in repos:
        named(repo, venv)
        needing(repo, "one", "three")
    if not made:
        shutil.rmtree(venv)
        venv.mkdir()
    shells = [subprocess.Popen(
        command(repo, f"python -c 'import three'; {PACKAGES}"),
        cwd=tmp_path, env=environment(repo, **YES), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE) for repo in repos]
    outs, errors = zip(*(shell.communicate() for shell in shells), strict=True)
    for repo, out in zip(repos, outs, strict=True):
        assert "status=0" in out and out.endswith(f"{repo}\n"), (outs, errors)
    assert "".join(outs).count("installing") == 1
    assert re.fullmatch(r"activate\.sh: waiting for process \d+ of .*\n",
                        "".join(errors)), errors


def test_a_full_disk(set_up, tmp_path, mount):
    """The old one works; with room, it goes on."""
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
    refused(source(repo, **YES), "No space left.*free some disk space")
    assert works(repo, PACKAGES) and not imports(venv, "big")
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    works(repo, **YES)
    assert imports(venv, "big")
    stays()


def test_a_disk_that_can_only_be_read(tmp_path, mount):
    """Once it is set up, it is used as it is; so is a folder on a mount."""
    venv = tmp_path / "venv"
    venv.mkdir()
    mount("-t", "tmpfs", "none", venv)
    repo = tiny_clone(tmp_path)
    named(repo, venv)
    assert f"from {venv}/lib" in works(repo, f"{PACKAGES}; pip --version")
    needing(repo, "one", "three")
    subprocess.run(["mount", "-o", "remount,ro", venv], check=True)
    assert works(repo, PACKAGES).endswith(f"{repo}\n")
    refused(source(repo, **YES), "not writable")


def test_a_shared_environment_of_another(clone, tmp_path):
    """It is used as it is."""
    if os.getuid():
        pytest.skip("only root can give a folder to somebody else")
    repo, shared = tiny_clone(tmp_path), clone / ".venv"
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
        refused(source(repo, **YES), "may not change it")
        base = shared / "workshop-base"
        whole = base.read_text()
        base.write_text("unfinished\n")
        refused(source(repo), "is incomplete")
        base.write_text(whole)
    finally:
        os.chown(shared, os.getuid(), -1)
    named(repo, tmp_path / "none")
    refused(source(repo), "is incomplete")
    assert not (repo / ".venv").exists()


def test_the_demo_dataset_comes_with_a_shared_environment(set_up, tmp_path):
    """It is built once, by the clone that makes the environment."""
    maker, venv = set_up(tmp_path, shared=True)
    site, = (venv / "lib").glob("python*/site-packages")
    (site / "more.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(maker / "fineweb/demo")
    out, err = source(maker)
    assert "2,048 tokens" in out and "reading modules" in err, out + err
    built = (venv / "workshop-demo/manifest.json").read_text()
    assert built == (maker / "fineweb/demo/manifest.json").read_text()

    attendee = tiny_clone(tmp_path / "attendee")
    shutil.rmtree(attendee / "fineweb/demo")
    named(attendee, venv)
    out = works(attendee)
    assert f"copied from {venv}/workshop-demo" in out
    assert (attendee / "fineweb/demo/manifest.json").read_text() == built
    assert "copied" not in works(attendee)


def test_an_environment_made_by_hand_is_left_alone(tmp_path):
    repo = tiny_clone(tmp_path)
    venv = tmp_path / "by hand"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv],
                   check=True)
    site, = venv.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    named(repo, venv)
    made = set(venv.iterdir())
    out, err = source(repo, arguments="tests deepspeed")
    assert "did not make" in out and not err, out + err
    out, err = source(repo, "echo $TIKTOKEN_CACHE_DIR")
    assert "For pytest: pip install -r tests/requirements.txt\n" in out
    assert out.endswith(f"status=0\n{repo}/fineweb/.cache/tiktoken\n"), err
    assert set(venv.iterdir()) == made


def test_a_clone_that_moves_and_the_sites_own_pytorch(set_up, tmp_path):
    """In a folder with a space and an apostrophe.

    A module brings PyTorch by PYTHONPATH, in a version of its own.
    """
    original, venv = set_up(tmp_path / "a")
    stays = plant(venv)
    repo = original.rename(tmp_path / "it's mine")
    venv = repo / ".venv"
    assert f"from {venv}/lib" in works(repo, f"{PACKAGES}; pip --version")
    needing(repo, "one", "torch", "three")
    (repo / "constraints.txt").write_text("torch==2.13.0\n")
    (repo / "site.sh").write_text("WORKSHOP_SITE_PACKAGES=yes\n")
    refused(source(repo, WORKSHOP_INSTALL="no"), "a job installs nothing")
    module = tmp_path / "module"
    module.mkdir()
    for name in "torch", "three":
        ZipFile(module / wheel(module, name, {f"{name}.py": ""})
                ).extractall(module)
    (module / "torch.py").write_text("raise OSError('no libcudart.so')")
    home = tmp_path / "home"  # where its maker has another package
    local = home / ".local/lib/python{}.{}/site-packages".format(
        *sys.version_info)
    local.mkdir(parents=True)
    ZipFile(repo / "wheels/one-1.0-py3-none-any.whl").extractall(local)
    out, err = source(repo, PYTHONPATH=str(module), HOME=str(home))
    assert imports(venv, "one", "two") and not imports(venv, "three")
    assert "status=0" in out and err.count("\n") == 1, out + err
    assert "cannot be loaded here (OSError: no libcudart.so)" in err
    (module / "torch.py").write_text("")
    out = works(repo, "python -c 'import torch; print(torch.__file__)'",
                PYTHONPATH=str(module))
    assert out.endswith(f"{module}/torch.py\n"), out
    stays(venv)
    marker = venv / "workshop-base"  # another Python
    marker.write_text(re.sub("(?m)^base=.*", "base=3 9", marker.read_text()))
    refused(source(repo, WORKSHOP_INSTALL="no"), "not up to date")
    out, err = source(repo, arguments="tests deepspeed",
                      PYTHONPATH=str(module))
    assert "status=0" in out and imports(venv, "five", "six"), out + err
    stays(venv)


# -------------------------------------------------------------- pins, style


def test_the_pins_are_for_any_patch_release_of_python():
    """Debian 12 has 3.11.2, Ubuntu 24.04 has 3.12.3: here may be a later."""
    first = "{}.{}.0".format(*sys.version_info)
    pins = (ROOT / "constraints.txt").read_text().split()
    pinned = 0
    for package in distributions():
        name = canonicalize_name(package.name)
        if f"{name}=={package.version}" in pins:
            pinned += 1
            needed = package.metadata.get("Requires-Python", "")
            assert first in SpecifierSet(needed), (package.name, needed)
    assert pinned > 50


def test_shellcheck():
    needs("shellcheck", "git")
    # those that differ only in their comments are one
    scripts = {re.sub("(?m)^#[^!].*", "", (ROOT / name).read_text()): name
               for name in tracked(".ci/run", ".ci/constraints", "*.sh")
               }.values()
    assert {"activate.sh", "batchfiles/job.sh"} <= {*scripts}
    subprocess.run(["shellcheck", *scripts], cwd=ROOT, check=True)


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check",
                    *tracked("*.py", "*.ipynb")], cwd=ROOT, check=True)
