"""From the evidence to an answer: which rank, which line, why.

The rules are asked in an order, causes before effects: ranks that have not met
cannot call different collectives, and one that has ended makes others wait.
Each is a function of the `Rank`s that returns an `Answer` or None. Nothing
here looks at the machine, so that the tests can hand in any evidence.
"""

import linecache
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from workshop.why.witness import find_line

PATIENCE = 30  # seconds without a move that are no longer normal
SHARE = 0.3  # of the time that the others wait for a straggler
MOSTLY, RARE = 0.7, 0.3  # of its time that a rank waits, in a pipeline
# What an error says where another rank was the first to end
LOST = re.compile(
    r"[Cc]onnection (closed|reset) by|Broken pipe|[Rr]emote (peer|process)"
    r"|failed to (recv|connect)|[Ww]atchdog|RemoteError|lost the other"
    r"|Timed out|timed out")
TIMED_OUT = re.compile("[Tt]imed out|[Ww]atchdog")
SACCT = "SLURM's word: sacct -j JOBID -o JobID,State,ExitCode,MaxRSS"
MISSING = ("look in the log for why it has not started: a node that is down, "
           "an import that fails, a smaller --nnodes; if it has, it writes "
           "elsewhere: WORKSHOP_WHY has to be the same on all nodes")
SAME_CALLS = ("all ranks have to call the same collectives in the same order: "
              "look for a branch that not all ranks take")
# In these, one rank has what the others wait for
ONE_SENDS = re.compile("distributed_c10d.*:(broadcast|scatter|recv)")
# In these, DDP and FSDP wait for the other ranks; py-spy does not see where
BACKWARD = re.compile("torch/(autograd/|_tensor|nn/parallel/distributed)")
# These have to have the same sizes on all ranks
SAME_SIZES = re.compile(
    "all_?reduce|broadcast|bcast|all_?gather(?!v)|reduce_scatter", re.I)


@dataclass
class Answer:
    """fault: its name, "" if nothing is wrong."""

    fault: str
    reason: str
    advice: str = ""
    ranks: list = field(default_factory=list)  # the Ranks to blame


class Rank:
    """A process: what its witness wrote, and what the system says now.

    record: as witness.py writes it. alive: None if it is on another
    host. fresh: whether it has answered now. last: its .stack file.
    """

    def __init__(self, record, alive=None, fresh=False, last=""):
        self.__dict__.update(record)
        self.alive, self.fresh, self.last = alive, fresh, last
        self.recorded = self.calls is not None
        self.calls = [call for call in self.calls or ()
                      if not call["p2p"] and call["group"]]
        if self.ended and self.ended.get("stack"):
            self.stack = self.ended["stack"]
        elif last and self.ending != "runs":
            self.stack = find_frames(main_thread(last))[::-1] or self.stack

    @property
    def ending(self):
        """How it ended: runs, done, error, lost, stopped, crashed or gone."""
        if self.ended:
            if self.ended["status"] == "timeout":
                return "stopped"
            if "error" not in self.ended:  # None: a status is not known
                return "done" if self.ended["status"] in (0, None) else "error"
            text = self.ended["error"] + self.ended["message"]
            return ("lost" if LOST.search(text) and "in use" not in text
                    else "error")
        if "Fatal Python error" in self.last:
            return "crashed"
        if self.fresh if self.alive is None else self.alive:
            return "runs"
        return "stopped" if self.last else "gone"

    @property
    def frame(self):
        """[file, line, function] of the script's innermost line."""
        return find_line(self.stack)

    @property
    def where(self):
        """For example `line 41 of train.py: loss.backward()`."""
        return describe_line(self.frame)

    @property
    def last_heard(self):
        """When it last wrote, and where it was then."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.written))
        return f"{clock}, when it was in {self.where}"

    @property
    def waits(self):
        """Whether it waits for other ranks, as far as its record says."""
        return self.waits_now or bool(self.message) or any(
            call["waits"] for call in self.calls[-1:])

    @property
    def waits_now(self):
        """The same, as far as its stack says."""
        return not self.imports and any(
            "torch/distributed/" in file and name != "wrapper"
            for file, _, name in self.stack)

    @property
    def timed_out(self):
        """Whether it has waited for others until a time-out ended it."""
        return self.waits and bool(self.ended) and (
            self.ended["status"] == "timeout" or (
                self.ending == "lost"
                and bool(TIMED_OUT.search(self.ended["message"]))))

    @property
    def may_wait(self):
        """Whether it may wait unseen: no record, and inside PyTorch's own."""
        return not self.recorded and self.inside(BACKWARD)

    @property
    def imports(self):
        """Whether it loads a module, which can take minutes on a cluster."""
        return self.inside("importlib")

    def inside(self, pattern):
        """Whether its stack has a frame of such a file or function."""
        return any(re.search(pattern, f"{file}:{name}")
                   for file, _, name in self.stack)


