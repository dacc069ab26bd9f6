"""How a failed run ended: what happened, and where."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rankcheck.engine.events import TO_ONE, Event
from rankcheck.engine.findings import (
    Finding,
    Fragment,
    Line,
    count_of,
    fail,
)

if TYPE_CHECKING:  # they import the fork server, or torch
    from rankcheck.engine.ranks import RankExit
    from rankcheck.engine.run_record import RunRecord

EFFECT = re.compile(  # words about what another rank did, or did not
    r"lost the other|onnection|gloo|Broken pipe|Unpickling|pickle|preamble|"
    r"Timed out|SIGABRT")  # gloo aborts where two collectives do not fit
# By the script itself
ERROR_LINE = re.compile(r"error(?: \(rank \d+\))?: (.*)")
# This package: no script of theirs
OWN_FOLDER = f"{Path(__file__).parents[1]}/"
NO_GPU = re.compile(r"\b(CUDA|NVIDIA|NCCL|XPU|HIP)\b|accelerator device")
SAME_CALLS = "call the same collectives in the same order on all ranks"
RUN_ON_CPU = ("let the script run on a CPU, as it does here: "
              'device = "cuda" if torch.cuda.is_available() else "cpu"')


def explain_failure(run: RunRecord) -> Finding | None:
    """Return a failure if a run failed or hangs, else None."""
    if run.gave_up == "flood":
        return fail(["endless output: ", *where(run, 0)],
                    kind="endless-output")
    if run.gave_up == "endless":
        last = (run.steps or 0) - 1
        return fail(f"training continues after step {last}, the last one",
                    kind="endless-training")
    if run.gave_up == "busy":
        done = run.first_step + min(map(run.count_steps,
                                        range(len(run.ranks))))
        return fail([f"step {done} is never reached, but the script runs: ",
                     *where(run, 0)], numbers={"step": done},
                    kind="no-progress")
    if run.gave_up == "waits":
        return fail([f"no step in {run.patience:.0f} s, and idle: ",
                     *where_all(run)], kind="idle")
    failed = [rank for rank, end in enumerate(run.ranks)
              if end.status or (end.status is None and not run.gave_up)]
    if not failed and run.gave_up != "hangs":
        return None
    explanations = {rank: explain_rank(run, rank) for rank in failed}

    def blame(rank: int) -> tuple[bool, bool]:
        """Sort last the ranks whose error follows from another rank's."""
        killed = run.kills and (run.ranks[rank].status or 0) < 0
        return killed, bool(EFFECT.search(explanations[rank].text))

    first = min(failed, default=None, key=blame)
    mismatch = find_mismatch(run)
    if first is not None:
        finding = explanations[first]
        if not (mismatch and EFFECT.search(finding.text)):
            fix = RUN_ON_CPU if NO_GPU.search(finding.text) else ""
            return fail([f"rank {first} ", *finding.sentence], fix,
                        finding.error, ranks=[first], kind=finding.kind)
    if run.gave_up == "hangs":
        sentence = ["it hangs: ", *where_all(run)]
        if not mismatch:
            return fail(sentence, kind="hang")
        return fail([*sentence, "; ", *mismatch], SAME_CALLS,
                    kind="collective-mismatch")
    return fail(mismatch, SAME_CALLS, kind="collective-mismatch")


def explain_rank(run: RunRecord, rank: int) -> Finding:
    """Return what a rank's error output says that happened, and where."""
    end = run.ranks[rank]
    err = re.sub(r"^\[rank\d+\]: ", "", error_output(end),
                 flags=re.MULTILINE)  # torch's
    lines = [line for line in err.splitlines() if line.strip()]
    own = [found[1] for found in map(ERROR_LINE.match, lines) if found]
    if own:
        return fail(f"ended with an error: {own[-1]}", kind="error")
    if end.status is not None and end.status < 0:  # by no error of Python
        name = name_signal(-end.status)
        return fail([f"was killed by {name}, ", *where(run, rank)],
                    kind="killed")
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception"
                                                 r"|Exit|Interrupt)\b", line)]
    message = (errors or lines or ["no message"])[-1].strip()
    if errors and message.endswith("Error:"):  # the cause has the message
        message = errors[0]
    places = own_places(run, err)
    return fail([f"ended with an error: {shorten_message(message)}",
                 *in_brackets(
        places[-1:])], error=message if errors else "", kind="error")


