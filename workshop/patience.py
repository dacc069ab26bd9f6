"""Waits for the ranks of a `workshop.processes.Launch`, as long as they work.
"""

import time

ASLEEP = 3.0  # seconds without anything to do after which it hangs
UNSTARTED = 20.0  # the same, before mpirun has started the script
FLOOD = 20e6  # bytes of output: it prints without end


class Patience:
    """Whether to give the ranks up, by what they do and not by the clock.

    On a busy machine everything takes longer, but not more seconds of a CPU:
    they are given up when all sleep, though nobody will wake them, or when
    they have used too many of those without a step. Says what it waits for.
    """

    def __init__(self, launch, observed, say, allowed, sleep=ASLEEP,
                 endless=float("inf")):
        """What to allow each rank of a `Launch`, observed in that folder.

        allowed: seconds of a CPU for a step. sleep: seconds in which nobody
        does anything. endless: steps, after which it is taken for one that
        never ends.
        """
        self.launch, self.observed, self.say = launch, observed, say
        self.allowed, self.sleep, self.endless = allowed, sleep, endless
        self.reason, self.cpu, self.spent = "", 0.0, 0.0
        self.begun = not launch.mpirun
        self.tasks, self.updates = {}, 0
        self.looks = []  # (time, seconds of a CPU since the last, who waits)
        self.begin = self.last = self.stepped = time.monotonic()
        self.said = self.begin

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
        if now - self.said > 5 and not self.reason:
            self.said = now
            self.say(f"        still waiting after {now - self.begin:.0f} s: "
                     f"{updates} updates made, over all ranks")
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
            return "asleep" if now - self.stepped > 60 else ""
        tasks, eager = activity
        used = sum(seconds - self.tasks.get(task, 0.0)
                   for task, seconds in tasks.items())
        self.tasks = tasks
        self.cpu += used
        self.spent += used
        self.looks.append((now, used, eager))
        if not self.begun and any(self.observed.glob("*.jsonl")):
            self.begun, self.looks = True, self.looks[-1:]
        if self.sleeps(self.sleep if self.begun else UNSTARTED):
            return "asleep" if self.begun else "unstarted"
        return "busy" if self.spent > self.allowed * size else ""

    def sleeps(self, seconds):
        """Whether no rank has done or wanted to do anything for so long."""
        now = self.last
        while now - self.looks[0][0] > seconds:
            self.looks.pop(0)
        watched = now - max(self.begin, self.looks[0][0])
        busy = sum(used for _, used, _ in self.looks[1:])
        wanted = sum(eager > 0 for _, _, eager in self.looks)
        return (watched > 0.9 * seconds and busy < 0.05 * watched
                and wanted < 0.2 * len(self.looks))
