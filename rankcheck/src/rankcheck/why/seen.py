"""Where the ranks are, since when, and what they wait for, in sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from rankcheck.engine.findings import Finding
from rankcheck.system.sources import NAMED, SCRIPT
from rankcheck.why.ranks import (
    SOON,
    Place,
    Rank,
    Who,
    find_frames,
    main_thread,
)

MOST = 16  # ranks of a group that are named


def with_status(ranks):
    """How these have ended, which is not known after `raise SystemExit`."""
    return "with status 0" if all(
        rank.ended["status"] == 0 for rank in ranks) else (
        "with a status that is not known")


def describe_call(call):
    """For example `all_reduce of float [4] in line 41 of train.py: ...`."""
    sizes = " and ".join(f"{kind.lower()} {size}" for kind, size in zip(
        call["types"][:2], call["sizes"]))
    return (call["call"] + (f" of {sizes}" if sizes else "") + (
        f" with root {call['root']}" if call.get("root") is not None else ""
        ) + (f" in {Place(*call['line'])}" if call["line"] else ""))


def describe_wait(rank):
    """In what it waits, and where."""
    return f"waits in {name_wait(rank)}, in {rank.place}"


def name_wait(rank: Rank) -> str:
    """The message, the collective or the function in which it waits."""
    if rank.message:
        peer = rank.message["peer"]
        return rank.message["call"] + (
            "" if peer is None else f" for rank {peer}")
    if rank.awaited:
        call = rank.pending
        name = f"{call['call']}, collective {call['number']} of group "
        return name + describe_group(call, rank.world_size)
    if not rank.joined and rank.inside("init_process_group"):
        return "init_process_group"
    return rank.sources.find_wait(rank.stack)


def describe_group(call: dict, world_size: int | None) -> str:
    """A group's name, with its ranks, unless these are all or too many."""
    ranks = call["group"]
    if len(ranks) == world_size or len(ranks) > MOST:
        return call["name"]
    return f"{call['name']} (ranks {', '.join(map(str, ranks))})"


def describe_error(rank):
    """With which error or status, where, and the errors that followed."""
    error, message = (rank.ended.get(name) or "" for name in
                      ("error", "message"))
    first = message.strip().partition("\n")[0][:200]
    frames, place = find_frames(message), rank.place
    if frames:  # it quotes the traceback of another process
        first = f"{first} {message.strip().splitlines()[-1][:200]}"
        place = rank.find_place(frames)
    then = ""
    for stack, words in rank.ended.get("then", ()):
        then += f"; then {words}"
        if stack:  # one that a group holds may never have been raised
            then += f", in {rank.find_place(stack)}"
    told = bool(rank.ended.get("told")) and not frames
    return (f", in {place}" * (not told and place.file != "?") + ", with " + (
        f"{error}: {first}" if error else f"status {rank.ended['status']!r}"
        + ", as the launcher says" * told) + then)


def describe(rank):
    """Where a rank is, since when, and whether it waits or works."""
    since = f" for {rank.in_line:.0f} s" if rank.in_line >= SOON / 2 else ""
    where = describe_wait(rank) if rank.waits else f"is in {rank.place}" + (
        f" (in {rank.stack[-1][2]} of {Path(rank.stack[-1][0]).name})"
        if rank.stack and [*rank.place] not in (
            rank.stack[-1], ["?", 0, "?"]) else "")
    if rank.mute:
        return f"has not answered since {rank.heard}"
    if rank.ending == "done":
        return f"ended {with_status([rank])}" + (
            "; the process still runs" * bool(rank.alive))
    if rank.ending in ("lost", "error"):
        return ("ended" if rank.ending == "error" else "lost the others"
                ) + describe_error(rank)
    if not rank.runs:
        return {
            "stopped": f"was told to end by {rank.signal}, " + re.sub(
                "^waits", "waiting", where.removeprefix("is ")),
            "killed": f"was ended by {rank.signal}, {describe_kill(rank)}",
            "gone": "is gone, and nothing says how; last wrote at "
                    f"{rank.heard}{say_oom([rank])}"}[rank.ending]
    if not rank.answers:
        where = "has imported neither torch nor mpi4py"
    words = [where + since + ", after the end of its script" * rank.over]
    if rank.still - rank.in_line >= SOON:  # a loop, also of messages of gloo
        words.append("goes round in places where it has been before for "
                     f"{rank.still:.0f} s")
    if rank.handles:
        words.append(describe_handled(rank))
    works, idle = describe_work(rank)
    if works:
        words.append("works: " + ", ".join(works))
    elif rank.mpi and since and not rank.waits:
        words.append("whether it computes or waits for a message of MPI "
                     "(requests, files, windows) is not known")
    elif not rank.waits:
        words += ["computes, reads or writes"] if rank.computes else idle
    if rank.pending and not rank.waits:
        words.append(f"{rank.pending['call']}, collective "
                     f"{rank.pending['number']}, has not ended")
    if not rank.waits:
        words += describe_waiting_threads(rank)
    if rank.nested:
        words.append("the ranks of a job that it has started: "
                     f"[{describe_each(rank.nested)}]")
    if rank.connecting:
        words.append(f"gets no answer from {rank.connecting[0]}")
    elif rank.answer and rank.meets:
        words.append(f"{rank.address}: {rank.answer}")
    return "; ".join(words)


