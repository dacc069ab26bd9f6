"""Whether ranks that do nothing wait for what can never come.

Idleness proves nothing: a script may wait for a download, a compiler or slow
storage. Ranks hang if they have called different collectives of one group, or
if each that waits in a call waits for a rank that has ended, or that waits
for ever itself.
"""

import json
import re
from collections import defaultdict

ONE_WAY = (("send", "ssend"), ("recv",))  # calls of which none ends another
TO_ONE = ("send", "ssend", "isend", "issend", "recv", "irecv")


def hangs(events, stacks, ended, size):
    """Whether the ranks of a job that is idle can never go on.

    events: what each rank has recorded, see `read_events`. stacks: the line of
    the script in which each rank is now, or None. ended: the set of the ranks
    that have ended.
    """
    calls = [[event for event in those if "call" in event] for those in events]
    made = defaultdict(lambda: defaultdict(list))  # group -> rank -> its calls
    for rank, those in enumerate(calls):
        for call in those:
            if call["call"] not in TO_ONE:
                made[str(call["group"])][rank].append(call)
    # in a call, and in no line after it
    inside = {rank: those[-1] for rank, those in enumerate(calls)
              if rank not in ended and those and those[-1]["lines"]
              and those[-1]["lines"][0][0] == stacks[rank]}
    if len(inside) == size and any(
            all(call["call"] in names for call in inside.values())
            for names in ONE_WAY):
        return True
    waits = {}  # rank -> those that have not come to the call it is in
    for rank, call in inside.items():
        if call["call"] in TO_ONE:
            continue
        _, ranks = call["group"] or ("", range(size))  # MPI's
        group = made[str(call["group"])]
        number = len(group[rank])
        others = {other: group[other][number - 1:number] for other in ranks}
        if any(theirs and kind(theirs[0]) != kind(call)
               for theirs in others.values()):
            return True
        waits[rank] = {other for other, theirs in others.items() if not theirs}
    stuck = {rank for rank in waits if waits[rank]}
    while left := {rank for rank in stuck
                   if not waits[rank] & (stuck | ended)}:
        stuck -= left
    return bool(stuck)


def kind(call):
    """What has to be the same on all ranks."""
    return call["call"], call["elements"] * (call["call"] == "allreduce")


def read_events(file):
    """The lines of a rank's record that are complete; [] if there is none."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def read_line(text, script):
    """The innermost line of the script in a stack of faulthandler's, or None.
    """
    found = re.search(rf'File "{re.escape(str(script))}", line (\d+)', text)
    return int(found[1]) if found else None
