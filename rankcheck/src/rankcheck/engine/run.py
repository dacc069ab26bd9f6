"""A run of a script: its processes, and what each one is told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:  # it imports torch
    from rankcheck.record.rank_record import RankRecord
    from rankcheck.record.recorder import Log

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel",
           "torch.distributed.elastic.multiprocessing", "torch._dynamo",
           "torch.distributed.pipelining", "torch.distributed.tensor.parallel")


class Torchrun:
    """Sets torchrun's variables, except those that name torchrun itself.

    Another launcher is a subclass. Each rank gets it, pickled before `begin`.
    """

    processes: Sequence[subprocess.Popen[bytes]] = ()  # that it has started
    # how the files end whose functions communicate: by these a line is named
    waiting_files: tuple[str, ...] = ("distributed_c10d.py",)

    def begin(self, run: ScriptRun, folder: Path) -> None:
        """Start what the forked ranks need. folder: where its files go."""

    def check(self) -> None:
        """Raise a `UserError` if it cannot do that."""

    def end(self) -> None:
        """Wait for what it has started. The ranks have ended."""

    def tell(self, run: ScriptRun, rank: int, port: int, output: str
             ) -> Mapping[str, str]:
        """In a rank: its environment. output: see fork_server.run_script."""
        if not run.world_size:
            return run.env
        devices = run.world_size // run.nodes
        numbers = {
            "RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": run.world_size,
            "ROLE_WORLD_SIZE": run.world_size,
            "LOCAL_RANK": rank % devices, "LOCAL_WORLD_SIZE": devices,
            "GROUP_RANK": rank // devices, "GROUP_WORLD_SIZE": run.nodes,
            "MASTER_PORT": port}
        return {**run.env, "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1",
                **{name: str(number) for name, number in numbers.items()}}

    def join(self, run: ScriptRun, log: Log) -> None:
        """In a rank, right before its probes and the script."""

    def part(self, status: int) -> None:
        """In a rank, at its end."""


@dataclass(frozen=True)
class ScriptRun:
    """A script as several processes, which get this, and how it is watched.

    Attributes:
        script: its file.
        flags: its own, in which {rank} becomes the rank.
        env: the variables that all ranks have.
        world_size: the number of processes; None is plain python.
        nodes: on so many the processes believe they are.
        launcher: what tells the ranks of each other.
        probes: functions that get each process's `Log` first.
        record: what they fill in; None: a `RankRecord`.
        log: the folder in which that is kept.
        threads: of torch, in each process.
        preload: modules that are imported once for all of them.
        place: what the script imports from; None: its folder.
        cwd: the current folder; None: this process's.
        within: where the folder of what they print is made.
        hashes: the seed of Python's hashes in the first rank, if each is to
            have its own, as under a real launcher; there are four.
        module: the script's name, if it is run as by python -m.
    """

    script: str
    flags: tuple[str, ...]
    env: Mapping[str, str]
    world_size: int | None = None
    nodes: int = 1
    launcher: Torchrun = field(default_factory=Torchrun)
    probes: Sequence[Callable[[Log], object]] = ()
    record: type[RankRecord] | None = None
    log: str | Path | None = None
    threads: int = 1
    preload: Sequence[str] = PRELOAD
    place: str | Path | None = None
    cwd: str | None = None
    within: str | Path | None = None
    hashes: int | None = None
    module: str = ""


class RunOptions(TypedDict, total=False):
    """The optional fields of a `ScriptRun`, as keyword arguments."""

    world_size: int | None
    nodes: int
    launcher: Torchrun
    probes: Sequence[Callable[[Log], object]]
    record: type[RankRecord] | None
    log: str | Path | None
    threads: int
    preload: Sequence[str]
    place: str | Path | None
    cwd: str | None
    within: str | Path | None
    hashes: int | None
    module: str