def find_frames(text):
    """The frames of a traceback, or of faulthandler's dump, as printed."""
    return [[file, int(line), name] for file, line, name in
            re.findall(r'File "(.*)", line (\d+),? in (.*)', text)]


def main_thread(text):
    """Of faulthandler's dump, the thread that was running."""
    parts = re.split(r"\n(?=Thread |Current thread |Stack )", text)
    for part in parts:
        if part.lstrip().startswith(("Current thread", "Stack")):
            found = part
            break
    else:
        found = text
    # a signal that a library's thread got says nothing of Python's line
    return found if 'File "' in found else parts[-1]


def describe_line(frame):
    file, line, _ = frame
    if file.endswith("/hook/sitecustomize.py"):
        return "its start"
    if file == "?":
        return "a line that is not known"
    code = linecache.getline(file, line).strip()
    return f"line {line} of {Path(file).name}" + (f": {code}" if code else "")


def name_ranks(ranks):
    """For example "rank 2" or "ranks 0, 1, 3"."""
    numbers = [rank if isinstance(rank, int) else rank.rank for rank in ranks]
    many = len(numbers) > 1
    return f"rank{'s' if many else ''} {', '.join(map(str, numbers))}"


def with_status(ranks):
    """How these have ended, which is not known after `raise SystemExit`."""
    return "with status 0" if all(
        rank.ended["status"] == 0 for rank in ranks) else (
        "without an error, with a status that is not known")


def is_are(ranks):
    return "are" if len(ranks) > 1 else "is"


def has_have(ranks):
    return "have" if len(ranks) > 1 else "has"


def judge(ranks, alive=True):
    """The `Answer`, by the first rule that has one.

    ranks: sorted; alive: whether any of the processes may still run.
    """
    ranks = [rank for rank in ranks if rank.rank is not None]
    waited = max((rank.age for rank in ranks), default=0)
    for rule in RULES:
        answer = rule(ranks, waited if alive else float("inf"))
        if answer:
            return answer
    if all(rank.ending == "done" for rank in ranks):
        return Answer("", f"all ranks have ended {with_status(ranks)}")
    mute = [rank for rank in ranks
            if not rank.fresh and rank.ending in ("runs", "gone")]
    if mute:
        return Answer("", "the others move on, but " * (mute != ranks)
                      + f"{name_ranks(mute)} on {mute[0].host} "
                      f"{has_have(mute)} not answered yet: ask again")
    still = min(rank.still for rank in ranks)
    if still > PATIENCE:
        return Answer("", f"no rank has moved for {still:.0f} s, which they "
                      "may need: ask again")
    return Answer("", "nothing is stuck: the ranks move on")


def check_stopped(ranks, waited):
    """A signal has stopped them, as Ctrl-Z does: that is known at once."""
    out = [rank for rank in ranks
           if rank.ending == "runs" and rank.state == "T"]
    if not out:
        return None
    return Answer(
        "a stopped process", f"{name_ranks(out)} on {out[0].host} "
        f"{is_are(out)} stopped, in {out[0].where}", "kill -CONT "
        + " ".join(str(rank.pid) for rank in out) + f" lets "
        f"{'them' if len(out) > 1 else 'it'} go on", out)


def describe_ending(rank):
    """How it ended, or that it runs."""
    if rank.ending == "runs" and not rank.fresh:
        return "does not answer"
    if rank.ending == "done":
        return f"ended {with_status([rank])}"
    return {"stopped": "was told to end", "lost": "lost the others",
            "error": "ended with an error", "crashed": "crashed",
            "gone": "ended without a word", "runs": "runs"}[rank.ending]


# --------------------------------------------------------- they do not meet


