"""The diagnosis: the fault that the records prove, or what is observed.

The questions are asked in their order, causes before effects: ranks that have
not met cannot call different collectives, and one that has ended makes others
wait. Each is about a fault that the evidence can prove, because it excludes
all else; its docstring is the fault's line in rankcheck/docs/why.md. If it is
none of them, `report_observations` says where the ranks are.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import TYPE_CHECKING, NamedTuple

from rankcheck.engine.findings import Finding
from rankcheck.engine.waits import find_cycle, find_stuck
from rankcheck.system.sources import is_mpi_call
from rankcheck.why import describe
from rankcheck.why.ranks import (
    IDLE_LIMIT,
    SOON,
    CodeLine,
    Job,
    Rank,
    RankCall,
    RankList,
    RankNumbers,
)

if TYPE_CHECKING:
    from rankcheck.system.sources import Stack
    from rankcheck.why.process_record import Ended

WAITING_SHARE = 0.3  # of the time that the others wait for a straggler
APART = 5  # seconds between clocks of different nodes, at most
SEE_LOG = ("see the end of the log; sacct -j JOBID -o "
           "JobID,State,ExitCode,MaxRSS")
# These have to have the same sizes on all ranks
SAME_SIZES = re.compile(
    "all_?reduce|broadcast|bcast|all_?gather(?!v)|reduce_scatter", re.I)
TRUNCATED = re.compile("message truncated|MPI_ERR_TRUNCATE", re.I)


@dataclass(frozen=True)
class Diagnosis:
    """What a question has proven of a job."""

    blamed: RankList
    sentence: str


FindFault = Callable[[Job], "Diagnosis | None"]


class FaultQuestion(NamedTuple):
    """Whether a job has a fault.

    Attributes:
        sign: what people see.
        fix: what to try first.
        find: proves it of a job; None if it is not so, or not proven.
    """

    sign: str
    fault: str
    fix: str
    find: FindFault


FAULT_QUESTIONS: list[FaultQuestion] = []


def asks(sign: str, fault: str, fix: str) -> Callable[[FindFault], FindFault]:
    """Make a function the last of `FAULT_QUESTIONS`."""
    def add(find: FindFault) -> FindFault:
        FAULT_QUESTIONS.append(FaultQuestion(sign, fault, fix, find))
        return find
    return add


def diagnose(ranks: Sequence[Rank],
             sample_again: Callable[[], Sequence[Rank]] | None = None
             ) -> Finding:
    """Return the first question's `Finding`, or what is seen.

    Args:
        ranks: as evidence.collect returns them.
        sample_again: returns them anew, some seconds later. Without it,
            nothing is named that takes two samples.
    """
    job = Job(ranks)
    for _, fault, fix, find in FAULT_QUESTIONS:
        diagnosis = find(job)
        if diagnosis is None:
            continue
        if find in NEED_TWO_SAMPLES:
            if sample_again is None:
                continue
            later = sample_again()
            if not later:
                continue  # there is nothing to see any more
            if not is_same(diagnosis, find(Job(later))):
                return diagnose(later)
        return Finding("FAIL", [diagnosis.sentence], [fix], kind=fault,
                       ranks=[*diagnosis.blamed])
    return describe.report_observations(job)


def is_same(diagnosis: Diagnosis, later: Diagnosis | None) -> bool:
    """Whether a question has said the same of the same ranks twice."""
    if later is None or diagnosis.sentence != later.sentence:
        return False
    return [rank.rank for rank in diagnosis.blamed] == [
        rank.rank for rank in later.blamed]


BEGINS, STOPS, ENDS, SLOW = ("it never starts", "it hangs", "it ends",
                             "it is slow")


@asks(STOPS, "stopped process", "resume it: kill -CONT PID")
def find_stopped(job: Job) -> Diagnosis | None:
    """a signal has stopped it, as Ctrl-Z and `scontrol suspend` do"""
    ranks = job.select(lambda rank: rank.runs and rank.state == "T"
                       and not (rank.has_watcher and rank.has_answered))
    if not ranks:
        return None
    processes = ", ".join(
        f"process {rank.pid} on {rank.host}, last wrote at {rank.last_report}"
        for rank in ranks)
    return Diagnosis(ranks, f"{ranks:is} stopped: {processes}")


@asks(STOPS, "debugger prompt", "type c at the prompt to continue, or take "
      "breakpoint() out of the script")
def find_debugger_prompt(job: Job) -> Diagnosis | None:
    """it waits for a command at pdb's prompt, which breakpoint() opens"""
    ranks = job.select(lambda rank: rank.runs and rank.reads_pdb_command
                       and rank.idle_seconds > IDLE_LIMIT)
    if not ranks:
        return None
    others = job.select(lambda rank: rank.runs and rank.waits).without(ranks)
    waiting = f"; {others:waits} meanwhile" if others else ""
    return Diagnosis(ranks, f"{ranks:is} at a debugger's prompt, "
                     f"{describe.say_places(ranks)}{waiting}")


