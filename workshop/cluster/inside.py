"""The first process of a cluster's namespaces, and of a node's.

    python -m workshop.cluster.inside cluster FOLDER
    python -m workshop.cluster.inside node FOLDER NAME

If it ends, the kernel ends all other processes there, and the namespaces with
their mounts and interfaces. So nothing of a cluster can be left over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from backstage.errors import UserError, require, run_main
from workshop.cluster import processes
from workshop.cluster.config import CONTROLLER, NETWORK_PREFIX, address
from workshop.cluster.machine import unshare_command
from workshop.cluster.settings import ClusterFolder, ClusterSettings

LOOK = 0.1  # seconds between two looks at the requests
STEP_SECONDS = 60  # seconds for a step that takes a moment
# Real devices, which jobs would find although SLURM gave them others
REAL_DEVICES = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "kfd", "dri/*")
# A daemon that answers questions about hosts from the machine's /etc/hosts
NAME_CACHE = Path("/var/run/nscd")


def main() -> None:
    kind, folder, *names = sys.argv[1:]
    # it mounts files, and sets the host's name: never in the machine's own
    require(os.getpid() == 1, "this program is the first process of a "
            "cluster's namespaces; fix: python -m workshop cluster up")
    place = ClusterFolder(Path(folder))
    settings = place.read()
    if settings is None:
        raise UserError(f"no cluster in {folder}")
    require_own_start(place)
    if kind == "cluster":
        Controller(place, settings).run()
    else:
        run_node(place, settings, names[0])


def require_own_start(place: ClusterFolder) -> None:
    """Raise a `UserError` if a later start has made this folder anew.

    An `up` that is killed may leave a child that has not become this program
    yet, and has not the variable by which the next `up` finds it.
    """
    known = ""
    with contextlib.suppress(FileNotFoundError):
        known = place.start_id.read_text()
    require(known == os.environ.get(processes.CLUSTER_START_VARIABLE),
            "another start of the "
            "cluster has replaced this one")


def call_command(*command: str | os.PathLike[str]) -> None:
    """Run a command.

    Raises:
        UserError: it fails, with what it prints.
    """
    end = subprocess.run(list(map(str, command)), text=True, check=False,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = " ".join(end.stdout.split())
    require(end.returncode == 0, f"{command[0]} failed: {output}")


def start_daemon(*command: str | os.PathLike[str]) -> None:
    """Start a program that puts itself into the background.

    It is not to have the capabilities by which the namespaces are set up.
    """
    arguments = list(map(str, command))
    if os.geteuid():
        arguments = ["setpriv", "--ambient-caps=-all", "--inh-caps=-all",
                     *arguments]
    call_command(*arguments)


@dataclass
class Controller:
    """The namespaces of the cluster: its network, munged and slurmctld."""

    place: ClusterFolder
    settings: ClusterSettings
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> None:
        """Start all parts, then those that are asked for. Never returns."""
        self.set_up()
        self.start("munged")
        self.start("slurmctld", "-c")  # without the jobs of an earlier one
        for name in self.settings.names:
            self.boot(name)
        for name in self.settings.names:
            self.connect(name)
        self.place.started.touch()
        while True:
            for request in self.place.requests.iterdir():
                try:
                    self.start(request.name)
                except UserError as error:
                    print(error, flush=True)  # into cluster.log
                request.unlink()
            reap()
            time.sleep(LOOK)

    def set_up(self) -> None:
        """Set up the network, the host's name and the devices."""
        socket.sethostname(CONTROLLER)
        call_command("mount", "--bind", self.place.hosts, "/etc/hosts")
        if NAME_CACHE.is_dir():
            call_command("mount", "-t", "tmpfs", "none", NAME_CACHE)
        call_command("mount", "-t", "tmpfs", "none", self.place.bin)
        self.provide_devices()
        self.provide_pmix()
        for line in ("link set lo up", "link add br0 type bridge",
                     f"addr add {NETWORK_PREFIX}1/24 dev br0",
                     "link set br0 up"):
            call_command("ip", *line.split())

    def provide_devices(self) -> None:
        """Create the GPUs that SLURM gives to jobs, and hide the real ones.

        SLURM asks for devices, which need not work.
        """
        for number in range(self.settings.gpus):
            file = self.place.devices / f"nvidia{number}"
            file.touch()
            call_command("mount", "--bind", "/dev/null", file)
        for pattern in REAL_DEVICES:
            for device in Path("/dev").glob(pattern):
                if device.is_char_device():
                    call_command("mount", "--bind", "/dev/null", device)

    def provide_pmix(self) -> None:
        """Give PMIx the name under which SLURM loads it.

        Debian's package has that name only with the files for development.
        """
        for library in Path("/usr/lib").glob("*/pmix2/lib"):
            copy = self.place.folder / "lib"
            shutil.copytree(library, copy, symlinks=True, dirs_exist_ok=True)
            link = copy / "libpmix.so"
            if not link.exists():
                link.symlink_to("libpmix.so.2")
            call_command("mount", "--bind", copy, library)

    def start(self, name: str, *options: str) -> None:
        """Start a part that does not run.

        Args:
            name: munged, slurmctld or a node.
            options: further ones of slurmctld.
        """
        place = self.place
        if name == "munged":
            # --force: the folders above may belong to anybody
            start_daemon(
                "munged", "--force", f"--key-file={place.key}",
                f"--socket={place.socket}",
                f"--pid-file={place.folder}/run/munged.pid",
                f"--log-file={place.logs}/munged.log",
                f"--seed-file={place.folder}/run/munged.seed")
        elif name == "slurmctld":
            start_daemon("slurmctld", *options)
        elif name in self.nodes and self.nodes[name].poll() is None:
            # the node runs, but its slurmd does not
            holder = self.nodes[name].pid
            start_daemon(
                "nsenter", f"--target={holder}", "--mount", "--uts", "--net",
                f"--pid=/proc/{holder}/ns/pid_for_children", "--",
                "slurmd", "-N", name)
        elif name in self.settings.names:
            self.boot(name)
            self.connect(name)

    def boot(self, name: str) -> None:
        """Make the namespaces of a node, and start its first process."""
        command = [*unshare_command(user=False), sys.executable, "-m",
                   processes.INSIDE, "node", str(self.place.folder), name]
        self.nodes[name] = subprocess.Popen(command, start_new_session=True)

    def connect(self, name: str) -> None:
        """Connect a node to the network, once it has its own."""
        holder, end = self.nodes[name].pid, time.monotonic() + STEP_SECONDS
        while processes.same_namespace(holder, "net"):
            require(time.monotonic() < end and self.nodes[name].poll() is None,
                    f"{name} has no network")
            time.sleep(0.02)
        link = f"v{self.settings.names.index(name) + 1}"
        # of a node that has been killed a moment ago
        subprocess.run(["ip", "link", "del", link], check=False,
                       stderr=subprocess.DEVNULL)
        # the same address each time: the other nodes remember it, and would
        # send to that of a node that has crashed and is back
        number = self.settings.names.index(name) + 1
        call_command("ip", "link", "add", link, "type", "veth", "peer", "name",
                     "eth0", "address", f"02:00:00:00:00:{number:02x}",
                     "netns", str(holder))
        call_command("ip", "link", "set", link, "master", "br0", "up")


def run_node(place: ClusterFolder, settings: ClusterSettings,
             name: str) -> None:
    """Set up a node, and start its slurmd. Never returns."""
    socket.sethostname(name)
    call_command("mount", "-t", "tmpfs", "shm", "/dev/shm")
    call_command("ip", "link", "set", "lo", "up")
    end = time.monotonic() + STEP_SECONDS
    while not Path("/proc/self/net/dev").read_text().count("eth0:"):
        require(time.monotonic() < end, f"{name} has no network")
        time.sleep(0.02)
    own = address(settings.names.index(name) + 1)
    call_command("ip", "addr", "add", f"{own}/24", "dev", "eth0")
    call_command("ip", "link", "set", "eth0", "up")
    start_daemon("slurmd", "-N", name)
    while True:
        reap()
        time.sleep(1)


def reap() -> None:
    """Forget the processes that have ended; also what has lost its parent."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    run_main(main)