def check_meeting(ranks, waited):
    """They wait for one another in init_process_group()."""
    out = [rank for rank in ranks if not rank.joined and rank.ending == "runs"
           and rank.inside("init_process_group|rendezvous|create_c10d_store")]
    if not out:
        return None
    twice = [rank for rank in ranks if rank.ending == "runs"
             and any(other.rank == rank.rank and other is not rank
                     and other.ending == "runs" for other in ranks)]
    if twice:
        return Answer(
            "rendezvous", "several processes say that they are the same rank: "
            + ", ".join(f"{rank.rank} (process {rank.pid} on {rank.host})"
                        for rank in twice), "give each node another "
            "--node-rank, and each process another RANK", twice)
    if any(rank.ending in ("error", "crashed") for rank in ranks):
        return None
    first = next((rank for rank in ranks if rank.rank == 0), ranks[0])
    host, port = first.master
    place = f"{host}:{port}"
    for name, values in (
            ("MASTER_ADDR:MASTER_PORT",
             {rank.rank: ":".join(map(str, rank.master)) for rank in ranks}),
            ("the world size", {rank.rank: rank.world_size
                                for rank in ranks})):
        usual = values[first.rank]
        odd = [rank for rank in ranks if values[rank.rank] != usual]
        if odd:
            return Answer(
                "rendezvous", f"{name} is {values[odd[0].rank]} on "
                f"{name_ranks(odd)}, and {usual} on rank {first.rank}",
                "export the same values on all nodes", odd)
    missing = find_unseen(ranks)
    if missing and waited > PATIENCE:
        return Answer(
            "rendezvous incomplete", f"{name_ranks(missing)} of "
            f"{first.world_size} {is_are(missing)} missing: the others wait "
            f"at {place}", MISSING, out)
    # rank 0 itself has to reach the address that it has
    deaf = [rank for rank in out if getattr(rank, "answer", "")
            or place in rank.connecting]
    if first in deaf:
        problem = getattr(first, "answer", "") or "no answer"
        return Answer(
            "wrong MASTER_ADDR", f"rank 0, on {first.host}, is to be found at "
            f"{place}, but does not reach that itself: {problem}",
            f"export MASTER_ADDR={first.host}, a name or address of the node "
            "of rank 0", [first])
    # rank 0 may not have tried yet, and then it is not known which it is
    if deaf and (hasattr(first, "answer") or waited > PATIENCE):
        problem = getattr(deaf[0], "answer", "") or "no answer"
        return Answer(
            "blocked port", f"rank 0 at {place} cannot be reached from "
            f"{name_ranks(deaf)} on {deaf[0].host}: {problem}",
            "try another MASTER_PORT; a firewall between the nodes, or an "
            "address of another network: `ip address` lists the interfaces",
            deaf)
    stuck = [rank for rank in out if rank.connecting]
    if stuck:
        return Answer(
            "wrong network interface", f"{stuck[0].connecting[0]}, which a "
            f"rank has named as its address, does not answer "
            f"{name_ranks(stuck)} on {stuck[0].host}",
            "name the interface that connects the nodes: export "
            "NCCL_SOCKET_IFNAME=... GLOO_SOCKET_IFNAME=...", stuck)
    absent = [rank for rank in ranks if rank not in out and not rank.joined]
    still = min(rank.still for rank in out)
    if still > PATIENCE and absent:
        return Answer(
            "a rank is late", f"{name_ranks(absent)} {has_have(absent)} not "
            "come to init_process_group() yet: "
            f"{describe_ending(absent[0])} in {absent[0].where}; "
            f"{name_ranks(out)} {has_have(out)} waited there for "
            f"{still:.0f} s", "does that line take so long, or wait for "
            "something?", absent)
    if still > PATIENCE and len(out) == len(ranks):
        return Answer(
            "rendezvous", f"all ranks reach {place}, but do not go on",
            "is another job's rank 0 there? Try another MASTER_PORT", out)
    return None


# -------------------------------------------- they do not call the same thing


