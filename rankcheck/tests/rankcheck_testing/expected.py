"""What a test expects of a finding, in one line, and not in its words.

    FAIL unequal-gradients step=2 rank=1 "0.weight"

A verdict and a kind come first, then numbers of the finding by their names,
which it may round to 3%, then texts that it quotes: names of parameters or
files, a script's own error. `rank` is one of its ranks, `line` a line of the
script that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rankcheck.engine.findings import Finding

FORM = re.compile(
    r'(ok|warn|FAIL) [a-z][a-z-]*( [a-z]+=[-.0-9]+)*( "[^"]+")*')


@dataclass(frozen=True)
class Expected:
    """A finding that has to be there.

    Attributes:
        numbers: pairs of a name and a value.
        quotes: texts of the script's own that the sentence has.
    """

    verdict: str
    kind: str
    numbers: tuple[tuple[str, float], ...] = ()
    quotes: tuple[str, ...] = ()

    def matches(self, finding: Finding) -> bool:
        """Return whether this finding is the one."""
        if (finding.verdict, finding.kind) != (self.verdict, self.kind):
            return False
        if not all(has_number(finding, *pair) for pair in self.numbers):
            return False
        return all(text in finding.text for text in self.quotes)

    def is_in(self, findings: Iterable[Finding]) -> bool:
        """Return whether one of these findings is the one."""
        return any(map(self.matches, findings))


def has_number(finding: Finding, name: str, value: float) -> bool:
    """Return whether a finding has this number, rank or line."""
    if name == "rank":
        return value in finding.ranks
    if name == "line":
        return value in finding.lines
    if name not in finding.numbers:
        return False
    return math.isclose(finding.numbers[name], value, rel_tol=0.03)


def list_kinds(findings: Iterable[Finding]) -> str:
    """Return the beginnings of the lines that expect these findings."""
    kinds = [f"{one.verdict} {one.kind}" for one in findings]
    return " | ".join(dict.fromkeys(kinds)) or "nothing"


def read_expected(text: str) -> Expected | None:
    """Return what a line expects; None if it is not of that form."""
    if not FORM.fullmatch(text):
        return None
    begin = text.partition('"')[0]
    verdict, kind, *pairs = begin.split()
    numbers = []
    for pair in pairs:
        name, _, value = pair.partition("=")
        numbers.append((name, float(value)))
    quotes = re.findall('"([^"]+)"', text)
    return Expected(verdict, kind, tuple(numbers), tuple(quotes))
