"""How a trial ended, where it did not end well: what happened, and why."""

import re
import signal

from workshop.check.causes import asks_the_launcher, thinks_it_is_rank_0
from workshop.check.findings import fail
from workshop.check.trial import STEPS
from workshop.stages import STAGES

TO_ONE = ("send", "ssend", "isend", "issend", "recv", "irecv")
# What an error says -> what to do, where neither it nor its line says it.
HINTS = (
    (r"rank [1-9]\d* called run\.\w+\(\)|rank 0 alone",
     "guard it with `if rank == 0:`"),
    (r"(?i)(cuda|nccl|xpu|hip)\b.*(driver|available|compiled|support|found"
     r"|GPU)|Torch not compiled",
     "the check runs on the CPU, without a GPU: use_device(hp.device, "
     "local_rank) and what depends on `device` work on both"),
    (r"No space left|could not be written", "make room on the disk"),
)


def explain(trial):
    """A `Finding` where it failed or hangs, None where it came to its end."""
    if trial.gave_up == "flood":
        return fail("it prints without end", f"{where(trial, 0)}: is a print "
                    "inside a loop that does not end?")
    if trial.gave_up == "endless":
        return fail(f"it continues after step {STEPS - 1}, the last step",
                    "max_steps is the number of updates: the loop, or the "
                    "Trainer, ends after so many")
    if trial.gave_up == "busy":
        return fail(f"it never reaches step {steps_done(trial)} but keeps "
                    f"running: {where(trial, 0)}", "a loop does not end "
                    "there: is something waited for that no rank does?")
    if trial.gave_up == "asleep":
        return hangs(trial)
    killed = [r for r, rank in enumerate(trial.ranks)
              if (rank.status or 0) < 0]
    failed = [r for r, rank in enumerate(trial.ranks) if rank.status
              and rank.status > 0]
    if killed and not (trial.by_mpi and failed):  # by whom, if not by mpirun
        rank = killed[0]
        aborted = trial.ranks[rank].status == -signal.SIGABRT
        apart = part_ways(trial) if aborted else None
        if apart:  # gloo does so where two collectives do not fit
            return apart
        return fail(f"rank {rank} was ended by "
                    f"{signal_name(trial.ranks[rank].status)}, "
                    f"{where(trial, rank)}", "not by an error of Python: "
                    "SIGKILL is what a full memory brings, SIGSEGV and "
                    "SIGABRT come from a library")
    bad = (failed if trial.by_mpi else
           [r for r, rank in enumerate(trial.ranks) if rank.status != 0])
    if not bad:
        return None
    said = {r: last_words(trial, r) for r in bad}
    # that a connection was lost is what the others saw of an error
    rank = min(bad, key=lambda r: is_effect(said[r]))
    if is_effect(said[rank]):
        apart = part_ways(trial)
        if apart:
            return apart
    unasked = ("holds a run already|another process trains in this run|"
               "(RANK|ADDR) expected|called run")
    if (re.search(unasked, said[rank])
            and STAGES[trial.stage].launcher == "torchrun"
            and not asks_the_launcher(trial)):
        return thinks_it_is_rank_0(trial)
    return fail(f"rank {rank} ended with an error: {said[rank]}", next(
        (words for pattern, words in HINTS if re.search(pattern, said[rank])),
        "the first error is the one to fix"))


def signal_name(status):
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def is_effect(words):
    """Whether it says that another rank did something."""
    return bool(re.search(r"lost the other|onnection|gloo|Broken pipe|"
                          r"Unpickling|pickle|preamble|Timed out", words))


def last_words(trial, rank):
    """The line of an error output that says what happened, and where."""
    lines = [line for line in trial.ranks[rank].err.splitlines()
             if line.strip()]
    ours = [line for line in lines if line.startswith("error")]
    if ours:
        return ours[-1].split(": ", 1)[1]
    script = [line for line in lines if re.match(
        rf'  File "[^"]*{re.escape(trial.script.name)}"', line)]
    found = re.search(r"line \d+", script[-1]) if script else None
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception"
                                                 r"|Exit|Interrupt)\b", line)]
    words = (errors or lines or ["no message"])[-1].strip()
    if words.endswith("Error:"):  # the cause has the message
        words = errors[0]
    if len(words) > 200:
        words = words[:200] + " ..."
    return f"{words} ({found[0]})" if found else words


