"""Names lines of a script that was tried as those of the attendee's script.

They are two scripts where other changes were made, or names were replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from rankcheck.engine.findings import Finding, Fragment, Line

NameLine = Callable[[Line], str]


def lines_as_in(yours: bytes, tried: bytes) -> NameLine:
    """Return a function that names a line of the script that was tried.

    It names it as a line of the attendee's script, or quotes it if it is not
    there.

    Args:
        yours: the attendee's script.
        tried: the one that was tried.
    """
    if tried == yours:  # comparing it with itself may take long
        return str
    own_lines, tried_lines = (
        data.decode("utf-8", "replace").splitlines()
        for data in (yours, tried))
    matcher = SequenceMatcher(None, tried_lines, own_lines, autojunk=False)
    same: dict[int, int] = {}  # a line of what was tried -> the attendee's
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            same[block.a + k + 1] = block.b + k + 1

    def name(line: Line) -> str:
        if line in same or not 0 < line <= len(tried_lines):
            return f"line {same.get(line, int(line))}"
        return f"the lesson's line `{tried_lines[line - 1].strip()}`"

    return name


def name_lines(finding: Finding, name: NameLine) -> Finding:
    """Return the finding with the name of each line in the line's place."""
    return replace(finding, sentence=name_all(finding.sentence, name),
                   fix=name_all(finding.fix, name))


def name_all(fragments: Sequence[Fragment], name: NameLine) -> list[Fragment]:
    named: list[Fragment] = []
    for part in fragments:
        named.append(name(part) if isinstance(part, Line) else part)
    return named
