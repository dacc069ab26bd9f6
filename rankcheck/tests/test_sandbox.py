"""A watched script changes no file that was there, however it writes."""

import contextlib
import errno
import functools
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankcheck.engine import sandbox
from rankcheck.engine.ranks import launch
from rankcheck.system.errors import UserError
from rankcheck.verification.command import verify
from rankcheck_testing.support import SOURCE_PATH, is_installed, needs
from rankcheck_testing.user_files import TEXT, let_it_write, look
from rankcheck_testing.verify_cases import read

NUMPY_WAYS = {
    "tofile": "np.zeros(9).tofile(name)",
    "memmap": "np.memmap(name, np.uint8)[:] = 0"}

# Each writes to the file called `name`; after it comes what it needs first
WAYS = {
    "open": "open(name, 'w').write('new')",
    "append": "print('new', file=open(name, 'a', 1))",
    "update": "file = open(name, 'r+b'); file.write(b'new'); file.close()",
    "bytes": "open(os.fsencode(name), 'w').write('new')",
    "os.open": "os.write(os.open(name, os.O_WRONLY), b'new')",
    "in an open folder":
        "os.write(os.open(os.path.basename(name), os.O_WRONLY, dir_fd=os.open("
        "os.path.dirname(name) or '.', os.O_RDONLY)), b'new')",
    "a folder's descriptor":
        "os.remove(os.path.basename(name), dir_fd=os.open("
        "os.path.dirname(name) or '.', os.O_RDONLY))",
    "torch.save": "torch.save({}, name)",
    "torch.save(Path)": "torch.save({}, Path(name))",
    "serialization": "torch.serialization.save({}, name)",
    **{name: f"import numpy as np; {code}"
       for name, code in NUMPY_WAYS.items()},
    "os.replace": "Path('part').write_text('new'); os.replace('part', name)",
    "move": "Path('part').write_text('new'); shutil.move('part', name)",
    "move away": "shutil.move(name, 'part')",
    "rotate": "os.rename(name, name + '.1'); open(name + '.1', 'w')",
    "remove": "os.remove(name)",
    "truncate": "os.truncate(name, 1)",
    "chmod": "os.chmod(name, 0o777)",
    "touch": "os.utime(name)",
    "hard link": "os.link(name, 'part'); open('part', 'w').write('new')",
    "link": "os.symlink(name, 'part'); open('part', 'w').write('new')",
    "sqlite": "base = sqlite3.connect(name); base.execute("
              "'create table a (b)'); base.commit()",
    "a thread": "thread = threading.Thread(target=lambda: open("
                "name, 'w').write('new')); thread.start(); thread.join()",
    "a fork": "pid = os.fork()\nif pid == 0:\n    open(name, 'w').write('new')"
              "\n    os._exit(0)\nos.waitpid(pid, 0)",
    "a Python": "subprocess.run([sys.executable, '-c', 'import sys, torch; "
                "torch.save({}, sys.argv[1])', name])",
    "an error that is caught": "try:\n    open(name, 'w').write('new')\n"
                               "except BaseException:\n    pass",
}
IMPORTS = """\
import os, shutil, sqlite3, subprocess, sys, threading
from pathlib import Path
import torch
"""


@functools.cache
def content(way, times=1):
    if way != "sqlite":
        return TEXT * times
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute("create table mine as select zeroblob(?)",
                     [len(TEXT) * times])
        return base.serialize()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Files of a user's, for each way one; home/mine is the current folder."""
    mine = tmp_path / "home" / "mine"
    for folder in (mine, mine / "out", mine.parent / "other"):
        folder.mkdir(parents=True)
        for i, way in enumerate(WAYS):
            (folder / f"log{i}").write_bytes(content(way))
            (folder / f"large{i}").write_bytes(content(way, 200))
    (mine / "latest").symlink_to(mine / "out", True)
    (mine / "link").symlink_to("out/log0")
    (mine / "purged").symlink_to("/nowhere/mine")
    (mine / "elsewhere").symlink_to(mine.parent / "other", True)
    (mine / "beside").symlink_to("../other", True)
    (mine / "file").symlink_to("../other/log9")
    monkeypatch.chdir(mine)
    monkeypatch.setattr(sandbox, "SMALL", 20_000)
    return mine.parent


