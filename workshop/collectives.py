"""Run a cell of a lesson as several processes: what `%%ranks` starts.

    python -m workshop.collectives CELL OUTPUT RANKS SECONDS

The cell's code finds `torch`, `dist`, `time`, `rank`, `world_size`, and

    show(tensor, title)           draw what each rank holds at this point
    plot(xs, ys, xlabel, ylabel)  draw a curve, from rank 0

A collective that waits longer than SECONDS for the others raises an error. To
OUTPUT goes what is to be drawn, as JSON; what the ranks print is printed.
"""

import datetime
import json
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from workshop.errors import check, start
from workshop.ranks import launch


def main():
    cell, output, ranks, seconds = sys.argv[1:]
    try:
        compile(Path(cell).read_text(), "cell", "exec")
    except SyntaxError as error:
        check(False, f"line {error.lineno} of this cell: {error.msg}")
    with tempfile.TemporaryDirectory() as folder:
        ended = launch(
            __file__, cell, folder, seconds, world_size=int(ranks),
            timeout=120, preload=["torch", "torch.distributed"])
        said = []
        for rank, process in enumerate(ended):
            for line in process.out.splitlines():
                print(f"rank {rank}: {line}")
            file = Path(folder, f"{rank}.json")
            if file.exists():
                said.append(json.loads(file.read_text()))
            else:
                why = (process.err.strip().splitlines() or ["killed"])[-1]
                print(f"rank {rank}: did not come to its end: {why}")
                said.append({"shown": [], "svg": None})
    Path(output).write_text(json.dumps({
        "shown": [one["shown"] for one in said], "svg": said[0]["svg"]}))


def run_cell(cell, folder, seconds):
    """What each rank does."""
    warnings.simplefilter("ignore", FutureWarning)  # names that move on
    dist.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=float(seconds)))
    rank = dist.get_rank()
    said = {"shown": [], "svg": None}

    def show(value, title=""):
        if isinstance(value, (list, tuple)):
            value = torch.cat([part.flatten() for part in value])
        numbers = None if value is None else value.flatten().tolist()
        said["shown"].append([title, numbers])

    def plot(xs, ys, xlabel, ylabel):
        from workshop.plot import themed

        def curve(ax):
            ax.set(xlabel=xlabel, ylabel=ylabel)
            ax.loglog(xs, ys, "o-")

        if rank == 0:
            said["svg"] = themed(curve)

    names = {"torch": torch, "dist": dist, "time": time, "rank": rank,
             "world_size": dist.get_world_size(), "show": show, "plot": plot}
    try:
        exec(compile(Path(cell).read_text(), "cell", "exec"), names)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(
            error.__traceback__) if frame.filename == "cell"]
        # without the place in the C++ source
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).splitlines()
        print(f"line {lines[-1]}: {type(error).__name__}: {reason[0]}"
              if reason else f"line {lines[-1]}: {type(error).__name__}")
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_cell(*sys.argv[1:])
    else:
        start(main)
