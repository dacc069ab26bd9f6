"""The folder in which a script runs, and the runs made in it.

A client names a script, its flags, what is recorded and what the ranks may
take; verify is one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.ranks import Flag
from rankcheck.engine.run import RunOptions
from rankcheck.engine.sandbox import Kept, Sandbox
from rankcheck.engine.scratch import full, scratch_folder

if TYPE_CHECKING:
    from typing import Unpack  # new in Python 3.11

    from rankcheck.engine.run_record import AnyRunRecord

LITTLE = 1e6  # bytes; with no more than that left, a file may not be whole


@dataclass(frozen=True)
class Workspace:
    """A folder for runs, beside files that have to stay as they are.

    Attributes:
        folder: of all that the runs need and leave.
        files: those of the current folder, as they were at the beginning.
    """

    folder: Path
    files: Kept = field(default_factory=Kept)

    @property
    def temporary(self) -> Path:
        """The folder for the runs' temporary files."""
        return self.folder / "tmp"

    def run(self, run: AnyRunRecord, flags: Iterable[Flag],
            record_folder: Path,
            say: Callable[[str], None], budget: Budget, *,
            sandbox: Sandbox, fix: str, env: Mapping[str, str],
            **options: Unpack[RunOptions]) -> AnyRunRecord:
        """Run the script of a record once, in a sandbox and watched.

        Args:
            run: which is filled with what came.
            flags: of the script.
            record_folder: the folder of the ranks' records.
            say: is told what it waits for.
            budget: what the ranks may take.
            sandbox: the copy of the current folder in which they run.
            fix: what to do if the script changes files outside of it.
            env: the variables of all ranks.
            options: further fields of a `rankcheck.engine.run.ScriptRun`, but
                for the folders.

        Returns:
            The run.

        Raises:
            InternalError: a probe raised an exception.
            UserError: the script would have changed files, or there is no
                room for its own.
        """
        from rankcheck.engine.run_record import watch_run  # imports torch

        options["probes"] = [sandbox, *options.get("probes", ())]
        options["cwd"] = str(sandbox.name(Path.cwd()))
        options["within"] = self.folder
        run = watch_run(run, flags, record_folder, say, budget, env=env,
                        **options)
        sandbox.require_kept(fix)
        came_to_end = all(run.records) and not any(
            rank.status for rank in run.ranks)
        if not came_to_end and shutil.disk_usage(self.folder).free < LITTLE:
            raise full(self.folder.parent)
        return run


@contextlib.contextmanager
def open_workspace(interrupted: bytes) -> Iterator[Workspace]:
    """Give a workspace that is removed at the end, also on a signal.

    interrupted: what is written to stdout where a signal ends the program.
    """
    files = Kept()
    with scratch_folder(interrupted) as folder:
        workspace = Workspace(folder, files)
        workspace.temporary.mkdir()
        yield workspace
