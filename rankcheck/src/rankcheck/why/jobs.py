"""Which of the records in a folder belong to one job.

Several jobs may write to one folder: a sweep that a script starts, one after
the other or at once, a launcher that starts its ranks anew, a folder that is
used again. Their ranks have the same numbers. A job that is set up wrongly, on
the other hand, may have ranks that were told different addresses: they are one
job, as their numbers differ.

Nothing here looks at the machine.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Any

Record = dict[str, Any]  # as witness.py writes it, with "alive"
NAMES = ("run", "restart", "slurm_job", "slurm_step", "pmix", "address",
         "port", "world_size")  # of what is in a record's "start"


def read_start(record: Record) -> dict[str, str | None]:
    """What the launcher has told the process, by `NAMES`."""
    given = record.get("start") or []
    return dict.fromkeys(NAMES) | dict(zip(NAMES, given))


def known_as(record: Record) -> tuple[int | None, str]:
    """What no other rank of a job is called: mp.spawn counts on each node."""
    return record["rank"], "" if record["world_size"] else record["host"]


def read_parent(record: Record) -> tuple[str, str | None, int] | None:
    """What has started it, a launcher as a rule."""
    if record.get("parent") is None:
        return None
    return record["host"], record.get("space"), record["parent"]


def read_end(record: Record) -> float:
    """When it was over: if nobody knows, when it last wrote."""
    if record["ended"]:
        return record["ended"].get("time") or record["written"]
    return math.inf if record.get("alive") else record["written"]


def is_before(some: list[Record], others: list[Record]) -> bool:
    """Whether all of these were over before the others began."""
    last = max(read_end(record) for record in some)
    return last < min(record["began"] for record in others)


def identify_start(record: Record) -> tuple[Any, ...]:
    """What is the same for all ranks of a job that is set up well, and for
    ranks of another job as a rule not.
    """
    start = read_start(record)
    address = start["address"]
    if is_loopback(address):  # each machine, or network, has its own
        start["address"] = str((address, record["host"],
                                record.get("network")))
    return tuple(start.values())


def is_loopback(address: str | None) -> bool:
    """Whether an address means the machine itself."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False


def excludes(earlier: Record, later: Record) -> bool:
    """Whether two processes with one number, and told the same, are of two
    jobs: of one, they would be a rank that is there twice, or a program that
    a rank's own script runs before.
    """
    if known_as(earlier) != known_as(later):
        return False
    other_launcher = read_parent(earlier) != read_parent(later) and (
        None not in (read_parent(earlier), read_parent(later)))
    if is_before([earlier], [later]):
        return other_launcher or earlier["joined"]
    # who has been told no port may meet anywhere
    return other_launcher and read_start(later)["port"] is None


def split_alike(records: list[Record]) -> list[list[Record]]:
    """The jobs of records that were all told the same."""
    jobs: list[list[Record]] = []
    for record in sorted(records, key=lambda one: one["began"]):
        fitting = [job for job in jobs if not any(
            excludes(other, record) for other in job)]
        siblings = [job for job in fitting if read_parent(record) in map(
            read_parent, job)]
        # one before the newest has been followed by another job
        found = siblings[-1:] or [job for job in fitting if job is jobs[-1]
                                  or not is_before(job, [record])][-1:]
        if found:
            found[0].append(record)
        else:
            jobs.append([record])
    return jobs


def may_be_one(job: list[Record], others: list[Record]) -> bool:
    """Whether ranks that were told different things may be of one job."""
    if {*map(known_as, job)} & {*map(known_as, others)}:
        return False
    if is_before(job, others) or is_before(others, job):
        return False
    first, second = read_start(job[0]), read_start(others[0])
    for name in ("run", "restart", "pmix"):
        told = {first[name], second[name]} - {None, "none"}
        if len(told) > 1:
            return False
    return True


def split(records: list[Record]) -> list[list[Record]]:
    """The records of each job, those first that began first."""
    told: dict[tuple[Any, ...], list[Record]] = {}
    unknown = []  # of which only a launcher says something
    for record in records:
        if record.get("start") is None:
            unknown.append(record)
        else:
            told.setdefault(identify_start(record), []).append(record)
    alike = [job for some in told.values() for job in split_alike(some)]
    alike.sort(key=find_begin)
    jobs: list[list[Record]] = []
    for group in alike:
        fitting = [job for job in jobs if may_be_one(job, group)]
        if fitting:
            fitting[-1].extend(group)
        else:
            jobs.append(group)
    for record in unknown:
        siblings = [job for job in jobs if read_parent(record) in map(
            read_parent, job)]
        if siblings or len(jobs) == 1:
            (siblings or jobs)[-1].append(record)
        else:
            jobs.append([record])
    jobs.sort(key=find_begin)
    return jobs


def find_begin(job: list[Record]) -> float:
    """When the first of its ranks began."""
    return min(record["began"] for record in job)


def is_followed(job: list[Record], later: list[Record]) -> bool:
    """Whether the same launcher has started its ranks anew."""
    same = {*map(read_parent, job)} & {*map(read_parent, later)} - {None}
    attempts = [read_start(some[0])["restart"] for some in (job, later)]
    return bool(same) and attempts[0] != attempts[1] and is_before(job, later)


def choose(jobs: list[list[Record]],
           last_start: str | None = None) -> list[list[Record]]:
    """Those of the last start, and those that were not over when its last job
    began: a folder may be used again.

    Args:
        jobs: those that began first are first.
        last_start: the token of the last start; None if it is not known.
    """
    if not jobs:
        return []
    newest = [jobs[-1], *(job for job in jobs if last_start is not None
                          and has_token(job, last_start))][-1]
    tokens = {record.get("token") for record in newest} - {None}
    found = []
    for job in jobs:
        if any(is_followed(job, later) for later in jobs):
            continue
        same = tokens & {record.get("token") for record in job}
        if job is newest or same or not is_before(job, newest):
            found.append(job)
    return found


def has_token(job: list[Record], token: str) -> bool:
    return any(record.get("token") == token for record in job)
