"""Where a step's time goes: --profile N.

torch.profiler records N steps on all ranks, after a few that are slow for
reasons of their own. Each instant of a step is charged to one part:

    data        the script reads a microbatch
    forward     from there to the backward pass
    backward    the backward pass
    optimizer   what follows the last one: norm, clipping, update, report
    loop        what lies between these, such as a Trainer's own work
    all-reduce  a message of any kind is under way, and nothing computes
    waiting     the same, but the last rank has not come to it yet

A message takes longest on the rank that comes first. The least that it takes
on any rank is the message itself; what it takes longer on the others is
waiting. So nothing depends on the clocks of several nodes. Between two stages
of a pipeline all of it is waiting: one sends and the other receives, and the
two cannot be told apart like that.

On a CPU "computes" means that the main thread runs an operator or reads. On an
accelerator it means a kernel, which is charged to the part that asked for it;
what leaves the device idle is charged to what the program did meanwhile.
"""

import contextlib
import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from backstage.errors import require, warn
from backstage.files import show_path, write_atomically
from backstage.world import get_rank_and_size, on_every_rank

PARTS = ("data", "forward", "backward", "all-reduce", "waiting", "optimizer",
         "loop")
BEFORE = 5  # steps that are not recorded: allocation, compilation
MARK = "step: "  # begins the names of what is marked here
CALLERS = ("autograd::", "torch::autograd::")  # operators that call others
SENDERS = ("c10d::", "_c10d_functional::")  # and that send, or wait
BETWEEN = {  # two marks that follow one another; all others: "loop"
    ("begin", "backward"): "forward", ("data", "backward"): "forward",
    ("backward", "backward"): "forward", ("backward", "end"): "optimizer"}


def check(number):
    """Raise a `UserError` unless the script's steps can be recorded."""
    require(not number or hasattr(sys.modules["__main__"], "DataIterator"),
            "--profile needs the script's class DataIterator, which reads "
            "the microbatches")


def record_messages(comm):
    """The same communicator of MPI; a profiler sees its Allreduce."""
    class Recorded(type(comm)):
        def Allreduce(self, *args, **options):
            if not torch.autograd._profiler_enabled():
                return super().Allreduce(*args, **options)
            with record_function("mpi:Allreduce"):
                return super().Allreduce(*args, **options)

    same = Recorded(comm)
    vars(same).update(getattr(comm, "__dict__", {}))
    return same


def start(number, *options):
    """What a run tells where its steps begin and end. All ranks."""
    return Recorder(number, *options) if number else Nothing()


class Nothing:
    """Does nothing: without --profile."""

    def step_began(self):
        """For a loop that says it; else a step begins with its reading."""

    def step_ended(self, step):
        """Called where the time of each step is taken. All ranks."""

    def finish(self):
        """The run has ended. All ranks."""