# --------------------------------------------------------- they do not meet


@asks(BEGINS, "duplicate rank", "give each node its own --node-rank, and each "
      "process its own RANK")
def find_duplicate_rank(job: Job) -> Diagnosis | None:
    """several processes that join have the same RANK"""
    running = job.by_ending["runs"]
    numbers = Counter(rank.identity for rank in running)
    ranks = RankList(rank for rank in running if numbers[rank.identity] > 1
                     and (rank.joined or rank in job.joining))
    if not job.joining or len(ranks) < 2:
        return None
    processes = ", ".join(f"{rank.rank} (process {rank.pid} on {rank.host})"
                          for rank in ranks)
    return Diagnosis(
        ranks, f"several processes have the same RANK: {processes}")


@asks(BEGINS, "different addresses", "export the same values on all nodes")
def find_different_addresses(job: Job) -> Diagnosis | None:
    """the port, the world size or the address differ between ranks"""
    if not job.not_joined:
        return None
    joined = job.select(lambda rank: rank.runs and rank.joined)
    not_joined = RankList() if joined else job.not_joined
    diagnosis = find_odd_value("the world size", lambda rank: rank.world_size,
                               RankList([*joined, *job.not_joined]))
    if diagnosis is None:
        diagnosis = find_odd_value("MASTER_PORT", lambda rank: rank.master[1],
                                   not_joined)
    if diagnosis is None:  # two names may be of one machine: then they meet
        diagnosis = find_odd_value("MASTER_ADDR", lambda rank: rank.master[0],
                                   not_joined, IDLE_LIMIT)
    return diagnosis


def find_odd_value(name: str, read: Callable[[Rank], int | str | None],
                   ranks: RankList, patience: float = 0) -> Diagnosis | None:
    """Return those ranks that were told another value than the first one.

    Args:
        name: the value's.
        read: returns the value of a rank; false if it does not know any.
        ranks: in order.
        patience: seconds for which they have not moved.
    """
    odd = RankList(rank for rank in ranks if read(rank)
                   and rank.idle_seconds >= patience
                   and read(rank) != read(ranks[0]))
    if not odd:
        return None
    return Diagnosis(odd, f"{name} is {read(odd[0])} on {odd}, and "
                     f"{read(ranks[0])} on {RankList(ranks[:1])}")


@asks(BEGINS, "wrong MASTER_ADDR", "export MASTER_ADDR=HOST, a name or "
      "address of rank 0's node")
def find_wrong_address(job: Job) -> Diagnosis | None:
    """rank 0 cannot connect to its own MASTER_ADDR"""
    # where nobody listens at all, it may have no need to: torchrun does
    ranks = RankList(rank for rank in job.unconnected if rank.rank == 0
                     and rank.master_problem != "nobody listens there")
    if not ranks:
        return None
    return Diagnosis(ranks, f"rank 0 on {ranks.hosts} cannot connect to its "
                     f"own address {ranks[0].address}: "
                     f"{ranks[0].master_problem}")


@asks(BEGINS, "blocked port", "use another MASTER_PORT, open the firewall "
      "between the nodes, or use an address of another network: `ip address` "
      "lists the interfaces")
def find_blocked_port(job: Job) -> Diagnosis | None:
    """a rank cannot connect to rank 0, which can connect to itself"""
    ranks, first = job.unconnected, job.first_rank
    if first not in job.joining or first.master_problem != "" or not ranks:
        return None
    return Diagnosis(ranks, f"rank 0 at {first.address} cannot be reached "
                     f"from {ranks} on {ranks.hosts}: "
                     f"{ranks[0].master_problem}")


# -------------------------------------------- they do not call the same thing

CallsByRank = Mapping[int, RankCall]  # of one collective, by rank


def call_name(call: RankCall, calls: CallsByRank) -> Hashable:
    return call["call"]


def call_size(call: RankCall, calls: CallsByRank) -> Hashable:
    """Return what has to be equal where the same line calls it on all ranks;
    None if it has not.
    """
    lines = {str(call["line"]) for call in calls.values()}
    if len(lines) != 1 or not call["sizes"] or (
            not SAME_SIZES.search(call["call"])):
        return None
    return sum(map(math.prod, call["sizes"])), str(call["types"])


