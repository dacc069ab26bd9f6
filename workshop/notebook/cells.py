"""The functions that the cells of the lessons call.

They work in any kernel: whatever needs torch runs in the course's own
interpreter. An error is shown as one line.
"""

import functools
import html
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import show_path
from workshop import interpreter
from workshop.doctor import ask_slurm
from workshop.lesson import render
from workshop.lesson.diff import Diff
from workshop.notebook import pictures
from workshop.results import runs as results
from workshop.stages import DESK, FIRST


class Shown:
    """Something that a notebook shows as HTML, and a terminal as text."""

    def __init__(self, html, text):
        self.html, self.text = html, text

    def _repr_html_(self):
        return self.html

    def __repr__(self):
        return self.text


def complaint(error):
    """What went wrong, in one line."""
    line = render.paragraph(render.quote(str(error)), "bad")
    return Shown(render.box(line), str(error))


def in_one_line(function):
    """Let a cell show what the user can fix, instead of a traceback."""
    @functools.wraps(function)
    def call(*args):
        try:
            return function(*args)
        except UserError as error:
            return complaint(error)
    return call


def picture(svg):
    """An SVG picture, for a notebook."""
    return Shown(render.box(svg), "(a picture)")


# ------------------------------------------------------------ every lesson


def diff(stage):
    """What is left to change in your script, and why."""
    try:
        changes = Diff(stage)
    except UserError as error:
        return complaint(error)
    return Shown(render.to_html(changes), render.to_text(changes))


def check(stage):
    """Compare your script with the single-device stage, on real processes."""
    try:
        interpreter.run("-m", "workshop", "check", stage)
    except UserError as error:
        return complaint(error)


def slurm():
    """Prepare this kernel for `!sbatch`, and say whether SLURM is here."""
    if shutil.which("sbatch") is None:
        return complaint("There is no SLURM on this machine, so the next "
                         "cells do not find its commands. Read on: on a "
                         "cluster's login node or in its portal they work.")
    os.environ.update(interpreter.sbatch_variables())
    try:
        answer = ask_slurm()
    except UserError as error:
        return complaint(error)
    return Shown(render.box(render.paragraph(render.quote(answer))), answer)


def cadence():
    """The picture of how 1, 2 and 4 processes take their microbatches."""
    return Shown(render.box(pictures.cadence()), "(a picture)")


def strategies():
    """The picture of what each strategy keeps on each GPU."""
    return Shown(render.box(pictures.strategies()), "(a picture)")


# -------------------------------------------------------------- start_here


@in_one_line
def doctor():
    """Does this machine have everything the workshop needs?"""
    interpreter.run("-m", "workshop", "doctor")


def data_parallel():
    """The picture of a step with data parallelism."""
    return picture(pictures.data_parallel())


def words():
    """The picture of what an epoch is made of."""
    return picture(pictures.words())


def nodes():
    """The picture of ranks and local ranks."""
    return picture(pictures.nodes())


@in_one_line
def script_map():
    """The sections, classes and functions of the script on the desk."""
    require(DESK.exists(), f"{show_path(DESK)} is not there: was it moved? "
            f"`python -m workshop reset {FIRST}` makes a new one")
    try:
        return Shown(render.box(pictures.script_map(DESK.read_text())),
                     "(a map of the script)")
    except SyntaxError as error:
        require(False, f"{show_path(DESK)} is not Python yet: line "
                f"{error.lineno}, {error.msg}")


@in_one_line
def train(*flags):
    """Run `python code/train_gpt2.py flags...` in the workshop's Python."""
    require(DESK.exists(), f"{show_path(DESK)} is not there: was it moved? "
            "`python -m workshop reset std` makes a new one")
    interpreter.run(str(DESK), *flags)


@in_one_line
def gpus():
    """Show what this machine's GPUs are doing now."""
    for command in (["nvidia-smi"], ["xpu-smi", "discovery"]):
        if shutil.which(command[0]):
            run = subprocess.run(command, capture_output=True, text=True,
                                 check=False)
            print(run.stdout or run.stderr)
            return None
    return complaint("There is no GPU here (neither nvidia-smi nor xpu-smi): "
                     "all lessons work on the CPU, and a batch job may have "
                     "a GPU.")


# ------------------------------------------------------------- collectives


def ranks(line, cell):
    """%%ranks [N [SECONDS]]: run the cell as N processes; draw what it shows.

    SECONDS: how long a collective waits for the others.
    """
    from IPython.display import display

    try:
        run_ranks(cell, *(line.split() or ["4"]))
    except UserError as error:
        display(complaint(error))


def run_ranks(cell, number, seconds="20"):
    from IPython.display import display

    require(number.isdigit() and 1 <= int(number) <= 8 and seconds.isdigit(),
            "write %%ranks N or %%ranks N SECONDS, with N from 1 to 8")
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "cell.py"), Path(folder, "output.json")
        # line 1 has %%ranks, so that errors name the lines that one sees
        source.write_text("\n" + cell, encoding="utf-8")
        interpreter.run("-m", "workshop.notebook.ranks", str(source),
                        str(output), number, seconds)
        if not output.exists():  # it has printed why
            return
        seen = json.loads(output.read_text())
    if any(seen["shown"]):
        display(picture(pictures.tensors(seen["shown"])))
    if seen["svg"]:
        display(picture(seen["svg"]))


def load_ipython_extension(ipython):
    """Called by `%load_ext workshop.notebook.cells`."""
    ipython.register_magic_function(ranks, "cell")


# ----------------------------------------------------------------- results


@in_one_line
def runs(*folders):
    """A table of the runs in the pictures, and which runs are left out."""
    found, notes = results.find(folders)
    rows = [("run", "stage", "device", "steps", "last loss", "tokens/s")]
    rows += [(show_path(run.folder), run.name, run.device, len(run.rows),
              f"{run.rows[-1]['loss']:.4f}", f"{run.tokens_per_second:,.0f}")
             for run in found]
    presets = sorted({run.preset for run in found})
    notes = [f"Preset {', '.join(presets)}.", *notes]
    table = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        + "</tr>" for row in rows)
    lines = [render.paragraph(render.quote(note)) for note in notes]
    text = "\n".join([*notes, *("  ".join(map(str, row)) for row in rows)])
    return Shown(render.box(f"<table>{table}</table>{''.join(lines)}"), text)


@in_one_line
def plot(panel, *folders):
    """One panel of the picture that `python -m workshop plot` makes."""
    results.find(folders)  # finds errors without starting a process
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "panel.svg")
        interpreter.run("-m", "workshop.results.plot", str(output), panel,
                        *(str(Path(name).resolve()) for name in folders))
        return picture(output.read_text("utf-8")) if output.exists() else None
