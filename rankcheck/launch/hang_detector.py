"""Waits for the ranks of a `ranks.Launch`, as long as they work."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rankcheck.deadlock import hangs, read_events
from rankcheck.launch.ranks import Launch

IDLE = 3.0  # seconds without anything to do after which it may hang
PATIENCE = 120.0  # seconds without an update, in which it may wait
LOOKS = 2.0  # seconds between two looks at where idle ranks are
SAYS = 10.0  # seconds, after which it says so
UNSTARTED = 20.0  # the same, before a launcher has started the script
FLOOD = 20e6  # bytes of output: it prints without end


@dataclass
class Patience:
    """Whether to give the ranks up, by what they do and not by the clock.

    On a busy machine everything takes longer, but not more seconds of a CPU:
    they are given up when they have used too many of those without a step,
    when they hang for certain (see deadlock.py), or when they have been idle
    for a long time. Says what it waits for.
    """

    launch: Launch
    observed: Path  # the folder in which its ranks are
    say: object  # a function that is told what it waits for
    allowed: float  # seconds of a CPU for a step of each rank
    idle: float = IDLE  # seconds of idleness after which it may hang
    endless: float = float("inf")  # steps after which it never ends
    patience: float = PATIENCE  # seconds without a step, if all are idle
    reason: str = ""  # why they were given up
    cpu: float = 0.0  # seconds that they have used
    spent: float = 0.0  # the same since the last step
    updates: int = 0
    asked: float = 0.0  # when idle ranks were last asked where they are
    lines: list = field(default_factory=list)  # in which each was then
    tasks: dict = field(default_factory=dict)
    # (time, seconds of a CPU since the last, how many want one)
    looks: list = field(default_factory=list)

    def __post_init__(self):
        self.begun = not self.launch.launcher.processes
        self.begin = self.last = self.stepped = self.said = time.monotonic()

    def __call__(self):
        now = time.monotonic()
        if now - self.last < 0.15:
            return False
        self.last = now
        updates = sum(file.stat().st_size  # a byte for each
                      for file in self.observed.glob("*.updates"))
        if updates > self.updates:
            self.updates, self.spent, self.stepped = updates, 0.0, now
        self.reason = self.look(now, updates)
        if now - self.said > SAYS and not self.reason:
            self.said = now
            self.say(f"        still waiting after {now - self.begin:.0f} s: "
                     f"{updates} updates made, over all ranks" + "".join(
                         f", rank {rank} is in line {line}"
                         for rank, line in enumerate(self.lines) if line))
        return bool(self.reason)

    def look(self, now, updates):
        """Why it is to end, "" if it is to go on."""
        size = len(self.launch.jobs)
        if self.launch.printed() > FLOOD:
            return "flood"
        if updates > self.endless * size:
            return "endless"
        activity = self.launch.activity()
        if activity is None:  # no such figures on this system
            return "waits" if now - self.stepped > self.patience else ""
        tasks, eager = activity
        used = sum(seconds - self.tasks.get(task, 0.0)
                   for task, seconds in tasks.items())
        self.tasks = tasks
        self.cpu += used
        self.spent += used
        self.looks.append((now, used, eager))
        if not self.begun and any(self.observed.glob("*.jsonl")):
            self.begun, self.looks = True, self.looks[-1:]
        if not self.sleeps(self.idle if self.begun else UNSTARTED):
            self.lines = []
        elif not self.begun:
            return "unstarted"
        elif not self.lines or now - self.asked > LOOKS:
            self.asked, self.lines = now, self.launch.lines()
            if hangs([read_events(self.observed / f"{rank}.jsonl")
                      for rank in range(size)], self.lines, {
                    rank for rank, job in enumerate(self.launch.jobs)
                    if not job.is_alive()}, size):
                return "hangs"
            if now - self.stepped > self.patience:
                return "waits"
        return "busy" if self.spent > self.allowed * size else ""

    def sleeps(self, seconds):
        """Whether all ranks have been idle for that many seconds."""
        now = self.last
        while now - self.looks[0][0] > seconds:
            self.looks.pop(0)
        watched = now - max(self.begin, self.looks[0][0])
        busy = sum(used for _, used, _ in self.looks[1:])
        wanted = sum(eager > 0 for _, _, eager in self.looks)
        return (watched > 0.9 * seconds and busy < 0.05 * watched
                and wanted < 0.2 * len(self.looks))