class Recorder(Nothing):
    """Records steps, and writes where their time went."""

    def __init__(self, number, folder, max_steps, device):
        self.number, self.max_steps = number, max_steps
        self.folder, self.device = Path(folder) / "profile", device
        self.rank, _ = get_rank_and_size()
        self.first = None  # step that is recorded
        self.recorded = 0  # how many steps
        self.profiler = None  # while it records
        self.marks = contextlib.ExitStack()

    def step_began(self):
        self.mark("begin")

    def step_ended(self, step):
        self.mark("end")
        if self.first is None:
            spare = self.max_steps - step - 1 - self.number
            self.first = step + 1 + min(BEFORE - 1, max(1, spare))
        if step + 1 == self.first + self.number:
            self.write()
        elif step + 2 == self.first:  # the profiler's first step is slow
            self.begin()

    def mark(self, name):
        if self.profiler:
            with record_function(MARK + name):
                pass

    def begin(self):
        """Record from now on."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints
        reader = sys.modules["__main__"].DataIterator
        for owner, name, part in ((reader, "__next__", "data"),
                                  (torch.autograd, "backward", "backward")):
            function = getattr(owner, name)
            setattr(owner, name, record_function(MARK + part)(function))
            self.marks.callback(setattr, owner, name, function)
        activities = {ProfilerActivity.CPU}
        if self.device.type != "cpu":
            activities = torch.profiler.supported_activities()
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()

    def finish(self):
        if self.profiler:
            self.write()
        if not self.recorded and self.rank == 0:
            warn("--profile has recorded nothing: the first steps, which are "
                 "slow, are left out, and the run had no others")

    def write(self):
        """Stop recording, and write what was recorded."""
        self.marks.close()  # from now on nothing is marked
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(file))
            trace = json.loads(file.read_bytes())
        self.profiler = None
        steps = find_steps(trace["traceEvents"])[1:]
        self.recorded = len(steps)
        if not steps:
            return
        sent = on_every_rank([step.sent for step in steps])
        mine = [step.charge(shortest(ranks, step.sent))
                for step, *ranks in zip(steps, *sent, strict=True)]
        all_ranks = on_every_rank((trace["baseTimeNanoseconds"], mine))
        self.folder.mkdir(exist_ok=True)
        write_trace(self.folder / f"trace-rank-{self.rank}.json.gz", trace,
                    all_ranks)
        if self.rank == 0:
            self.report([[total(pieces) for pieces in steps]
                         for _, steps in all_ranks])
            for note in self.notes(trace["traceEvents"]):
                print(note)
            sys.stdout.flush()

    def report(self, ranks):
        """Write parts.json, and print the means as a table. Rank 0 alone.

        ranks: for each rank and step, seconds by part.
        """
        write_atomically(self.folder / "parts.json", json.dumps(
            {"first_step": self.first, "ranks": ranks}, indent=1).encode())
        number = len(ranks[0])
        print(f"steps {self.first} to {self.first + number - 1}, "
              f"{show_path(self.folder, Path.cwd())}/, for "
              "https://ui.perfetto.dev; milliseconds:\n"
              + "".join(f"{name:>11}" for name in ("rank", *PARTS, "step")))
        for rank, steps in enumerate(ranks):
            means = [1000 * sum(step[part] for step in steps) / number
                     for part in PARTS]
            print(f"{rank:11d}" + "".join(
                f"{mean:11.1f}" for mean in (*means, sum(means))))

    def notes(self, events):
        """What these figures cannot tell."""
        if self.device.type != "cpu" and not has_kernels(events):
            yield (f"{self.device.type}: no kernels were recorded, so this "
                   "is what the program did, not when the device computed")
        if any(is_one_to_one(event["name"]) for event in events):
            yield ("messages between pipeline stages are all counted "
                   "as waiting")


# ------------------------------------- what the recorded events say of a step


@dataclass
class Step:
    """A step of this rank. Times are microseconds, as in the trace."""

    begin: float
    end: float
    doing: list  # (begin, end, part): what the program does, in its order
    work: list  # (begin, end, part): what computes; part None: as `doing`
    calls: list  # (begin, end, part): sends, or waits for what was sent
    messages: list  # (begin, end, name), in their order

    @property
    def sent(self):
        """(name, microseconds) of each message."""
        return [(name, end - begin) for begin, end, name in self.messages]

    def charge(self, least):
        """The step in pieces: (begin, end, part), one after the other.

        least: the least that each message takes on any rank, microseconds.
        """
        moving, waiting = [], []
        for (begin, end, _), time in zip(self.messages, least, strict=True):
            waiting.append((begin, end - time, "waiting"))
            moving.append((end - time, end, "all-reduce"))
        upper = cover([self.work, moving, waiting, self.calls])
        upper = [piece for piece in upper if piece[2]]
        return [(max(begin, self.begin), min(end, self.end), part)
                for begin, end, part in cover([upper, self.doing])
                if begin < self.end and end > self.begin]


def cover(layers):
    """Pieces (begin, end, what) that do not overlap, in their order.

    layers: lists of such pieces; the first layer that has one at an instant
    decides what is there.
    """
    edges = sorted((
        (time, level, what, change) for level, pieces in enumerate(layers)
        for begin, end, what in pieces if begin < end
        for time, change in ((begin, 1), (end, -1))), key=lambda edge: edge[0])
    open_ones = [Counter() for _ in layers]
    result = []
    for (now, level, what, change), (then, *_) in pairwise(edges):
        open_ones[level][what] += change
        open_ones[level] += Counter()  # forget what is at zero
        top = next((ones for ones in open_ones if ones), None)
        if top and now < then:
            result.append((now, then, next(iter(top))))
    return result


def total(pieces):
    """Seconds by part."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for begin, end, part in pieces:
        seconds[part] += (end - begin) / 1e6
    return seconds


def shortest(ranks, mine):
    """The least that each of my messages takes, on the ranks that send alike.

    ranks: of each rank, (name, microseconds) of its messages in this step.
    """
    def names(messages):
        return [name for name, _ in messages]

    alike = [messages for messages in ranks if names(messages) == names(mine)]
    return [0.0 if is_one_to_one(same[0][0]) else min(
        time for _, time in same) for same in zip(*alike, strict=True)]


def is_one_to_one(name):
    return name.startswith(("gloo:send", "gloo:recv")) or "SendRecv" in name


