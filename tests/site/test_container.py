"""The container's files: what they run, in a new Debian.

Neither Docker nor Apptainer builds them here: a new root gets what their lines
say, in a container's namespaces. Debian took 27 s, the packages 38 s, and the
environment 38 s (2.6 GB from a registry that was near), on two cores beside
other work; all of it 6 minutes beside much other work.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import commit_all, needs

from backstage import ROOT

DOCKER, APPTAINER = (ROOT / "container" / name
                     for name in ("Dockerfile", "course.def"))
ROOM = 8_000_000_000  # bytes: the environment has 5.5 GB
ATTENDEE = 1000  # the user whose clone is mounted into the container
CLONE = "/home/attendee/course"
# How this machine's pip reaches a registry, which an image does not have
NETWORK = re.compile(r"PIP_|SSL_CERT_FILE|(http|https|no)_proxy", re.I)
# A command in another root, with the rights of a privileged container. A
# chroot is not enough: there the kernel allows no namespaces.
ENTER = """\
mount --bind "$1" "$1" && mount --rbind /dev "$1/dev" && cd "$1" &&
    mount -t proc proc proc && mount --bind /etc/resolv.conf etc/resolv.conf &&
    pivot_root . mnt && cd / && umount -l /mnt && shift && exec "$@"
"""
# What a person does in the container that has been started
IN_IT = """\
set -e
git status --short
python -m workshop diff ddp >/dev/null
python code/train_gpt2.py --max-steps 2 --preset tiny
eval "$(python -m workshop cluster up)"
srun --nodes=2 --gpus-per-node=2 sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'
sbatch --wait --output=job.log batchfiles/batch-ddp-2n2g.sh --max-steps 2 \
    --preset tiny
