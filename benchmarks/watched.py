"""What `why` costs a run: does the thread of rankcheck/why/witness.py slow it?

The stage ddp trains as two processes. In the same run, the thread takes turns:
it looks at the main thread in one block of steps, and sleeps in the next. A
ratio compares two neighbouring blocks, so that what else the machine does
slows both. One look every two seconds costs too little to be seen on a machine
that others use. So here the thread looks TIMES as often, and what that costs,
divided by TIMES, is the answer: each look costs the same.

    python benchmarks/watched.py [PAIRS]      its own command, 100 pairs
"""

import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from torch.optim.optimizer import register_optimizer_step_post_hook

from backstage import ROOT
from rankcheck.why import witness

BLOCK = 40  # steps: about a second, so some ten looks
TIMES = 20
WARM_UP = 2  # blocks that do not count


def train(file, pairs):
    """In a rank: train, and write by block: watched, seconds, CPU seconds,
    those of the thread.
    """
    looks, blocks, step, begin = threading.Event(), [], 0, None
    own = 0  # CPU seconds of the thread that looks
    looks.set()

    def sleep(seconds):
        nonlocal own
        own = time.thread_time()
        time.sleep(seconds)
        looks.wait()

    def count(*_):
        nonlocal step, begin
        step += 1
        if step % BLOCK:
            return
        now = time.perf_counter(), time.process_time(), own
        if begin:
            blocks.append((looks.is_set(), *(
                b - a for a, b in zip(begin, now, strict=True))))
        (looks.clear if looks.is_set() else looks.set)()
        begin = now
        Path(f"{file}-{os.environ['RANK']}").write_text(json.dumps(blocks))

    witness.POLL /= TIMES
    witness.time = SimpleNamespace(**{**vars(time), "sleep": sleep})
    witness.start(f"{file}-why")
    register_optimizer_step_post_hook(count)
    sys.argv = [str(ROOT / "solutions" / "train_gpt2_ddp.py"), "--preset",
                "tiny", "--device", "cpu", "--max-steps",
                str(BLOCK * (2 * pairs + 2 + WARM_UP)),
                "--run-dir", f"{file}-run",
                *[word for flag in ("eval", "generate", "checkpoint")
                  for word in (f"--{flag}-every", "1000000")]]
    sys.path.insert(0, str(ROOT / "solutions"))
    runpy.run_path(sys.argv[0], run_name="__main__")


def middle(values):
    """Their median, and the interval that has it with 95% (sign test)."""
    values = sorted(values)
    half, off = len(values) / 2, 0.98 * math.sqrt(len(values))
    return (statistics.median(values), values[max(0, round(half - off) - 1)],
            values[min(len(values), round(half + off) + 1) - 1])


def main(pairs=100):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node=2", __file__, str(pairs), str(file)],
            check=True, stdout=subprocess.DEVNULL)
        blocks = json.loads(Path(f"{file}-0").read_text())[WARM_UP:]
    watched, not_watched = ([block for block in blocks if block[0] == looks]
                            for looks in (True, False))
    print(f"{len(watched)} pairs of blocks of {BLOCK} steps, load "
          f"{os.getloadavg()[0]:.1f}; in brackets: 95% confidence")
    for name, column in (("tokens/s", 1), ("1 / CPU time", 2)):
        ratios = middle(mine[column] / theirs[column] for theirs, mine
                        in zip(watched, not_watched, strict=False))
        always = [1 - (1 - ratio) / TIMES for ratio in ratios]
        for words, (ratio, low, high) in (
                (f"looks every {1000 * witness.POLL / TIMES:.0f} ms", ratios),
                (f"every {witness.POLL} s, as always", always)):
            print(f"{name}, {words}, over none: {ratio:.4f} "
                  f"({low:.4f} to {high:.4f})")
    cpu, own = (sum(block[column] for block in watched) for column in (2, 3))
    print(f"the thread itself: {100 * own / cpu / TIMES:.3f}% of the CPU time")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[2], int(sys.argv[1]))
    else:
        main(*map(int, sys.argv[1:]))