def describe_waiting_threads(rank: Rank) -> list[str]:
    """Its threads that wait for other ranks, while its main one does not."""
    found = []
    for name, number, stack in rank.threads or ():
        wait = rank.sources.find_wait(stack)
        if wait and number != rank.pid:
            place, words = rank.find_place(stack), ""
            if rank.sources.owner(place.file) in NAMED:
                words = f", in {place}"
            found.append(f"its thread {name} waits in {wait}{words}")
    return found


def describe_handled(rank: Rank) -> str:
    """The error which led to where it is, in `except` or `finally`."""
    if not rank.handles:
        return ""
    error, stack = rank.handles
    return f"handles {error}, raised in {rank.find_place(stack)}"


def describe_kill(rank: Rank) -> str:
    """Where a signal met it, or when it was seen last."""
    if not (rank.crash or rank.aborted):
        return f"as the launcher says; last wrote at {rank.heard}"
    words = f"in {rank.place}"
    if not rank.aborted:
        return words
    if wait := name_wait(rank):
        words += f", waiting in {wait}"
    caller = rank.find_place(find_frames(main_thread(rank.last))[::-1])
    if caller[:2] != rank.place[:2] and caller.line and (
            rank.sources.owner(caller.file) == SCRIPT):
        words += f"; a thread of its own called abort() in {caller}"
    return words


def describe_work(rank):
    """(what works of what it has started, what of it is idle), as texts."""
    works, idle = [], []
    for work in rank.work:
        kind, pid, name, state, worked, line = work
        name = f"{kind} {name if kind == 'thread' else f'{pid} ({name})'}"
        if pid == rank.pid:
            continue
        if worked:
            works.append(name + (f", in {Place(*line)}" if line else ""))
        elif kind == "process":
            idle.append(f"its {name} " + {
                "Z": "has ended", "T": "is stopped"}.get(
                    state, "does not work"))
        elif work in rank.helpers:
            idle.append(f"its {name} is in {Place(*line)}")
    idle.sort(key=lambda words: not words.endswith("ended"))
    return works[:3], idle[:3]


def say_oom(ranks):
    """How often the kernel says that it has ended something on their node."""
    kills = max((rank.oom_kills for rank in ranks), default=0)
    return (f"; meanwhile the kernel of that node ended {kills} process(es), "
            "of any job, for lack of memory") if kills else ""


def describe_each(ranks):
    """The same of several, with those together of which it is the same."""
    groups = defaultdict(Who)
    for rank in ranks:
        groups[describe(rank)].append(rank)
    return "; ".join(f"{who:{verb}} {more}" for words, who in groups.items()
                     for verb, more in [words.split(" ", 1)])


def say_places(ranks: list[Rank]) -> str:
    """In which line they are, or in which lines who of them is."""
    places: dict[Place, Who] = defaultdict(Who)
    for rank in ranks:
        places[rank.place].append(rank)
    if len(places) == 1:
        return f"in {ranks[0].place}"
    return " and ".join(f"{who} in {place}" for place, who in places.items())


def report(job):
    """What is seen of them, where no fault is proven."""
    awaited = job.those(lambda rank: not rank.waits and any(
        rank in job.waits_for(other) for other in job.left))
    others = Who(rank for rank in job.left
                 if rank.runs and {*job.waits_for(rank)} & {*awaited})
    ended = Who(rank for rank in job.aborted
                if {*job.waits_for(rank)} & {*awaited})
    late = awaited or job.those(lambda rank: rank.mute)
    unseen = Who(sorted({*range(job.first.world_size or 0)}
                        - {rank.rank for rank in job.ranks}))
    if others and not job.by["lost"]:
        text = (f"{describe_each(awaited)}; {others:waits} for "
                f"{'them' if awaited[1:] else 'it'}, {say_places(others)}")
    elif ended and not job.by["lost"]:
        text = (f"{describe_each(awaited)}; {ended:was} aborted, as by a "
                f"watchdog, while waiting for "
                f"{'them' if awaited[1:] else 'it'}: {describe_each(ended)}")
    elif unseen and job.meeting:
        text = (f"{unseen:has} left no evidence here, of "
                f"{job.first.world_size}; {job.meeting:has} waited in "
                f"init_process_group for {job.meeting[0].still:.0f} s")
    elif len(job.by["done"]) == len(job.ranks):
        who = f"{job.ranks:has}" if unseen else "all ranks have"
        text = f"{who} ended {with_status(job.ranks)}"
    elif all(rank.runs and not rank.mute and rank.still < SOON
             for rank in job.ranks):
        text = f"no rank has stood still for {SOON} s"
    else:
        text = describe_each(job.ranks)
    off = job.those(lambda rank: rank.switched_off and rank.joined
                    and not rank.mpi and not rank.calls)
    if off:
        text += (f"; {off:has} kept no record of collectives, as "
                 f"{off[0].switched_off}=0 switches it off: start it again "
                 "without that variable")
    return Finding("ok", [text], [
        f"py-spy dump --native --pid {late[0].pid}, on {late[0].host}"
        if late and (late[0].runs or late[0].mute) else ""], ranks=[*late])
