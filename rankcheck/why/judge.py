"""From the evidence to an answer: which rank, which line, why.

The rules are asked in their order, causes before effects: ranks that have not
met cannot call different collectives, and one that has ended makes others
wait. Each has its fault, sentence and advice as data, and a function that says
of a `Job` which ranks are to blame and, in a dictionary, what else stands in
the sentence. Its docstring is the fault's line in rankcheck/docs/why.md.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

from rankcheck.findings import Finding
from rankcheck.why.ranks import (
    PATIENCE,
    Job,
    Place,
    Rank,
    Who,
    find_frames,
    find_line,
    with_status,
)

SHARE = 0.3  # of the time that the others wait for a straggler
CROWD = 1.5  # threads that run, for each core
MOSTLY, RARE = 0.7, 0.3  # of its time that a rank waits, in a pipeline
# What several rules advise
ADVICE = {
    "sacct": "SLURM's word: sacct -j JOBID -o JobID,State,ExitCode,MaxRSS",
    "log": "look in the log for why it has not started: a node that is down, "
           "an import that fails, a smaller --nnodes; if it has, it writes "
           "elsewhere: RANKCHECK_WHY has to be the same on all nodes",
    "calls": "all ranks have to call the same collectives in the same order: "
             "look for a branch that not all ranks take",
    "sizes": "all ranks have to send tensors of the same shape and type: "
             "print shape and dtype before it",
    "long": "does that line take so long, or wait for something?"}
# In these, one rank has what the others wait for
ONE_SENDS = re.compile("distributed_c10d.*:(broadcast|scatter|recv)")
# These have to have the same sizes on all ranks
SAME_SIZES = re.compile(
    "all_?reduce|broadcast|bcast|all_?gather(?!v)|reduce_scatter", re.I)
RULES = []


@dataclass
class Rule:
    """sign: what people see. says, advice: texts with names of values: `who`
    is to blame, and is `at` a place, of which `find` may tell more.
    """

    sign: str
    fault: str
    says: str
    advice: str
    find: Any
    verdict: str

    def ask(self, job):
        found = self.find(job)
        who, more = found if isinstance(found, tuple) else (found, {})
        if not who:
            return None
        one, rest = who[0], job.waiting.without(who)
        facts = {
            **vars(one), **ADVICE, "one": one, "who": Who(who),
            "at": one.place, "unseen": job.unseen, "others": rest,
            "there": rest[0].place if rest else "",
            "pids": " ".join(str(rank.pid) for rank in who),
            "place": job.first.address(), "is": "are" if who[1:] else "is",
            "has": "have" if who[1:] else "has", **more}
        return Finding(self.verdict, *(
            [text.format(**facts)] for text in (self.says, self.advice)),
            kind=self.fault, ranks=[*who])


def rule(sign, fault, says, advice="", verdict="FAIL"):
    """verdict: "warn" where what is seen may be as it should."""
    def keep(find):
        RULES.append(Rule(sign, fault, says, advice, find, verdict))
        return find
    return keep


SIGNS = ("it never begins", "it stops in mid-training", "it ends",
         "it is slow", "")
begins, stops, ends, slow, fine = (partial(rule, sign) for sign in SIGNS)
fine = partial(fine, "", verdict="ok")


def judge(ranks, alive=True):
    """The `Finding` of the first rule that has one.

    ranks: sorted; alive: whether any of the processes may still run.
    """
    job = Job(ranks, alive)
    return next(filter(None, (rule.ask(job) for rule in RULES)))


@stops("a stopped process", "{who} on {host} {is} stopped, in {at}",
       "kill -CONT {pids} lets it go on")
def stopped(job):
    """a signal has stopped it, as Ctrl-Z and `scontrol suspend` do"""
    return job.those(lambda rank: rank.runs and rank.state == "T")


# --------------------------------------------------------- they do not meet


@begins("a rank is there twice", "several processes say that they are the "
        "same rank: {each}", "give each node another --node-rank, and each "
        "process another RANK")
def same_number(job):
    """several processes have the same RANK"""
    numbers = Counter(rank.known_as for rank in job.by["runs"])
    twice = [rank for rank in job.by["runs"] if numbers[rank.known_as] > 1
             and (rank.joined or rank in job.outside)]
    return twice and job.outside and (twice, {"each": ", ".join(
        f"{rank.rank} (process {rank.pid} on {rank.host})"
        for rank in twice)})


@begins("different addresses", "{name} is {other} on {who}, and {usual} on "
        "{first}", "export the same values on all nodes")
def other_address(job):
    """MASTER_ADDR, MASTER_PORT or the world size differ between ranks"""
    # before they meet, a script may still set them
    there = job.those(lambda rank: rank.joined or (
        rank.world_size and rank in job.meeting))
    for name, value in (
            ("MASTER_ADDR:MASTER_PORT", Rank.address),
            ("the world size", lambda rank: rank.world_size)):
        odd = job.meeting and [
            rank for rank in there if value(rank) != value(there[0])]
        if odd:
            return odd, {"name": name, "other": value(odd[0]), "usual":
                         value(there[0]), "first": Who(there[:1])}
    return None


@begins("ranks are missing", "{unseen:has} left no evidence here, of "
        "{world_size} ranks; {who} {has} waited for {still:.0f} s in {at}",
        "{log}")
def missing(job):
    """they have left no evidence, and the others wait for them"""
    return job.unseen and job.all_wait and job.stands and (
        not first_difference(job)) and job.left


@begins("wrong MASTER_ADDR", "rank 0, on {host}, is to be found at {place}, "
        "but does not reach that itself: {one.problem}", "export "
        "MASTER_ADDR={host}, a name or address of the node of rank 0")
def wrong_address(job):
    """rank 0 does not reach its own address"""
    return [rank for rank in job.deaf if rank is job.first]


@begins("blocked port", "rank 0 at {place} cannot be reached from {who} on "
        "{host}: {one.problem}", "try another MASTER_PORT; a firewall between "
        "the nodes, or an address of another network: `ip address` lists the "
        "interfaces")
def blocked_port(job):
    """a rank does not reach rank 0"""
    # while rank 0 has not come, or not tried, it is not known which it is
    tried = job.first.answer is not None or job.waited > PATIENCE
    return tried and job.first in job.meeting and job.deaf


@begins("wrong network interface", "{unheard}, which a rank has named "
        "as its address, does not answer {who} on {host}", "name the "
        "interface that connects the nodes: export NCCL_SOCKET_IFNAME=... "
        "GLOO_SOCKET_IFNAME=...")
def wrong_interface(job):
    """ranks do not reach each other"""
    deaf = [rank for rank in job.meeting if rank.connecting]
    return deaf and (deaf, {"unheard": deaf[0].connecting[0]})


@begins("a rank is late", "{who} {has} not come to init_process_group() yet: "
        "{one.doing} in {at}; {meeting:has} waited there for {time:.0f} s",
        "{long}")
def late_for_meeting(job):
    """the others wait for it"""
    absent = [rank for rank in job.ranks
              if rank not in job.meeting and not rank.joined]
    return job.stuck_outside > PATIENCE and not all(
        rank.moves for rank in absent) and (absent, {
            "meeting": job.meeting, "time": job.stuck_outside})


# -------------------------------------------- they do not call the same thing


def differ(job, calls, values):
    """Who calls another thing than most, and what both call."""
    usual = Counter(map(str, values.values())).most_common()
    # of two halves, rank 0's is taken for the right one
    right = (usual[0][0] if len(usual) == 1 or usual[0][1] > usual[1][1]
             else str(values[min(values)]))
    odd, even = ([rank for rank in sorted(values)
                  if (str(values[rank]) == right) == same]
                 for same in (False, True))
    return job.those(lambda rank: rank.rank in odd), {
        "call": describe_call(calls[odd[0]]), "even": Who(even),
        "usual": describe_call(calls[even[0]]),
        "number": calls[odd[0]]["number"]}


def describe_call(call):
    """For example `all_reduce of float [4] in line 41 of train.py: ...`."""
    sizes = " and ".join(
        f"{kind.lower()} {size}" for kind, size in zip(
            call["types"][:2], call["sizes"]))
    return (call["call"] + (f" of {sizes}" if sizes else "")
            + (f" in {Place(*call['line'])}" if call["line"] else ""))


def first_difference(job):
    """(what `differ` says of it, whether only the sizes differ), or None."""
    for calls in job.calls:
        kinds = {rank: call["call"] for rank, call in calls.items()}
        sizes = {rank: (sum(map(math.prod, call["sizes"])), call["types"])
                 for rank, call in calls.items()
                 if SAME_SIZES.search(call["call"]) and call["sizes"]}
        for values in (kinds, sizes):
            if len(set(map(str, values.values()))) > 1:
                return differ(job, calls, values), values is sizes and len(
                    {str(call["line"]) for call in calls.values()}) == 1
    return None


BOTH = "collective {number} is {call} on {who}, and {usual} on {even}"


@stops("different collectives", BOTH, "{calls}")
def other_calls(job):
    """a branch that not all ranks take"""
    found, sizes = first_difference(job) or (None, False)
    return not sizes and found


@stops("different sizes", BOTH, "{sizes}")
def other_sizes(job):
    """a tensor has another shape or type"""
    found, sizes = first_difference(job) or (None, False)
    return sizes and found


@stops("different order of groups", "{waits}", "all ranks have to use their "
       "groups in the same order")
def other_order(job):
    """each waits in a group to whose collective another does not come"""
    for rank in job.waiting:
        for other in job.absent(rank):
            if rank in job.absent(other):
                return [other], {"waits": ", and ".join(
                    f"rank {one.rank} waits in collective "
                    f"{one.calls[-1]['number']} of group "
                    f"{one.calls[-1]['name']}, in {one.place}"
                    for one in (rank, other))}
    return None


@stops("different collectives", "gloo has ended {who}, which received in {at} "
       "what it did not expect: {each}", "{calls}; with tensors of the same "
       "shape and type")
def aborted(job):
    others = Who(rank for rank in job.ranks if rank.ending in (
        "lost", "stopped") or (rank.waits and rank.ending != "crashed"))
    return others and ([rank for rank in job.by["crashed"]
                        if "Aborted" in rank.last and rank.waits],
                       {"each": each(others)})


# ------------------------------------------------------------ one has ended


def failed(job, ending="error"):
    """The first that ended so: [the rank], and its error."""
    rank = min(job.by[ending], key=lambda rank: rank.ended["time"],
               default=None)
    if rank is None:
        return [], {}
    error, message = (rank.ended.get(name) or "" for name in
                      ("error", "message"))
    first = message.strip().partition("\n")[0][:200]
    frames = find_frames(message)
    if frames:  # it quotes the traceback of another process
        rank.stack = frames
        first = f"{first} {message.strip().splitlines()[-1][:200]}"
    then = "".join(f"; then {words}, in {Place(*find_line(stack))}"
                   for stack, words in rank.ended.get("then", ()))
    return [rank], {
        "place": "" if rank.ended.get("told") and not frames else
        f", in {rank.place}",
        "then": then, "first": first, "all": f"{error}: {message}", "error":
        f"{error}: {first}" if error else f"status {rank.ended['status']!r}"}


@ends("out of memory", "{who} ended in {at}, as the memory is full: {first}",
      "a smaller microbatch, or recompute activations; does another process "
      "use that device?")
def out_of_memory(job):
    """of the device, or of the process"""
    who, words = failed(job)
    return who and re.search(
        "^[^:]*OutOfMemory|out of memory|Cannot allocate memory",
        words["all"]) and (who, words)


@stops("different collectives", "{who} got a message of another size than it "
       "expects, in {at}{rest}", "all ranks have to call the same collectives "
       "in the same order, with arrays of the same size")
def truncated(job):
    who, words = failed(job)
    return who and re.search("message truncated|MPI_ERR_TRUNCATE",
                             words["all"], re.I) and (who, {"rest": "".join(
        f"; rank {other.rank} last wrote from {other.place}"
        for other in job.ranks.without(who))})


FIRST = "{who} was the first to end{place}, with {error}{then}"
MEND = "mend that: the errors of the other ranks follow from it"


@ends("a rank was killed", "{one.signal} has ended {who} on {host}, as the "
      "launcher says{oom}{wrote}", "the kernel sends "
      "SIGKILL where the memory is full, and so does a scheduler: `dmesg` on "
      "that node; {sacct}")
def killed(job):
    """by a signal; its launcher says by which"""
    # an abort may follow from what another rank has done
    who = [rank for rank in job.by["killed"] if rank.signal != "SIGABRT"
           or not failed(job)[0]]
    return who and (who, oom(job, who) | {
        "wrote": f"; it last wrote at {who[0].heard}" * bool(who[0].stack)})


@ends("a rank ended", FIRST, MEND)
def first_error(job):
    """its error comes first, the others follow from it"""
    return failed(job)


@ends("a rank crashed", "{who} ended in {at}: {what}", "its last words are "
      "in the log, above those of the launcher")
def crashed(job):
    """for example by a segmentation fault"""
    return job.by["crashed"] and (job.by["crashed"][:1], {
        "what": re.search(r"Fatal Python error: (.*)",
                          job.by["crashed"][0].last)[1]})


@ends("a rank ended early", "{who} ended {status}, and left {left} waiting in "
      "{line}", "all ranks have to make the same number of steps: does each "
      "have as many batches? Look in the log for what it printed")
def ended_early(job):
    """it had fewer batches, or gave up"""
    left = job.those(lambda rank: rank.ending == "lost" or (
        rank.waits and rank.ending != "done"))
    return left and not job.gone and (job.by["done"], {
        "left": left, "line": left[0].place,
        "status": with_status(job.by["done"])})


@ends("a rank is late", "{who} on {host} last wrote from {at}; {waited} "
      "waited for it in {line}, until the time-out", "{long} Was it stopped, "
      "or did its file system or device not answer? See the node's log")
def late_until_time_out(job):
    waited = job.those(lambda rank: rank.timed_out and (
        job.gone or not job.by["runs"]))
    return waited and ([rank for rank in job.ranks if any(
        rank in job.absent(other) for other in waited)] or [
        rank for rank in job.gone or job.ranks if rank not in waited
        and (job.gone or rank.ending == "lost" or not rank.ended)], {
        "waited": waited, "line": waited[0].place})


@stops("a rank does not answer", "{who} on {host} {has} not answered since "
       "{one.heard}", "it may be dead, hold Python's lock in code that is not "
       "Python's, or wait for its file system: scontrol show node {host}; on "
       "that node: py-spy dump --native --pid {pid}")
def silent(job):
    """it holds Python's lock, waits for its file system, or is dead"""
    return not (job.by["lost"] or job.by["stopped"]) and all(
        rank.alive is None for rank in job.gone) and job.gone


