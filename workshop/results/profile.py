"""Where a step's time goes, from the traces of --profile N.

    python -m workshop profile RUN

Each instant of a recorded step is charged to one part:

    data        between the passes: reading, and the loop's own work
    forward     from a model's first operator to the backward pass
    backward    the backward pass
    optimizer   what follows the last one: norm, clipping, update, report
    all-reduce  a message of any kind is under way, and nothing computes
    waiting     the same, but the last rank has not come to it yet

A message takes longest on the rank that comes first. The least that it takes
on any rank is the message itself; what it takes longer on the others is
waiting. So nothing depends on the clocks of several nodes. Between two stages
of a pipeline all of it is waiting: one sends and the other receives, and the
two cannot be told apart like that.

On a CPU "computes" means that the main thread runs an operator. On an
accelerator it means a kernel, which is charged to the part that asked for it;
what leaves the device idle is charged to what the program did meanwhile.

This needs the standard library and NumPy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backstage.errors import require
from backstage.files import StrPath, reading, show_path
from workshop.results.runs import read_metrics, read_started

STEP_PARTS = ("data", "forward", "backward", "all-reduce", "waiting",
              "optimizer")
STEP = "end of step "  # begins the name of the mark that the run has left
NODE = "autograd::engine::evaluate_function"  # of the backward pass
CALLERS = ("autograd::", "torch::autograd::")  # operators that call others
SENDERS = ("c10d::", "_c10d_functional::")  # and that send, or wait

Seconds = dict[str, float]  # of a step, by part
TimeSpan = tuple[float, float, str | None]  # (begin, end, part), microseconds
# (begin, end, as in the trace)
TraceEvent = tuple[float, float, dict[str, Any]]
Message = tuple[str, float]  # (name, microseconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")


def main(args: argparse.Namespace) -> None:
    """Print where the time of a run's steps goes."""
    folder, ranks = args.run, charge_steps(args.run)
    require(ranks, f"{show_path(folder)}: no step was recorded; fix: start "
            "the run with --profile 10")
    print("milliseconds of a step, the mean of steps "
          f"{min(ranks[0].steps)} to {max(ranks[0].steps)}:\n"
          + "".join(f"{name:>11}" for name in ("rank", *STEP_PARTS, "step")))
    for rank, parts in enumerate(map(mean, ranks)):
        print(f"{rank:11d}" + "".join(
            f"{1000 * seconds:11.1f}"
            for seconds in (*parts.values(), sum(parts.values()))))
    messages = {name for rank in ranks for step in rank.steps.values()
                for _, _, name in step.messages}
    if any(map(is_one_to_one, messages)):
        print("messages between pipeline stages are all counted as waiting")
    if len(ranks) > 1 and not messages:
        print("the traces do not show the messages (MPI's never do); their "
              "time is counted in the part that sends them")
    if read_started(folder)["device"] != "cpu" and not any(
            rank.kernels for rank in ranks):
        print("no kernels were recorded, so these are times of the CPU, not "
              "of the device")
    print("as a picture: `python -m workshop plot`; by operator: open the "
          f"files in {show_path(folder)}/profile in https://ui.perfetto.dev")


def recorded_parts(folder: StrPath) -> list[Seconds]:
    """{part: seconds of a step} of each rank; [] if no step was recorded."""
    return [mean(rank) for rank in charge_steps(folder)]


def mean(rank: RankProfile) -> Seconds:
    """{part: seconds of a step} of a `RankProfile`."""
    return {part: statistics.mean(seconds[part] for seconds in rank.charged)
            for part in STEP_PARTS}


# ------------------------------------- what the recorded events say of a step


@dataclass
class RankProfile:
    kernels: bool  # whether the trace shows a device's
    steps: dict[int, Step]
    # of each step, from `Step.charge`
    charged: list[Seconds] = field(default_factory=list)


@dataclass
class Step:
    """A step of a rank. Times are microseconds, as in the trace."""

    begin: float
    end: float
    doing: list[TimeSpan]  # what the program does, in its order
    work: list[TimeSpan]  # what computes; part None: as `doing`
    calls: list[TimeSpan]  # sends, or waits for what was sent
    messages: list[tuple[float, float, str]]  # (begin, end, name), in order

    @property
    def sent(self) -> list[Message]:
        """(name, microseconds) of each message."""
        return [(name, end - begin) for begin, end, name in self.messages]

    def charge(self, least: Iterable[float]) -> Seconds:
        """{part: seconds} of the step.

        Each microsecond is painted with a part: with what the program does,
        over that with messages, and over these with what computes. least: the
        least that each message takes on any rank, microseconds.
        """
        import numpy as np

        def paint(pieces: Iterable[TimeSpan]) -> Any:
            painted = np.full(round(self.end - self.begin), -1, np.int8)
            for *times, part in pieces:
                begin, end = (max(0, round(time - self.begin))
                              for time in times)
                painted[begin:end] = (doing[begin:end] if part is None else
                                      STEP_PARTS.index(part))
            return painted

        doing = paint(self.doing)
        work = paint(self.work)
        # an operator that sends within does not compute meanwhile
        work[paint(self.calls) >= 0] = -1
        rest = paint([
            *self.doing, *self.calls,
            *((begin, end, "waiting") for begin, end, _ in self.messages),
            *((end - time, end, "all-reduce")
              for (_, end, _), time in zip(
                  self.messages, least, strict=False))])
        counts = np.bincount(np.where(work < 0, rest, work),
                             minlength=len(STEP_PARTS))
        return dict(zip(STEP_PARTS, (counts / 1e6).tolist(), strict=False))


