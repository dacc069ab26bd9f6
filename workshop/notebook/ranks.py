"""Run cells of a lesson as several processes: `%%ranks` talks to this.

    python -m workshop.notebook.ranks

It serves a kernel as long as that lives. PyTorch is imported once: each cell
gets new processes, forked with it, and so begins within a moment, with nothing
left of the cell before. A request is a line of JSON on the standard input:

    {"cell": code, "ranks": 4, "seconds": 20, "mpirun": false}

A collective that waits longer than `seconds` for the others raises an error.
With mpirun, for `%%mpi`, they are ranks of MPI: the cell has `MPI`, `comm` and
`np` in the place of `dist`, and all end after `seconds`.
The answers are lines, too: {"line": text}, then {"error": text} or
{"shown": [...], "svg": text, "events": [...]}.
The cell's code can use `torch`, `dist`, `time`, `rank`, `world_size`, and

    show(tensor, title)           draw what each rank holds at this point
    show(tensor, title, i, r)     ... where number i has just come from rank r
    plot(xs, ys, xlabel, ylabel)  draw rank 0's curve
    timeline(events)              draw when each rank did what:
                                  [name, number, begin, end], in seconds
"""

from __future__ import annotations

import datetime
import json
import linecache
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankcheck.engine import fork_server
from rankcheck.engine import ranks as processes
from rankcheck.engine.run import Torchrun
from rankcheck.system.errors import UserError
from workshop.errors import run_tool
from workshop.jobs.interpreter import last_line
from workshop.jobs.mpirun import Mpirun

PRELOADED = ["torch", "torch.distributed", "notebooks.experiments.overlap",
             "notebooks.experiments.pipelines",
             "notebooks.experiments.sharding"]
# Process groups that outlive the models of a cell. If DDP held the last
# reference to one, its destructor would keep the GIL while it waits for gloo's
# thread, which may itself wait for the GIL.
kept_groups: list[Any] = []


def main() -> None:
    os.environ["COLUMNS"] = "54"  # of bars and tables: 62 after "rank 0: "
    fork_server.get_servers(PRELOADED)  # imports torch meanwhile
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(**request)
        except UserError as error:
            send_answer(error=str(error))


def answer(cell: str, ranks: int, seconds: int, mpirun: bool = False) -> None:
    """Run a cell on so many ranks, and print the answers."""
    try:
        compile(cell, "cell", "exec")
    except SyntaxError as error:
        send_answer(error=f"line {error.lineno} of this cell: {error.msg}")
        return
    except ValueError as error:  # a character that no source can hold
        send_answer(error=f"this cell: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "cell.py")
        source.write_text(cell, encoding="utf-8")
        ended = processes.Launch(
            __file__, source, folder, seconds, *["mpirun"] * mpirun,
            world_size=ranks, preload=PRELOADED,
            launcher=Mpirun(sleeping=False) if mpirun else Torchrun()
        ).wait(120, too_late(folder, ranks, seconds) if mpirun else None)
        results = []
        for rank, process in enumerate(ended):
            for line in process.out.splitlines():
                send_answer(line=f"rank {rank}: {line}".rstrip())
            file = Path(folder, f"{rank}.json")
            if file.exists():
                results.append(json.loads(file.read_text()))
            else:
                why = last_line(process.err, "killed")
                waits = re.search(r'File "cell", line (\d+)', process.err)
                if mpirun and waits:
                    why = f"it still waits in line {waits[1]}"
                send_answer(line=f"rank {rank}: did not finish: {why}")
                results.append({"shown": [], "svg": None, "events": []})
    send_answer(shown=[one["shown"] for one in results], svg=results[0]["svg"],
                events=[one["events"] for one in results])


def too_late(folder: str, ranks: int, seconds: float) -> Callable[[], bool]:
    """A function: whether all ranks were seen to have begun with the cell so
    long ago. MPI has no limit of its own.
    """
    end = float("inf")

    def is_late() -> bool:
        nonlocal end
        if len([*Path(folder).glob("*.begun")]) == ranks:
            end = min(end, time.monotonic() + seconds)
        return time.monotonic() > end
    return is_late


def send_answer(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def run_cell(cell: str, folder: str, seconds: str,
             mpirun: str | None = None) -> None:
    """Run the cell, in each rank."""
    import torch  # is there already, in a forked process
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch renames things
    if mpirun:
        import numpy as np
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, world_size = comm.rank, comm.size
        messages = {"MPI": MPI, "comm": comm, "np": np}
    else:
        dist.init_process_group(
            "gloo", timeout=datetime.timedelta(seconds=float(seconds)))
        dist.barrier()  # none ends before all are connected
        rank, world_size = dist.get_rank(), dist.get_world_size()
        messages = {"dist": dist}
    result: dict[str, Any] = {"shown": [], "svg": None, "events": []}

    def show(value: Any, title: str = "", came: int | None = None,
             source: int | None = None) -> None:
        if isinstance(value, (list, tuple)):
            value = torch.cat([part.flatten() for part in value])
        numbers = None if value is None else value.flatten().tolist()
        result["shown"].append([title, numbers, came, source])

    def plot(xs: Any, ys: Any, xlabel: str, ylabel: str) -> None:
        from workshop.results.plot import themed

        def curve(ax: Any) -> None:
            ax.set(xlabel=xlabel, ylabel=ylabel)
            ax.loglog(xs, ys, "o-")

        if rank == 0:
            result["svg"] = themed(curve)

    names = {"torch": torch, "time": time, "rank": rank, **messages,
             "world_size": world_size, "show": show, "plot": plot,
             "timeline": result["events"].extend}
    failed, text = False, Path(cell).read_text("utf-8")
    # Triton asks for the source of a kernel
    linecache.cache["cell"] = (
        len(text), None, text.splitlines(keepends=True), "cell")
    Path(folder, f"{rank}.begun").touch()
    try:
        exec(compile(text, "cell", "exec"), names)
    except Exception as error:
        failed = True
        lines = [frame.lineno for frame in traceback.extract_tb(
            error.__traceback__) if frame.filename == "cell"]
        # leave out the place in the C++ source
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).splitlines()
        print(f"line {lines[-1]}: {type(error).__name__}: {reason[0]}"
              if reason else f"line {lines[-1]}: {type(error).__name__}")
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    if not mpirun:
        kept_groups.append(dist.group.WORLD)
        dist.destroy_process_group()
    elif failed:  # the others would wait for this rank
        sys.stdout.flush()
        comm.Abort(1)
    else:
        MPI.Finalize()


if __name__ == "__main__":
    if "RANK" in os.environ or sys.argv[4:] == ["mpirun"]:
        run_cell(*sys.argv[1:])
    else:
        run_tool(main)
