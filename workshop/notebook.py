"""What the cells of the lessons call, in any kernel; no tracebacks."""

from workshop import environment, pictures, view
from workshop.diff import Diff
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
