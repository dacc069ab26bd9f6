"""What grows: the number of shards, of steps, and the size of a checkpoint."""

import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import train_gpt2_std as std

from backstage import dataset
from backstage.checkpoint import (
    gather_state,
    load_checkpoint,
    write_checkpoint,
)
from backstage.flags import DEMO
from workshop.stages import find_stage

from turns import column, show, summary, take_turns, train

TOKENS = 1_000_000  # of a shard; they are mapped, not read


def measure(flags, device):
    """Seconds, and bytes of the checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder, f"many_train_{i:06d}.npy") for i in range(100)]
        for shard in shards:
            np.save(shard, np.zeros(TOKENS, np.uint16))
        opened = take_turns({
            f"open {n:3d} shard(s), read one": partial(read, shards[:n])
            for n in (1, 10, 100)}, flags.rounds)
        sizes = {"tiny": 257} if flags.quick else {
            "nano": dataset.vocabulary_size(DEMO), "gpt2": dataset.GPT2_SIZE}
        saved = take_turns({
            f"{preset}: checkpoint": partial(save, preset, size, folder)
            for preset, size in sizes.items()}, flags.rounds)
    steps = 40 if flags.quick else 2000
    preset = "tiny" if flags.quick else "nano"
    turn = train(find_stage("std").solution, "--preset", preset,
                 "--device", device.type, "--max-steps", steps, "--data",
                 DEMO)
    tenth = steps // 10
    parts = [median(turn["steps"][i:i + tenth])
             for i in range(0, steps, tenth)]
    results = {name: summary(turns) for name, turns in opened.items()}
    for name, turns in saved.items():
        results[f"{name}, write"] = summary(column(turns, "write"))
        results[f"{name}, read"] = summary(column(turns, "read"))
        results[f"{name}, bytes"] = {"median": turns[0]["bytes"]}
    results["step, tenths of a run"] = {"steps": steps, "seconds": parts}
    show(("ms", "median", "least", "most"), *(
        (name, *(f"{1000 * row[key]:.1f}"
                 for key in ("median", "least", "most")))
        for name, row in results.items() if "least" in row))
    for name, turns in saved.items():
        print(f"{name}: {turns[0]['bytes'] / 2**20:,.1f} MiB")
    print(f"{steps} steps: the last tenth takes {parts[-1] / parts[0]:.3f} "
          f"times the first; {min(parts) * 1000:.1f} to "
          f"{max(parts) * 1000:.1f} ms")
    return results


def read(shards):
    """Seconds until the first microbatch is there."""
    begin = time.perf_counter()
    next(std.DataIterator(shards, 4, 1024))
    return time.perf_counter() - begin


def save(preset, vocab_size, folder):
    """Seconds to write and read a checkpoint after a step, and its bytes."""
    config = replace(std.MODELS[preset], vocab_size=vocab_size)
    model = std.GPT(config)
    optimizer = model.configure_optimizers(std.PRESETS[preset])
    model(*torch.zeros(2, 1, 8, dtype=torch.int64)).backward()
    optimizer.step()
    begin = time.perf_counter()
    weights, moments = gather_state(model, optimizer)
    write_checkpoint(Path(folder), {
        "stage": "std", "step": 1, "model": weights, "optimizer": moments,
        "config": asdict(config), "hyperparameters": {"data": ""}})
    middle = time.perf_counter()
    file, = Path(folder).glob("step_*.pt")
    size = file.stat().st_size
    load_checkpoint(file)
    end = time.perf_counter()
    file.unlink()
    return {"write": middle - begin, "read": end - middle, "bytes": size}