def check_collectives(ranks, waited):
    """The first collective that is not the same on all ranks."""
    found = defaultdict(dict)  # (group, number) -> rank -> call
    for rank in ranks:
        for call in rank.calls:
            group = call["name"], tuple(call["group"])
            found[group, call["number"]][rank.rank] = call
    by_number = {rank.rank: rank for rank in ranks}
    for (_, number), calls in sorted(
            found.items(), key=lambda item: min(
                call["time"] for call in item[1].values())):
        kinds = {rank: call["call"] for rank, call in calls.items()}
        sizes = {rank: (count_elements(call), call["types"])
                 for rank, call in calls.items()
                 if SAME_SIZES.search(call["call"]) and call["sizes"]}
        if len(set(kinds.values())) > 1:
            return differ("different collectives", number, calls, kinds,
                          by_number)
        if len(set(map(str, sizes.values()))) > 1:
            lines = {str(call["line"]) for call in calls.values()}
            return differ("different collectives" if len(lines) > 1 else
                          "different sizes", number, calls, sizes, by_number)
    return (check_orders(ranks) or check_aborted(ranks)
            or check_places(ranks, found))


def find_absent(rank, ranks):
    """The ranks that have not come to the collective in which it waits."""
    call = next((call for call in rank.calls[-1:]
                 if call["waits"] or rank.timed_out), None)
    if call is None:
        return []
    return [other for other in ranks
            if other.rank in call["group"] and other is not rank
            # what it wrote before says nothing of this collective
            and (other.written >= call["time"]
                 or (other.ending == "stopped" and not other.waits))
            and not any(its["name"] == call["name"]
                        and its["number"] >= call["number"]
                        for its in other.calls)]


def check_orders(ranks):
    """Each waits in a collective to which another one does not come, as that
    waits in another group's.
    """
    waiting = [rank for rank in ranks if find_absent(rank, ranks)]
    for rank in waiting:
        for other in find_absent(rank, ranks):
            if rank in find_absent(other, ranks):
                return Answer(
                    "different collectives", " and ".join(
                        f"rank {one.rank} waits in collective "
                        f"{one.calls[-1]['number']} of group "
                        f"{one.calls[-1]['name']}, in {one.where}"
                        for one in (rank, other)), "all ranks have to use "
                    "their groups in the same order", [other])
    return None


def count_elements(call):
    """How many numbers it takes; of a tensor's shape, the product."""
    total = 0
    for shape in call["sizes"]:
        product = 1
        for side in shape:
            product *= side
        total += product
    return total


def differ(fault, number, calls, values, ranks):
    usual = Counter(map(str, values.values())).most_common()
    # of two halves, rank 0's is taken for the right one
    right = (usual[0][0] if len(usual) == 1 or usual[0][1] > usual[1][1]
             else str(values[min(values)]))
    odd = [rank for rank in sorted(values) if str(values[rank]) != right]
    even = [rank for rank in sorted(values) if str(values[rank]) == right]
    advice = SAME_CALLS if fault == "different collectives" else (
        "all ranks have to send tensors of the same shape and type: print "
        "shape and dtype before it")
    return Answer(
        fault, f"collective {number} is {describe_call(calls[odd[0]])} on "
        f"{name_ranks(odd)}, and {describe_call(calls[even[0]])} on "
        f"{name_ranks(even)}", advice, [ranks[rank] for rank in odd])


def describe_call(call):
    """For example `all_reduce of float [4] in line 41 of train.py: ...`."""
    sizes = " and ".join(
        f"{kind.lower()} {size}" for kind, size in zip(
            call["types"][:2], call["sizes"]))
    return (call["call"] + (f" of {sizes}" if sizes else "")
            + (f" in {describe_line(call['line'])}" if call["line"] else ""))


def check_aborted(ranks):
    """gloo ends the process that receives more than it expects."""
    for rank in ranks:
        if rank.ending != "crashed" or "Aborted" not in rank.last or (
                not rank.waits):
            continue
        others = [other for other in ranks if other is not rank and (
            other.waits or other.ending in ("lost", "stopped"))]
        for other in others:
            if other.frame[:2] != rank.frame[:2]:
                return Answer(
                    "different collectives", f"rank {rank.rank} is in "
                    f"{rank.where}, and {name_ranks([other])} in "
                    f"{other.where}; gloo has ended rank {rank.rank}, which "
                    "received what it did not expect", SAME_CALLS, [rank])
        if others:
            return Answer(
                "different sizes", f"gloo has ended rank {rank.rank} in "
                f"{rank.where}, as it received more than it expects there; "
                f"{name_ranks(others)} sent "
                f"{describe_call(others[0].calls[-1])}"
                if others[0].calls else f"gloo has ended rank {rank.rank}",
                "all ranks have to send tensors of the same shape and type: "
                "print shape and dtype before it", [rank])
    return None


