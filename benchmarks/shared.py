"""How long a step of `nano` takes on a CPU that others use as well.

torch's threads wait for one another hundreds of times in a step. Three sides
train: "default" lets them spin, as torch does by itself; "ours" lets them spin
for a moment, as activate.sh says (GOMP_SPINCOUNT), and keeps its memory, as
the stages do; and "passive" is the default with threads that always sleep
(OMP_WAIT_POLICY). They take turns beside k processes that compute without a
pause. k = 0 is an idle machine only if nothing else runs there. The goals,
over the default beside none: ours at most 1.03 beside none, and beside others
less than half of what the default takes.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from statistics import mean, median

from workshop.stages import find

from turns import show, summary, take_turns, train

DEFAULT = {"BENCHMARK_DEFAULT": "1"}  # side.py: as torch does by itself
SIDES = {"default": DEFAULT, "ours": {"GOMP_SPINCOUNT": "10000"},
         "passive": DEFAULT | {"OMP_WAIT_POLICY": "PASSIVE"}}
SETTLE = 2.0  # seconds of a turn that do not count: a run goes on for minutes
COMPUTE = """if True:  # until the process that started it has ended
    import os
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))
"""


def measure(flags, device):
    """{load: {side: seconds of a step}}."""
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(("OMP_", "GOMP_"))}
    sides = {name: partial(seconds, kept | more, 0 if flags.quick else 4)
             for name, more in SIDES.items()}
    results = {}
    for load in (0, 2) if flags.quick else (0, 1, 2, 4, 6):
        with busy(load):
            found = take_turns(sides, flags.rounds)
        results[load] = {name: summary(turns) for name, turns in found.items()}
    idle = results[0]["default"]["median"]
    show(("ms a step (default idle: 1)", *SIDES), *(
        (f"beside {load}", *(
            f"{1000 * row['median']:.0f} ({row['median'] / idle:.2f})"
            for row in rows.values())) for load, rows in results.items()))
    return results


def seconds(env, limit):
    """Of a step: the mean of a turn, but for its beginning."""
    turn = train(find("std").solution, "--preset", "nano", "--device", "cpu",
                 env=env, limit=SETTLE + limit)
    ends = accumulate(turn["steps"])
    steps = [time for time, end in zip(turn["steps"], ends, strict=True)
             if end - time > SETTLE]
    return mean(steps) if steps else median(turn["steps"][-2:])


@contextmanager
def busy(number):
    """That many processes compute, each on one core."""
    others = [subprocess.Popen([sys.executable, "-c", COMPUTE])
              for _ in range(number)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()