def list_traces(folder: StrPath) -> list[Path]:
    """The ranks' files of the newest start, in their order."""
    starts = sorted(Path(folder, "profile").glob("*-trace*/"))
    files = starts[-1].glob("rank*.json.gz") if starts else ()
    return sorted(files, key=lambda file: (len(file.name), file.name))


def charge_steps(folder: StrPath) -> list[RankProfile]:
    """The run's `RankProfile`s, charged; [] if none has recorded."""
    files = list_traces(folder)
    if not files:
        return []
    seconds = {row["step"]: row["seconds"]
               for row in read_metrics(Path(folder, "metrics.csv"))}
    ranks = [read_trace(file, seconds) for file in files]
    common = set.intersection(*(set(rank.steps) for rank in ranks))
    for rank in ranks:
        rank.steps = {step: rank.steps[step] for step in sorted(common)}
        rank.charged = [
            step.charge(shortest([other.steps[number].sent for other in ranks],
                                 step.sent))
            for number, step in rank.steps.items()]
    return ranks if common else []


def read_trace(file: Path, seconds: Mapping[int, float]) -> RankProfile:
    """Read a trace. seconds: how long each step took, by its number."""
    with reading(file, "record it again"), gzip.open(file) as text:
        return RankProfile(*find_steps(json.load(text)["traceEvents"],
                                       seconds))


def find_steps(events: list[dict[str, Any]],
               seconds: Mapping[int, float]) -> tuple[bool, dict[int, Step]]:
    """Whether there are kernels, and {number: `Step`}, from a trace's events.

    seconds: {number: how long the step took}, for those that may count.
    """
    # a GPU shows a mark again, where the kernels of that time ran
    times = sorted(((event["ts"], event["ts"] + event["dur"], event)
                    for event in events if event.get("ph") == "X"
                    and event.get("cat") != "gpu_user_annotation"),
                   key=lambda time: time[0])
    kernels = any(event.get("cat") == "kernel" for _, _, event in times)
    marks = [(int(event["name"][len(STEP):]), end, event["tid"])
             for end, _, event in times if event["name"].startswith(STEP)]
    steps = {}
    for number, end, main in marks[1:]:  # the profiler starts in the first
        if number in seconds:
            begin = end - 1e6 * seconds[number]
            inside = [time for time in times
                      if time[0] < end and time[1] > begin]
            step = Step(begin, end, [], [], [], [])
            step.doing = what_it_does(step, inside, main)
            (read_kernels if kernels else read_operators)(step, inside, main)
            steps[number] = step
    return kernels, steps


def what_it_does(step: Step, times: list[TraceEvent],
                 main: int) -> list[TimeSpan]:
    """(begin, end, part) from a step's begin to its end.

    A backward pass runs the nodes that forward operators have left, and each
    has its operator's sequence number. An operator that leaves none has the
    number of the next one that does.
    """
    marks, operators, nodes, done = [], {}, set(), step.begin
    for begin, end, event in times:
        number = event.get("args", {}).get("Sequence number")
        if event["name"].startswith(NODE):
            nodes.add(number)
            marks.append((begin, end, "backward"))
            done = max(done, end)
        elif event["tid"] == main and begin >= done:  # none is recomputed
            operators[number] = begin
    marks += [(begin, begin, "forward") for number, begin
              in operators.items() if number in nodes - {None}]
    doing, at, last, done = [], step.begin, "data", step.begin
    for begin, end, part in sorted(marks):
        if part != last:
            if last == "backward":
                doing.append((at, done, last))
                at, last = done, "data"
            doing.append((at, begin, last))
            at, last = begin, part
        done = max(done, end)
    return [*doing, (at, done, last), (done, step.end, "optimizer")]


def read_operators(step: Step, times: list[TraceEvent], main: int) -> None:
    """The work and the messages of a step on a CPU."""
    for begin, end, event in times:
        name = event["name"]
        if name.startswith("gloo:"):
            step.messages.append((begin, end, name))
        elif event.get("cat") == "cpu_op" and event["tid"] == main:
            if name.startswith(SENDERS):
                step.calls.append((begin, end, "all-reduce"))
            elif "Compiled" in name or (
                    "::" in name and not name.startswith(CALLERS)):
                step.work.append((begin, end, None))


def read_kernels(step: Step, times: list[TraceEvent], main: int) -> None:
    """The work and the messages of a step on an accelerator."""
    asked = {event["args"]["correlation"]: begin for begin, _, event in times
             if event.get("cat") in ("cuda_runtime", "cuda_driver",
                                     "xpu_runtime")
             and "correlation" in event.get("args", {})}
    for begin, end, event in times:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        if "ccl" in event["name"].lower():  # NCCL, RCCL, oneCCL
            step.messages.append((begin, end, event["name"]))
        else:
            time = asked.get(event["args"].get("correlation"), begin)
            part = next((part for start, stop, part in step.doing
                         if start <= time < stop), "data")
            step.work.append((begin, end, part))


def shortest(ranks: list[list[Message]], mine: list[Message]) -> list[float]:
    """The least that each of my messages takes, on the ranks that send alike.

    ranks: of each rank, (name, microseconds) of its messages in this step.
    A step of one rank may begin a message earlier than that of another, so
    they are counted from the end, and what others do not have is not known.
    """
    mine, *ranks = (messages[::-1] for messages in (mine, *ranks))
    alike = [messages for messages in ranks if all(
        one == other for (one, _), (other, _) in zip(
            messages, mine, strict=False))]
    least = [0.0 if is_one_to_one(name) else min(
        messages[i][1] for messages in alike if i < len(messages))
        for i, (name, _) in enumerate(mine)]
    return least[::-1]


def is_one_to_one(name: str) -> bool:
    return name.startswith(("gloo:send", "gloo:recv")) or "SendRecv" in name