def call_root(call: RankCall, calls: CallsByRank) -> Hashable:
    return call.get("root")


@asks(STOPS, "collective mismatch", "call the same collectives in the same "
      "order on all ranks, with the same shape, dtype and root: look for a "
      "branch that not all ranks take; print shape and dtype before it")
def find_collective_mismatch(job: Job) -> Diagnosis | None:
    """the first call that differs, in name, size, dtype or root"""
    for every_call in job.calls:
        calls = {number: call for number, call in every_call.items()
                 if call not in job.later_calls}
        for property_of in call_name, call_size, call_root:
            values = {}
            for number, call in sorted(calls.items()):
                value = property_of(call, calls)
                if value is not None:
                    values[number] = value
            if len({*values.values()}) > 1:
                return compare_calls(job, calls, values)
    return None


def compare_calls(job: Job, calls: CallsByRank,
                  values: Mapping[int, Hashable]) -> Diagnosis:
    """Return which ranks have not the usual value.

    Args:
        calls: a collective.
        values: what differs between them, by rank, in order.
    """
    # of two halves, the one with the lowest rank is named last
    usual = mode(values.values())
    odd = RankNumbers(number for number, value in values.items()
                      if value != usual)
    even = RankNumbers(number for number, value in values.items()
                       if value == usual)
    first, other = calls[odd[0]], calls[even[0]]
    sentence = (f"collective {first['number']} is "
                f"{describe.describe_call(first)} on {odd}, and "
                f"{describe.describe_call(other)} on {even}")
    for rank in job.ranks:
        if rank.handles:
            sentence += f"; rank {rank.rank} {describe.describe_handled(rank)}"
    return Diagnosis(job.select(lambda rank: rank.rank in odd), sentence)


@asks(STOPS, "deadlock", "use the groups in the same order on all ranks, and "
      "match each recv with a send")
def find_deadlock(job: Job) -> Diagnosis | None:
    """each waits for the other, which no thread of either can end"""
    blocked = job.select(lambda rank: rank.is_blocked)
    waits = {rank: RankList(other for other in job.waits_for(rank)
                            if other in blocked) for rank in blocked}
    if not find_stuck(waits):
        return None
    cycle = find_cycle(waits)
    # the one in whose collective the most others wait is right
    in_order = sorted(cycle, key=lambda rank: rank.rank)
    blamed = sorted(in_order, key=lambda rank: len(job.waiters_of(rank)))[-1]
    return Diagnosis(RankList([blamed]), ", and ".join(
        f"rank {rank.rank} {describe.describe_wait(rank)}" for rank in cycle))


# As they come and go: one sample may show several ranks at different moments
NEED_TWO_SAMPLES = (find_deadlock,)


# ------------------------------------------------------------ one has ended


@asks(ENDS, "aborted in another line", "check that these lines call the "
      "same collectives with the same sizes: gloo aborts the rank that gets a "
      "message of another size than it expects, a watchdog those that wait "
      f"too long; {SEE_LOG}")
def find_aborted(job: Job) -> Diagnosis | None:
    """SIGABRT ended a rank in one line, where the others waited in another"""
    ranks = aborted_while_all_waited(job)
    if not ranks or len(known_places(job)) < 2:
        return None
    return Diagnosis(ranks, describe.describe_each(job.ranks))


@asks(ENDS, "aborted in the same line", "compare the sizes of what the ranks "
      "pass to this line's collective: gloo aborts the rank that gets a "
      "message of another size than it expects, a watchdog one that waits too "
      f"long; {SEE_LOG}")
def find_aborted_in_same_line(job: Job) -> Diagnosis | None:
    """SIGABRT ended a rank in the line in which all others waited, too"""
    ranks = aborted_while_all_waited(job)
    if not ranks or not job.ranks.without(ranks):
        return None
    if len(known_places(job)) != 1:
        return None
    return Diagnosis(ranks, describe.describe_each(job.ranks))


def aborted_while_all_waited(job: Job) -> RankList:
    """Return the ranks that SIGABRT ended, if they waited and so did all
    others.
    """
    ranks = job.select(
        lambda rank: rank.was_aborted or rank.was_aborted_in_backward)
    others = job.ranks.without(ranks)
    if job.by_ending["error"] or others.without(job.waiting):
        return RankList()
    return ranks


def known_places(job: Job) -> set[CodeLine]:
    """Return the lines of the script in which ranks are or were."""
    return {rank.place for rank in job.ranks if rank.place.file != "?"}


