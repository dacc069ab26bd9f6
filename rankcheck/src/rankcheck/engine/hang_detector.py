"""Waits for the ranks of a `ranks.Launch`, as long as they work."""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rankcheck.engine.exits import TO_ONE
from rankcheck.engine.ranks import Launch

IDLE = 3.0  # seconds without anything to do after which it may hang
PATIENCE = 120.0  # seconds without an update, in which it may wait
LOOKS = 2.0  # seconds between two looks at where idle ranks are
SAYS = 10.0  # seconds, after which it says so
UNSTARTED = 20.0  # the same, before a launcher has started the script
FLOOD = 20e6  # bytes of output: it prints without end
ONE_WAY = (("send", "ssend"), ("recv",))  # calls of which none ends another


@dataclass
class Patience:
    """Whether to give the ranks up, by what they do and not by the clock.

    On a busy machine everything takes longer, but not more seconds of a CPU:
    they are given up when they have used too many of those without a step,
    when they hang for certain (see `hangs`), or when they have been idle
    for a long time. Says what it waits for.
    """

    launch: Launch
    observed: Path  # the folder in which its ranks are
    say: object  # a function that is told what it waits for
    allowed: float  # seconds of a CPU for a step of each rank
    idle: float = IDLE  # seconds of idleness after which it may hang
    endless: float = float("inf")  # steps after which it never ends
    patience: float = PATIENCE  # seconds without a step, if all are idle

    def __post_init__(self):
        self.reason = ""  # why they were given up
        self.cpu = self.spent = 0.0  # seconds used: in all, since a step
        self.updates, self.tasks = 0, {}
        self.asked, self.lines = 0.0, []  # when and where idle ranks were
        self.looks = []  # (time, seconds used since the last, eager)
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
                    if not job.is_alive()}):
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


def hangs(events, stacks, ended):
    """Whether the ranks of a job that is idle can never go on.

    Idleness proves nothing: a script may wait for a download, a compiler or
    slow storage. Ranks hang if they have called different collectives of one
    group, or if each that waits in a call waits for a rank that has ended, or
    that waits for ever itself.

    events: what each rank has recorded, see `read_events`. stacks: the line of
    the script in which each rank is now, or None. ended: the set of the ranks
    that have ended.
    """
    calls = [[event for event in those if "call" in event] for those in events]
    made = defaultdict(lambda: defaultdict(list))  # group -> rank -> its calls
    for rank, those in enumerate(calls):
        for call in those:
            if call["call"] not in TO_ONE:
                made[str(call["group"])][rank].append(call)
    # in a call, and in no line after it
    inside = {rank: those[-1] for rank, those in enumerate(calls)
              if rank not in ended and those and those[-1]["lines"]
              and those[-1]["lines"][0][0] == stacks[rank]}
    names = {call["call"] for call in inside.values()}
    if len(inside) == len(calls) and any(map(names.issubset, ONE_WAY)):
        return True
    waits = {}  # rank -> those that have not come to the call it is in
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
    stuck = {rank for rank in waits if waits[rank]}
    while left := {rank for rank in stuck
                   if not waits[rank] & (stuck | ended)}:
        stuck -= left
    return bool(stuck)


def kind(call):
    """What has to be the same on all ranks."""
    return call["call"], call["elements"] * (call["call"] == "allreduce")


def read_events(file):
    """The lines of a rank's record that are complete; [] if there is none."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