def check_places(ranks, found):
    """The same collective from other lines, where a rank has one too few.

    Alone that is no mistake: `if rank == 0: broadcast(a) else: broadcast(b)`.
    """
    if not any(rank.waits for rank in ranks) or len(ranks) < 2:
        return None
    over = [rank for rank in ranks if rank.ending == "done" or (
        not rank.waits and rank.still > PATIENCE)]
    apart = [rank for rank in ranks
             if rank.waits and rank.still > PATIENCE] or over
    if not apart or len({tuple(rank.frame[:2]) for rank in ranks}) == 1:
        return None
    for (_, number), calls in sorted(found.items(), key=lambda item: min(
            call["time"] for call in item[1].values())):
        lines = {rank: str(call["line"])
                 for rank, call in calls.items() if call["line"]}
        if len(set(lines.values())) > 1:
            return differ("different collectives", number, calls, lines,
                          {rank.rank: rank for rank in ranks})
    return None


# ------------------------------------------------------------ one has ended


def check_ends(ranks, waited):
    """The rank that was the first to end."""
    by = defaultdict(list)
    for rank in ranks:
        by[rank.ending].append(rank)
    if by["error"]:
        return explain_error(min(by["error"], key=lambda rank: rank.ended[
            "time"]), ranks)
    if by["crashed"]:
        rank = by["crashed"][0]
        what = re.search(r"Fatal Python error: (.*)", rank.last)[1]
        return Answer("a rank crashed", f"rank {rank.rank} ended in "
                      f"{rank.where}: {what}", "its last words are in the "
                      "log, above those of the launcher", [rank])
    if is_slow_to_answer(by["gone"], by["runs"], ranks):
        return None
    if by["gone"] and len(by["gone"]) < len(ranks):
        return explain_gone(by["gone"], ranks)
    left = [rank for rank in ranks if rank.ending == "lost"
            or (rank.waits and rank.ending != "done")]
    if by["done"] and left:
        known = all(rank.ended["status"] == 0 for rank in by["done"])
        return Answer(
            "a rank ended early", f"{name_ranks(by['done'])} ended "
            f"{with_status(by['done'])}, and left {name_ranks(left)} waiting "
            f"in {left[0].where}", "all ranks have to make the same number of "
            "steps: does each have as many batches?" if known else
            "look in the log for what it printed, and for a `raise "
            "SystemExit` in the script", by["done"])
    if ranks and len(by["gone"]) == len(ranks):
        return Answer(
            "ended from outside", "all ranks ended without a word, as "
            "SIGKILL ends them" + say_oom(ranks), f"{SACCT}; mpiexec ends "
            "all ranks after one: the log's end names that one", ranks)
    return None


def is_slow_to_answer(gone, run, ranks):
    """Whether these may only be slow to answer, from another machine."""
    return (gone and run and len(gone) + len(run) == len(ranks)
            and all(rank.alive is None for rank in gone)
            and max(rank.still for rank in run) < PATIENCE)


def explain_error(rank, ranks):
    error, message = (rank.ended.get(name) or "" for name in
                      ("error", "message"))
    first = message.strip().partition("\n")[0][:200]
    frames = find_frames(message)
    if frames:  # it quotes the traceback of another process
        rank.stack = frames
        first = f"{first} {message.strip().splitlines()[-1][:200]}"
    if "OutOfMemory" in error or re.search(
            "out of memory|Cannot allocate memory", message):
        return Answer(
            "out of memory", f"rank {rank.rank} ended in {rank.where}, as the "
            f"memory is full: {first}", "a smaller microbatch, or "
            "recompute activations; does another process use that device?",
            [rank])
    if re.search("message truncated|MPI_ERR_TRUNCATE", message, re.I):
        others = "".join(f"; rank {other.rank} last wrote from {other.where}"
                         for other in ranks if other is not rank)
        return Answer(
            "different collectives", f"rank {rank.rank} got a message of "
            f"another size than it expects, in {rank.where}{others}",
            "all ranks have to call the same collectives in the same order, "
            "with arrays of the same size", [rank])
    what = f"{error}: {first}" if error else (
        f"status {rank.ended['status']!r}")
    return Answer("a rank ended", f"rank {rank.rank} was the first to end, in "
                  f"{rank.where}, with {what}", "mend that: the errors of "
                  "the other ranks follow from it", [rank])


