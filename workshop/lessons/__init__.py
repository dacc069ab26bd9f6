"""The lessons: which change turns one stage into the next, and why.

A lesson is a list of `Change`s, in the order in which they are taught. The
code itself stands in solutions/ alone: an anchor ties a change to the lines
of the diff between the two stages.
"""

import importlib
from dataclasses import dataclass

STARTS = {"ddp": "std", "lit": "ddp"}  # stage -> the stage it is made from


@dataclass
class Change:
    """One thing to teach.

    anchors: the lines of the diff where the change begins, with their sign
    and without their indentation: "+import os", "-rank = 0". It goes on to
    the next anchor, or until three lines in a row are the same in both
    stages; what comes after these needs an anchor again. Where a change
    begins among replaced lines, name both the first line removed and the
    first line added.
    """

    title: str
    why: str
    anchors: tuple[str, ...]


def load(stage):
    """The `Change`s that make the stage."""
    return importlib.import_module(f"{__name__}.{stage}").CHANGES
