"""Check that this machine has what a cluster needs."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from backstage.errors import UserError, require
from workshop.cluster.config import Programs

# Program -> the package of Debian and Ubuntu that has it
DAEMON_PACKAGES = {
    "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm",
    "munged": "munge", "ip": "iproute2", "mount": "mount",
    "unshare": "util-linux", "nsenter": "util-linux",
    "setpriv": "util-linux"}
# An ordinary user's PATH has no folders of daemons
DAEMON_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
# What is tried in new namespaces: each part of a cluster needs it
TRIAL = """\
mount -t tmpfs none /mnt || exit 3
ip link add br0 type bridge && ip link add a0 type veth peer name a1 || exit 4
"""
CONTAINER = "see docs/cluster.md"


@dataclass(frozen=True)
class Switch:
    """A setting of Linux that forbids namespaces of an ordinary user."""

    name: str  # as sysctl names it
    forbids: str
    allows: str

    def is_forbidding(self, root: Path = Path("/")) -> bool:
        file = root / "proc/sys" / self.name.replace(".", "/")
        try:
            return file.read_text().strip() == self.forbids
        except OSError:  # this kernel has no such setting
            return False


SWITCHES = (
    Switch("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    Switch("kernel.unprivileged_userns_clone", "0", "1"),
    Switch("user.max_user_namespaces", "0", "15000"))


def search_path() -> str:
    """Return the PATH in which the programs are searched."""
    return f"{os.environ.get('PATH', os.defpath)}:{DAEMON_PATH}"


def unshare_command(user: bool) -> list[str]:
    """Return the command that starts another in namespaces of its own.

    Args:
        user: whether it makes a user namespace, in which this user may set up
            the others. The user stays the same there.
    """
    command = ["unshare"]
    if user:
        command += ["--user", "--map-current-user", "--keep-caps"]
    return [*command, "--net", "--mount", "--uts", "--pid", "--fork",
            "--mount-proc", "--propagation", "private",
            "--kill-child=SIGKILL"]


def find_programs() -> Programs:
    """Return the programs that run a cluster.

    Raises:
        UserError: the machine lacks something.
    """
    require(sys.platform == "linux", "SLURM runs only on Linux; fix: use the "
            "container, docs/cluster.md")
    missing = [name for name in DAEMON_PACKAGES
               if not shutil.which(name, path=search_path())]
    packages = " ".join(dict.fromkeys(DAEMON_PACKAGES[name] for name
                                      in missing))
    require(not missing, f"{', '.join(missing)} not installed; fix: sudo "
            f"apt-get install --no-install-recommends {packages} (Debian, "
            "Ubuntu; nothing is installed for you)")
    sbatch = find_sbatch()
    # a client would ask for a configuration
    output = subprocess.run(
        ["slurmd", "-V"], text=True, check=False, capture_output=True,
        env={**os.environ, "PATH": search_path()}).stdout
    version = re.search(r"(\d+)\.(\d+)", output)
    if not version:
        raise UserError(f"slurmd -V prints no version: {output[:60]!r}")
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = ""
    require(user, f"user {os.getuid()} has no name on this machine, which "
            "SLURM needs; fix: add a line to /etc/passwd")
    return Programs(sbatch, tuple(map(int, version.groups())), user,
                    os.geteuid() == 0)


def find_sbatch() -> str:
    """Return the sbatch of the daemons' SLURM.

    The first one of the PATH may be of a site's other version, or one that a
    cluster of ours has made.
    """
    daemon = shutil.which("slurmd", path=search_path())
    if daemon:
        beside = Path(daemon).parent.parent / "bin" / "sbatch"
        if os.access(beside, os.X_OK):
            return str(beside)
    for folder in search_path().split(":"):
        found = shutil.which("sbatch", path=folder)
        if found and not Path(folder, "../workshop-cluster.json").exists():
            return found
    return "/usr/bin/sbatch"


def require_namespaces(is_root: bool) -> None:
    """Raise a `UserError` that says why there can be no namespaces."""
    end = subprocess.run(
        [*unshare_command(user=not is_root), "sh", "-c", TRIAL], text=True,
        check=False, env={**os.environ, "PATH": search_path()},
        stdin=subprocess.DEVNULL, capture_output=True)
    if end.returncode == 0:
        return
    reason = (end.stderr.strip().splitlines() or ["no reason is given"])[0]
    require(end.returncode != 4, f"this kernel cannot connect the nodes "
            f"({reason}); fix: sudo modprobe -a bridge veth")
    for switch in SWITCHES:
        require(is_root or not switch.is_forbidding(), "this machine does not "
                f"let you make namespaces; fix: sudo sysctl -w {switch.name}="
                f"{switch.allows} (until the next boot), or start the "
                "cluster in a root shell (sudo -s)")
    advice = f"in a container, {CONTAINER}"
    if not is_root:
        advice = f"start it in a root shell (sudo -s); {advice}"
    raise UserError(f"this machine allows no namespaces here ({reason}); fix: "
                    f"{advice}")