def oom(job, some):
    """How often the kernel says that it has ended something there."""
    hosts = {rank.host for rank in some}
    kills = max(rank.oom_kills for rank in job.ranks if rank.host in hosts)
    return {"oom": f"; meanwhile the kernel of that node ended {kills} "
            "process(es), of any job, for lack of memory" if kills else ""}


@ends("no record of an end", "{who} on {host} ended without a record of how"
      "{node}{oom}; last written at {one.heard}", "the end of the log: a "
      "launcher names the status or the signal there; {sacct}; `dmesg` on "
      "{host} says whether its memory was full, and `scontrol show node "
      "{host}` whether it is down")
def gone(job):
    """a signal, a full memory, os._exit, or a node that is down"""
    hosts = {rank.host for rank in job.ranks.without(job.gone)}
    return job.gone and (job.gone, oom(job, job.gone) | {
        "node": "" if hosts & {rank.host for rank in job.gone} else
        ", and all ranks of that node with it"})


@ends("no record of an end", "all ranks ended without a record of how{oom}",
      "the end of the log; {sacct}", verdict="warn")
def all_gone(job):
    return len(job.by["gone"]) == len(job.ranks) and (
        job.ranks, oom(job, job.ranks))


# ----------------------------------------------------- one makes others wait


KEEPS = "{who} on {host} has been in {at} for {still:.0f} s{kept}"