for run in runs/*/; do
    echo "steps: $(($(wc -l <"$run/metrics.csv") - 1))"
done
python -m workshop cluster down
! ls -d /tmp/workshop-cluster* /tmp/course || exit 3

# as Docker's network: the port of this address is published
ip link set lo up
ip link add eth0 type bridge
ip addr add 172.17.0.2/16 dev eth0
python -m workshop lab >lab.log 2>&1 &
lab=$!
until grep -q 'http://127.0.0.1:8888/.*token=' lab.log; do
    kill -0 "$lab"
    sleep 0.2
done
python - <<'END'
import re, urllib.error, urllib.request
status = "http://172.17.0.2:8888/api/status"
try:
    print("without a token", urllib.request.urlopen(status).status)
except urllib.error.HTTPError as error:
    print("without a token", error.code)
token, = set(re.findall(r"http://127.*token=(\\w+)", open("lab.log").read()))
print("with it", urllib.request.urlopen(f"{status}?token={token}").status)
END
kill "$lab"
"""


@dataclass(frozen=True)
class Container:
    """A new Debian in a folder, and what the Dockerfile says of its start."""

    root: Path
    variables: "dict[str, str]"

    def run(self, *command, namespaces=(), **options):
        """Run a command as root, with the rights of a privileged container."""
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--propagation",
             "private", "--kill-child", *namespaces, "sh", "-c", ENTER, "sh",
             self.root, *command], text=True, capture_output=True,
            timeout=1500, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                               "HOME": "/root", **self.variables}, **options)


def lines_of(file, pattern):
    """What follows in the lines that begin with a word."""
    return re.findall(rf"(?m)^{pattern} (.*)$", file.read_text())


def section(name):
    """The lines of a section of Apptainer's definition."""
    text = APPTAINER.read_text()
    return re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", text)[1]


def copy_clone(clone):
    """The files that git has of this one, as they are now, in a repository."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, text=True,
        capture_output=True).stdout.split("\0")
    for name in filter(None, names):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    commit_all(clone)


def set_up(clone, root):
    """Run what Apptainer runs on the host, as it does."""
    subprocess.run(["sh", "-ec", section("setup")], cwd=clone, check=True,
                   env={**os.environ, "APPTAINER_ROOTFS": str(root)})


@pytest.fixture(scope="module")
def debian():
    """A new Debian of the version that the files name."""
    needs("mmdebstrap")
    if os.getuid():
        pytest.skip("needs root, to enter another root")
    name, = re.findall("^From: debian:(.*)$", APPTAINER.read_text(), re.M)
    sources = [file for file in (
        Path("/etc/apt/sources.list.d/debian.sources"),
        Path("/etc/apt/sources.list")) if file.exists()]
    if f"VERSION_CODENAME={name}\n" not in Path(
            "/etc/os-release").read_text() or not sources:
        pytest.skip(f"needs the sources of packages of Debian {name}")
    if shutil.disk_usage("/tmp").free < ROOM:
        pytest.skip(f"needs {ROOM / 1e9:.0f} GB in /tmp")
    root = Path(tempfile.mkdtemp(prefix="root", dir="/tmp"))
    try:
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", name, root,
             *sources], check=True, timeout=900)
        (root / "etc" / "hosts").touch()  # as each container has it
        yield root
    finally:
        shutil.rmtree(root)


def network(root):
    """The variables by which pip reaches a registry, with their files."""
    found = {}
    for name, value in os.environ.items():
        if NETWORK.match(name):
            if os.path.isfile(value):  # a certificate
                copy = f"/opt/{name.lower()}"
                shutil.copy(value, root / copy.lstrip("/"))
                value = copy
            found[name] = value
    return found


def test_both_files_run_the_same():
    """In the same system, and leave the same variable."""
    texts = [file.read_text() for file in (DOCKER, APPTAINER)]
    for pattern in (r"(?im)^from:? (.*)$", r"install\.sh (?!published)(\w+)",
                    r"WORKSHOP_VENV=(\S+)", r"container/(?!install)\S+"):
        one, other = (re.findall(pattern, text) for text in texts)
        assert one
        if "container/" in pattern:  # the command to build each
            assert [one, other] == [["container/Dockerfile"],
                                    ["container/course.def"]]
        else:
            assert one == other
    script = (ROOT / "container" / "install.sh").read_text()
    assert "venv=/opt/gpt2-workshop\n" in script
    assert "WORKSHOP_VENV=/opt/gpt2-workshop" in texts[0]


def test_what_apptainer_copies(tmp_path):
    """What git has, with edits; nothing that the clone has made."""
    needs("git")
    clone, root = tmp_path / "clone", tmp_path / "root"
    copy_clone(clone)
    for made in ".venv/bin/python", "runs/std-1/metrics.csv", "site.sh":
        (clone / made).parent.mkdir(parents=True, exist_ok=True)
        (clone / made).write_text("made")
    (clone / "README.md").write_text("edited")
    set_up(clone, root)
    course = root / "tmp" / "course"
    found = {str(path.relative_to(course)) for path in course.rglob("*")
             if path.is_file()}
    names = subprocess.run(["git", "ls-files", "-z"], cwd=clone, text=True,
                           capture_output=True).stdout.split("\0")
    assert found == {*names} - {""}
    assert (course / "README.md").read_text() == "edited"
    assert os.access(course / "container" / "install.sh", os.X_OK)
    assert [*root.glob("tmp/*")] == [course]
    with pytest.raises(subprocess.CalledProcessError):  # never into /tmp
        subprocess.run(["sh", "-ec", section("setup")], cwd=clone, check=True,
                       env={"PATH": os.environ["PATH"]}, capture_output=True)


@pytest.mark.whole
def test_a_container(debian, tmp_path):
    """Build it with the files' own commands, start it, and work in it.

    The packages and the environment come from their registries, without any
    cache. What runs in the container has no other network.
    """
    needs("git")
    copy_clone(tmp_path / "clone")
    set_up(tmp_path / "clone", debian)
    building = Container(debian, network(debian))
    for command in lines_of(DOCKER, "RUN"):
        end = building.run("sh", "-c", command)
        assert end.returncode == 0, end.stdout + end.stderr

    clone = debian / CLONE.lstrip("/")
    shutil.copytree(tmp_path / "clone", clone, symlinks=True)
    for path in clone, *clone.rglob("*"):
        os.chown(path, ATTENDEE, ATTENDEE, follow_symlinks=False)
    variables = dict(line.split("=") for line in lines_of(DOCKER, "ENV"))
    start, = lines_of(DOCKER, "CMD")
    (debian / "in-it.sh").write_text(IN_IT)
    end = Container(debian, variables).run(
        "sh", "-c", 'cd "$0" && exec "$@"', CLONE, *json.loads(start),
        namespaces=["--net", "--uts"],
        input="exec bash /in-it.sh </dev/null\n")
    said = end.stdout
    assert end.returncode == 0, said + end.stderr
    assert "The workshop's environment is active: Python 3.11" in said
    assert said.splitlines().count("steps: 2") == 2, said
    assert {"node1 0,1", "node2 0,1"} <= {*said.splitlines()}, said
    assert said.splitlines()[-2:] == ["without a token 403", "with it 200"]
