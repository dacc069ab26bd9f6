"""The container's files: what they run, in a new Debian.

Neither Docker nor Apptainer builds them here.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import copy_course, needs

from backstage import ROOT

DOCKER, APPTAINER = (ROOT / "container" / name
                     for name in ("Dockerfile", "course.def"))
# A command in another root, with the rights of a privileged container. A
# chroot is not enough: there the kernel allows no namespaces.
ENTER = """\
mount --bind "$1" "$1" && mount --rbind /dev "$1/dev" && cd "$1" &&
    mount -t proc proc proc && mount --bind /etc/resolv.conf etc/resolv.conf &&
    pivot_root . mnt && cd / && umount -l /mnt && shift && exec "$@"
"""
IN_IT = """\
set -e
/tmp/course/container/install.sh packages
cd /tmp/course
export PYTHONPATH=$PWD:$PWD/rankcheck/src
python3 -m workshop cluster up >/dev/null
. /tmp/workshop-cluster-0/main/env.sh
srun --nodes=2 --gpus-per-node=2 sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'
python3 -m workshop cluster down
ls -A /tmp
"""


def test_both_files_run_the_same():
    """In the same system, and leave the same variable."""
    texts = [file.read_text() for file in (DOCKER, APPTAINER)]
    for pattern in (r"(?im)^from:? (.*)$", r"install\.sh (\w+)",
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


@pytest.mark.whole
def test_a_cluster_in_a_new_debian():
    """With the packages that the files install, and no others."""
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
    root = Path(tempfile.mkdtemp(prefix="root", dir="/tmp"))
    try:
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", name, root,
             *sources], check=True, timeout=900)
        (root / "etc" / "hosts").touch()  # as each container has it
        copy_course(root / "tmp" / "course", "backstage", "container",
                    "workshop")
        end = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--propagation",
             "private", "--kill-child", "sh", "-c", ENTER, "sh", root, "bash",
             "-c", IN_IT], text=True, capture_output=True, timeout=900, env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    finally:
        shutil.rmtree(root)
    said = end.stdout.splitlines()
    assert end.returncode == 0, end.stdout + end.stderr
    assert sorted(said[-3:-1]) == ["node1 0,1", "node2 0,1"], said
    assert said[-1] == "course"