def run(folder, code):
    """Run this code in a sandbox; returns (the rank, the sandbox).

    A folder for temporary files may have a colon in its name.
    """
    script = folder / "script.py"
    script.write_text(IMPORTS + code)
    (folder / "our:s").mkdir()
    copy = sandbox.make(folder / "our:s", "copy", script)
    rank, = launch(copy.name(script), probes=[copy],
                   cwd=str(copy.name(Path.cwd())))
    return rank, copy


@pytest.mark.parametrize("place", [
    "log", *(pytest.param(place, marks=pytest.mark.whole)
    for place in ("../other/large", "large", "out/log", "latest/log",
                  "./out/../log", "elsewhere/log", "beside/large"))])
def test_what_it_writes_lands_in_the_copy(place, home, tmp_path):
    before = look(home)
    code = ""
    for i, (name, way) in enumerate(WAYS.items()):
        if name not in NUMPY_WAYS or is_installed("numpy"):
            code += (f"name = {f'{place}{i}'!r}\n{way}\n"
                     "Path('part').unlink(True)\n")
    rank, copy = run(tmp_path, code)
    assert rank.status == 0, rank.err
    copy.require_kept("")
    assert look(home) == before
    for i, way in enumerate(WAYS):  # and the script sees what it has written
        file = copy.name(f"{place}{i}")
        assert way in (
            "touch", "chmod", "hard link", "link") or (
            way in NUMPY_WAYS and not is_installed("numpy")) or (
            not file.exists() or file.read_bytes() not in (
                content(way), content(way, 200))), way


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=() if way in (
        "open", "torch.save", "os.replace", "a Python")
                 else pytest.mark.whole) for way in WAYS])
def test_what_is_elsewhere_is_not_changed(way, home, tmp_path):
    if way in NUMPY_WAYS:
        needs("numpy")
    before = look(home)
    rank, copy = run(tmp_path, f"name = {str(home / 'mine' / 'log0')!r}\n"
                     f"{WAYS[way]}\nprint('went on')")
    assert look(home) == before
    if way == "link":  # which is its own, and is replaced
        assert "went on" in rank.out
        return
    assert way in ("a fork", "a Python") or "went on" not in rank.out
    with pytest.raises(UserError, match=r"the existing file .*mine/log0 "
                       "and was stopped; the file is unchanged"):
        copy.require_kept("")


@pytest.mark.whole
def test_what_a_child_process_writes(home, tmp_path):
    """Small files are copies already. Of others verify says it."""
    before, files = look(home), sandbox.Kept()
    sh = "subprocess.run(['sh', '-c', 'echo new > log0; echo >> out/log1{}'])"
    links = "; echo > elsewhere/log2; echo > beside/log3; echo > file"
    rank, _ = run(tmp_path, sh.format(links))
    assert rank.status == 0 and look(home) == before and not files.changed()
    notes = tmp_path / "our:s" / sandbox.NOTES  # by which the check says it
    assert (notes / "started").read_text().startswith("subprocess.Popen")
    (tmp_path / "our:s").rename(tmp_path / "before")
    run(tmp_path, sh.format("; echo new > out/large2; echo > beside/large3"))
    assert files.changed() == (
        "out/large2, elsewhere/large3, beside/large3 changed meanwhile")


def test_what_it_is_printed_to_has_not_changed(tmp_path):
    """As by rankcheck verify ... > log.txt."""
    with open(tmp_path / "log.txt", "w") as log:
        told = subprocess.run(
            [sys.executable, "-c", "import os\n"
             "from rankcheck.engine.sandbox import Kept\nfiles = Kept()\n"
             "print('more', flush=True)\n"
             "os.write(2, repr(files.changed()).encode())"], stdout=log,
            stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=True,
            env=os.environ | {"PYTHONPATH": SOURCE_PATH}).stderr
    assert told == "''"


