"""Scripts that are others with changes: GROUP/NAME.diff, a unified diff.

Its first line says whether the script is `right` or `wrong`, then, after a
colon, what must be said of it, in parts between ` | `. The line with `---`
names the script that is changed, from the top of the clone: a Python file, or
another such diff. The old lines of each hunk have to be there once; their
numbers do not matter.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from backstage import ROOT

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Planted:
    """A script, and what must be said of it."""

    path: Path
    marks: tuple  # the words of the first line before the colon
    says: tuple  # the parts after it
    base: Path  # what is changed
    hunks: tuple

    @property
    def group(self):
        """The stage that it is a script of, or the style of the script."""
        return self.path.parent.name.replace("-", " ")

    @property
    def name(self):
        return f"{self.group}: {self.path.stem.replace('-', ' ')}"

    @property
    def right(self):
        return "right" in self.marks

    def script(self):
        """The text of the script."""
        text = "\n" + (load(self.base).script() if self.base.suffix == ".diff"
                       else self.base.read_text())
        for hunk in self.hunks:
            lines = [(line[0], line[1:] or "\n")  # an empty one: no sign
                     for line in hunk.splitlines(keepends=True)]
            old, new = ("\n" + "".join(line for sign, line in lines
                                       if sign != other) for other in "+-")
            assert text.count(old) == 1, (
                f"{self.path} no longer applies to {self.base}:\n{hunk}")
            text = text.replace(old, new)
        return text[1:]


def load(path):
    head, *hunks = re.split("^@@ .*\n", path.read_text(), flags=re.MULTILINE)
    first, base = re.match("(.+)\n--- (.+)\n", head).groups()
    marks, _, says = first.partition(": ")
    return Planted(path, tuple(marks.split()), tuple(
        filter(None, says.split(" | "))), ROOT / base, tuple(hunks))


def load_all(table):
    """Those of a table, in the order of their names."""
    return [load(path) for path in sorted(HERE.glob(f"{table}/*/*.diff"))]