def name_signal(number: int) -> str:
    """Return a signal's name, with what has most likely sent it."""
    names = {one.value: one.name for one in signal.Signals}
    name = names.get(number, str(number))
    if number == signal.SIGKILL:
        name += " (out of memory?)"
    return name


def shorten_message(text: str, most: int = 200) -> str:
    """Return as many complete sentences as fit in `most` characters; if none
    does, the first words.
    """
    if len(text) <= most:
        return text
    whole = re.match(rf".{{1,{most - 1}}}[.!?](?=\s|$)", text)
    if whole:
        return whole[0]
    return textwrap.shorten(text, most, placeholder=" ...")


def error_output(rank: RankExit) -> str:
    """Return what a rank has said of an error: on stdout, if it sends all
    there.
    """
    begin = rank.out.rfind("Traceback (most recent call last)")
    if begin < 0 or "Error" in rank.err:
        return rank.err
    return rank.err + rank.out[begin:]


def in_brackets(places: Iterable[Fragment]) -> list[Fragment]:
    """Return the end of a sentence: each place in brackets."""
    fragments: list[Fragment] = []
    for place in places:
        fragments += [" (", place, ")"]
    return fragments


def own_places(run: RunRecord, err: str) -> list[Fragment]:
    """Return the `Line`s of the script, and those of modules beside it, in a
    stack.
    """
    script, folder = str(run.script), f"{run.script.parent}/"
    places: list[Fragment] = []
    for file, line in re.findall(r'File "(.*)", line (\d+)', err):
        installed = "/site-packages/" in file or OWN_FOLDER in file
        if file == script:
            places.append(Line(line))
        elif file.startswith(folder) and not installed:
            places.append(f"{file.removeprefix(folder)}, line {line}")
    return places


def where(run: RunRecord, rank: int) -> list[Fragment]:
    """Say what a rank is doing, or did last, from its stack and record."""
    if run.ranks[rank].status == 0:
        return [f"rank {rank} has ended"]
    # what came before it may be of an error that the script has caught
    err = run.ranks[rank].err.rpartition("Stack (most recent call")[2]
    stack = re.findall(r'File "(.*)", line (\d+) in (\S+)', err)
    lines = own_places(run, err)
    if lines:
        function = stack[0][2] if stack else ""
        for file, _, name in stack:  # of torch or MPI, if it is in one
            if file.endswith(run.waiting_files) and name != "wrapper":
                function = name
        return [f"rank {rank} is in ", lines[0], f" ({function})"]
    calls = [call for call in run.calls(rank) if call["lines"]]
    if calls:
        return [f"rank {rank} after ", Line(calls[-1]["lines"][0][0])]
    return [f"rank {rank} after ", count_of(run.count_steps(rank), "step")]


def where_all(run: RunRecord) -> list[Fragment]:
    """Say what each rank is doing, or did last."""
    sentence = where(run, 0)
    for rank in range(1, len(run.ranks)):
        sentence += [", ", *where(run, rank)]
    return sentence


def find_mismatch(run: RunRecord) -> list[Fragment]:
    """Say where the ranks first call different collectives; [] if nowhere."""
    if not run.alike:
        return []
    calls = [[call for call in run.calls(rank) if call["call"] not in TO_ONE]
             for rank in range(len(run.ranks))]
    for row in zip_longest(*calls):
        kinds = [call and (call["call"], call["elements"], call["lines"][:1])
                 for call in row]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                return ["collective mismatch: ",
                        *describe_next_call(run, 0, row[0]), ", but ",
                        *describe_next_call(run, rank, row[rank])]
    return []


def describe_next_call(run: RunRecord, rank: int,
                       call: Event | None) -> list[Fragment]:
    """Say which collective a rank calls. call: None if it calls no more."""
    if call is None:
        if run.records[rank] and run.facts("left", rank):
            steps = count_of(run.count_steps(rank), "step")
            return [f"rank {rank} has finished its {steps}"]
        return [f"rank {rank} makes no further collective call"]
    if not call["lines"]:
        return [f"rank {rank} calls {call['call']}"]
    line, _, called = call["lines"][0]
    return [f"rank {rank} calls {called or call['call']} in ", Line(line)]