@asks(ENDS, "rank killed", "read its last output in the log, above the "
      "launcher's, and `dmesg` on that node: the kernel sends SIGKILL when "
      "memory is full, and so does a scheduler; gloo aborts on a message of "
      f"another size than it expects; {SEE_LOG}")
def find_killed(job: Job) -> Diagnosis | None:
    """by a signal, which its launcher reports, or by a crash"""
    failed = job.by_ending["error"]
    # an abort or a crash may follow from what another rank has done
    ranks = RankList(rank for rank in job.by_ending["killed"] if not (
        failed and (rank.crash or rank.signal == "SIGABRT")))
    # launchers send SIGKILL to those that do not end by themselves
    first_end = min((rank.end_time for rank in failed), default=math.inf)
    ranks = RankList(rank for rank in ranks
                     if rank.crash or rank.end_time < first_end + APART)
    if {*ranks} <= {*job.aborted_ranks}:
        elsewhere = [rank for rank in job.ranks.without(job.waiting)
                     if rank.place.file != "?"]
        if {*job.aborted_ranks} == {*job.ranks} or elsewhere:
            return None  # it waited for one that did something else
    else:
        ranks = ranks.without(job.aborted_ranks)
    if not ranks:
        return None
    text = describe.describe_each(ranks) + describe.say_oom(
        [rank for rank in ranks if rank.signal == "SIGKILL"])
    others = job.ranks.without(ranks)
    if others:
        text += f"; {describe.describe_each(others)}"
    return Diagnosis(ranks, text)


@asks(ENDS, "rank failed", "start with this error, as the other ranks "
      "failed because of it (exception: if MPI says 'message truncated', "
      "check the sender's size); if memory is full, use a smaller microbatch")
def find_first_error(job: Job) -> Diagnosis | None:
    """its own error, not a lost connection, came first"""
    failed = sorted(job.by_ending["error"], key=lambda rank: rank.end_time)
    if not failed:
        return None
    first = failed[0]
    ended: Ended = first.ended or {}
    same = RankList(rank for rank in job.by_ending["error"]
                    if identify_error(rank) == identify_error(first))
    if len(same) > 1:
        return Diagnosis(same, describe.describe_each(same))
    near = [rank for rank in failed[1:] if rank.host != first.host
            and rank.end_time < first.end_time + APART]
    # a launcher looks at its processes now and then
    verb = "was the first to end"
    if near or ended.get("told") or any(
            rank.ended and rank.end_time < first.end_time
            for rank in job.ranks):
        verb = "ended"
    blamed = RankList([first, *near])
    texts = [f"{RankList([rank])} {verb}{describe.describe_rank_error(rank)}"
             for rank in blamed]
    others = job.ranks.without(blamed)
    if others and TRUNCATED.search(ended.get("message") or ""):
        texts.append(describe.describe_each(others))
    return Diagnosis(blamed, "; ".join(texts))


def identify_error(rank: Rank) -> str | tuple[str, CodeLine]:
    """Return what is the same for the same error, in whatever words; of one
    that may follow from another rank's, the words as well.
    """
    error = (rank.ended or {}).get("error") or "Runtime"
    if re.search("Runtime|Dist|Connection|Pipe|EOF|Timeout|OSError", error):
        return describe.describe_rank_error(rank)
    return error, rank.place


@asks(ENDS, "rank ended early", "take the same number of steps on all ranks: "
      "check that each has as many batches, and what this one printed")
def find_ended_early(job: Job) -> Diagnosis | None:
    """it ended without an error, and others wait for it or have lost it"""
    # one that is gone without a word may be the one that they have lost
    is_sure = not (job.by_ending["gone"] or job.by_ending["silent"])
    waiters = {rank: RankList(other for other in job.waiters_of(rank)
                              if is_sure or other.ending != "lost")
               for rank in job.by_ending["done"]}
    ranks = RankList(rank for rank in waiters if waiters[rank])
    if not ranks:
        return None
    others = waiters[ranks[0]]
    return Diagnosis(
        ranks, f"{ranks} ended {describe.describe_status(ranks)} and left "
        f"{others} waiting {describe.say_places(others)}")


def may_follow(other: Rank, rank: Rank) -> bool:
    """Whether a rank can have lost another, or was aborted as it waited for
    it, because that one had gone: it wrote nothing later.
    """
    clocks = 0 if other.host == rank.host else APART
    if other.ending == "lost":
        return rank.written <= other.end_time + clocks
    call = other.current_call
    return other.was_aborted and call is not None and (
        rank.written <= call["time"] + SOON + clocks)