def first_of(job, condition):
    """The first for whom others wait, of this kind."""
    for rank in job.those(lambda rank: rank.mute) or job.awaited:
        others = job.waiting.without([rank])
        if job.stands and condition(rank) and (
                rank.still > PATIENCE or (rank.mute and others)):
            return [rank], {"kept": f", and keeps {others} waiting"
                            if others else ""}
    return None


@stops("the file system does not answer", KEEPS, "the process waits for a "
       "disk: try `ls` on that node; tell the site's support")
def disk(job):
    """the process waits for a disk"""
    return first_of(job, lambda rank: rank.state == "D")


@stops("the data loader waits", KEEPS + "; {one.asleep}", "num_workers=0 "
       "shows their error; do they wait for a lock that was held at the fork "
       "(OpenCV, tokenizers), or for a server? py-spy dump --native --pid "
       "WORKER; look at the memory and the file system")
def loader(job):
    """its workers bring no batch, and do not work either"""
    return first_of(job, lambda rank: rank.loads and not rank.fed)


@stops("a rank does not answer", "{who} on {host} has not answered since "
       "{one.heard}{kept}", "it may hold Python's lock, in code that is not "
       "Python's: py-spy dump --native --pid {pid}")
def holds_lock(job):
    return first_of(job, lambda rank: rank.mute and rank.state != "R")


