"""Where the ranks are, since when, and what they wait for, in sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankcheck.engine.findings import Finding, count_of
from rankcheck.system.sources import NAMED, SCRIPT
from rankcheck.why.process_record import Call, Ended, ErrorThatFollowed
from rankcheck.why.ranks import (
    SOON,
    CodeLine,
    Job,
    Rank,
    RankList,
    RankNumbers,
    find_frames,
    main_thread,
)

MOST_NAMED = 16  # ranks of a group that are named


def describe_status(ranks: Iterable[Rank]) -> str:
    """Return how these have ended; unknown after `raise SystemExit`."""
    if all((rank.ended or {}).get("status") == 0 for rank in ranks):
        return "with status 0"
    return "with unknown status"


def describe_call(call: Call) -> str:
    """Return for example `all_reduce of float [4] in line 41 of train.py: x`.
    """
    text = call["call"]
    sizes = " and ".join(f"{kind.lower()} {size}" for kind, size in zip(
        call["types"][:2], call["sizes"], strict=False))
    if sizes:
        text += f" of {sizes}"
    root = call.get("root")
    if root is not None:
        text += f" with root {root}"
    if call["line"]:
        text += f" in {CodeLine(*call['line'])}"
    return text


def describe_wait(rank: Rank) -> str:
    """Return in what it waits, and where."""
    return f"waits in {name_wait(rank)}, in {rank.place}"


def name_wait(rank: Rank) -> str:
    """Return the message, the collective or the function in which it waits."""
    if rank.message:
        name = rank.message["call"]
        if rank.message["peer"] is not None:
            name += f" for rank {rank.message['peer']}"
        return name
    call = rank.current_call
    if rank.awaited_calls and call:
        name = f"{call['call']}, collective {call['number']} of group "
        return name + describe_group(call, rank.world_size)
    if not rank.joined and rank.has_frame("init_process_group"):
        return "init_process_group"
    return rank.sources.find_wait(rank.stack)


def describe_group(call: Call, world_size: int | None) -> str:
    """Return a group's name, with its ranks unless these are all or too many.
    """
    ranks = call["group"] or []
    if len(ranks) == world_size or len(ranks) > MOST_NAMED:
        return call["name"]
    return f"{call['name']} (ranks {', '.join(map(str, ranks))})"


def describe_rank_error(rank: Rank) -> str:
    """Return with which error or status it ended, where, and the errors that
    followed.

    The line comes last, as its code may contain the error's own words.
    """
    ended: Ended = rank.ended or {}
    error, message = ended.get("error") or "", ended.get("message") or ""
    first = message.strip().partition("\n")[0][:200]
    frames, place = find_frames(message), rank.place
    if frames:  # it quotes the traceback of another process
        first = f"{first} {message.strip().splitlines()[-1][:200]}"
        place = rank.find_place(frames)
    launcher_says = bool(ended.get("told")) and not frames
    text = f", with status {ended['status']!r}"
    if error:
        text = f", with {error}: {first}"
    elif launcher_says:
        text += ", according to the launcher"
    if not launcher_says and place.file != "?":
        text += f", in {place}"
    for row in ended.get("then", ()):
        followed = ErrorThatFollowed(*row)
        text += f"; then {followed.text}"
        if followed.stack:  # one that a group holds may never be raised
            text += f", in {rank.find_place(followed.stack)}"
    return text


def describe_rank(rank: Rank) -> str:
    """Return where a rank is, since when, and whether it waits or works."""
    if rank.is_unresponsive:
        return f"has not answered since {rank.last_report}"
    if rank.ending == "done":
        text = f"ended {describe_status([rank])}"
        if rank.alive:
            text += "; the process still runs"
        return text
    if rank.ending == "error":
        return f"ended{describe_rank_error(rank)}"
    if rank.ending == "lost":
        return f"lost the other ranks{describe_rank_error(rank)}"
    if rank.ending == "stopped":
        where = re.sub("^waits", "waiting",
                       describe_place(rank).removeprefix("is "))
        return f"was told to end by {rank.signal}, {where}"
    if rank.ending == "killed":
        return f"was killed by {rank.signal}, {describe_kill(rank)}"
    if rank.ending == "gone":
        return (f"disappeared, with no record of an end; last wrote at "
                f"{rank.last_report}{say_oom([rank])}")
    return "; ".join(list_activities(rank))


def describe_place(rank: Rank) -> str:
    """Return in which line it waits or is, and in which function of others.
    """
    if rank.waits:
        return describe_wait(rank)
    text = f"is in {rank.place}"
    if rank.stack:
        frame = [*rank.stack[-1]]
        if [*rank.place] not in (frame, ["?", 0, "?"]):
            text += f" (in {frame[2]} of {Path(frame[0]).name})"
    return text


def list_activities(rank: Rank) -> list[str]:
    """Return what a rank that runs does, and where."""
    where = describe_place(rank)
    if not rank.has_watcher:
        where = "has imported neither torch nor mpi4py"
    is_idle = rank.seconds_in_line >= SOON / 2
    if is_idle:
        where += f", {rank.seconds_in_line:.0f} s so far"
    if rank.script_ended:
        where += ", after the end of its script"
    activities = [where]
    # a loop, also of messages of gloo
    if rank.idle_seconds - rank.seconds_in_line >= SOON:
        activities.append("repeats the same lines for "
                          f"{rank.idle_seconds:.0f} s")
    if rank.handles:
        activities.append(describe_handled(rank))
    started = describe_work(rank)
    if started.working:
        activities.append(f"busy: {', '.join(started.working)}")
    elif rank.uses_mpi and is_idle and not rank.waits:
        activities.append("either computes, or waits for an MPI message "
                          "(requests, files, windows)")
    elif not rank.waits and rank.computes:
        activities.append("computes, reads or writes")
    elif not rank.waits:
        activities += started.idle
    if rank.current_call and not rank.waits:
        activities.append(f"{rank.current_call['call']}, collective "
                          f"{rank.current_call['number']}, has not ended")
    if not rank.waits:
        activities += describe_waiting_threads(rank)
    if rank.started_ranks:
        activities.append("the ranks of a job that it has started: "
                          f"[{describe_each(rank.started_ranks)}]")
    if rank.connecting:
        activities.append(f"cannot connect to {rank.connecting[0]}")
    elif rank.master_problem and rank.is_joining:
        activities.append(f"{rank.address}: {rank.master_problem}")
    return activities


def describe_waiting_threads(rank: Rank) -> list[str]:
    """Return which of its threads wait for other ranks, while its main one
    does not.
    """
    found = []
    for thread in rank.other_threads:
        wait = rank.sources.find_wait(thread.stack)
        if not wait:
            continue
        text = f"its thread {thread.name} waits in {wait}"
        place = rank.find_place(thread.stack)
        if rank.sources.owner(place.file) in NAMED:
            text += f", in {place}"
        found.append(text)
    return found


def describe_handled(rank: Rank) -> str:
    """Return the error which led to where it is, in `except` or `finally`."""
    if not rank.handles:
        return ""
    error, stack = rank.handles
    return f"handles {error}, raised in {rank.find_place(stack)}"


def describe_kill(rank: Rank) -> str:
    """Return where a signal met it, or when it was seen last."""
    if not (rank.crash or rank.was_aborted):
        return f"according to the launcher; last wrote at {rank.last_report}"
    text = f"in {rank.place}"
    if not rank.was_aborted:
        return text
    wait = name_wait(rank)
    if wait:
        text += f", waiting in {wait}"
    caller = rank.find_place(find_frames(main_thread(rank.stack_dump))[::-1])
    if caller[:2] != rank.place[:2] and caller.line and (
            rank.sources.owner(caller.file) == SCRIPT):
        text += f"; a thread of its own called abort() in {caller}"
    return text


@dataclass(frozen=True)
class StartedProcesses:
    """What a rank has started, as texts, at most three of each."""

    working: list[str]
    idle: list[str]


def describe_work(rank: Rank) -> StartedProcesses:
    """Return what works of what a rank has started, and what does not."""
    states = {"Z": "has ended", "T": "is stopped"}
    working, idle = [], []
    for work in rank.work:
        if work.number == rank.pid:
            continue
        name = f"{work.kind} {work.number} ({work.name})"
        if work.kind == "thread":
            name = f"thread {work.name}"
        if work.has_worked:
            if work.line:
                name += f", in {CodeLine(*work.line)}"
            working.append(name)
        elif work.kind == "process":
            state = states.get(work.state, "is idle")
            idle.append(f"its {name} {state}")
        elif work.line and work in rank.helpers:
            idle.append(f"its {name} is in {CodeLine(*work.line)}")
    idle.sort(key=lambda text: not text.endswith("ended"))
    return StartedProcesses(working[:3], idle[:3])


def say_oom(ranks: Iterable[Rank]) -> str:
    """Return how many processes of their node the kernel says that it has
    ended; "" if none.
    """
    kills = max((rank.oom_kills for rank in ranks), default=0)
    if not kills:
        return ""
    processes = count_of(kills, "process")
    return (f"; meanwhile the kernel of that node killed {processes}, of any "
            "job, for lack of memory")


def describe_each(ranks: Iterable[Rank]) -> str:
    """Describe several, with those together of which it is the same."""
    groups: defaultdict[str, RankList] = defaultdict(RankList)
    for rank in ranks:
        groups[describe_rank(rank)].append(rank)
    texts = []
    for text, members in groups.items():
        verb, rest = text.split(" ", 1)
        texts.append(f"{members:{verb}} {rest}")
    return "; ".join(texts)


def say_places(ranks: Sequence[Rank]) -> str:
    """Return in which line they are, or in which lines who of them is."""
    places: defaultdict[CodeLine, RankList] = defaultdict(RankList)
    for rank in ranks:
        places[rank.place].append(rank)
    if len(places) == 1:
        return f"in {ranks[0].place}"
    return " and ".join(
        f"{members} in {place}" for place, members in places.items())


def report_observations(job: Job) -> Finding:
    """Return what is seen of them, where no fault is proven."""
    awaited = job.select(lambda rank: not rank.waits and any(
        rank in job.waits_for(other) for other in job.waiting))
    late = awaited or job.select(lambda rank: rank.is_unresponsive)
    text = describe_job(job, awaited)
    unrecorded = job.select(
        lambda rank: rank.switched_off and rank.joined
        and not rank.uses_mpi and not rank.calls)
    if unrecorded:
        text += (f"; {unrecorded:has} no record of collectives, because "
                 f"{unrecorded[0].switched_off}=0 disables it: restart "
                 "without that variable")
    fix = ""
    if late and (late[0].runs or late[0].is_unresponsive):
        fix = f"py-spy dump --native --pid {late[0].pid}, on {late[0].host}"
    return Finding("ok", [text], [fix], ranks=[*late])


def describe_job(job: Job, awaited: RankList) -> str:
    """Return where the ranks are, those first that matter most.

    Args:
        awaited: those that do not wait, and for whom others do.
    """
    has_lost = bool(job.by_ending["lost"])
    waiting = RankList(rank for rank in job.waiting
                       if rank.runs and {*job.waits_for(rank)} & {*awaited})
    aborted = RankList(rank for rank in job.aborted_ranks
                       if {*job.waits_for(rank)} & {*awaited})
    world_size = job.first_rank.world_size
    unseen = RankNumbers(sorted({*range(world_size or 0)}
                                - {rank.rank for rank in job.ranks}))
    pronoun = "them" if len(awaited) > 1 else "it"
    if waiting and not has_lost:
        return (f"{describe_each(awaited)}; {waiting:waits} for {pronoun}, "
                f"{say_places(waiting)}")
    if aborted and not has_lost:
        return (f"{describe_each(awaited)}; {aborted:was} aborted, as by a "
                f"watchdog, while waiting for {pronoun}: "
                f"{describe_each(aborted)}")
    if unseen and job.joining:
        return (f"{unseen:has} left no record here, of {world_size}; "
                f"{job.joining:has} waited in init_process_group for "
                f"{job.joining[0].idle_seconds:.0f} s")
    if len(job.by_ending["done"]) == len(job.ranks):
        subject = f"{job.ranks:has}" if unseen else "all ranks have"
        return f"{subject} ended {describe_status(job.ranks)}"
    if all(rank.runs and not rank.is_unresponsive
           and rank.idle_seconds < SOON for rank in job.ranks):
        return f"every rank made progress in the last {SOON} s"
    return describe_each(job.ranks)
