"""What `why` costs a run: does the thread of backstage/witness.py slow it?

The stage ddp trains as two processes. In the same run, the thread takes turns:
it looks every two seconds in one block of steps, and sleeps in the next. A
ratio compares two neighbouring blocks, so that what else the machine does
slows both. CPU time is that of all threads of a rank; how much of it is the
thread's own is measured, too.

    python benchmarks/watched.py [PAIRS]      its own command, 20 pairs
"""

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from torch.optim.optimizer import register_optimizer_step_post_hook

from backstage import ROOT, witness

BLOCK = 100  # steps: some seconds, so a few looks
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

    witness.time = SimpleNamespace(**{**vars(time), "sleep": sleep})
    register_optimizer_step_post_hook(count)
    sys.argv = [str(ROOT / "solutions" / "train_gpt2_ddp.py"), "--preset",
                "tiny", "--device", "cpu", "--max-steps",
                str(BLOCK * (2 * pairs + 2 + WARM_UP)), "--run", f"{file}-run",
                *[word for flag in ("eval", "generate", "checkpoint")
                  for word in (f"--{flag}-every", "1000000")]]
    sys.path.insert(0, str(ROOT / "solutions"))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(pairs=20):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node=2", __file__, str(pairs), str(file)],
            check=True, stdout=subprocess.DEVNULL)
        blocks = json.loads(Path(f"{file}-0").read_text())[WARM_UP:]
    for name, column in (("seconds", 1), ("CPU seconds", 2)):
        # each block against the one before it, which is of the other kind
        ratios = [(after if after[0] else before)[column]
                  / (before if after[0] else after)[column]
                  for before, after in pairwise(blocks)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name} of a step, watched / not: {middle:.4f} (the middle "
              f"half of {len(ratios)} from {low:.4f} to {high:.4f})")
    watched = [block for block in blocks if block[0]]
    cpu, own = (sum(block[column] for block in watched) for column in (2, 3))
    print(f"the thread takes {100 * own / cpu:.2f}% of the CPU time")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[2], int(sys.argv[1]))
    else:
        main(*map(int, sys.argv[1:]))