@stops("a rank at work", "{who} {is} at work in {at}; {others:has} "
       "waited for {time:.0f} s in {there}", "does that take so long? Then "
       "nothing is wrong; else see below where its time goes", verdict="warn")
def at_work(job):
    """the others wait for it, but it moves: that may be as it should"""
    rest = job.stands and job.waiting.without(job.awaited)
    return rest and all(rank.moves for rank in job.awaited) and (
        job.awaited, {"time": max(rank.still for rank in rest)})


@stops("a rank is late", "{who} {is} in {at}, and kept {others} waiting for "
       "{time:.0f} s in {there}", "{long}")
def late(job):
    """the others wait for it"""
    kept = job.stands and job.waiting.without(job.awaited)
    return kept and job.awaited and (job.awaited, {
        "time": max(rank.still for rank in kept)})


def each(ranks):
    """Who is in which line, with those of a line together."""
    groups = defaultdict(Who)
    for rank in ranks:
        groups[rank.place].append(rank)
    return ", ".join(f"{group:is} in {place}"
                     for place, group in groups.items())


@stops("all send, or all receive", "all ranks wait for another one, for "
       "{still:.0f} s: {each}", "src has to be the same on all ranks, and a "
       "recv needs a send; if all send first, a large message waits for its "
       "recv: use Sendrecv")