def explain_gone(gone, ranks):
    hosts = {rank.host for rank in gone}
    answer = explain_timeout(gone, ranks)
    if answer:  # the launcher then killed what did not end
        return answer
    if not any(rank.ending in ("lost", "stopped") for rank in ranks) and all(
            rank.alive is None for rank in gone):
        return Answer(
            "a rank does not answer", f"{name_ranks(gone)} on "
            f"{', '.join(sorted(hosts))} {has_have(gone)} not answered since "
            f"{gone[0].last_heard}",
            "it may be dead, hold Python's lock in code that is not Python's, "
            f"or wait for its file system: scontrol show node "
            f"{sorted(hosts)[0]}; on that node: py-spy dump --native --pid "
            f"{gone[0].pid}", gone)
    blind = [rank for rank in gone if not rank.sees_crashes]
    if blind:
        return Answer(
            "a rank was killed, or crashed", f"{name_ranks(blind)} on "
            f"{blind[0].host} ended without a word; faulthandler was "
            "enabled by the script, so a crash's stack is not here",
            "look for `Fatal Python error` in the log; else see SLURM's "
            "word, and `dmesg` on that node", blind)
    if len({rank.host for rank in ranks}) > 1 and not any(
            rank.host in hosts for rank in ranks if rank not in gone):
        return Answer(
            "dead node" if len(gone) > 1 else "dead node, or a killed rank",
            f"all ranks of {', '.join(sorted(hosts))} "
            f"({name_ranks(gone)}) ended without a word, the other nodes "
            "went on" + say_oom(gone), "SLURM's word: scontrol show node "
            f"{sorted(hosts)[0]}; resume on other nodes: sbatch "
            f"--exclude={sorted(hosts)[0]}", gone)
    return Answer(
        "a rank was killed", f"{name_ranks(gone)} on {gone[0].host} ended "
        "without a word, as SIGKILL ends a process; it last wrote from "
        f"{gone[0].where}" + say_oom([
            rank for rank in ranks if rank.host in hosts]),
        "the kernel does that where the node's memory is full: sacct -o "
        "State,MaxRSS and `dmesg` say so; ask for more memory, or use fewer "
        "workers", gone)


def explain_timeout(mute, ranks):
    """Where other ranks have waited for these until their time was over."""
    waited = [rank for rank in ranks if rank.timed_out]
    absent = [rank for rank in ranks if rank not in waited and any(
        rank in find_absent(other, ranks) for other in waited)]
    mute = absent or [rank for rank in mute if rank not in waited]
    if not waited or not mute:
        return None
    return Answer(
        "a rank is late" if absent else "a rank did not answer",
        f"{name_ranks(mute)} on {mute[0].host} "
        f"last wrote from {mute[0].where}; {name_ranks(waited)} waited for it "
        f"in {waited[0].where}, until the time-out", "does that line take so "
        "long, was it stopped, or did its file system or device not answer? "
        "See the node's log", mute)


def say_oom(ranks):
    kills = max(rank.oom_kills for rank in ranks)
    return (f"; meanwhile the kernel of that node ended {kills} process(es), "
            "of any job, for lack of memory" if kills else "")


# ----------------------------------------------------- one makes others wait


