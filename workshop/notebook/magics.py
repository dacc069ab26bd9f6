"""%%ranks and %%mpi: a cell that runs as several processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from backstage.errors import UserError
from workshop.diff import page
from workshop.jobs import interpreter
from workshop.notebook import frontend, pictures
from workshop.notebook.output import complaint, live, show_output


def ranks(line: str, cell: str) -> None:
    """%%ranks [N [SECONDS]]: run the cell as N processes; draw what it shows.

    SECONDS: how long a collective waits for the others.
    """
    run_cell_program("%%ranks", line, cell)


def mpi(line: str, cell: str) -> None:
    """%%mpi [N [SECONDS]]: run the cell as N ranks of MPI, by mpirun.

    SECONDS: after which all are ended, if they wait for one another.
    """
    run_cell_program("%%mpi", line, cell)


def run_cell_program(name: str, line: str, cell: str) -> None:
    try:
        found = re.fullmatch("([1-8])?(?: ([1-9][0-9]{0,3}))?",
                             " ".join(line.split()))
        if found is None:
            raise UserError(f"invalid arguments; fix: write {name} N or "
                            f"{name} N SECONDS, with N from 1 to 8")
        run_ranks(name, cell, int(found[1] or 4), int(found[2] or 20))
    except UserError as error:
        frontend.LiveOutput(complaint(error).bundle())


class Warm:
    """The program that runs this kernel's `%%ranks`, with torch imported."""

    process: Any = None  # of `start_python`, with its pipes

    def start(self) -> None:
        """Start it, if it is not there."""
        if self.process is None or self.process.poll() is not None:
            self.process = interpreter.start_python("-m",
                                                    "workshop.notebook.ranks")

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Its answers to a request, as they come."""
        self.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                try:
                    answer = json.loads(line)
                except ValueError:  # a complaint of Python's own
                    answer = {"line": line.rstrip()}
                yield answer
                if "line" not in answer:
                    return
            yield {"error": "the processes have ended: run the cell again"}
        except KeyboardInterrupt:  # the kernel's stop button
            self.process.kill()  # what it has started ends with it
            yield {"error": "interrupted"}
        except OSError as error:
            yield {"error": f"the processes have ended ({error}): run the "
                   "cell again"}


warm = Warm()


def run_ranks(name: str, cell: str, number: int, seconds: int) -> None:
    who = pictures.plural(number, "process", "es")
    status = f"{who} at work ..."
    state, show = show_output(status, status), live(lambda: state)
    begin, lines = time.monotonic(), []
    show(now=True)
    # line 1 has %%ranks, so that errors name the lines that one sees
    for answer in warm.ask({"cell": "\n" + cell, "ranks": number,
                            "seconds": seconds, "mpirun": name == "%%mpi"}):
        if "line" in answer:
            lines.append(answer["line"])
        elif "error" in answer:
            state = complaint(" ".join([*lines, answer["error"]]))
        else:
            drawn = [draw(answer[what]) for what, draw in (
                ("events", pictures.timeline), ("shown", pictures.tensors))
                if any(answer[what])]
            status = f"{who}, {time.monotonic() - begin:.1f} s"
            state = show_output("\n".join([*lines, status]), status, "".join(
                [*drawn, answer["svg"] or "", page.KEEP_IN_SIGHT]))
    show(now=True)
