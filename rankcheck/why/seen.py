"""Where the ranks are, since when, and what they wait for, in sentences."""

import re
from collections import defaultdict
from pathlib import Path

from rankcheck.findings import Finding
from rankcheck.why.calls import find_line
from rankcheck.why.ranks import (
    SOON,
    Place,
    Who,
    find_frames,
    is_waiting,
    with_status,
)


def describe_call(call):
    """For example `all_reduce of float [4] in line 41 of train.py: ...`."""
    sizes = " and ".join(
        f"{kind.lower()} {size}" for kind, size in zip(
            call["types"][:2], call["sizes"]))
    return (call["call"] + (f" of {sizes}" if sizes else "") + (
        f" with root {call['root']}" if call.get("root") is not None else ""
        ) + (f" in {Place(*call['line'])}" if call["line"] else ""))


def describe_wait(rank):
    """In what it waits, for how long, and where."""
    call, what = rank.message or rank.pending, is_waiting(rank.stack)
    if rank.message:
        what = call["call"] + (f" for rank {call['peer']}"
                               if call["peer"] is not None else "")
    elif call:
        what = f"{call['call']}, collective {call['number']} of group " + (
            call["name"])
    elif not rank.joined and rank.inside("init_process_group"):
        what = "init_process_group"
    return f"waits in {what}, in {rank.place}"


def describe_error(rank):
    """With which error or status, where, and the errors that followed."""
    error, message = (rank.ended.get(name) or "" for name in
                      ("error", "message"))
    first = message.strip().partition("\n")[0][:200]
    frames, place = find_frames(message), rank.place
    if frames:  # it quotes the traceback of another process
        first = f"{first} {message.strip().splitlines()[-1][:200]}"
        place = Place(*find_line(frames, rank.library))
    then = "".join(f"; then {words}, in "
                   f"{Place(*find_line(stack, rank.library))}"
                   for stack, words in rank.ended.get("then", ()))
    told = rank.ended.get("told") and not frames
    return (f", in {place}" * (not told and place.file != "?") + ", with " + (
        f"{error}: {first}" if error else
        f"status {rank.ended['status']!r}, as the launcher says" if told
        else f"status {rank.ended['status']!r}") + then)


def describe(rank):
    """Where a rank is, since when, and whether it waits or works."""
    since = f" for {rank.still:.0f} s" if rank.still >= SOON / 2 else ""
    where = describe_wait(rank) if rank.waits else f"is in {rank.place}" + (
        f" (in {rank.stack[-1][2]} of {Path(rank.stack[-1][0]).name})"
        if rank.stack and [*rank.place] not in (
            rank.stack[-1], ["?", 0, "?"]) else "")
    if rank.mute:
        return f"has not answered since {rank.heard}"
    if not rank.runs:
        return {
            "done": lambda: f"ended {with_status([rank])}"
                    + "; the process still runs" * bool(rank.alive),
            "stopped": lambda: f"was told to end by {rank.signal}, and "
                       + re.sub("^waits", "waited", re.sub(
                           "^is", "was", where)),
            "lost": lambda: "lost the others" + describe_error(rank),
            "error": lambda: "ended" + describe_error(rank),
            "killed": lambda: f"was ended by {rank.signal}, " + (
                f"in {rank.place}" if rank.crash else "as the launcher says; "
                f"last wrote at {rank.heard}"),
            "gone": lambda: "is gone, and nothing says how; last wrote at "
                            f"{rank.heard}{say_oom([rank])}"}[rank.ending]()
    words = [where + since
             + ", after the end of its script" * rank.over
             + ", where it imports" * rank.imports]
    if rank.helpers:
        words.append("works: " + ", ".join(rank.helpers[:3]))
    elif rank.blocked:
        pass
    elif rank.mpi and since:
        words.append("whether it computes or waits for a message of MPI "
                     "(requests, files, windows) is not known")
    elif rank.computes:
        words.append("computes")
    else:
        words += rank.idle
    if rank.pending and not rank.waits:
        words.append(f"{rank.pending['call']}, collective "
                     f"{rank.pending['number']}, has not ended")
    if rank.connecting:
        words.append(f"gets no answer from {rank.connecting[0]}")
    elif rank.answer and not rank.joined:
        words.append(f"{rank.address()}: {rank.answer}")
    return "; ".join(words)


def say_oom(ranks):
    """How often the kernel says that it has ended something on their node."""
    kills = max(rank.oom_kills for rank in ranks)
    return (f"; meanwhile the kernel of that node ended {kills} process(es), "
            "of any job, for lack of memory") if kills else ""


def describe_each(ranks):
    """The same of several, with those together of which it is the same."""
    groups = defaultdict(Who)
    for rank in ranks:
        groups[describe(rank)].append(rank)
    many = {"is": "are", "has": "have", "was": "were", "waits": "wait"}
    return "; ".join(
        f"{who} {many.get(first, first) if who[1:] else first} {more}"
        for words, who in groups.items()
        for first, more in [words.split(" ", 1)])


def report(job):
    """What is seen of them, where no fault is proven."""
    late = job.awaited or job.those(lambda rank: rank.mute)
    others = Who(rank for rank in job.by["runs"] if rank in job.left
                 and {*job.waits_for(rank)} & {*job.awaited})
    if others and not job.by["lost"]:
        text = (f"{describe_each(job.awaited)}; {others:waits} for "
                f"{'them' if job.awaited[1:] else 'it'}, in "
                f"{others[0].place}")
    elif job.unseen and job.meeting:
        text = (f"{job.unseen:has} left no evidence here, of "
                f"{job.ranks[0].world_size}; {job.meeting:has} waited in "
                f"init_process_group for {job.meeting[0].still:.0f} s")
    elif len(job.by["done"]) == len(job.ranks):
        text = f"all ranks have ended {with_status(job.ranks)}"
    elif all(rank.runs and not rank.mute and rank.still < SOON
             for rank in job.ranks):
        text = "the ranks move on"
    else:
        text = describe_each(job.ranks)
    return Finding("ok", [text], [
        f"py-spy dump --native --pid {late[0].pid}, on {late[0].host}"
        if late and late[0].alive is not False else ""], ranks=[*late])
