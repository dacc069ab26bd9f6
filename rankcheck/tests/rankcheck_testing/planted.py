"""Scripts that are others with changes: GROUP/NAME.diff, a unified diff.

Its first line says whether the script is `right` or `wrong`, then, after a
colon, what must be said of it, in parts between ` | `. The line with `---`
names the script that is changed, from the folder that the table names its
scripts from: a Python file, or another such diff. The old lines of each hunk
have to be there once; their numbers do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """A script, and what must be said of it."""

    path: Path
    top: Path  # where the names of the scripts that are changed begin
    marks: tuple[str, ...]  # the words of the first line before the colon
    says: tuple[str, ...]  # the parts after it
    base: Path  # what is changed
    hunks: tuple[str, ...]

    @property
    def group(self) -> str:
        """The stage that it is a script of, or the style of the script."""
        return self.path.parent.name.replace("-", " ")

    @property
    def name(self) -> str:
        return f"{self.group}: {self.path.stem.replace('-', ' ')}"

    @property
    def right(self) -> bool:
        return "right" in self.marks

    def script(self) -> str:
        """Return the text of the script."""
        if self.base.suffix == ".diff":
            text = "\n" + load(self.base, self.top).script()
        else:
            text = "\n" + self.base.read_text()
        for hunk in self.hunks:
            old, new = take_side(hunk, "-"), take_side(hunk, "+")
            assert text.count(old) == 1, (
                f"{self.path} no longer applies to {self.base}:\n{hunk}")
            text = text.replace(old, new)
        return text[1:]


def take_side(hunk: str, own: str) -> str:
    """Return a hunk's old lines ("-") or its new ones ("+"), without signs."""
    other = "+" if own == "-" else "-"
    text = "\n"
    for line in hunk.splitlines(keepends=True):
        if line[0] != other:
            text += line[1:] or "\n"  # an empty one: no sign
    return text


def load(path: Path, top: Path) -> Planted:
    """Read one; its script's name begins in the folder `top`."""
    head, *hunks = re.split("^@@ .*\n", path.read_text(), flags=re.MULTILINE)
    # `diff -u` puts a tab and a time after the name
    found = re.match("(.+)\n--- ([^\t\n]+)", head)
    assert found, f"{path} does not begin with what is said, and a base"
    marks, _, says = found[1].partition(": ")
    return Planted(path, top, tuple(marks.split()),
                   tuple(filter(None, says.split(" | "))),
                   top / found[2], tuple(hunks))


def load_all(table: Path, top: Path) -> list[Planted]:
    """Return those of a table, in the order of their names."""
    return [load(path, top) for path in sorted(table.glob("*/*.diff"))]
