"""A run: start a script once, watch it, and collect its record."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rankcheck.engine.events import Event
from rankcheck.engine.hang_detector import (
    Budget,
    Patience,
    read_events,
)
from rankcheck.engine.progress import saying_that_it_lasts
from rankcheck.engine.ranks import Flag, Launch, RankExit
from rankcheck.engine.run import RunOptions, Torchrun
from rankcheck.record.rank_record import RankRecord
from rankcheck.system.errors import InternalError

if TYPE_CHECKING:
    from typing import Unpack  # new in Python 3.11

SECONDS = 900  # after which a run is ended, whatever it does


@dataclass
class RunRecord:
    """The result of one start of a script. It can be pickled.

    Attributes:
        script: the file, which may have gone.
        ranks: how each has ended.
        gave_up: why it was ended: "hangs", "waits", "busy", ..., or "".
        records: of each rank; None if it died before it wrote one.
        events: of each rank, in their order.
        patience: seconds of idleness after which it is ended.
        seconds: that it took.
        cpu: seconds of CPUs that the ranks have used.
        copy: the folder that stands for / where it has run, if any.
        steps: after which it should end, if that is known.
        first_step: the number of the first that it makes.
        kills: whether its launcher ends all after one that fails.
        alike: whether all ranks call the same collectives.
        waiting_files: as the launcher of its ranks has them.
    """

    script: Path
    ranks: list[RankExit] = field(default_factory=list)
    gave_up: str = ""
    records: Sequence[RankRecord | None] = ()
    events: list[list[Event]] = field(default_factory=list)
    patience: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    copy: str = ""
    steps: int | None = None
    first_step: int = 0
    kills: bool = False
    alike: bool = True
    waiting_files: tuple[str, ...] = Torchrun.waiting_files

    @property
    def all_records(self) -> Sequence[RankRecord]:
        """The records of all ranks.

        Raises:
            InternalError: a rank has left none; see `record_of`.
        """
        return [self.record_of(rank) for rank in range(len(self.records))]

    def record_of(self, rank: int) -> RankRecord:
        """Return the record of a rank that left one.

        Raises:
            InternalError: it has left none, which the caller has to rule out.
        """
        record = self.records[rank]
        if record is None:
            raise InternalError(f"rank {rank} left no record")
        return record

    def facts(self, name: str, rank: int = 0) -> list[Any]:
        """Return the values of the facts of this name about a rank."""
        return self.record_of(rank).fact_values(name)

    @property
    def killed(self) -> bool:
        return any(rank.status == -signal.SIGKILL for rank in self.ranks)

    def calls(self, rank: int) -> list[Event]:
        """Return the collectives that a rank has called."""
        return [event for event in self.events[rank] if "call" in event]

    def count_steps(self, rank: int) -> int:
        """Return how many steps a rank has made."""
        return sum("call" not in event for event in self.events[rank])


AnyRunRecord = TypeVar("AnyRunRecord", bound=RunRecord)


def watch_run(run: AnyRunRecord, flags: Iterable[Flag], record_folder: Path,
              say: Callable[[str], None], budget: Budget, *,
              env: Mapping[str, str] | None = None,
              **options: Unpack[RunOptions]) -> AnyRunRecord:
    """Run a record's script once, watch it, and fill the record in.

    Args:
        flags: of the script.
        record_folder: the folder of the ranks' records.
        say: is told what it waits for.
        budget: what the ranks may take.
        env: the variables of all ranks; None: this process's.
        options: further fields of a `rankcheck.engine.run.ScriptRun`.

    Raises:
        InternalError: a probe raised an exception.
    """
    begin = time.monotonic()
    record_folder.mkdir(exist_ok=True)
    options["log"] = record_folder
    with saying_that_it_lasts(say, "starting the processes"):
        launch = Launch(run.script, *flags, env=env, **options)
    patience = Patience(launch, record_folder, say, budget)
    run.ranks = launch.wait(SECONDS, patience)
    run.waiting_files = launch.launcher.waiting_files
    run.gave_up, run.cpu = patience.reason, patience.cpu
    run.patience = budget.patience
    run.seconds = time.monotonic() - begin
    kind, ranks = options.get("record") or RankRecord, range(len(run.ranks))
    run.records = [kind.read_from(record_folder, rank) for rank in ranks]
    run.events = [read_events(record_folder / f"{rank}.jsonl")
                  for rank in ranks]
    require_sound_probes(run)
    return run


def require_sound_probes(run: RunRecord) -> None:
    """Raise `InternalError` if a rank was ended by an error of a probe."""
    for rank, record in enumerate(run.records):
        errors = record.fact_values("internal error") if record else []
        if errors:
            raise InternalError(
                f"rankcheck itself failed in rank {rank} of "
                f"{len(run.records)}: {errors[0]}. This says nothing about "
                "the script. fix: report this with the versions of torch and "
                "rankcheck")
