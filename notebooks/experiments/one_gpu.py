"""Makes one device fast, step by step, and keeps a table of what was measured.

    python -m notebooks.experiments.one_gpu limit    # what is possible here
    python -m notebooks.experiments.one_gpu bf16 FILE.svg  # a row, a picture
    python -m notebooks.experiments.one_gpu all      # all rows

Each row is a run of the stage std with flags. What has no flag is edited in a
copy of the script, one line each. The rows are kept in runs/one_gpu.json.

On a busy machine the same script is slower a minute later. So a row is trained
beside a plain one that is kept already, in turns of a step: what counts is the
ratio of their steps.
"""

import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backstage import ROOT, dataset
from backstage.device import device_name, find_device, has_bf16
from backstage.errors import require, run_main
from backstage.files import reading, write_atomically
from backstage.flags import find_data
from backstage.flops import flops_per_token, peak_flops
from backstage.process import count_cores
from notebooks.experiments.sharding import std
from workshop.jobs import interpreter
from workshop.results import plot, runs
from workshop.results.profile import recorded_parts
from workshop.stages import FIRST_STAGE, STAGES

RECORD = runs.RUNS / "one_gpu.json"
EDITS = {  # what the script was like before somebody knew better
    "TF32": ('if hp.precision == "bf16":', "if True:"),
    "rows": ("math.ceil(config.vocab_size / 128) * 128",
             "config.vocab_size | 1"),
    "AdamW": ("fused=True", "fused=False"),
    "shards": ("tokens = self.shards[k]",
               "tokens = np.array(self.shards[k])"),
}
TURN = "start_time = time.", "input()\n        start_time = time."  # it waits
ALONE, TURNS = 9, 15  # steps: to warm up and be recorded; then in turns
PLAIN = ("bf16", "tf32", "fp32")  # rows that others are trained beside


@dataclass
class Step:
    """A row: flags that stay from here on, and the edits of this row."""

    what: str
    flags: tuple = ()
    edits: tuple = ()


STEPS = {
    "fp32": Step("fp32", ("--precision", "fp32"), ("rows", "AdamW")),
    "tf32": Step("TF32", (), ("TF32", "rows", "AdamW")),
    "bf16": Step("bf16", ("--precision", "bf16"), ("rows", "AdamW")),
    "compile": Step("torch.compile", ("--compile",), ("rows", "AdamW")),
    "padded": Step("vocabulary padded", (), ("AdamW",)),
    "fused": Step("fused AdamW"),
    "microbatch": Step("microbatch x 4", ("--microbatch-size", "*4")),
    "shards": Step("a whole shard for each sample", (), ("shards",)),
    "recompute": Step("recompute", ("--recompute",)),
}


def sizes(device):
    """What all rows train: flags of the stage."""
    preset, S, B = (("nano", 8, 2) if device.type == "cpu"
                    else ("gpt2", 64, 4))
    return {"--preset": preset, "--minibatch-size": S, "--microbatch-size": B,
            "--max-steps": ALONE + TURNS}


def lacks(name, device):
    """Why this device has no such row, in a line, or None."""
    if name == "tf32" and device.type != "cuda":
        return f"{device.type}: it has no TF32, so there is no such row"
    if name == "bf16" and not has_bf16(device):
        return (f"{device_name(device)}: it has no bf16 arithmetic and would "
                "emulate it, so what follows stays in fp32")
    return None


def flags_of(name, device, size):
    """The flags of a row: its own and those of the rows before it."""
    flags = {**size, "--device": device.type, "--no-compile": None}
    for other, step in STEPS.items():
        # a CPU compiles for half a minute: there this is no row's but its own
        if (step.flags and not lacks(other, device) and (
                other in (name, "fp32") or other != "compile"
                or device.type != "cpu")):
            flag, *value = step.flags
            if value == ["*4"]:
                value = [4 * flags[flag]]
            flags.pop(f"--no-{flag[2:]}", None)  # its opposite
            flags[flag] = value[0] if value else None
        if other == name:
            break
    return [str(word) for pair in flags.items() for word in pair
            if word is not None]


def edited(*edits):
    text = STAGES[FIRST_STAGE].solution.read_text("utf-8")
    for old, new in (TURN, *(EDITS[name] for name in edits)):
        require(text.count(old) == 1, f"the script has no such line: {old}")
        text = text.replace(old, new)
    return text


def train(names, device, size):
    """Train these rows side by side: {name: its `Run`, and its parts}."""
    with tempfile.TemporaryDirectory() as folder, (
            contextlib.ExitStack()) as stack:
        sides = {}
        for name in names:
            script = Path(folder, name, "train_gpt2.py")
            script.parent.mkdir()
            script.write_text(edited(*STEPS[name].edits), "utf-8")
            sides[name] = stack.enter_context(subprocess.Popen(
                [sys.executable, script, *flags_of(name, device, size),
                 "--run-dir", script.with_name("run"), "--profile", "3",
                 "--eval-minibatches", "1"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=stack.enter_context(
                    script.with_name("errors").open("w")),
                env=interpreter.variables()))
            stack.callback(sides[name].kill)
        for steps in (ALONE, *[1] * TURNS):
            for name, side in sides.items():
                done = take_turn(side, steps)
                errors = Path(folder, name, "errors").read_text().strip()
                require(done, f"{name} failed: {errors.splitlines()[-1:]}")
        for side in sides.values():
            side.communicate()
        found = {name: Path(folder, name, "run") for name in names}
        return {name: (runs.read_run(run), *recorded_parts(run))
                for name, run in found.items()}


def take_turn(side, steps):
    """Let a process train so many steps; whether it did."""
    with contextlib.suppress(BrokenPipeError):
        side.stdin.write("\n" * steps)
        side.stdin.flush()
    for line in side.stdout:
        steps -= line.startswith("| step")
        if not steps:
            return True
    return False


def compare(plain, other):
    """How much longer the steps of a run take than a plain one's, in turns.

    A `UserError` if other work on the machine hides it.
    """
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(
        plain.rows[ALONE:], other.rows[ALONE:], strict=True))
    require(ratios[-4] <= 1.25 * ratios[3], "the machine was busy: run it "
            "again")  # from the fourth to the fourth last: 96% of 15
    return statistics.median(ratios)