AS_NOBODY = """\
import os, sys
from rankcheck.engine import sandbox
if os.getuid() == 0:
    os.setuid(65534)
os.chdir(sys.argv[1])
open("script.py", "w").close()
copy = sandbox.make(sys.argv[2], "copy", "script.py")
print(os.readlink(copy.name("theirs")))
files = sandbox.Kept()
open("log", "w").close()
print(files.changed(), files.changed())
"""


def test_a_link_that_may_not_be_read_is_left_alone():
    """As those in /proc of another user's processes."""
    with tempfile.TemporaryDirectory() as parent:  # a path for everybody
        folders = [Path(parent, name) for name in ("mine", "copies")]
        for folder in (Path(parent), *folders):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        (folders[0] / "theirs").symlink_to("/proc/1/cwd")
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *folders], text=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": SOURCE_PATH})
    assert done.stdout == "/proc/1/cwd\n \n", done
    assert not done.stderr


def test_the_notebook_that_it_is_started_from_has_not_changed(
        tmp_path, monkeypatch):
    """Jupyter replaces it every two minutes; another one is named."""
    names = ["mine.ipynb", "theirs.ipynb"]
    for name in names:
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "mine.ipynb"))
    files = sandbox.Kept()
    for name in names:
        (tmp_path / "saved").write_text("{...}")
        (tmp_path / "saved").replace(tmp_path / name)
    assert files.changed() == "theirs.ipynb changed meanwhile"


def test_a_script_that_is_a_link_finds_what_is_beside_it(home, tmp_path):
    (home / "other" / "beside.py").write_text("print('found')")
    (home / "other" / "train.py").write_text("import beside")
    Path("train.py").symlink_to("../other/train.py")
    copy = sandbox.make(tmp_path / "ours", "copy", "train.py")
    rank, = launch(copy.name("train.py"), probes=[copy],
                   cwd=str(copy.name(Path.cwd())))
    assert rank.out == "found\n", rank.err


@pytest.mark.parametrize("cwd", [".", "/"])
def test_the_copy_is_in_the_current_folder(cwd, home, monkeypatch):
    """Where TMPDIR is below it, as `export TMPDIR=$PWD/tmp` makes it."""
    ours = home / "mine" / "tmp" / "ours"
    monkeypatch.setattr(sandbox, "MOST_ENTRIES", 400)
    monkeypatch.chdir(cwd)
    copy = sandbox.make(ours, "copy", home / "mine" / "log0")
    assert (copy.name(home / "mine" / "log0")).read_bytes() == TEXT
    assert copy.name(Path.cwd()).is_dir()
    assert not (copy.name(ours) / "copy" / "copy").exists()


def test_a_copy_is_whole_or_a_link(home, tmp_path, monkeypatch):
    """On a full disk, too: half a file is not what the user has."""
    def copy(path, place):
        Path(place).write_bytes(b"three")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", copy)
    made = sandbox.make(tmp_path / "ours", "copy", "log0")
    assert made.name("log1").read_bytes() == TEXT


def test_what_it_makes_is_its_own(home, tmp_path):
    """Also by an absolute path, and for another rank, it can be changed."""
    elsewhere = tmp_path / "elsewhere"
    rank, copy = run(tmp_path, f"""\
os.makedirs("out/new/deep"); open("out/new/deep/a", "w")
shutil.rmtree("out"); os.mkdir("out"); open("link", "w")
for place in "new", {str(elsewhere)!r}:
    os.makedirs(place, exist_ok=True)
    for _ in range(2):
        open(f"{{place}}/a", "w").write("new")
        shutil.copy(f"{{place}}/a", f"{{place}}/b")
        os.replace(f"{{place}}/b", f"{{place}}/c")
    shutil.rmtree(place)
open("/dev/null", "w").write("new")
Path({str(tmp_path / "lock")!r}).touch(); open({str(tmp_path / "lock")!r}, "a")
""")
    copy.require_kept("")
    assert rank.status == 0, rank.err
    assert (home / "mine" / "out" / "log0").read_bytes() == TEXT


@pytest.mark.whole
def test_verify_runs_in_it(home):
    """The script and what is beside it, in a folder with its real output."""
    script = home / "mine" / "train.py"
    script.write_text(let_it_write(read("ddp")))
    before = look(home)
    assert not verify([str(script)], 2, 2).failures
    assert look(home) == before
