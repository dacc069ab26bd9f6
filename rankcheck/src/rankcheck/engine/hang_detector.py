"""Waits for the ranks of a `ranks.Launch` while they make progress."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rankcheck.engine.events import TO_ONE, Event
from rankcheck.engine.findings import count_of
from rankcheck.engine.progress import Reminder
from rankcheck.engine.ranks import Launch
from rankcheck.engine.waits import find_stuck

IDLE = 3.0  # seconds without anything to do after which it may hang
PATIENCE = 120.0  # seconds without a step, in which it may wait
SAMPLE_INTERVAL = 2.0  # seconds, of where idle ranks are
UNSTARTED = 20.0  # the same, before a launcher has started the script
FLOOD = 20e6  # bytes of output: it prints without end
ONE_WAY = (("send", "ssend"), ("recv",))  # calls of which none ends another


@dataclass(frozen=True)
class Budget:
    """The time that the ranks may take before they are killed.

    Attributes:
        allowed: seconds of a CPU for a step of each rank.
        idle: seconds of idleness after which it may hang.
        endless: steps after which it never ends.
        patience: seconds without a step, if all are idle.
        steps: that each rank is to make, 0 if that is not known.
    """

    allowed: float
    idle: float = IDLE
    endless: float = float("inf")
    patience: float = PATIENCE
    steps: int = 0


@dataclass(frozen=True)
class ActivitySample:
    """What the ranks did between two samples.

    Attributes:
        time: of the sample, in seconds of time.monotonic().
        used: seconds of CPUs since the sample before.
        eager: how many threads wanted a CPU.
    """

    time: float
    used: float
    eager: int


@dataclass
class Patience:
    """Decides when to kill ranks: by their activity, not by the clock.

    On a busy machine everything takes longer, but not more seconds of a CPU:
    they are given up when they have used too many of those without a step,
    when they hang for certain (see `hangs`), or when they have been idle
    for a long time. Says what it waits for.
    """

    launch: Launch
    observed: Path  # the folder of the ranks' records
    say: Callable[[str], None]  # is told what it waits for
    budget: Budget

    def __post_init__(self) -> None:
        self.reason = ""  # why they were given up
        self.cpu = self.spent = 0.0  # seconds used: in all, since a step
        self.steps = 0
        self.seconds: dict[str, float] = {}  # of a CPU, of each thread
        self.asked = 0.0  # when idle ranks were asked where they are
        self.lines: list[int | None] = []  # and where they were
        self.samples: list[ActivitySample] = []
        self.begun = not self.launch.launcher.processes
        self.begin = self.last = self.stepped = time.monotonic()
        self.reminder = Reminder(self.begin)

    def __call__(self) -> bool:
        """Return whether to kill the ranks now."""
        now = time.monotonic()
        if now - self.last < 0.15:
            return False
        self.last = now
        steps = sum(file.stat().st_size  # a byte for each
                    for file in self.observed.glob("*.steps"))
        if steps > self.steps:
            self.steps, self.spent, self.stepped = steps, 0.0, now
        self.reason = self.find_reason(now, steps)
        if not self.reason and self.reminder.is_due(now):
            text = (f"        still waiting after {now - self.begin:.0f} s: "
                    f"{self.count(steps)}")
            for rank, line in enumerate(self.lines):
                if line:
                    text += f", rank {rank} is in line {line}"
            self.say(text)
        return bool(self.reason)

    def count(self, steps: int) -> str:
        """Return how many optimizer steps all ranks have made, as a text."""
        processes = len(self.launch.jobs)
        planned = self.budget.steps * processes
        if 0 < planned >= steps:  # a second optimizer makes more
            text = f"{steps} of {count_of(planned, 'optimizer step')}"
            if processes > 1:
                text += f" of {processes} processes"
            return text
        return f"{count_of(steps, 'optimizer step')} in total"

    def find_reason(self, now: float, steps: int) -> str:
        """Return why to end the ranks, "" to let them continue.

        Args:
            now: as time.monotonic() says it.
            steps: how many all ranks have made.
        """
        size, budget = len(self.launch.jobs), self.budget
        if self.launch.printed() > FLOOD:
            return "flood"
        if steps > budget.endless * size:
            return "endless"
        activity = self.launch.activity()
        if activity is None:  # no such figures on this system
            return "waits" if now - self.stepped > budget.patience else ""
        used = sum(seconds - self.seconds.get(thread, 0.0)
                   for thread, seconds in activity.seconds.items())
        self.seconds = activity.seconds
        self.cpu += used
        self.spent += used
        self.samples.append(
            ActivitySample(now, used, activity.eager))
        if not self.begun and any(self.observed.glob("*.jsonl")):
            self.begun, self.samples = True, self.samples[-1:]
        if not self.sleeps(budget.idle if self.begun else UNSTARTED):
            self.lines = []
        elif not self.begun:
            return "unstarted"
        elif not self.lines or now - self.asked > SAMPLE_INTERVAL:
            self.asked, self.lines = now, self.launch.lines()
            events = [read_events(self.observed / f"{rank}.jsonl")
                      for rank in range(size)]
            ended = {rank for rank, job in enumerate(self.launch.jobs)
                     if not job.is_alive()}
            if hangs(events, self.lines, ended):
                return "hangs"
            if now - self.stepped > budget.patience:
                return "waits"
        return "busy" if self.spent > budget.allowed * size else ""

    def sleeps(self, seconds: float) -> bool:
        """Return whether all ranks have been idle for that many seconds."""
        now = self.last
        while now - self.samples[0].time > seconds:
            self.samples.pop(0)
        watched = now - max(self.begin, self.samples[0].time)
        busy = sum(sample.used for sample in self.samples[1:])
        wanted = sum(sample.eager > 0 for sample in self.samples)
        return (watched > 0.9 * seconds and busy < 0.05 * watched
                and wanted < 0.2 * len(self.samples))


def hangs(events: Sequence[list[Event]], lines: Sequence[int | None],
          ended: Set[int]) -> bool:
    """Return whether the ranks of an idle job can never continue.

    Idleness proves nothing: a script may wait for a download, a compiler or
    slow storage. Ranks hang if they have called different collectives of one
    group, or if each that waits in a call waits for a rank that has ended, or
    that waits for ever itself.

    Args:
        events: what each rank has recorded, see `read_events`.
        lines: of the script in which each rank is now, or None.
        ended: the ranks that have ended.
    """
    calls = [[event for event in those if "call" in event] for those in events]
    # group -> rank -> its calls
    made: dict[str, dict[int, list[Event]]] = defaultdict(
        lambda: defaultdict(list))
    for rank, those in enumerate(calls):
        for call in those:
            if call["call"] not in TO_ONE:
                made[str(call["group"])][rank].append(call)
    # in a call, and in no line after it
    inside = {rank: those[-1] for rank, those in enumerate(calls)
              if rank not in ended and those and those[-1]["lines"]
              and those[-1]["lines"][0][0] == lines[rank]}
    names = {call["call"] for call in inside.values()}
    if len(inside) == len(calls) and any(map(names.issubset, ONE_WAY)):
        return True
    # rank -> those that have not come to the call it is in
    waits: dict[int, set[int]] = {}
    for rank, call in inside.items():
        if call["call"] in TO_ONE:
            continue
        _, ranks = call["group"] or ("", range(len(calls)))  # MPI's
        group = made[str(call["group"])]
        number = len(group[rank])
        others = {other: group[other][number - 1:number] for other in ranks}
        if any(theirs and kind(theirs[0]) != kind(call)
               for theirs in others.values()):
            return True
        waits[rank] = {other for other, theirs in others.items() if not theirs}
    return bool(find_stuck(waits, ended))


def kind(call: Event) -> tuple[str, int]:
    """Return what must be equal on all ranks."""
    elements = call["elements"] if call["call"] == "allreduce" else 0
    return call["call"], elements


def read_events(file: Path) -> list[Event]:
    """Return the complete lines of a rank's record; [] if there is none."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
