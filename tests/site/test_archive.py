"""WORKSHOP_VENV as an archive: unpacked once, whole, on a node's own disk."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from cluster import wait_for
from conftest import program
from shells import (
    PACKAGES,
    command,
    environment,
    killed,
    refused,
    source,
    tiny_clone,
)
from shells import mount as mount  # a fixture

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def archives(tmp_path_factory, set_up):
    """A folder with the packed environment of another clone."""
    folder = tmp_path_factory.mktemp("archives")
    repo, venv = set_up(folder, shared=True)
    for name in ("venv.tar", "venv.tar.gz"):
        out, err = source(repo, f"'{repo}/setup.sh' pack "
                          f"{folder}/{name} && echo packed")
        assert out.endswith("packed\n"), out + err
    venv.rename(folder / "not here")  # nothing of it is needed any more
    assert [*folder.glob(".new*")] == []
    return folder


@pytest.fixture
def node(tmp_path):
    """A function that sources activate.sh where TMPDIR is a node's disk."""
    repo, disk = tiny_clone(tmp_path), tmp_path / "a node's disk"
    disk.mkdir()

    def call(archive, then="", disk=disk, **changes):
        (repo / "site.sh").write_text(
            f"WORKSHOP_VENV={shlex.quote(str(archive))}\n")
        return source(repo, then, TMPDIR=str(disk), **changes)
    call.repo, call.disk = repo, disk
    call.left = lambda: [path.name for path in disk.glob("*/*")
                         if path.name != "lock"]
    return call


# Finds the course's Python in a kernel's place; that says where it is.
KERNEL = """import course_process
course_process.BOOT = '''import sys
from importlib.util import find_spec
if find_spec("one") is None:
    sys.exit(77)
from notebooks.course_messages import Cells, encode
print(encode(Cells({"prefix": sys.prefix})), flush=True)'''
print(course_process.start().docs["prefix"])"""


def in_a_kernel(node):
    """What is printed by a kernel that finds the course's Python."""
    return subprocess.run(
        ["python3", "-c", KERNEL], cwd=node.repo / "notebooks",
        capture_output=True, text=True, check=True,
        env=environment(node.repo, TMPDIR=str(node.disk))).stdout


def test_it_is_unpacked_once(archives, node):
    """And a kernel that is not ours finds it."""
    archive = archives / "venv.tar"
    out, err = node(archive, f"{PACKAGES}; pip --version")
    place, = node.disk.glob("*/[0-9]*")
    assert f"status=0\n{node.repo}\n" in out and f"from {place}/lib" in out
    assert err.count("unpacking") == err.count("\n") == 1, err
    assert "installing" not in out and place.parent.stat().st_mode & 0o77 == 0
    for path in (*place.glob("bin/*"), *place.glob("*.cfg")):
        assert path.is_symlink() or str(archives) not in path.read_text()
    out, err = node(archive, "echo $VIRTUAL_ENV",
                    WORKSHOP_INSTALL="no")  # as in a job
    assert out.endswith(f"status=0\n{place}\n") and not err
    assert in_a_kernel(node) == f"{place}\n"
    os.utime(archive, (1, 1))  # another version
    assert node(archive)[1].count("unpacking") == 1
    assert len(node.left()) == 2
    os.utime(archive, (10**8, 10**8))  # and in a kernel the cell says so, too
    said, _, third = in_a_kernel(node).partition("\n")
    assert said.startswith(f"unpacking {archive} into {third.strip()} (a min")
    assert len(node.left()) == 3


def test_two_shells_at_once(archives, node):
    again = f"source '{node.repo}/activate.sh'"
    out, err = node(archives / "venv.tar.gz", 'rm -r "$TMPDIR"/*/[0-9]*\n'
                    f"{again} & {again}; wait; {PACKAGES}")
    assert out.count("is active") == 3 and out.endswith(f"{node.repo}\n")
    assert err.count("unpacking") == 2 and len(node.left()) == 1, err


def test_what_is_wrong_is_one_line(archives, node, tmp_path, mount):
    bad, full = tmp_path / "bad.tar", node.disk / "full"
    refused(node(tmp_path / "no.tar.gz"), "no.tar.gz cannot be read")
    refused(node(tmp_path / "no" / "a.tar"), "no such folder: .*/no;")
    whole = (archives / "venv.tar").read_bytes()
    end = whole.rindex(b"workshop-base\0")  # where the last file begins
    for size in (1000, len(whole) // 2, end):
        bad.write_bytes(whole[:size])
        out, err = node(bad)
        refused((out, err.partition("\n")[2]),
                "bad.tar in .*check that it is complete")
    refused(node(archives / "venv.tar", disk=tmp_path / "no"), "cannot be mad")
    assert node.left() == []
    full.mkdir()
    mount("-t", "tmpfs", "-o", "size=2M", "tmpfs", full)
    out, err = node(archives / "venv.tar", disk=full)
    refused((out, err.partition("\n")[2]), "No space left on device")
    assert [*full.glob("*/[0-9]*")] == []


def test_it_replaces_only_what_it_has_packed(set_up, tmp_path):
    repo, _ = set_up(tmp_path)
    pack = f"'{repo}/setup.sh' pack {tmp_path}"
    other = tmp_path / "a.tar"
    subprocess.run(["tar", "-cf", other, "activate.sh"], cwd=repo, check=True)
    theirs = other.read_bytes()
    out, err = source(repo, f"{pack}/b.tar && {pack}/b.tar && {pack}/a.tar; "
                      "echo $?")
    assert out.endswith("\n1\n") and "a.tar is unchanged" in err, out + err
    assert other.read_bytes() == theirs and (tmp_path / "b.tar").exists()
    assert [*tmp_path.glob(".new*")] == []


def test_what_a_killed_one_has_left_goes(archives, node):
    """And nothing else, whatever it is called."""
    (node.repo / "site.sh").write_text(f"WORKSHOP_VENV={archives}/venv.tar\n")
    slow = node.repo.parent / "tar"
    program(slow, f"#!{sys.executable}\n"  # a shell could lose a SIGINT
            "import sys, time\n"
            "open(sys.argv[2] + '/begun', 'w')\n"
            "time.sleep(1000)\n")
    for number in (signal.SIGINT, signal.SIGKILL):
        killed(command(node.repo), lambda: [*node.disk.glob("*/*/begun")],
               environment(node.repo, TMPDIR=str(node.disk), PATH=(
                   f"{slow.parent}:{os.environ['PATH']}")), number)
        if number == signal.SIGINT:
            wait_for(lambda: not node.left())  # a trap's work
    left, = node.disk.glob("*/*.new*")
    (left / "notes").symlink_to(node.disk)
    left.with_name("a.new").write_text("theirs")
    left.with_name("b.new").mkdir()
    left.with_name("b.new").joinpath("notes").write_text("theirs")
    marked = node.repo.parent / "marked"
    marked.mkdir()
    (marked / ".begun").touch()
    left.with_name("c.new").symlink_to(marked)
    assert "status=0" in node(archives / "venv.tar")[0]
    place, *theirs = sorted(node.left())
    assert place.isdigit() and theirs == ["a.new", "b.new", "c.new"]
    assert left.with_name("b.new").joinpath("notes").read_text() == "theirs"
    assert (marked / ".begun").exists()
    assert not (left.parent / place / ".begun").exists()
    (left.parent / place).rename(node.disk / "once")
    left.mkdir()  # by one that was killed right after that
    assert "status=0" in node(archives / "venv.tar")[0]
