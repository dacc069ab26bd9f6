"""A trial: a script is started once, watched, and what came is collected."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rankcheck.engine.events import Event
from rankcheck.engine.hang_detector import (
    Budget,
    Patience,
    read_events,
)
from rankcheck.engine.ranks import Flag, Launch, Rank
from rankcheck.engine.run import RunOptions, Torchrun
from rankcheck.system.errors import InternalError

if TYPE_CHECKING:
    from typing import Unpack  # new in Python 3.11

SECONDS = 900  # after which a trial is ended, whatever it does


# What the probes of a rank have seen, by the names that they give it
Record = dict[str, Any]


@dataclass
class Trial:
    """The result of one start of a script. It can be pickled.

    Attributes:
        script: the file, which may have gone.
        ranks: how each has ended.
        gave_up: why it was ended: "hangs", "waits", "busy", ..., or "".
        seen: the record of each rank, {} if it died.
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
    ranks: list[Rank] = field(default_factory=list)
    gave_up: str = ""
    seen: list[Record] = field(default_factory=list)
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

    def asked(self, what: str, rank: int = 0) -> list[Any]:
        """Return the values with which a rank has asked for something."""
        return [value for name, value in self.seen[rank]["asked"]
                if name == what]

    @property
    def killed(self) -> bool:
        return any(rank.status == -signal.SIGKILL for rank in self.ranks)

    def calls(self, rank: int) -> list[Event]:
        """Return the collectives that a rank has called."""
        return [event for event in self.events[rank] if "call" in event]

    def updates(self, rank: int) -> int:
        """Return how many updates a rank has made."""
        return sum("call" not in event for event in self.events[rank])


AnyTrial = TypeVar("AnyTrial", bound=Trial)


def watch(trial: AnyTrial, flags: Iterable[Flag], seen: Path,
          say: Callable[[str], None], budget: Budget, *,
          env: Mapping[str, str] | None = None,
          **options: Unpack[RunOptions]) -> AnyTrial:
    """Run a trial's script once, under observation; return the trial.

    Args:
        flags: of the script.
        seen: the folder of the ranks' records.
        say: is told what it waits for.
        budget: what the ranks may take.
        env: the variables of all ranks; None: this process's.
        options: further fields of a `rankcheck.engine.run.Run`.

    Raises:
        InternalError: a probe raised an exception.
    """
    begin = time.monotonic()
    seen.mkdir(exist_ok=True)
    options["log"] = seen
    launch = Launch(trial.script, *flags, env=env, **options)
    patience = Patience(launch, seen, say, budget)
    trial.ranks = launch.wait(SECONDS, patience)
    trial.waiting_files = launch.launcher.waiting_files
    trial.gave_up, trial.cpu = patience.reason, patience.cpu
    trial.patience = budget.patience
    trial.seconds = time.monotonic() - begin
    for rank in range(len(trial.ranks)):
        file = seen / f"{rank}.pt"
        trial.seen.append(torch.load(file) if file.exists() else {})
        trial.events.append(read_events(seen / f"{rank}.jsonl"))
    require_sound_probes(trial)
    return trial


def require_sound_probes(trial: Trial) -> None:
    """Raise `InternalError` if a rank was ended by an error of a probe."""
    for rank, record in enumerate(trial.seen):
        errors = trial.asked("internal error", rank) if record else []
        if errors:
            raise InternalError(
                f"rankcheck itself failed in rank {rank} of "
                f"{len(trial.seen)}: {errors[0]}. This says nothing about the "
                "script. fix: report this with the versions of torch and "
                "rankcheck")