def measure(name, device, size, record):
    """Train a row; returns it, a dictionary."""
    plain = next((row for row in PLAIN if row in record["rows"] and [
        *STEPS].index(row) < [*STEPS].index(name)), None)
    beginning = f"{STEPS[name].what}: it starts"
    if plain:
        beginning += f", and trains in turns with {plain}"
    # a line each: a notebook would need to be scrolled sideways for one
    print(f"{beginning}.\nThis takes half a minute, or some minutes on a busy "
          "machine.", flush=True)
    found = train([name, plain] if plain else [name], device, size)
    run, parts = found[name]
    seconds = run.seconds
    if plain:
        seconds = record["rows"][plain]["seconds"] * compare(
            found[plain][0], run)
    hp = run.hyperparameters
    speed = hp["minibatch_size"] * hp["sequence_length"] / seconds
    return {"what": STEPS[name].what, "flags": " ".join(
                flags_of(name, device, size)),
            "tokens_per_second": speed, "seconds": seconds,
            # by the third step: what the profiler takes comes later
            "memory": run.rows[2]["memory"],
            "mfu": speed * flops_per_token(
                std.GPTConfig(**run.config), hp["sequence_length"]
            ) / record["peak"], "parts": parts}


def find_peak(device):
    """FLOP/s of the device in its fastest precision: (number, where from).

    That of its data sheet; else of products of two large matrices, here.
    """
    precision = "bf16" if has_bf16(device) else "fp32"
    if peak := peak_flops(device, precision):
        return peak, f"{precision}, by its data sheet"
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, best = torch.ones(2048, 2048, dtype=kind, device=device), float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - begin)
    return 2 * 2048**3 / best, f"{precision}, products of matrices, measured"


def table(record):
    lines = [f"{'':31}{'tokens/s':>12}{'ms a step':>11}{'GiB':>8}{'MFU':>8}"]
    lines += [f"{row['what']:31}{row['tokens_per_second']:12,.0f}"
              f"{1000 * row['seconds']:11.1f}{row['memory'] / 2**30:8.2f}"
              f"{row['mfu']:8.1%}" for row in record["rows"].values()]
    return "\n".join([*lines, f"{record['hardware']}, {record['date']}"])


@plot.as_svg
def draw(ax, record):
    """Where a step's time goes, a bar for each row: SVG.

    A bar is as long as the table's step. Its parts are those of a step that
    the profiler has recorded, and which it makes longer.
    """
    ax.set(title="where a step's time goes", xlabel="ms per step")
    rows = record["rows"].values()
    plot.stack_parts(ax, [(row["what"], {
        part: row["seconds"] * seconds / (sum(row["parts"].values()) or 1)
        for part, seconds in row["parts"].items()}) for row in rows], [
        part for part in plot.PART_COLOURS
        if any(row["parts"][part] for row in rows)])


def read(device, file=RECORD):
    """What has been measured here so far, or a record without rows."""
    if file.exists():
        with reading(file, "delete it"):
            record = json.loads(file.read_bytes())
            table(record)  # which needs all of it
            if record["hardware"].startswith(hardware(device)):
                return record
    peak, source = find_peak(device)
    return {"date": str(datetime.date.today()), "peak": peak, "rows": {},
            "hardware": f"{hardware(device)}; peak {peak / 1e12:.3g} TFLOP/s "
                        f"({source})"}


def hardware(device):
    name = (f"{count_cores()} cores" if device.type == "cpu"
            else device_name(device))
    return f"{name}, torch {torch.__version__}"


def add(name, device, size=None, file=RECORD):
    """Measure a row, and keep it in the file: the record."""
    record = read(device, file)
    row = measure(name, device, size or sizes(device), record)
    rows = {**record["rows"], name: row}
    record["rows"] = {key: rows[key] for key in STEPS if key in rows}
    keep(record, file)
    return record


def keep(record, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(record, indent=1) + "\n").encode())


def limit(device, file=RECORD):
    """Say how many tokens/s the device's peak would be.

    The peak is kept: it is that of all rows.
    """
    record = read(device, file)
    keep(record, file)
    preset = sizes(device)["--preset"]
    data = find_data(preset)
    require(data.is_dir(), f"{data} is not there: run `source activate.sh`")
    config = replace(std.MODELS[preset],
                     vocab_size=dataset.vocabulary_size(data))
    each = flops_per_token(config, std.PRESETS[preset].sequence_length)
    print(f"{record['hardware']}\n"
          f"preset {preset}: {each / 1e6:,.1f} MFLOP a token\n"
          f"at most {record['peak'] / each:,.0f} tokens/s")


def main():
    name, *output = sys.argv[1:]
    device = find_device()
    if name == "limit":
        return limit(device)
    record = None
    for each in STEPS if name == "all" else [name]:
        require(each in STEPS, f"there is no step {each}: choose from "
                f"{', '.join(STEPS)}")
        if reason := lacks(each, device):
            print(reason)
            continue
        record = add(each, device)
        print(table(record), flush=True)
    if output and record:
        plot.write_new(output[0], draw(record))


if __name__ == "__main__":
    run_main(main)
