"""Run a cell of a lesson as several processes: `%%ranks` starts this.

    python -m workshop.notebook.ranks CELL OUTPUT RANKS SECONDS

The cell's code can use `torch`, `dist`, `time`, `rank`, `world_size`, and

    show(tensor, title)           draw what each rank holds at this point
    plot(xs, ys, xlabel, ylabel)  draw rank 0's curve

A collective that waits longer than SECONDS for the others raises an error.
What the ranks print is printed; what is to be drawn goes to OUTPUT, as JSON.
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

from backstage.errors import require, run_main
from workshop.processes import launch


def main():
    cell, output, ranks, seconds = sys.argv[1:]
    try:
        compile(Path(cell).read_text(), "cell", "exec")
    except SyntaxError as error:
        require(False, f"line {error.lineno} of this cell: {error.msg}")
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
                print(f"rank {rank}: did not finish: {why}")
                said.append({"shown": [], "svg": None})
    Path(output).write_text(json.dumps({
        "shown": [one["shown"] for one in said], "svg": said[0]["svg"]}))


def run_cell(cell, folder, seconds):
    """Run the cell, in each rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames things
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
        from workshop.results.plot import themed

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
        # leave out the place in the C++ source
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).splitlines()
        print(f"line {lines[-1]}: {type(error).__name__}: {reason[0]}"
              if reason else f"line {lines[-1]}: {type(error).__name__}")
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_cell(*sys.argv[1:])
    else:
        run_main(main)
