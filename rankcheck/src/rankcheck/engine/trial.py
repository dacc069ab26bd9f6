"""A trial: a script is started once, watched, and what came is collected."""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rankcheck.engine.hang_detector import Patience, read_events
from rankcheck.engine.ranks import Launch
from rankcheck.system.errors import InternalError

SECONDS = 900  # after which a trial is ended, whatever it does
LITTLE = 1e6  # with no more than that left, a file may not be whole


@dataclass
class Trial:
    """What came of one start of a script. It can be pickled."""

    script: Path  # which may have gone
    ranks: list = ()  # of rankcheck.engine.ranks.Rank
    gave_up: str = ""  # why it was ended: "hangs", "waits", "busy", ...
    seen: list = field(default_factory=list)  # of each rank, None if it died
    events: list = field(default_factory=list)  # of each rank, in their order
    patience: float = 0.0  # seconds of idleness after which it is ended
    seconds: float = 0.0
    cpu: float = 0.0
    copy: str = ""  # the folder that stands for / where it has run, if any
    # what is known of the script
    steps: int | None = None  # after which it should end
    first_step: int = 0
    kills: bool = False  # whether its launcher ends all after one that fails
    alike: bool = True  # whether all ranks call the same collectives

    def asked(self, what, rank=0):
        """The values with which a rank asked for it."""
        return [value for name, value in self.seen[rank]["asked"]
                if name == what]

    @property
    def killed(self):
        return any(rank.status == -signal.SIGKILL for rank in self.ranks)

    def calls(self, rank):
        return [event for event in self.events[rank] if "call" in event]

    def updates(self, rank):
        return sum("call" not in event for event in self.events[rank])


def watch(trial, flags, seen, say, budget, **options):
    """Run a trial's script once, under observation; returns the `Trial`.

    seen: the folder of what its probes see. budget: what it may take, see
    `Patience`. options: of `rankcheck.engine.ranks.Start`. An error of a
    probe is an `InternalError`.
    """
    begin = time.monotonic()
    seen.mkdir(exist_ok=True)
    launch = Launch(trial.script, *flags, log=seen, **options)
    patience = Patience(launch, seen, say, **budget)
    trial.ranks = launch.wait(SECONDS, patience)
    trial.gave_up, trial.cpu = patience.reason, patience.cpu
    trial.patience = patience.patience
    trial.seconds = time.monotonic() - begin
    for rank in range(len(trial.ranks)):
        file = seen / f"{rank}.pt"
        trial.seen.append(torch.load(file) if file.exists() else None)
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