def check_late(ranks, waited):
    """Some wait for a rank that does not come, or for each other."""
    everybody = ranks
    ranks = [rank for rank in ranks if rank.ending != "done"]
    waiting = [rank for rank in ranks if rank.waits]
    late = [rank for rank in ranks if not rank.waits and not rank.may_wait
            and rank.ending in ("runs", "stopped")]
    if not ranks or standstill(ranks) < max(
            PATIENCE, 3 * max(map(longest_gap, ranks))):
        return None
    # those for whom others wait, and who do not wait for others in turn
    late = [rank for rank in ranks if not find_absent(rank, ranks) and any(
        rank in find_absent(other, ranks) for other in waiting)] or late
    mute = [rank for rank in ranks if rank.alive and not rank.fresh]
    for rank in mute or late:
        others = [other for other in waiting if other is not rank]
        for_others = (f", and keeps {name_ranks(others)} waiting" if others
                      else "")
        reason, advice = why_late(rank)
        if reason and (others or rank.still > PATIENCE):
            return Answer(reason, f"rank {rank.rank} on {rank.host} has " + (
                f"not answered since {rank.last_heard}" if rank in mute else
                f"been in {rank.where} for {rank.still:.0f} s") + for_others,
                advice, [rank])
    if waiting and late:
        kept = [rank for rank in waiting if rank not in late]
        return Answer(
            "a rank is late", f"{name_ranks(late)} {is_are(late)} in "
            f"{late[0].where}, and kept {name_ranks(kept)} waiting for "
            f"{max(rank.still for rank in kept):.0f} s in {kept[0].where}",
            "does that line take so long, or wait for something?", late)
    unseen = find_unseen(everybody)
    if waiting and len(waiting) == len(ranks) and unseen:
        return Answer(
            "ranks are missing", f"{name_ranks(unseen)} of "
            f"{ranks[0].world_size} {has_have(unseen)} left no evidence here; "
            f"{name_ranks(ranks)} {has_have(ranks)} waited for "
            f"{ranks[0].still:.0f} s in {ranks[0].where}", MISSING, ranks)
    if len(waiting) < len(ranks) or len(ranks) == 1:
        return check_lines(ranks)
    if all(rank.message or rank.inside(ONE_SENDS) for rank in ranks) and (
            not any(rank.connecting for rank in ranks)):
        all_send = all(rank.message and "send" in rank.message["call"].lower()
                       for rank in ranks)
        return Answer(
            "nobody receives" if all_send else "nobody sends",
            "all ranks wait for another one: " + ", ".join(
                f"{name_ranks(group)} in {group[0].where}"
                for group in by_line(ranks))
            + f", for {ranks[0].still:.0f} s", "src has to be the same on all "
            "ranks, and a recv needs a send; if all send first, a large "
            "message waits for its recv: use Sendrecv", ranks)
    return check_lines(ranks) or (Answer(
        "the network", "all ranks are in the same collective, in "
        f"{ranks[0].where}, for {ranks[0].still:.0f} s"
        + "".join(f"; rank {rank.rank} gets no answer from "
                  f"{rank.connecting[0]}" for rank in ranks
                  if rank.connecting),
        "python -m workshop doctor --ranks measures it; name the "
        "interface: export NCCL_SOCKET_IFNAME=...", ranks)
        if len({str([(call["name"], call["number"])
                     for call in rank.calls[-1:]]) for rank in ranks}) == 1
        else None)


def by_line(ranks):
    """Lists of the ranks that are in the same line."""
    groups = defaultdict(list)
    for rank in ranks:
        groups[tuple(rank.frame[:2])].append(rank)
    return list(groups.values())


def standstill(ranks):
    """For how many seconds one has waited, or done nothing if none waits."""
    waiting = [rank for rank in ranks if rank.waits]
    return max((rank.still for rank in waiting or ranks), default=0)


def check_lines(ranks):
    """All stand still, in different lines: py-spy sees no record."""
    still = [rank for rank in ranks
             if rank.still > PATIENCE and not rank.imports]
    lines = Counter(tuple(rank.frame[:2]) for rank in still)
    if len(still) < 2 or len(lines) < 2:
        return None
    usual = (still[0].frame[:2] if lines.most_common(2)[1][1] ==
             lines.most_common(1)[0][1] else lines.most_common(1)[0][0])
    odd = [rank for rank in still
           if list(rank.frame[:2]) != list(usual)]
    even = [rank for rank in still if rank not in odd]
    return Answer(
        "different collectives" if all(rank.waits for rank in still) else
        "different lines", f"{name_ranks(odd)} waited in {odd[0].where} "
        f"for {odd[0].still:.0f} s, and {name_ranks(even)} in "
        f"{even[0].where}", SAME_CALLS, odd)


def find_unseen(ranks):
    """The numbers of the ranks that have left no evidence here."""
    return sorted({*range(ranks[0].world_size or 0)}
                  - {rank.rank for rank in ranks})


def longest_gap(rank):
    """Seconds between two of its collectives, at most."""
    times = [call["time"] for call in rank.calls]
    return max((b - a for a, b in zip(times, times[1:])), default=0)


