"""A job with a fault that the lesson plants, and what `why` says of it."""

import atexit
import itertools
import re
import shutil
import tempfile
from typing import Any

from backstage.errors import require
from workshop.diff import page
from workshop.html import folded, paragraph
from workshop.jobs import interpreter
from workshop.notebook import output

# the program that runs a job with a fault, and its folder
planted: list[Any] = []


@output.in_one_line
def plant(number):
    """Run their script with this fault; show at first what it prints."""
    require(number in range(1, 10), "no such fault; fix: choose from 1 to 9")
    unplant()
    folder = tempfile.mkdtemp(prefix="why-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program: Any = interpreter.start_python(
        "-m", "notebooks.experiments.hangs", str(number), folder)
    planted[:] = program, folder
    state, lines = "4 processes start, which takes some seconds.", []
    show = output.live(lambda: output.show_output(state))
    show(now=True)
    for line in itertools.chain(program.stdout, ["..\n"]):
        if line not in (".\n", "..\n"):
            lines.append(line)
            continue
        state, lines = "".join(lines) or state, []
        show(now=True)
        if line == "..\n":
            break


@output.in_one_line
def unplant():
    """End the job that runs with a fault, if there is one."""
    if planted:
        planted[0].stdin.close()
        planted[0].wait()


@output.in_one_line
def why():
    """Ask why that job hangs, has died or is slow."""
    require(planted, "no fault is planted; fix: plant one first: plant(1)")
    output.run_and_show("-m", "workshop", "why", planted[1], view=show_reason)


def show_reason(text, last):
    """Show `why`'s answer: the fault, the fix, and the evidence folded."""
    answer, *evidence = re.split("^(?=  )", text, maxsplit=1, flags=re.M)
    fault, *lines = page.quote(answer).splitlines()
    kind = "good" if fault.startswith("no fault is proven") else "bad"
    out = [paragraph(f"<strong>{fault}</strong>", kind),
           *map(paragraph, lines),
           *(folded("The evidence", output.printed(part.rstrip()))
             for part in evidence)]
    return output.Shown(page.styled_box("".join(out), last), text)