@asks(ENDS, "rank disappeared", f"{SEE_LOG}; `dmesg` on its node says "
      "whether memory was full, `scontrol show node NODE` whether it is down")
def find_disappeared(job: Job) -> Diagnosis | None:
    """it left no record of its end, and others wait for it or have lost it"""
    ranks = RankList(
        rank for rank in (*job.by_ending["gone"], *job.by_ending["silent"])
        if any((other.runs and rank.ending == "gone")
               or may_follow(other, rank) for other in job.waiters_of(rank)))
    if not ranks:
        return None
    sentence = (f"{ranks} on {ranks.hosts} disappeared, with no record of an "
                "end")
    other_hosts = {rank.host for rank in job.ranks.without(ranks)}
    if not other_hosts & {rank.host for rank in ranks}:
        sentence += ", like all ranks of that node"
    return Diagnosis(ranks, f"{sentence}{describe.say_oom(ranks)}; last "
                     f"written at {ranks[0].last_report}")


@asks(STOPS, "blocked on I/O", "try `ls` on that node, and tell the site's "
      "support")
def find_blocked_io(job: Job) -> Diagnosis | None:
    """the kernel reports uninterruptible sleep: a disk does not answer"""
    ranks = job.select(
        lambda rank: rank.runs and rank.state == "D"
        and rank.idle_seconds > IDLE_LIMIT and not rank.computes)
    if not ranks:
        return None
    return Diagnosis(ranks, f"{ranks} on {ranks.hosts}, in {ranks[0].place}, "
                     f"{ranks:waits} for a disk or device, without progress "
                     f"for {ranks[0].idle_seconds:.0f} s")


# ------------------------------------------------------------- one is slower


@asks(SLOW, "straggler", "check with `top` and `nvidia-smi` on that node "
      "whether it shares its cores or its GPU with another process, or reads "
      "more data than the others")
def find_straggler(job: Job) -> Diagnosis | None:
    """the others wait for it for a measured share of the time"""
    # where the cores or the network are shared, now this one is late and now
    # that one: it has to be the same in each quarter of the record
    whole = [{number: call["time"] for number, call in calls.items()}
             for calls in job.calls if len(calls) == len(job.ranks) > 1]
    quarter = len(whole) // 4
    if quarter < 4:
        return None
    late = find_latest_rank(whole)
    for i in range(4):
        part = find_latest_rank(whole[i * quarter:][:quarter + 1])
        if part.rank != late.rank or part.share < WAITING_SHARE:
            return None
    ranks = job.select(lambda rank: rank.rank == late.rank)
    others = job.ranks.without(ranks)
    if late.seconds > min(rank.longest_gap for rank in others):
        return None  # nobody has waited so long: its clock is off
    rank = ranks[0]
    waits = sum(sample.times for sample in rank.stack_samples
                if rank.sources.find_wait(sample.stack)
                or is_in_mpi_call(sample.stack))
    samples = sum(sample.times for sample in rank.stack_samples)
    if waits > WAITING_SHARE * samples:
        return None  # it waits itself, as a pipeline's first stage does
    return Diagnosis(ranks, (
        f"{ranks} on {rank.host} is late by {1000 * late.seconds:.0f} ms on "
        f"average: the others wait for it {late.share:.0%} of the "
        f"time; it is in {rank.place}"))


def is_in_mpi_call(stack: Stack) -> bool:
    return bool(stack) and is_mpi_call(stack[-1][0], stack[-1][2])


class Lateness(NamedTuple):
    """How long the others wait for the rank that comes last."""

    rank: int | None  # None if no rank is the one that comes last
    share: float  # of the time
    seconds: float  # each time, on average


def find_latest_rank(times: Sequence[Mapping[int, float]]) -> Lateness:
    """Return for which rank the others wait.

    Args:
        times: when the ranks came to each collective, by rank, in seconds.
    """
    late: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for found in times:
        *_, before, last = sorted(found.values())
        if last - before > 0.005:  # clocks of nodes differ by as much
            late[max(found, key=found.__getitem__)].append((before, last))
    waits = {number: measure_covered(spans) for number, spans in late.items()}
    number = max(waits, key=waits.__getitem__, default=None)
    if number is None or waits[number] < 0.75 * sum(waits.values()):
        return Lateness(None, 0, 0)
    came = [time for found in times for time in found.values()]
    return Lateness(number, waits[number] / (max(came) - min(came)),
                    waits[number] / len(late[number]))


def measure_covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how many seconds some spans of time cover, of which some
    overlap.

    Args:
        spans: (begin, end) of each.
    """
    covered, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
