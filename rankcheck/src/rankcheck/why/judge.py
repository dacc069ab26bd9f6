"""From the evidence to an answer: what is proven, and else what is seen.

The rules are asked in their order, causes before effects: ranks that have not
met cannot call different collectives, and one that has ended makes others
wait. A rule is a fault that the evidence proves, because it excludes all else;
its docstring is the fault's line in rankcheck/docs/why.md. If no rule holds,
`report` says where the ranks are.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import mode

from rankcheck.engine.findings import Finding
from rankcheck.system.sources import is_mpi_call
from rankcheck.why import seen
from rankcheck.why.ranks import PATIENCE, SOON, Job, Rank, Who

SHARE = 0.3  # of the time that the others wait for a straggler
APART = 5  # seconds between clocks of different nodes, at most
LOG = "the end of the log; sacct -j JOBID -o JobID,State,ExitCode,MaxRSS"
# These have to have the same sizes on all ranks
SAME_SIZES = re.compile(
    "all_?reduce|broadcast|bcast|all_?gather(?!v)|reduce_scatter", re.I)
TRUNCATED = re.compile("message truncated|MPI_ERR_TRUNCATE", re.I)
RULES = []


def rule(sign, fault, advice):
    """sign: what people see; advice: what to try first.

    The function says of a `Job` who is to blame and the sentence; something
    false if it is not so, or not proven.
    """
    def keep(find):
        RULES.append((sign, fault, advice, find))
        return find
    return keep


def judge(ranks: list[Rank],
          look_again: Callable[[], list[Rank]] | None = None) -> Finding:
    """The `Finding` of the first rule that has one, or what is seen.

    Args:
        ranks: as evidence.collect returns them.
        look_again: returns them anew, some seconds later. Without it, nothing
            is named that takes two looks.
    """
    job = Job(ranks)
    for _, fault, advice, find in RULES:
        answer = find(job)
        if answer and find in TWO_LOOKS:
            if look_again is None:
                continue
            later = look_again()
            if not later:
                continue  # there is nothing to see any more
            if not is_same(answer, find(Job(later))):
                return judge(later)
        if answer:
            return Finding("FAIL", [answer[1]], [advice], kind=fault,
                           ranks=[*answer[0]])
    return seen.report(job)


def is_same(answer: tuple, later: tuple | None) -> bool:
    """Whether a rule has said the same of the same ranks twice."""
    return bool(later) and answer[1] == later[1] and (
        [rank.rank for rank in answer[0]] == [rank.rank for rank in later[0]])


BEGINS, STOPS, ENDS, SLOW = ("it never begins", "it stops in mid-training",
                             "it ends", "it is slow")


@rule(STOPS, "a stopped process", "kill -CONT PID lets it go on")
def stopped(job):
    """a signal has stopped it, as Ctrl-Z and `scontrol suspend` do"""
    who = job.those(lambda rank: rank.runs and rank.state == "T"
                    and not (rank.answers and rank.fresh))
    return who and (who, f"{who:is} stopped: " + ", ".join(
        f"process {rank.pid} on {rank.host}, last wrote at {rank.heard}"
        for rank in who))


# --------------------------------------------------------- they do not meet


@rule(BEGINS, "a rank is there twice", "give each node another --node-rank, "
      "and each process another RANK")
def same_number(job):
    """several processes that join have the same RANK"""
    numbers = Counter(rank.known_as for rank in job.by["runs"])
    twice = [rank for rank in job.by["runs"] if numbers[rank.known_as] > 1
             and (rank.joined or rank in job.meeting)]
    return job.meeting and len(twice) > 1 and (twice, (
        "several processes say that they are the same rank: " + ", ".join(
            f"{rank.rank} (process {rank.pid} on {rank.host})"
            for rank in twice)))


@rule(BEGINS, "different addresses", "export the same values on all nodes")
def other_address(job):
    """the port, the world size or the address differ between ranks"""
    joined = job.those(lambda rank: rank.runs and rank.joined)
    unmet = Who() if joined else job.unmet
    for name, value, ranks, patience in (
            ("the world size", lambda rank: rank.world_size,
             Who([*joined, *job.unmet]), 0),
            ("MASTER_PORT", lambda rank: rank.master[1], unmet, 0),
            # two names may be of the same machine: then they meet
            ("MASTER_ADDR", lambda rank: rank.master[0], unmet, PATIENCE)):
        odd = Who(rank for rank in ranks if value(rank) and rank.still
                  >= patience and value(rank) != value(ranks[0]))
        if job.unmet and odd:
            return odd, (f"{name} is {value(odd[0])} on {odd}, and "
                         f"{value(ranks[0])} on {Who(ranks[:1])}")


@rule(BEGINS, "wrong MASTER_ADDR", "export MASTER_ADDR=HOST, a name or "
      "address of the node of rank 0")
def wrong_address(job):
    """rank 0 does not reach its own address"""
    # where nobody listens at all, it may have no need to: torchrun does
    who = Who(rank for rank in job.deaf if rank.rank == 0
              and rank.answer != "nobody listens there")
    return who and (who, f"rank 0, on {who.hosts}, is to be found at "
                    f"{who[0].address}, but does not reach that itself: "
                    f"{who[0].answer}")


@rule(BEGINS, "blocked port", "another MASTER_PORT; a firewall between the "
      "nodes, or an address of another network: `ip address` lists the "
      "interfaces")
def blocked_port(job):
    """a rank does not reach rank 0, which reaches itself"""
    who = job.deaf
    return job.first in job.meeting and job.first.answer == "" and who and (
        who, f"rank 0 at {job.first.address} cannot be reached from {who} "
        f"on {who.hosts}: {who[0].answer}")


# -------------------------------------------- they do not call the same thing


def size_of(call, calls):
    """What has to be equal where the same line calls it on all ranks."""
    same = len({str(call["line"]) for call in calls.values()}) == 1
    return (sum(map(math.prod, call["sizes"])), str(call["types"])) if (
        same and call["sizes"] and SAME_SIZES.search(call["call"])) else None


@rule(STOPS, "different collectives", "all ranks have to call the same "
      "collectives in the same order, with the same shape, type and root: "
      "look for a branch that not all ranks take; print shape and dtype "
      "before it")
def other_calls(job):
    """the first that is another one, or has another size, type or root"""
    for calls in job.calls:
        calls = {number: call for number, call in calls.items()
                 if call not in job.later_calls}
        for property_of in (lambda call, _: call["call"], size_of,
                            lambda call, _: call.get("root")):
            values = {rank: value for rank, call in sorted(calls.items())
                      if (value := property_of(call, calls)) is not None}
            if len({*values.values()}) > 1:
                # of two halves, the one with the lowest rank is named last
                usual = mode(values.values())
                odd, even = (Who(rank for rank in values if (
                    values[rank] == usual) == same) for same in (False, True))
                who = job.those(lambda rank, odd=odd: rank.rank in odd)
                handled = [
                    f"; rank {rank.rank} {seen.describe_handled(rank)}"
                    for rank in job.ranks if rank.handles]
                return who, (
                    f"collective {calls[odd[0]]['number']} is "
                    f"{seen.describe_call(calls[odd[0]])} on {odd}, and "
                    f"{seen.describe_call(calls[even[0]])} on {even}"
                    + "".join(handled))


@rule(STOPS, "each waits for the other", "all ranks have to use their groups "
      "in the same order, and each recv needs a send")
def deadlock(job):
    """in a collective, or a message, to which no thread of the other comes"""
    blocked = job.those(lambda rank: rank.is_blocked)
    waits = {rank: Who(other for other in job.waits_for(rank)
                       if other in blocked) for rank in blocked}
    cycle = find_cycle(waits)
    if not cycle:
        return None
    # the one in whose collective the most others wait is right
    who = sorted(sorted(cycle, key=lambda rank: rank.rank),
                 key=lambda rank: len(job.keeps_waiting(rank)))[-1]
    return [who], ", and ".join(
        f"rank {rank.rank} {seen.describe_wait(rank)}" for rank in cycle)


def find_cycle(waits: dict[Rank, list[Rank]]) -> list[Rank]:
    """The shortest circle of ranks each of which waits for the next; [] if
    there is none.

    Args:
        waits: {rank: those for whom it waits}.
    """
    shortest: list[Rank] = []
    for first in waits:
        cycle = find_way_back(first, waits)
        if cycle and (not shortest or len(cycle) < len(shortest)):
            shortest = cycle
        if len(shortest) == 2:
            break  # there is no shorter one
    return shortest


def find_way_back(first: Rank, waits: dict[Rank, list[Rank]]) -> list[Rank]:
    """The shortest way from a rank to itself, itself first; [] without one."""
    ways, reached = {first: [first]}, [first]
    for rank in reached:  # which grows: the nearest ones first
        for other in waits[rank]:
            if other is first:
                return ways[rank]
            if other not in ways:
                ways[other] = [*ways[rank], other]
                reached.append(other)
    return []


# As they come and go: one look may see several ranks at different moments
TWO_LOOKS = (deadlock,)


# ------------------------------------------------------------ one has ended


@rule(ENDS, "aborted in another line", "do these lines call the same "
      "collectives, with the same sizes? gloo aborts the rank that gets a "
      "message of another size than it expects; a watchdog aborts those that "
      f"wait too long: {LOG}")
def aborted(job):
    """SIGABRT ended a rank in one line, where the others waited in another"""
    who = job.those(lambda rank: rank.aborted or rank.aborted_in_backward)
    others = job.ranks.without(who)
    if not who or job.by["error"] or others.without(job.left):
        return None
    places = {rank.place for rank in job.ranks if rank.place.file != "?"}
    return len(places) > 1 and (who, seen.describe_each(job.ranks))


@rule(ENDS, "a rank was killed", "its last words are in the log, above the "
      "launcher's; `dmesg` on that node: the kernel sends SIGKILL where the "
      "memory is full, and so does a scheduler; gloo aborts at a message of "
      f"another size than it expects; {LOG}")
def killed(job):
    """by a signal, as its launcher says, or by a crash, as it says itself"""
    # an abort or a crash may follow from what another rank has done
    who = Who(rank for rank in job.by["killed"] if not (
        job.by["error"] and (rank.crash or rank.signal == "SIGABRT")))
    first_error = min((rank.ended["time"] for rank in job.by["error"]),
                      default=math.inf)
    # launchers send SIGKILL to those that do not end by themselves
    who = Who(rank for rank in who if rank.crash
              or rank.ended.get("time", 0) < first_error + APART)
    if {*who} <= {*job.aborted}:
        elsewhere = [rank for rank in job.ranks.without(job.left)
                     if rank.place.file != "?"]
        if {*job.aborted} == {*job.ranks} or elsewhere:
            return None  # it waited for one that did something else
    else:
        who = who.without(job.aborted)
    return who and (who, "; ".join(filter(None, [
        seen.describe_each(who) + seen.say_oom(
            rank for rank in who if rank.signal == "SIGKILL"),
        seen.describe_each(job.ranks.without(who))])))


@rule(ENDS, "a rank ended", "mend that: the errors of the other ranks follow "
      "from it, but if MPI says that a message is truncated, another rank's "
      "may be too large. If the memory is full: a smaller microbatch")
def first_error(job):
    """its own error, which is no lost connection, comes first"""
    failed = sorted(job.by["error"], key=lambda rank: rank.ended["time"])
    if not failed:
        return None
    first = failed[0]
    same = Who(rank for rank in job.by["error"] if alike(rank) == alike(first))
    if len(same) > 1:
        return same, seen.describe_each(same)
    near = [rank for rank in failed[1:] if rank.host != first.host
            and rank.ended["time"] < first.ended["time"] + APART]
    # a launcher looks at its processes now and then
    ended = "ended" if near or first.ended.get("told") or any(
        rank.ended and rank.ended["time"] < first.ended["time"]
        for rank in job.ranks) else "was the first to end"
    others = job.ranks.without([first, *near]) if TRUNCATED.search(
        first.ended.get("message") or "") else ()
    return [first, *near], "; ".join(filter(None, [
        *(f"{Who([rank])} {ended}{seen.describe_error(rank)}"
          for rank in (first, *near)), seen.describe_each(others)]))


def alike(rank):
    """An error that does not follow from another, in whatever words."""
    error = rank.ended.get("error") or "Runtime"
    return seen.describe_error(rank) if re.search(
        "Runtime|Dist|Connection|Pipe|EOF|Timeout|OSError", error) else (
            error, rank.place)


@rule(ENDS, "a rank ended early", "all ranks have to make the same number of "
      "steps: does each have as many batches? Look in the log for what it "
      "printed")
def ended_early(job):
    """it ended without an error, and others wait for it or have lost it"""
    # one that is gone without a word may be the one that they have lost
    sure = not (job.by["gone"] or job.by["silent"])
    left = {rank: Who(other for other in job.keeps_waiting(rank)
                      if sure or other.ending != "lost")
            for rank in job.by["done"]}
    who = Who(rank for rank in left if left[rank])
    return who and (who, f"{who} ended {seen.with_status(who)}, and left "
                    f"{left[who[0]]} waiting {seen.say_places(left[who[0]])}")


def may_follow(other: Rank, rank: Rank) -> bool:
    """Whether a rank can have lost another, or was aborted as it waited for
    it, because that one had gone: it wrote nothing later.
    """
    clocks = 0 if other.host == rank.host else APART
    if other.ending == "lost":
        return rank.written <= other.ended["time"] + clocks
    return other.aborted and other.pending is not None and (
        rank.written <= other.pending["time"] + SOON + clocks)


@rule(ENDS, "no record of an end", f"{LOG}; `dmesg` on its node says whether "
      "the memory was full, and `scontrol show node NODE` whether it is down")
def gone(job):
    """it is gone without a word, and others wait for it or have lost it"""
    who = Who(rank for rank in (*job.by["gone"], *job.by["silent"]) if any(
        (other.runs and rank.ending == "gone") or may_follow(other, rank)
        for other in job.keeps_waiting(rank)))
    others = {rank.host for rank in job.ranks.without(who)}
    return who and (who, (
        f"{who} on {who.hosts} ended, and nothing says how" + (
            "" if others & {rank.host for rank in who} else
            ", and all ranks of that node with it")
        + f"{seen.say_oom(who)}; last written at {who[0].heard}"))


@rule(STOPS, "the disk does not answer", "try `ls` on that node; tell the "
      "site's support")
def disk(job):
    """the kernel says that the process waits for a device"""
    who = job.those(lambda rank: rank.runs and rank.state == "D"
                    and rank.still > PATIENCE and not rank.computes)
    return who and (who, f"{who} on {who.hosts}, in {who[0].place}, "
                    f"{who:waits} for a disk or device, and {who:has} not "
                    f"moved for {who[0].still:.0f} s")


# ------------------------------------------------------------- one is slower


@rule(SLOW, "straggler", "does it read more data than the others, or share "
      "its cores or its GPU with another process? `top` and `nvidia-smi` on "
      "that node say so")
def straggler(job):
    """a measured share of the time, the others wait for it"""
    # where the cores or the network are shared, now this one is late and now
    # that one: it has to be the same in each quarter of the record
    whole = [{rank: call["time"] for rank, call in calls.items()}
             for calls in job.calls if len(calls) == len(job.ranks) > 1]
    quarter = len(whole) // 4
    number, share, mean = find_last(whole)
    parts = [find_last(whole[i * quarter:][:quarter + 1]) for i in range(4)]
    if quarter < 4 or any(
            late != number or part < SHARE for late, part, _ in parts):
        return None
    who = job.those(lambda rank: rank.rank == number)
    if mean > min(rank.longest_gap for rank in job.ranks.without(who)):
        return None  # nobody has waited so long: its clock is off
    looks = who[0].looks
    waits = sum(times for times, stack in looks
                if who[0].sources.find_wait(stack)
                or (stack and is_mpi_call(stack[-1][0], stack[-1][2])))
    if waits > SHARE * sum(times for times, _ in looks):
        return None  # it waits itself, as a pipeline's first stage does
    return who, (f"{who} on {who[0].host} comes late, by {1000 * mean:.0f} ms "
                 f"on average: the others wait for it {share:.0%} of the "
                 f"time; it is in {who[0].place}")


def find_last(times):
    """Of the times at which the ranks came to each collective: (the rank that
    others wait for, their share of time, seconds each).
    """
    late = defaultdict(list)
    for found in times:
        *_, before, last = sorted(found.values())
        if last - before > 0.005:  # clocks of nodes differ by as much
            late[max(found, key=found.get)].append((before, last))
    waits = {rank: length(spans) for rank, spans in late.items()}
    number = max(waits, key=waits.get, default=None)
    if number is None or waits[number] < 0.75 * sum(waits.values()):
        return None, 0, 0
    came = [time for found in times for time in found.values()]
    return (number, waits[number] / (max(came) - min(came)),
            waits[number] / len(late[number]))


def length(spans):
    """Of (begin, end) pairs, what they cover: some overlap."""
    covered, last = 0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