def no_partner(job):
    """all wait in `Send`, in `recv`, or in a broadcast from another rank"""
    return job.stands and job.all_wait and len(job.left) > 1 and all(
        (rank.message or rank.inside(ONE_SENDS)) and not rank.connecting
        for rank in job.left) and (job.left, {"each": each(job.left)})


@stops("the network", "all ranks are in the same collective, in {at}, for "
       "{still:.0f} s{deaf}", "name the interface: export "
       "NCCL_SOCKET_IFNAME=...")
def network(job):
    """all wait in the same collective"""
    same = {str([(call["name"], call["number"])
                 for call in rank.calls[-1:]] or rank.place[:2])
            for rank in job.left}
    return job.stands and job.all_wait and len(job.left) > 1 and (
        len(same) == 1 and not job.outside) and (job.left, {"deaf": "".join(
            f"; rank {rank.rank} gets no answer from {rank.connecting[0]}"
            for rank in job.left if rank.connecting)})


# ------------------------------------------------------------- one is slower


@slow("the garbage collector", "{who} on {host} {has} spent {collecting:.0%} "
      "of some seconds in Python's garbage collector, in {at}",
      "gc.freeze() when all is loaded; gc.disable(), and gc.collect() after "
      "so many steps on all ranks at once; arrays in place of many objects")
def collector(job):
    """it takes the time, now of this rank and now of that one"""
    return [rank for rank in job.by["runs"]
            if rank.collecting > SHARE and not rank.imports]


BUSY = ("does it read more data than the others, or share its cores or its "
        "GPU with another process? `top` and `nvidia-smi` on that node say so")


@slow("straggler", "{who} on {host} comes late, by {mean:.0f} ms on average: "
      "the others wait for it {share:.0%} of the time; it is in {at}", BUSY)
