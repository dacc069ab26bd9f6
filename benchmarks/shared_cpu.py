"""How long a step of `nano` takes on a CPU that others use as well.

    python benchmarks/shared_cpu.py                  # 6 minutes
    python benchmarks/shared_cpu.py --rounds 2 --seconds 1 --loads 0 2

torch's threads wait for one another hundreds of times in a step. Three sides
train as the stage std does. "default" lets them spin, as torch does by itself;
"ours" has backstage/spinning.py, as the stages do; and with "passive"
(OMP_WAIT_POLICY) they always sleep. Beside k processes that compute without a
pause, the sides take turns, so that whatever else the machine does slows all
of them down. k = 0 is an idle machine only if nothing else runs there: the
first line says how busy it was. The goals, over the default beside none: ours
at most 1.03 beside none, 2 beside two and, on two cores, 4 beside six.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from backstage import ROOT
from backstage.command_line import parse_flags
from backstage.cores import count_cores
from backstage.errors import require, run_main

SIDES = {"default": {}, "ours": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
SETTLE = 2.0  # seconds of a turn that do not count: a run goes on for minutes
COMPUTE = """if True:  # until the process that started it has ended
    import os
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))
"""


@dataclass
class Flags:
    """Measure a step of nano beside other work."""

    loads: tuple[int, ...] = (0, 1, 2, 4, 6)  # processes that compute, too
    rounds: int = 3  # turns of each side beside each load
    seconds: float = 4.0  # of training in each turn, at least two steps
    side: Literal["", "default", "ours", "passive"] = ""  # only measure this


def measure(seconds, ours):
    """Train in this process: a turn for each line on stdin.

    It answers with a line: the seconds of a step, the mean over the turn.
    """
    import torch

    sys.path.insert(0, str(ROOT / "solutions"))
    import train_gpt2_std as std

    from backstage.cores import use_cores
    from backstage.device import cpu_has_bf16
    from backstage.spinning import share_cores

    use_cores()
    hp = std.PRESETS["nano"]
    config = std.GPTConfig(**vars(std.MODELS["nano"]) | {"vocab_size": 2048})
    precision = "bf16" if cpu_has_bf16() else "fp32"
    torch.manual_seed(0)
    B, T, cpu = hp.minibatch_size, hp.sequence_length, torch.device("cpu")
    tokens = torch.randint(2048, (B, T + 1))
    batch = torch.stack((tokens[:, :-1], tokens[:, 1:]))
    model = std.GPT(config)
    optimizer = model.configure_optimizers(hp)

    def step():
        std.training_step(model, batch, cpu, precision).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()

    if ours:
        share_cores()
    for _ in range(3):
        step()
    print(json.dumps(precision), flush=True)
    for _ in sys.stdin:
        settled = time.perf_counter() + SETTLE
        while time.perf_counter() < settled:
            step()
        steps, begin = 0, time.perf_counter()
        while steps < 2 or time.perf_counter() < begin + seconds:
            step()
            steps += 1
        print(json.dumps((time.perf_counter() - begin) / steps), flush=True)


class Side:
    """A process that measures one side."""

    def __init__(self, name, seconds):
        kept = {key: value for key, value in os.environ.items()
                if not key.startswith(("OMP_", "GOMP_"))}
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", name, "--seconds",
             str(seconds)], env=kept | SIDES[name], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.precision = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        require(line, f"the side {self.name} failed: see above")
        return json.loads(line)

    def turn(self):
        """The mean seconds of a step."""
        print(file=self.process.stdin, flush=True)
        return self.answer()


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


def main():
    flags = parse_flags(Flags)
    if flags.side:
        measure(flags.seconds, flags.side == "ours")
        return
    sides = [Side(name, flags.seconds) for name in SIDES]
    print(f"nano, {sides[0].precision}, {count_cores()} cores; load average "
          f"of the last minute: {os.getloadavg()[0]:.1f}")
    print("ms a step     " + "".join(f"{name:>10}" for name in SIDES))
    medians = {}
    for load in flags.loads:
        with busy(load):
            turns = [[side.turn() for side in sides]
                     for _ in range(flags.rounds)]
        medians[load] = [statistics.median(turn) for turn in
                         zip(*turns, strict=True)]
        print(f"beside {load:2d}     " + "".join(
            f"{1000 * value:10.0f}" for value in medians[load]), flush=True)
    for side in sides:
        side.process.communicate()
    if 0 in medians:
        for load, values in medians.items():
            print(f"beside {load:2d} / default idle" + "".join(
                f"{value / medians[0][0]:10.2f}" for value in values))


if __name__ == "__main__":
    run_main(main)
