"""How a trial ended, where it did not end well: what happened, and where."""

import re
import signal
import textwrap
from itertools import zip_longest
from pathlib import Path

from rankcheck.engine.findings import Line, fail

EFFECT = re.compile(  # words about what another rank did, or did not
    r"lost the other|onnection|gloo|Broken pipe|Unpickling|pickle|preamble|"
    r"Timed out|SIGABRT")  # gloo aborts where two collectives do not fit
SAID = re.compile(r"error(?: \(rank \d+\))?: (.*)")  # by the script itself
TO_ONE = ("send", "ssend", "isend", "issend", "recv", "irecv")
TOOLS = f"{Path(__file__).parents[1]}/"  # this package: no script of theirs
NO_GPU = re.compile(r"\b(CUDA|NVIDIA|NCCL|XPU|HIP)\b|accelerator device")
ON_CPU = ("it runs on the CPU here: the script needs a way to do so, as in "
          'device = "cuda" if torch.cuda.is_available() else "cpu"')


def explain(trial):
    """A `Finding` where it failed or hangs, None where it came to its end."""
    if trial.gave_up == "flood":
        return fail(["it prints without end: ", *where(trial, 0)])
    if trial.gave_up == "endless":
        return fail(f"it continues after step {trial.steps - 1}, the last "
                    "step")
    if trial.gave_up == "busy":
        done = trial.first_step + min(map(trial.updates,
                                          range(len(trial.ranks))))
        return fail([f"it never reaches step {done} but keeps running: ",
                     *where(trial, 0)])
    if trial.gave_up == "waits":
        return fail([f"made no update in {trial.patience:.0f} s, and was idle:"
                     " ", *where_all(trial)])
    bad = [rank for rank, one in enumerate(trial.ranks)
           if one.status or (one.status is None and not trial.gave_up)]
    if not bad and trial.gave_up != "hangs":
        return None
    said = {rank: last_words(trial, rank) for rank in bad}
    # that a connection was lost is what the others saw of an error
    first = min(bad, default=None, key=lambda rank: (
        trial.kills and (trial.ranks[rank].status or 0) < 0,
        bool(EFFECT.search(said[rank].text))))
    apart = part_ways(trial)
    if first is not None and not (apart and EFFECT.search(said[first].text)):
        last = said[first]
        return fail([f"rank {first} ", *last.sentence], ON_CPU * bool(
            NO_GPU.search(last.text)), last.error, ranks=[first])
    if trial.gave_up == "hangs":
        return fail(["it hangs: ", *where_all(trial)], apart)
    return fail(apart)


def last_words(trial, rank):
    """What an error output says that happened, and where: a `Finding`."""
    status = trial.ranks[rank].status
    err = re.sub(r"^\[rank\d+\]: ", "", error_output(trial.ranks[rank]),
                 flags=re.MULTILINE)  # torch's
    lines = [line for line in err.splitlines() if line.strip()]
    own = [found[1] for found in map(SAID.match, lines) if found]
    if (status or 0) < 0 and not own:  # not by an error of Python
        name = {one.value: one.name for one in signal.Signals}.get(-status)
        name = f"{name or -status}" + (
            " (is the memory full?)" * (status == -signal.SIGKILL))
        return fail([f"was ended by {name}, ", *where(trial, rank)])
    if own:
        return fail(f"ended with an error: {own[-1]}")
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception"
                                                 r"|Exit|Interrupt)\b", line)]
    words = (errors or lines or ["no message"])[-1].strip()
    if errors and words.endswith("Error:"):  # the cause has the message
        words = errors[0]
    places = own_places(trial, err)
    return fail([f"ended with an error: {shorten(words)}", *in_brackets(
        places[-1:])], error=words if errors else "")


def shorten(words, most=200):
    """Its whole sentences, as many as fit; if none does, its first words."""
    whole = re.match(rf".{{1,{most - 1}}}[.!?](?=\s|$)", words)
    return words if len(words) <= most else whole[0] if whole else (
        textwrap.shorten(words, most, placeholder=" ..."))


def error_output(rank):
    """What it has said of an error: on stdout, if it sends all there."""
    begin = rank.out.rfind("Traceback (most recent call last)")
    return rank.err if begin < 0 or "Error" in rank.err else (
        rank.err + rank.out[begin:])


def in_brackets(places):
    """The end of a sentence: a place, or nothing."""
    return [part for place in places for part in (" (", place, ")")]


def own_places(trial, err):
    """The `Line`s of the script, those of modules beside it, in a stack."""
    script, folder = str(trial.script), f"{trial.script.parent}/"
    return [Line(line) if file == script else
            f"{file.removeprefix(folder)}, line {line}"
            for file, line in re.findall(r'File "(.*)", line (\d+)', err)
            if file == script or (file.startswith(folder) and not any(
                place in file for place in ("/site-packages/", TOOLS)))]


def where(trial, rank):
    """A sentence: what a rank does, or did last, by its stack and record."""
    if trial.ranks[rank].status == 0:
        return [f"rank {rank} has ended"]
    # what came before it may be of an error that the script has caught
    err = trial.ranks[rank].err.rpartition("Stack (most recent call")[2]
    stack = re.findall(r'File "(.*)", line (\d+) in (\S+)', err)
    inside = [stack[0][2] if stack else ""] + [name for file, _, name in stack
              if file.endswith(("distributed_c10d.py", "blocking_mpi.py"))
              and name != "wrapper"]
    lines = own_places(trial, err)
    if lines:
        return [f"rank {rank} is in ", lines[0], f" ({inside[-1]})"]
    calls = [call for call in trial.calls(rank) if call["lines"]]
    return [f"rank {rank} after ", Line(calls[-1]["lines"][0][0]) if calls
            else f"{trial.updates(rank)} steps"]


def where_all(trial):
    return [part for rank in range(len(trial.ranks)) for part in (
        *[", "] * bool(rank), *where(trial, rank))]


def part_ways(trial):
    """Where the ranks first call different collectives, [] if nowhere."""
    if not trial.alike:
        return []
    calls = [[call for call in trial.calls(rank) if call["call"] not in TO_ONE]
             for rank in range(len(trial.ranks))]
    for row in zip_longest(*calls):
        kinds = [call and (call["call"], call["elements"], call["lines"][:1])
                 for call in row]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                return ["the ranks part ways: ", *describe(trial, 0, row[0]),
                        ", but ", *describe(trial, rank, row[rank])]
    return []


def describe(trial, rank, call):
    if call is None:
        return [f"rank {rank} " + (
            f"has made its {trial.updates(rank)} updates before that"
            if trial.seen[rank] and trial.asked("left", rank) else
            "calls nothing more")]
    if not call["lines"]:
        return [f"rank {rank} calls {call['call']}"]
    line, _, called = call["lines"][0]
    return [f"rank {rank} calls {called or call['call']} in ", Line(line)]