def straggler(job):
    """the others wait for one rank"""
    # where the cores or the network are shared, now this one is late and now
    # that one: it has to be the same in each quarter of the record
    whole = [times for times in (
        {rank: call["time"] for rank, call in calls.items()}
        for calls in job.calls) if len(times) == len(job.ranks) > 1]
    quarter = len(whole) // 4
    if quarter < 4:
        return None
    found = [find_last(whole[i * quarter:(i + 1) * quarter + 1])
             for i in range(4)]
    if min(share for _, share, _ in found) < SHARE or len(
            {number for number, _, _ in found}) > 1:
        return None
    number, share, mean = find_last(whole)
    if mean > min(rank.longest_gap for rank in job.ranks
                  if rank.rank != number):
        return None  # nobody has waited so long: its clock is another one
    return job.those(lambda rank: rank.rank == number), {
        "mean": 1000 * mean, "share": share}


def find_last(times):
    """(the rank that others wait for, their share of time, seconds each).

    times: of each collective, the time at which each rank came to it.
    """
    late = defaultdict(list)
    for found in times:
        *_, before, last = sorted(found.values())
        if last - before > 0.005:  # clocks of nodes differ by as much
            late[max(found, key=found.get)].append(last - before)
    ends = [max(found.values()) for found in times]
    number = max(late, key=lambda rank: sum(late[rank]), default=None)
    seconds = late[number]
    others = sum(map(sum, late.values())) - sum(seconds)
    if sum(seconds) < 3 * others:
        return number, 0, 0
    return (number, sum(seconds) / (max(ends) - min(ends)),
            sum(seconds) / max(len(seconds), 1))


@slow("straggler", "{who} on {host} waits {least:.0%} of the time, and the "
      "others {most:.0%} or more; it is mostly in {line}", "has its pipeline "
      "stage more to compute than the others? " + BUSY)
def slow_stage(job):
    """The same in a pipeline, whose messages gloo does not record: one rank
    hardly waits, and the others do nothing else.
    """
    if len(job.ranks) < 2 or not all(
            rank.runs and "/pipelining/" in str(rank.looks)
            for rank in job.ranks):
        return None
    *others, least = sorted(job.ranks, key=lambda rank: rank.share_waited,
                            reverse=True)
    if least.share_waited > RARE or others[-1].share_waited < MOSTLY:
        return None
    return [least], {
        "least": least.share_waited, "most": others[-1].share_waited,
        "line": Place(*find_line(max(least.looks)[1]))}


@slow("more threads than cores", "{running:.0f} threads of {who} run at once "
      "on the {cores} cores of {host}", "export OMP_NUM_THREADS={each}, or "
      "torch.set_num_threads() in what starts them: srun and mp.spawn leave "
      "as many threads to each rank as there are cores")
def too_many_threads(job):
    """each rank computes with as many threads as there are cores"""
    for host in sorted({rank.host for rank in job.by["runs"]}):
        mine = [rank for rank in job.by["runs"] if rank.host == host]
        cores = len(set().union(*(rank.cores for rank in mine)))
        running = sum(rank.running for rank in mine)
        if len(mine) > 1 and running > CROWD * cores > 0 and all(
                rank.running > CROWD for rank in mine):
            return mine, {"running": running, "cores": cores,
                          "each": max(1, cores // len(mine))}
    return None


# ------------------------------------ nothing says which of them began it


@ends("a rank ended", FIRST, MEND)
def first_lost(job):
    return not job.by["runs"] and failed(job, "lost")


@ends("ended from outside", "{who} got SIGTERM, in {at}", "{sacct}")
def told_to_end(job):
    return not job.by["runs"] and job.by["stopped"]


@fine("all ranks have ended {status}")
def all_done(job):
    return len(job.by["done"]) == len(job.ranks) and (
        job.ranks, {"status": with_status(job.ranks)})


@fine("{others}{who} on {host} {has} not answered yet: ask again")
def not_answered(job):
    mute = [rank for rank in job.ranks
            if not rank.fresh and rank.ending in ("runs", "gone")]
    return mute, {"others": "the others move on, but "
                  if len(mute) < len(job.ranks) else ""}


@rule("it stops in mid-training", "nobody moves", "no rank has moved for "
      "{time:.0f} s: {each}", "does that take so long? Then nothing is wrong: "
      "ask again", "warn")
def nobody_moves(job):
    """nothing says that the ranks wait for each other"""
    still = min(rank.still for rank in job.ranks)
    return still > PATIENCE and (job.ranks, {
        "time": still, "each": each(job.ranks)})


@fine("nothing is stuck: the ranks move on")
def all_move(job):
    return job.ranks