def find_steps(events):
    """The recorded `Step`s, from the events of a trace."""
    # a GPU shows a mark again, where the kernels of that time ran
    events = sorted((event for event in events if event.get("ph") == "X"
                     and event.get("cat") != "gpu_user_annotation"),
                    key=lambda event: event["ts"])
    times = [(event["ts"], event["ts"] + event["dur"], event)
             for event in events]
    marks = [(begin, end, event["name"].removeprefix(MARK), event["tid"])
             for begin, end, event in times if event["name"].startswith(MARK)]
    ends = [i for i, (_, _, name, _) in enumerate(marks) if name == "end"]
    steps = []
    for before, last in pairwise([-1, *ends]):
        doing = what_it_does([mark[:3] for mark in marks[before + 1:last + 1]])
        steps.append(Step(doing[0][0], doing[-1][1], doing, [], [], []))
    read = read_kernels if has_kernels(events) else read_operators
    for step in steps:
        read(step, times, main=marks[-1][3])
    return steps


def has_kernels(events):
    return any(event.get("cat") == "kernel" for event in events)


def what_it_does(marks):
    """(begin, end, part) from a step's begin to its end.

    marks: (begin, end, name), in their order. The step begins where the loop
    says so, or with the last reading before its first backward pass: what was
    read before that was for an evaluation.
    """
    first = [name for _, _, name in marks].index("backward")
    begins = ([i for i, mark in enumerate(marks) if mark[2] == "begin"]
              or [i for i in range(first) if marks[i][2] == "data"])
    marks = marks[begins[-1]:]
    doing = []
    for (begin, end, name), (then, _, following) in pairwise(marks):
        if name in PARTS:
            doing.append((begin, end, name))
        doing.append((end, then, BETWEEN.get((name, following), "loop")))
    return doing


def read_operators(step, times, main):
    """The work and the messages of a step on a CPU."""
    for begin, end, event in times:
        name = event["name"]
        if end <= step.begin or begin >= step.end:
            continue
        if name.startswith(("gloo:", "mpi:")):
            step.messages.append((begin, end, name))
        elif event.get("cat") == "cpu_op" and event["tid"] == main:
            if name.startswith(SENDERS):
                step.calls.append((begin, end, "all-reduce"))
            elif "Compiled" in name or (
                    "::" in name and not name.startswith(CALLERS)):
                step.work.append((begin, end, None))
    # an operator that sends within: it does not compute meanwhile
    inner = [(begin, end, "call") for begin, end, _ in step.calls]
    step.work = [(begin, end, None) for begin, end, what in cover(
        [inner, [(begin, end, "work") for begin, end, _ in step.work]])
        if what == "work"]
    # the thread that sends may notice late that it is done
    step.work += [(begin, end, None) for begin, end, part in step.doing
                  if part == "data"]


def read_kernels(step, times, main):
    """The work and the messages of a step on an accelerator."""
    asked = {event["args"]["correlation"]: begin for begin, _, event in times
             if event.get("cat") in ("cuda_runtime", "cuda_driver",
                                     "xpu_runtime")
             and "correlation" in event.get("args", {})}
    for begin, end, event in times:
        if end <= step.begin or begin >= step.end:
            continue
        if event["name"].startswith("mpi:"):  # from the CPU: no kernel
            step.messages.append((begin, end, event["name"]))
            continue
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        if "ccl" in event["name"].lower():  # NCCL, RCCL, oneCCL
            step.messages.append((begin, end, event["name"]))
        else:
            time = asked.get(event["args"].get("correlation"), begin)
            part = next((part for start, stop, part in step.doing
                         if start <= time < stop), "loop")
            step.work.append((begin, end, part))


def write_trace(file, trace, ranks):
    """The trace, with a row for each rank that shows the parts of its steps.

    ranks: of each, the time that its trace counts from, in nanoseconds, and
    its steps in pieces.
    """
    row = {"pid": "parts", "ph": "M"}
    rows = [row | {"name": "process_name",
                   "args": {"name": "where a step's time goes"}},
            row | {"name": "process_sort_index", "args": {"sort_index": -1}}]
    for rank, (base, steps) in enumerate(ranks):
        shift = (base - trace["baseTimeNanoseconds"]) / 1000
        rows.append(row | {"name": "thread_name", "tid": rank,
                           "args": {"name": f"rank {rank}"}})
        rows += [{"ph": "X", "pid": "parts", "tid": rank, "name": part,
                  "ts": begin + shift, "dur": end - begin}
                 for step in steps for begin, end, part in step]
    trace["traceEvents"] += rows
    write_atomically(file, gzip.compress(json.dumps(trace).encode(), 5))
