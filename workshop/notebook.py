"""What the cells of the lessons call, in any kernel; no tracebacks."""

import os
import shutil

from workshop import environment, pictures, view
from workshop.diff import Diff
from workshop.doctor import ask_slurm
from workshop.errors import UserError


class Shown:
    """Something that a notebook shows as HTML, and a terminal as text."""

    def __init__(self, html, text):
        self.html, self.text = html, text

    def _repr_html_(self):
        return self.html

    def __repr__(self):
        return self.text


def diff(stage):
    """What is left to change in your script, and why."""
    try:
        it = Diff(stage)
    except UserError as error:
        return complaint(error)
    return Shown(view.to_html(it), view.to_text(it))


def check(stage):
    """Compare your script with the single-device stage, on processes."""
    try:
        environment.run("-m", "workshop", "check", stage)
    except UserError as error:
        return complaint(error)


def slurm():
    """Get this kernel ready for `!sbatch`; says whether SLURM is here."""
    if shutil.which("sbatch") is None:
        return complaint("There is no SLURM on this machine, so the next "
                         "cells find no commands. Read on: on a cluster's "
                         "login node, or in its portal, they submit.")
    os.environ.update(environment.sbatch_variables())
    try:
        answer = ask_slurm()
    except UserError as error:
        return complaint(error)
    return Shown(view.box(view.paragraph(view.quote(answer))), answer)


def cadence():
    """The picture of how 1, 2 and 4 processes take their microbatches."""
    return Shown(view.box(pictures.cadence()), "(a picture)")


def strategies():
    """The picture of what each strategy keeps on each GPU."""
    return Shown(view.box(pictures.strategies()), "(a picture)")


def complaint(error):
    """What went wrong, in one line."""
    line = view.paragraph(view.quote(str(error)), "bad")
    return Shown(view.box(line), str(error))
