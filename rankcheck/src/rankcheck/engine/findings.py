"""Findings, the text of a finding, and the report of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

if TYPE_CHECKING:
    from typing import Unpack  # new in Python 3.11


class Line(int):
    """A line of the script under test, within a finding's text."""

    def __str__(self) -> str:
        return f"line {int(self)}"


Fragment = Union[str, Line]  # of a sentence
# "and": in a check, what follows from a "FAIL"
Verdict = Literal["ok", "warn", "FAIL", "and"]
LABELS: Mapping[str, str] = {  # of a verdict, as it is printed
    "warn": "warning", "and": "follows"}


class Proof(Enum):
    """What a finding of verify shows, whatever its verdict."""

    REDUCED = "gradients are reduced"
    EQUAL = "gradients are equal on all ranks"
    SINGLE = "losses, gradients or weights are compared with one process"


class Learned(TypedDict, total=False):
    """What a finding tells later questions: fields of a `Comparison`."""

    skip_reason: str
    averaged: str
    nodes: str
    rate: float
    settings: str


@dataclass
class Finding:
    """What was found.

    A sentence is a list of texts and `Line`s. A caller may print each `Line`
    as the line in another version of the script.

    Attributes:
        sentence: what is so.
        fix: what to do, where the sentence does not say it; `fix_text` is that
            in one text.
        error: with which the script has ended, without its place.
        kind: which finding it is, in words that stay the same when its
            sentence is worded otherwise; in `why`, the fault's name, or "".
        ranks: those to blame: their numbers; in `why`, its `Rank`s, of which
            this package must not know.
        numbers: those in the sentence, by name.
        question: its title; "" if it is about the runs themselves.
        learned: what later questions have to know.
        proves: what it shows, whatever the verdict.
    """

    verdict: Verdict
    sentence: list[Fragment]
    fix: list[Fragment]
    error: str = ""
    kind: str = ""
    ranks: Sequence[Any] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    question: str = ""
    learned: Learned = field(default_factory=Learned)
    proves: frozenset[Proof] = frozenset()

    @property
    def text(self) -> str:
        return "".join(map(str, self.sentence))

    @property
    def fix_text(self) -> str:
        return "".join(map(str, self.fix))

    @property
    def lines(self) -> set[int]:
        return {int(part) for part in self.sentence if isinstance(part, Line)}


class Details(TypedDict, total=False):
    """Optional fields of a `Finding`, as keyword arguments."""

    kind: str
    ranks: Sequence[int]
    numbers: Mapping[str, float]
    learned: Learned
    proves: frozenset[Proof]


SAME_SAMPLES = ("make the single-process run read the same samples (set a "
                "seed, or use {n} in a flag)")


@dataclass(frozen=True)
class Report:
    """What `rankcheck.verify` has found about one script.

    Attributes:
        script: the file that was run.
        findings: the answers, causes before their effects.
        not_checked: sentences; what the findings say nothing about.
        uncompared: sentences; what status 0 requires and was not shown.
            Empty if the caller accepts that (`allow_uncompared`).
        internal_errors: one line for each question that rankcheck could not
            answer because of an error of its own.
        comparable_by: what lets the script be compared, as an imperative; ""
            if nothing is known that does.
    """

    script: Path
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    internal_errors: tuple[str, ...] = ()
    comparable_by: str = SAME_SAMPLES

    @property
    def failures(self) -> list[Finding]:
        return [one for one in self.findings if one.verdict == "FAIL"]

    @property
    def warnings(self) -> list[Finding]:
        return [one for one in self.findings if one.verdict == "warn"]

    @property
    def status(self) -> int:
        """The exit status: 0 correct, 1 a failure, 2 not verified."""
        if self.internal_errors:
            return 2
        if self.failures:
            return 1
        return 2 if self.uncompared else 0

    @property
    def ok(self) -> bool:
        """Whether the script was compared, and nothing is wrong."""
        return self.status == 0

    @property
    def error(self) -> str:
        """Why the script is not verified (status 2), in one line; or ""."""
        if self.internal_errors:
            errors = "; ".join(self.internal_errors)
            return (f"rankcheck itself failed: {errors}. fix: report this "
                    "with your versions of torch and rankcheck")
        if self.status != 2:
            return ""
        fix = "check this by other means, and accept it by --allow-uncompared"
        if self.comparable_by:
            fix = f"{self.comparable_by}, or accept this by --allow-uncompared"
        return f"not verified: {'; '.join(self.uncompared)}. fix: {fix}"

    def __str__(self) -> str:
        lines = [f"{LABELS.get(one.verdict, one.verdict)}: {one.text}"
                 for one in self.findings]
        if self.error:
            lines.append(f"error: {self.error}")
        return "\n".join(lines)


def ok(text: str, **more: Unpack[Details]) -> Finding:
    return Finding("ok", [text], [], **more)


def warn(text: str, fix: str | Iterable[Fragment],
         **more: Unpack[Details]) -> Finding:
    return Finding("warn", [text], as_fragments(fix), **more)


def fail(sentence: str | Iterable[Fragment],
         fix: str | Iterable[Fragment] = "", error: str = "",
         **more: Unpack[Details]) -> Finding:
    return Finding("FAIL", as_fragments(sentence), as_fragments(fix), error,
                   **more)


def as_fragments(sentence: str | Iterable[Fragment]) -> list[Fragment]:
    """Return a sentence of its own, from a text or from fragments."""
    if isinstance(sentence, str):
        return [sentence]
    return [*sentence]


def counted(things: Sized, noun: str) -> str:
    """Return "1 step", "2 steps", as many as there are things."""
    return count_of(len(things), noun)


def count_of(number: int, noun: str) -> str:
    """Return "1 process", "2 processes", "2 properties", "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch")):
        return f"{number} {noun}es"
    if noun.endswith("ty"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}s"


def percent(error: float) -> str:
    if error != error:
        return "nan"
    return f"{error:.0%}" if error >= 0.1 else f"{error:.1%}"
