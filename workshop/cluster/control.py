"""Starts, inspects and ends a cluster, from outside its namespaces."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backstage.errors import FULL, UserError, require
from rankcheck.system import proc
from workshop import SOURCES
from workshop.cluster import machine
from workshop.cluster.config import Programs, write_commands, write_files
from workshop.cluster.processes import (
    CLUSTER_START_VARIABLE,
    INSIDE,
    PART_VARIABLE,
    find_daemon,
    find_holder,
    find_processes,
    kill,
    kill_all,
)
from workshop.cluster.settings import (
    ClusterFolder,
    ClusterSettings,
    require_own,
)

START_SECONDS = 120  # seconds for all nodes to come up, on a busy machine
CLUSTER_SPACE = 50_000_000  # bytes: logs, and the jobs that wait
NO_SPACE = ("no space left on device: the cluster needs 50 MB in {}; fix: "
            "free some, or set TMPDIR")
DAEMON_NAMES = ("munged", "slurmctld")
# States of sinfo in which a node does not answer; it also adds a * to others
SILENT_STATES = ("", "down", "unknown")


@dataclass(frozen=True)
class Part:
    """A daemon, or a node with its slurmd, and whether it runs."""

    name: str
    runs: bool


class Cluster:
    """A cluster of this user, which may not have been started."""

    def __init__(self, place: ClusterFolder) -> None:
        self.place = place

    # ---------------------------------------------------------- questions

    def settings(self) -> ClusterSettings | None:
        """Return its settings; None if it has not been started."""
        return self.place.read()

    def is_up(self) -> bool:
        """Return whether the cluster has started completely and still runs."""
        return self.place.complete.exists() and self.has_namespaces()

    def has_namespaces(self) -> bool:
        """Say whether its namespaces are there."""
        return self.place.read() is not None and bool(
            find_holder(find_processes(self.place), "cluster",
                        str(self.place.folder)))

    def parts(self) -> list[Part]:
        """Return the parts; none if it has not been started."""
        settings = self.place.read()
        if not settings:
            return []
        found = find_processes(self.place)
        return [Part(name, find_daemon(found, name) is not None)
                for name in (*DAEMON_NAMES, *settings.names)]

    def environment(self) -> dict[str, str]:
        """Return the variables of a program that uses the cluster."""
        return {"SLURM_CONF": str(self.place.config), "PATH": os.pathsep.join(
            [str(self.place.bin), os.environ.get("PATH", os.defpath)])}

    # ------------------------------------------------------------ actions

    def up(self, settings: ClusterSettings | None = None) -> None:
        """Start the cluster, or its parts that are not running.

        A start that was killed is started anew: nobody has used it.

        Args:
            settings: None for those that it has, or else the default ones.

        Raises:
            UserError: something is missing, or a part does not come up.
        """
        programs = machine.find_programs()
        with self.locked():
            known = self.place.read()
            if not self.is_up():
                machine.require_namespaces(programs.is_root)
                self.remove()
                self.require_space()
                self.start(settings or known or ClusterSettings(), programs)
                return
            require(not settings or settings == known, f"{self.place.folder} "
                    "is up with other settings; fix: python -m workshop "
                    "cluster down")
            names = [part.name for part in self.parts()]
            for part in self.parts():
                if not part.runs:
                    self.request(part.name)
            self.wait_for_parts(names)

    def start(self, settings: ClusterSettings, programs: Programs) -> None:
        """Start all of it; if that fails, nothing is left."""
        try:
            self.place.make(settings)
            write_files(self.place, settings, programs)
            self.write_key()
            self.place.start_id.write_text(secrets.token_hex(16))
            holder = self.make_namespaces(programs)
            write_commands(self.place, programs, holder)
            self.wait_for_parts([*DAEMON_NAMES, *settings.names])
            self.place.complete.touch()
        except BaseException as error:
            kill_all(self.place)
            reason = ""
            if not isinstance(error, KeyboardInterrupt):
                reason = self.last_error()
            with contextlib.suppress(UserError):
                self.remove()
            if isinstance(error, OSError) and error.errno in FULL:
                raise UserError(NO_SPACE.format(self.place.folder.parent)
                                ) from error
            if isinstance(error, UserError) and reason:
                raise UserError(f"{error} ({reason})") from error
            raise

    def require_space(self) -> None:
        """Raise a `UserError` if the disk is full."""
        above = self.place.folder.parent
        require(shutil.disk_usage(above).free >= CLUSTER_SPACE,
                NO_SPACE.format(above))

    def write_key(self) -> None:
        """Write munge's key, with which the daemons authenticate."""
        file = os.open(self.place.key, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(file, "wb") as opened:
            opened.write(os.urandom(128))

    def make_namespaces(self, programs: Programs) -> int:
        """Start the cluster's first process.

        Returns:
            The process that holds the namespaces.
        """
        path = os.pathsep.join(
            [*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {name: value for name, value in os.environ.items()
                     if not name.startswith(("SLURM", "SBATCH_"))}
        variables |= {PART_VARIABLE: str(self.place.folder),
                      "PYTHONPATH": path,
                      CLUSTER_START_VARIABLE: self.place.start_id.read_text(),
                      "PATH": machine.search_path(),
                      "SLURM_CONF": str(self.place.config)}
        command = [*machine.unshare_command(user=not programs.is_root),
                   sys.executable, "-m", INSIDE, "cluster",
                   str(self.place.folder)]
        with open(self.place.logs / "cluster.log", "w") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd="/", env=variables, start_new_session=True).pid

    def wait_for_parts(self, names: list[str]) -> None:
        """Wait until these daemons run, and these nodes answer.

        Raises:
            UserError: they do not.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            missing = self.find_missing(names)
            if not missing:
                return
            require(self.has_namespaces(), "the cluster did not start")
            require(time.monotonic() < end,
                    f"{', '.join(missing)} did not come up in "
                    f"{START_SECONDS} s; "
                    "fix: python -m workshop cluster down, then up")
            time.sleep(0.1)

    def find_missing(self, names: list[str]) -> list[str]:
        """Return the parts that are not running, or do not answer."""
        running = {part.name for part in self.parts() if part.runs}
        missing = [name for name in names if name not in running]
        if missing:
            return missing
        if not self.place.started.exists():
            return ["the network"]
        states = self.ask_states()
        for name in names:
            state = states.get(name, "")
            if name not in DAEMON_NAMES and (
                    state in SILENT_STATES or "*" in state):
                missing.append(name)
        return missing

    def ask_states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo names it; none if SLURM
        does not answer.
        """
        try:
            output = subprocess.run(
                [self.place.bin / "sinfo", "-h", "-N", "-o", "%N %T"],
                text=True, env={**os.environ, **self.environment()},
                check=True, capture_output=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        pairs = (line.split() for line in output.splitlines())
        return {name: state for name, state in pairs}

    def last_error(self) -> str:
        """Return a line of the logs that says what is wrong; "" if none does.

        That is the last one of our own, or the first fatal error of a daemon.
        """
        own = proc.read_text(self.place.logs / "cluster.log").splitlines()
        if own:
            return own[-1]
        for file in sorted(self.place.logs.glob("*.log")):
            for line in proc.read_text(file).splitlines():
                if "fatal: " in line or "Error: " in line:
                    return f"{file.name}: {line}"
        return ""

    def request(self, name: str) -> None:
        """Ask the cluster's first process to start a part."""
        (self.place.requests / name).touch()

    def start_part(self, name: str) -> None:
        """Start a node or a daemon that does not run, and wait for it."""
        self.require_part(name)
        with self.locked():
            if Part(name, True) not in self.parts():
                self.request(name)
            self.wait_for_parts([name])

    def kill_node(self, name: str) -> None:
        """Let a node crash: all its processes get SIGKILL."""
        self.require_part(name, nodes_only=True)
        holder = find_holder(find_processes(self.place), "node",
                             str(self.place.folder), name)
        if holder is None:
            raise UserError(f"{name} does not run")
        kill([holder])  # the kernel kills the others
        self.wait_for_end(name)

    def kill_daemon(self, name: str) -> None:
        """Kill a daemon alone; of a node its slurmd, and its jobs run on."""
        self.require_part(name)
        daemon = find_daemon(find_processes(self.place), name)
        if daemon is None:
            raise UserError(f"{name} does not run")
        kill([daemon])
        self.wait_for_end(name)

    def wait_for_end(self, name: str) -> None:
        """Wait until a daemon has ended."""
        end = time.monotonic() + START_SECONDS
        while find_daemon(find_processes(self.place), name):
            require(time.monotonic() < end, f"{name} does not end")
            time.sleep(0.02)

    def require_part(self, name: str, *, nodes_only: bool = False) -> None:
        """Raise a `UserError` unless the cluster is up and has this part."""
        require(self.is_up(), f"the cluster in {self.place.folder} is not up; "
                "fix: python -m workshop cluster up")
        names = [part.name for part in self.parts()
                 if not (nodes_only and part.name in DAEMON_NAMES)]
        require(name in names, f"no such part: {name}; fix: choose from "
                f"{', '.join(names)}")

    def down(self) -> bool:
        """End the cluster and all its jobs, and remove its folder.

        Returns:
            Whether there was anything.
        """
        with self.locked():
            there = self.place.read() is not None
            kill_all(self.place)
            self.remove()
        return there

    def remove(self) -> None:
        """Remove the folder of a cluster that does not run.

        Raises:
            UserError: it is not a cluster's, or something cannot be removed.
        """
        settings = self.place.read()
        if not settings:
            with contextlib.suppress(OSError):  # mostly there is none
                self.place.folder.rmdir()  # it is empty
            return
        kill_all(self.place)
        if settings.limits_memory:
            remove_cgroups(settings.prefix)
        try:
            # the mark last: what is left over can be removed again
            for path in self.place.folder.iterdir():
                if path != self.place.mark:
                    remove_path(path)
            shutil.rmtree(self.place.folder)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be removed: "
                            f"{error.strerror}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one command at a time change the cluster.

        The folder above is locked, and removed if it is empty at the end.
        """
        above = self.place.folder.parent
        opened = make_locked_folder(above)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                above.rmdir()
            os.close(opened)


def make_locked_folder(folder: Path) -> int:
    """Make and lock a folder, in which no other user may write.

    Another user may have made it, or a link in its place, after
    `find_cluster_folder` has looked.

    Returns:
        The open folder.

    Raises:
        UserError: it cannot be made, or another user may write in it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            opened = os.open(folder, flags)
        except OSError as error:
            raise UserError(f"{folder} cannot be used: {error.strerror}; fix: "
                            "remove what has its name, or set TMPDIR"
                            ) from error
        try:
            require_own(folder, os.fstat(opened))
        except UserError:
            os.close(opened)
            raise
        fcntl.flock(opened, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(opened), folder.lstat()):
                return opened
        os.close(opened)  # another command has removed it meanwhile


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_cgroups(prefix: str) -> None:
    """Remove the cgroups that SLURM leaves of nodes of this prefix."""
    for top in Path("/sys/fs/cgroup/memory").glob(f"slurm_{prefix}*"):
        folders = [Path(folder) for folder, *_ in os.walk(top, topdown=False)]
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
