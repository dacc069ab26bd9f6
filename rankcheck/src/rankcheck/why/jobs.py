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
from dataclasses import dataclass

from rankcheck.why.process_record import Identity, ProcessRecord

LAUNCH_NAMES = ("run", "restart", "slurm_job", "slurm_step", "pmix", "address",
                "port", "world_size")  # of what is in a record's "start"


@dataclass(frozen=True)
class Parent:
    """What has started a process, a launcher as a rule."""

    host: str
    space: str | None  # as proc.name_space() names it
    pid: int


def read_launch(record: ProcessRecord) -> dict[str, str | None]:
    """Return what the launcher has told the process, by `LAUNCH_NAMES`."""
    values: dict[str, str | None] = dict.fromkeys(LAUNCH_NAMES)
    values.update(zip(LAUNCH_NAMES, record.get("start") or [], strict=False))
    return values


def identify(record: ProcessRecord) -> Identity:
    return Identity(record["rank"],
                    "" if record["world_size"] else record["host"])


def read_parent(record: ProcessRecord) -> Parent | None:
    pid = record.get("parent")
    if pid is None:
        return None
    return Parent(record["host"], record.get("space"), pid)


def read_end(record: ProcessRecord) -> float:
    """Return when it was over: if nobody knows, when it last wrote."""
    if record["ended"]:
        return record["ended"].get("time") or record["written"]
    return math.inf if record.get("alive") else record["written"]


def is_before(some: list[ProcessRecord], others: list[ProcessRecord]) -> bool:
    """Whether all of these were over before the others began."""
    last = max(read_end(record) for record in some)
    return last < min(record["began"] for record in others)


def identify_start(record: ProcessRecord) -> tuple[str | None, ...]:
    """Return what all ranks of a job have in common that is set up well, and
    as a rule no rank of another job.
    """
    start = read_launch(record)
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


def excludes(earlier: ProcessRecord, later: ProcessRecord) -> bool:
    """Whether two processes with one number, and told the same, are of two
    jobs: of one, they would be a rank that is there twice, or a program that
    a rank's own script runs before.
    """
    if identify(earlier) != identify(later):
        return False
    parents = {read_parent(earlier), read_parent(later)}
    other_launcher = len(parents) == 2 and None not in parents
    if is_before([earlier], [later]):
        return other_launcher or earlier["joined"]
    # who has been told no port may meet anywhere
    return other_launcher and read_launch(later)["port"] is None


def split_alike(records: list[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Return the jobs of records that were all told the same."""
    jobs: list[list[ProcessRecord]] = []
    for record in sorted(records, key=lambda one: one["began"]):
        fitting = [job for job in jobs if not any(
            excludes(other, record) for other in job)]
        found = find_siblings(fitting, record)
        if not found:
            # one before the newest has been followed by another job
            found = [job for job in fitting
                     if job is jobs[-1] or not is_before(job, [record])]
        if found:
            found[-1].append(record)
        else:
            jobs.append([record])
    return jobs


def find_siblings(jobs: list[list[ProcessRecord]],
                  record: ProcessRecord) -> list[list[ProcessRecord]]:
    """Return those with a rank that the same launcher has started."""
    parent = read_parent(record)
    return [job for job in jobs if parent in map(read_parent, job)]


def may_be_one(job: list[ProcessRecord], others: list[ProcessRecord]) -> bool:
    """Whether ranks that were told different things may be of one job."""
    if {*map(identify, job)} & {*map(identify, others)}:
        return False
    if is_before(job, others) or is_before(others, job):
        return False
    first, second = read_launch(job[0]), read_launch(others[0])
    for name in ("run", "restart", "pmix"):
        values = {first[name], second[name]} - {None, "none"}
        if len(values) > 1:
            return False
    return True


def split_jobs(records: list[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Return the records of each job, those first that began first."""
    by_start: dict[tuple[str | None, ...], list[ProcessRecord]] = {}
    # those of which only a launcher says something
    unknown: list[ProcessRecord] = []
    for record in records:
        if record.get("start") is None:
            unknown.append(record)
        else:
            by_start.setdefault(identify_start(record), []).append(record)
    alike = [job for some in by_start.values() for job in split_alike(some)]
    alike.sort(key=find_first_begin)
    jobs: list[list[ProcessRecord]] = []
    for group in alike:
        fitting = [job for job in jobs if may_be_one(job, group)]
        if fitting:
            fitting[-1].extend(group)
        else:
            jobs.append(group)
    for record in unknown:
        siblings = find_siblings(jobs, record)
        if siblings:
            siblings[-1].append(record)
        elif len(jobs) == 1:
            jobs[0].append(record)
        else:
            jobs.append([record])
    jobs.sort(key=find_first_begin)
    return jobs


def find_first_begin(job: list[ProcessRecord]) -> float:
    """Return when the first of its ranks began."""
    return min(record["began"] for record in job)


def is_followed(job: list[ProcessRecord], later: list[ProcessRecord]) -> bool:
    """Whether the same launcher has started its ranks anew."""
    same = {*map(read_parent, job)} & {*map(read_parent, later)}
    attempts = [read_launch(some[0])["restart"] for some in (job, later)]
    if not same - {None} or attempts[0] == attempts[1]:
        return False
    return is_before(job, later)


def choose_current(jobs: list[list[ProcessRecord]],
                   last_start: str | None = None) -> list[list[ProcessRecord]]:
    """Return those of the last start, and those that were not over when its
    last job began: a folder may be used again.

    Args:
        jobs: those that began first are first.
        last_start: the token of the last start; None if it is not known.
    """
    if not jobs:
        return []
    newest = jobs[-1]
    if last_start is not None:
        for job in jobs:
            if has_token(job, last_start):
                newest = job
    tokens = {record.get("token") for record in newest} - {None}
    found = []
    for job in jobs:
        if any(is_followed(job, later) for later in jobs):
            continue
        same = tokens & {record.get("token") for record in job}
        if job is newest or same or not is_before(job, newest):
            found.append(job)
    return found


def has_token(job: list[ProcessRecord], token: str) -> bool:
    return any(record.get("token") == token for record in job)