def why_late(rank):
    """(the fault, what to do), ("", "") where there is nothing special."""
    if rank.state == "D":
        return ("the file system does not answer", "the process waits for a "
                "disk: try `ls` on that node; tell the site's support")
    loading = [bool(re.search("torch/utils/data/", file))
               for file, *_ in rank.stack]
    if any(loading[rank.stack.index(rank.frame):]):  # not the script itself
        return ("the data loader waits", "its workers bring no batch: try "
                "num_workers=0, which shows their error; look at their memory "
                "and the file system")
    if rank.alive and not rank.fresh:
        return ("a rank does not answer", "it may hold Python's lock, in code "
                "that is not Python's: py-spy dump --native --pid "
                f"{rank.pid}")
    return "", ""


def check_straggler(ranks, waited):
    """One rank comes late all the time, and all others wait for it.

    Where the cores or the network are shared, now this one is late and now
    that one: it has to be the same in each quarter of the record.
    """
    times = defaultdict(dict)
    for rank in ranks:
        for call in rank.calls:
            times[call["name"], tuple(call["group"]), call["number"]][
                rank.rank] = call["time"]
    whole = sorted((found for found in times.values()
                    if len(found) == len(ranks) > 1),
                   key=lambda found: min(found.values()))
    quarter = len(whole) // 4
    if quarter < 4:
        return None
    found = [find_last(whole[i * quarter:(i + 1) * quarter + 1])
             for i in range(4)]
    if min(share for _, share, _ in found) < SHARE or len(
            {number for number, _, _ in found}) > 1:
        return None
    number, share, mean = find_last(whole)
    if mean > min(longest_gap(rank) for rank in ranks if rank.rank != number):
        return None  # nobody has waited so long: its clock is another one
    rank = next(rank for rank in ranks if rank.rank == number)
    return Answer(
        "straggler", f"rank {number} on {rank.host} comes late, by "
        f"{1000 * mean:.0f} ms on average: the others wait for it "
        f"{100 * share:.0f}% of the time; it is in {rank.where}",
        "does it read more data than the others, or share its cores or its "
        "GPU with another process? `top` and `nvidia-smi` on that node say so",
        [rank])


def check_pipeline(ranks, waited):
    """The same in a pipeline, whose messages gloo does not record: one rank
    hardly waits, and the others do nothing else.
    """
    if len(ranks) < 2 or not all(rank.ending == "runs" and "/pipelining/" in
                                 str(rank.looks) for rank in ranks):
        return None
    *others, least = sorted(ranks, key=share_waited, reverse=True)
    if share_waited(least) > RARE or share_waited(others[-1]) < MOSTLY:
        return None
    _, least.stack = max(least.looks)
    return Answer(
        "straggler", f"rank {least.rank} on {least.host} waits "
        f"{100 * share_waited(least):.0f}% of the time, and the others "
        f"{100 * share_waited(others[-1]):.0f}% or more; it is mostly in "
        f"{least.where}",
        "has its pipeline stage more to compute than the others, or does it "
        "share its cores or its GPU with another process?", [least])


def share_waited(rank):
    """The share of the looks in which it waited for other ranks."""
    return sum(times for times, stack in rank.looks if is_waiting(stack)) / (
        sum(times for times, _ in rank.looks))


def is_waiting(stack):
    """Whether the innermost function is one of torch.distributed's.

    A module of torch.distributed that is being loaded does not count.
    """
    file, _, name = next((frame for frame in reversed(stack)
                          if not frame[0].endswith("torch/_ops.py")),
                         ("", 0, ""))
    return "torch/distributed/" in file and name != "<module>"


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


def check_rest(ranks, waited):
    """All have ended, and nothing says which of them began it."""
    lost, stopped = ([rank for rank in ranks if rank.ending == ending]
                     for ending in ("lost", "stopped"))
    if any(rank.ending == "runs" for rank in ranks):
        return None
    answer = explain_timeout(
        lost + [rank for rank in stopped if not rank.ended], ranks)
    if answer:
        return answer
    if lost:
        return explain_error(
            min(lost, key=lambda rank: rank.ended["time"]), ranks)
    if stopped:
        return Answer(
            "ended from outside", f"{name_ranks(stopped)} got SIGTERM, in "
            f"{stopped[0].where}", SACCT, stopped)
    return None


RULES = (check_stopped, check_meeting, check_collectives, check_ends,
         check_late, check_straggler, check_pipeline, check_rest)
