"""What the cells of start_here, collectives and results call.

As in notebook.py: in any kernel, and what goes wrong is said in one line.
"""

import functools
import html
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from IPython.display import display

from workshop import diagrams, environment, results, view
from workshop.diff import DESK
from workshop.errors import UserError, check
from workshop.notebook import Shown, complaint


def in_one_line(function):
    """Let a cell show what the user can mend, instead of a traceback."""
    @functools.wraps(function)
    def call(*args):
        try:
            return function(*args)
        except UserError as error:
            return complaint(error)
    return call


def picture(svg):
    """SVG for a notebook."""
    return Shown(view.box(svg), "(a picture)")


# -------------------------------------------------------------- start_here


@in_one_line
def doctor():
    """Is everything here that the workshop needs?"""
    environment.run("-m", "workshop", "doctor")


def data_parallel():
    """The picture of a step with data parallelism."""
    return picture(diagrams.data_parallel())


def words():
    """The picture of what an epoch is made of."""
    return picture(diagrams.words())


def nodes():
    """The picture of ranks and local ranks."""
    return picture(diagrams.nodes())


@in_one_line
def script_map():
    """The sections, classes and functions of the script on the desk."""
    check(DESK.exists(), f"{results.show(DESK)} is not there: was it moved? "
          "`python -m workshop reset std` puts one back")
    try:
        return Shown(view.box(diagrams.script_map(DESK.read_text())),
                     "(a map of the script)")
    except SyntaxError as error:
        check(False, f"{results.show(DESK)} is not Python yet: line "
              f"{error.lineno}, {error.msg}")


@in_one_line
def train(*flags):
    """`python code/train_gpt2.py flags...` in the workshop's environment."""
    check(DESK.exists(), f"{results.show(DESK)} is not there: was it moved?")
    environment.run(str(DESK), *flags)


@in_one_line
def gpus():
    """What this machine's GPUs are doing now."""
    for command in (["nvidia-smi"], ["xpu-smi", "discovery"]):
        if shutil.which(command[0]):
            run = subprocess.run(command, capture_output=True, text=True,
                                 check=False)
            print(run.stdout or run.stderr)
            return
    check(False, "There is no GPU here (neither nvidia-smi nor xpu-smi): all "
          "of the lessons work on the CPU, and a batch job may have one.")


# ------------------------------------------------------------- collectives


def ranks(line, cell):
    """%%ranks [N [SECONDS]]: run the cell as N processes, draw what it shows.

    SECONDS: how long a collective waits for the others.
    """
    try:
        run_ranks(cell, *(line.split() or ["4"]))
    except UserError as error:
        display(complaint(error))


def run_ranks(cell, number, seconds="20"):
    check(number.isdigit() and 1 <= int(number) <= 8 and seconds.isdigit(),
          "write %%ranks N or %%ranks N SECONDS, with N from 1 to 8")
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "cell.py"), Path(folder, "output.json")
        # line 1 is the one with %%ranks: errors name lines as one sees them
        source.write_text("\n" + cell, encoding="utf-8")
        environment.run("-m", "workshop.collectives", str(source),
                        str(output), number, seconds)
        if not output.exists():  # it has said why
            return
        seen = json.loads(output.read_text())
    if any(seen["shown"]):
        display(picture(diagrams.tensors(seen["shown"])))
    if seen["svg"]:
        display(picture(seen["svg"]))


def load_ipython_extension(ipython):
    """Called by `%load_ext workshop.cells`."""
    ipython.register_magic_function(ranks, "cell")


# ----------------------------------------------------------------- results


@in_one_line
def runs(*folders):
    """A table of the runs that the pictures show, and what they leave out."""
    found, notes = results.find(folders)
    rows = [("run", "stage", "device", "steps", "last loss", "tokens/s")]
    rows += [(results.show(run.folder), run.name, run.device, len(run.rows),
              f"{run.rows[-1]['loss']:.4f}", f"{run.tokens_per_second:,.0f}")
             for run in found]
    presets = sorted({run.preset for run in found})
    notes = [f"Preset {', '.join(presets)}.", *notes]
    table = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        + "</tr>" for row in rows)
    lines = [view.paragraph(view.quote(note)) for note in notes]
    text = "\n".join([*notes, *("  ".join(map(str, row)) for row in rows)])
    return Shown(view.box(f"<table>{table}</table>{''.join(lines)}"), text)


@in_one_line
def plot(panel, *folders):
    """A panel of the picture that `python -m workshop plot` makes."""
    results.find(folders)  # what is wrong with them, without a process
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "panel.svg")
        environment.run("-m", "workshop.plot", str(output), panel,
                        *(str(Path(name).resolve()) for name in folders))
        return picture(output.read_text("utf-8")) if output.exists() else None
