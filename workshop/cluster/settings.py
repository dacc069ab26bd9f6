"""What a cluster has, and where its files are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from backstage.errors import require

SETTINGS_FORMAT = 1  # of the mark, which holds the settings
MOST_NODES = 4
MOST_GPUS = 8
LONGEST_FOLDER = 80  # sockets have at most 107 characters


@dataclass(frozen=True)
class ClusterSettings:
    """What the nodes claim to have, which need not be real."""

    nodes: int = 3
    gpus: int = 4  # on each node
    gpu_type: str = "h100"
    cpus: int = 64
    memory: int = 512_000  # MB
    node_timeout: int = 30  # seconds after which a silent node is down
    prefix: str = "node"  # of the nodes' names
    limits_memory: bool = False  # by cgroups of version 1; for root alone

    @property
    def names(self) -> list[str]:
        """The names of the nodes."""
        return [f"{self.prefix}{i}" for i in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class ClusterFolder:
    """The folder of a cluster."""

    folder: Path

    @property
    def mark(self) -> Path:
        """The file by which a folder is known to be a cluster's."""
        return self.folder / "workshop-cluster.json"

    @property
    def config(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.folder / "etc" / "hosts"

    @property
    def key(self) -> Path:
        return self.folder / "etc" / "munge.key"

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "munge.sock"

    @property
    def bin(self) -> Path:
        """SLURM's commands for a shell outside of the namespaces."""
        return self.folder / "bin"

    @property
    def environment(self) -> Path:
        """What a shell sources to use the cluster."""
        return self.folder / "env.sh"

    @property
    def devices(self) -> Path:
        return self.folder / "dev"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def requests(self) -> Path:
        """Files with the names of the parts that are to be started."""
        return self.folder / "run" / "start"

    @property
    def started(self) -> Path:
        """A file that exists once the parts have been started."""
        return self.folder / "run" / "started"

    @property
    def start_id(self) -> Path:
        """What tells this start from others in the same folder."""
        return self.folder / "etc" / "start-id"

    @property
    def complete(self) -> Path:
        """A file that exists once `up` has finished."""
        return self.folder / "run" / "complete"

    def spool(self, node: str) -> Path:
        return self.folder / "spool" / node

    def make(self, settings: ClusterSettings) -> None:
        """Make the folder with its mark, and the folders in it."""
        self.folder.mkdir(mode=0o755)
        text = json.dumps({"format": SETTINGS_FORMAT, **asdict(settings)})
        self.mark.write_text(text, "utf-8")  # even a truncated one is a mark
        folders = [self.bin, self.config.parent, self.devices, self.logs,
                   self.requests, self.folder / "state", self.folder / "lib",
                   *map(self.spool, settings.names)]
        for folder in folders:
            folder.mkdir(parents=True)

    def read(self) -> ClusterSettings | None:
        """Return the settings of the cluster here; None if there is none.

        Raises:
            UserError: the folder is not that of a cluster.
        """
        if not self.mark.is_file():
            files = []
            with contextlib.suppress(FileNotFoundError):
                files = os.listdir(self.folder)
            require(not files, f"{self.folder} is not a cluster's folder (it "
                    f"has no {self.mark.name}), and is unchanged; fix: move "
                    "it away, or choose another --name")
            return None
        try:
            found = json.loads(self.mark.read_text("utf-8"))
            if found.pop("format") == SETTINGS_FORMAT:
                return ClusterSettings(**found)
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # of another version, or truncated: it can be removed
        return ClusterSettings()


def find_cluster_folder(name: str) -> ClusterFolder:
    """Return the place of this user's cluster of that name.

    Raises:
        UserError: the name cannot be a folder's, or another user may change
            the folder above it.
    """
    require(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,19}", name),
            f"{name!r} is not a cluster's name; fix: use at most 20 "
            "lower-case letters, digits and hyphens")
    # not Python's own choice: that is another folder if this one is full
    temporary = os.environ.get("TMPDIR") or "/tmp"
    require(re.fullmatch(rf"[\w./+-]{{1,{LONGEST_FOLDER - 40}}}", temporary),
            f"SLURM's files cannot be in {temporary}, which is too long or "
            "has unusual characters; fix: set TMPDIR=/tmp")
    above = Path(temporary) / f"workshop-cluster-{os.getuid()}"
    try:
        found = above.lstat()
    except FileNotFoundError:
        return ClusterFolder(above / name)
    require_own(above, found)
    return ClusterFolder(above / name)


def require_own(folder: Path, found: os.stat_result) -> None:
    """Raise a `UserError` unless this user alone may change a folder.

    Args:
        found: what the system says of it, without following a link.
    """
    require(stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            and not found.st_mode & 0o022,
            f"another user may write to {folder}; fix: remove it, or set "
            "TMPDIR")