def where(trial, rank):
    """Where a rank is or was last, as far as its stack and record say."""
    stack = re.findall(r'File "(.*)", line (\d+) in (\S+)',
                       trial.ranks[rank].err)
    for file, line, name in stack:
        if file.endswith("/" + trial.script.name):
            return f"rank {rank} in line {line} ({name})"
    calls = trial.calls(rank)
    if calls and calls[-1]["lines"]:
        return f"rank {rank} after line {calls[-1]['lines'][0][0]}"
    return f"rank {rank} after {trial.updates(rank)} steps"


def steps_done(trial):
    return trial.first_step + min(
        trial.updates(rank) for rank in range(trial.mesh.size))


# ------------------------------------------------------------------- hanging


def hangs(trial):
    late = [r for r, rank in enumerate(trial.ranks) if rank.status is None]
    texts = []
    for r, rank in enumerate(trial.ranks):
        if r not in late:
            texts.append(f"rank {r} has ended")
            continue
        stack = re.findall(r'File "(.*)", line (\d+) in (\S+)', rank.err)
        inside = next((name for file, _, name in stack
                       if file.endswith("distributed_c10d.py")
                       and name != "wrapper"), stack[0][2] if stack else "?")
        inside = ([inside] + [  # the last one is MPI's
            name for file, _, name in stack
            if file.endswith("sleeping_mpi.py")])[-1]
        lines = [line for file, line, _ in stack
                 if file.endswith("/" + trial.script.name)]
        texts.append(f"rank {r} waits" + (f" in line {lines[0]}" if lines
                                          else "") + f" ({inside})")
    failed = [r for r, rank in enumerate(trial.ranks) if rank.status]
    if failed:
        return fail(f"rank {failed[0]} ended with an error: "
                    f"{last_words(trial, failed[0])}",
                    "the others wait for it: " + ", ".join(texts))
    apart = part_ways(trial)
    return fail(f"it hangs: {', '.join(texts)}",
                all_send(trial, late) or (apart.hint if apart else "") or
                "all ranks have to call a collective (all_reduce, barrier, "
                "...) as often and in the same order: none inside `if rank "
                "== 0:`")


def all_send(trial, late):
    """A hint where each rank waits until another one receives."""
    last = [(trial.calls(rank) or [{"call": ""}])[-1]["call"]
            for rank in late]
    if not last or not set(last) <= {"send", "ssend"}:
        return ""
    return ("each waits in Send until the other receives, and none does: "
            "Isend and Irecv start both and wait afterwards, or Sendrecv "
            "does both at once")


def part_ways(trial):
    """Where the ranks first call different collectives: a `Finding`.

    Those of all ranks: what pipeline stages send each other is none.
    """
    calls = [[call for call in trial.calls(rank) if not call["group"]
              or len(call["group"]) == trial.mesh.size
              if call["call"] not in TO_ONE]
             for rank in range(trial.mesh.size)]
    for index in range(max(map(len, calls))):
        row = [one[index] if index < len(one) else None for one in calls]
        kinds = [call and (call["call"], call["elements"], place(call))
                 for call in row]
        first = kinds[0]
        other = next((r for r, kind in enumerate(kinds) if kind != first),
                     None)
        if other is None:
            continue
        said = [describe(rank, row[rank]) for rank in (0, other)]
        return fail(
            f"the ranks part ways: {said[0]}, but {said[1]}",
            "all ranks have to call the same collectives in the same order: "
            "none inside `if rank == 0:`")
    return None


def place(call):
    return tuple(map(tuple, call["lines"][:1]))


def describe(rank, call):
    if call is None:
        return f"rank {rank} calls nothing more"
    if not call["lines"]:
        return f"rank {rank} calls {call['call']}"
    line, _, called = call["lines"][0]
    if called == "_wrapped_call_impl":  # of torch.nn.Module
        called = "a module"
    return f"rank {rank} calls {called or call['call']} in line {line}"


# ----------------------------------------------------------- ending too soon


def why_early(trial):
    """Why there are not all rows, though it ended without an error."""
    if trial.updates(0) >= STEPS:
        return ("all updates were made, but not all logged: once a step, on "
                "rank 0")
    if trial.by_trainer:
        return "the Trainer counts updates: max_steps=max_steps, no epochs"
    return "look for an early return, break or exit"
