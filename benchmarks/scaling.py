"""What more processes gain: strong and weak scaling of the DDP stage.

Strong: the minibatch stays, as in the course. Weak: it grows with the number
of processes. On a CPU the processes share the cores: each has as many threads
as there are cores for it. The times are fitted by
t_step = A * t_microbatch + t_optimizer + t_exposed; the exposed all-reduce is
recorded, too, by --profile. "no no_sync()" reduces the gradients after every
microbatch.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch

from backstage.errors import require
from backstage.flags import DEMO
from backstage.flops import num_parameters
from backstage.process import count_cores
from workshop.results.runs import fit
from workshop.stages import find_stage

from turns import column, show, summary, take_turns, train

NO_SYNC = "with nullcontext() if is_last_microbatch else model.no_sync():"
STEPS = 25


def measure(flags, device):
    """{side: figures}, and the fitted times."""
    cpu = device.type == "cpu"
    most = 4 if cpu else torch.accelerator.device_count()
    numbers = [n for n in (1, 2, 4, 8) if n <= most]
    preset = "tiny" if flags.quick else "nano" if cpu else "gpt2"
    samples, B = (8, 1) if cpu else (512, 16)  # accumulates on all numbers
    sizes = {f"strong, {n}": (n, samples) for n in numbers}
    sizes |= {f"weak, {n}": (n, samples * n) for n in numbers[1:]}
    with tempfile.TemporaryDirectory() as folder:
        always = Path(folder, "no_sync.py")
        ddp = find_stage("ddp").solution
        text = ddp.read_text()
        require(NO_SYNC in text, f"{ddp} has no line {NO_SYNC}")
        always.write_text(text.replace(NO_SYNC, "with nullcontext():"))

        def side(script, n, S):
            return partial(run, script, n, "--preset", preset, "--device",
                           device.type, "--minibatch-size", S,
                           "--microbatch-size", B,
                           *(("--data", DEMO) if cpu else ()))

        sides = {name: side(ddp, n, S)
                 for name, (n, S) in sizes.items()}
        if len(numbers) > 1:
            sizes["no no_sync(), 2"] = 2, samples
            sides["no no_sync(), 2"] = side(always, 2, samples)
        found = take_turns(sides, flags.rounds)
    base = column(found["strong, 1"], "tokens_per_second")
    rows = {}
    for name, turns in found.items():
        row = summary(column(turns, "tokens_per_second"), base)
        row |= {"seconds": median(column(turns, "seconds")), **{
            part: median(column(turns, part))
            for part in ("all-reduce", "waiting")}}
        rows[name] = row
    show((f"{preset}: ddp, processes", "tokens/s", "over one", "each",
          "ms a step", "exposed", "waiting"),
         *((name, f"{row['median']:,.0f}", f"{row['ratio']:.2f}",
            f"{row['ratio'] / sizes[name][0]:.0%}",
            f"{1000 * row['seconds']:.1f}", f"{row['all-reduce']:.1%}",
            f"{row['waiting']:.1%}") for name, row in rows.items()))
    config = found["strong, 1"][0]["hyperparameters"]["config"]
    return rows | fitted(rows, sizes, B, config)


def run(script, n, *options):
    """A turn; and how much of the recorded steps each part takes."""
    record = 5
    threads = str(count_cores(n))
    turn = train(script, *options, "--max-steps", STEPS + record, "--profile",
                 record, processes=n, skip=5 + record + 1,
                 env=os.environ | {"OMP_NUM_THREADS": threads})
    all_of_it = sum(sum(rank.values()) for rank in turn["parts"])
    for part in ("all-reduce", "waiting"):
        turn[part] = sum(rank[part] for rank in turn["parts"]) / all_of_it
    return turn


def fitted(rows, sizes, B, config):
    """The times of the model, fitted to strong and weak scaling."""
    points = {}
    for name, (n, samples) in sizes.items():
        if name.startswith(("strong", "weak")):
            points[n, samples // (B * n), 1] = rows[name]["seconds"]
    model = fit(points, 4 * num_parameters(config))
    if model is None:
        print("(three numbers of processes are needed to fit the times)")
        return {}
    errors = [abs(model.seconds(*point) / time - 1)
              for point, time in points.items()]
    print(f"t_microbatch {1000 * model.microbatch:.2f} ms, t_optimizer "
          f"{1000 * model.optimizer:.2f} ms, all-reduce "
          + (f"{1e-9 / model.per_byte:.2f} GB/s" if model.per_byte else
             "not seen") + f"; the times are {mean(errors):.0%} off, at "
          f"most {max(errors):.0%}")
    return {"fitted": {"t_microbatch": model.microbatch, "t_optimizer":
                       model.optimizer, "seconds_per_byte": model.per_byte,
                       "errors": errors}}
