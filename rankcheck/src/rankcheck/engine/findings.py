"""A question of the check or of verify, its answer, and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

# Errors that a question may raise on data that it does not expect.
STRANGE = (ArithmeticError, AttributeError, LookupError, RuntimeError,
           TypeError, ValueError)


@dataclass(frozen=True)
class Question:
    """What is asked about a trial, or about a script's runs."""

    title: str  # what is right where the answer is "ok"
    answer: object  # function of what it is asked about
    kinds: tuple  # of trials: "whole", "uneven", "resumed", "stopped", ...
    where: object  # function of a trial or `Comparison`: is it asked there?
    early: bool  # also of a trial that has not come to its end


class Questions(list):
    """In the order in which they are asked: causes before their effects."""

    def add(self, title, kinds=("whole",), where=lambda _: True, early=False):
        """Ask the decorated function where `where` says so."""
        def add(answer):
            self.append(Question(title, answer, kinds, where, early))
            return answer

        return add


class Line(int):
    """A line of the script that was tried, within a sentence."""

    def __str__(self):
        return f"line {int(self)}"


class Proof(Enum):
    """What a finding of verify shows, whatever its verdict."""

    REDUCED = "gradients are reduced"
    EQUAL = "gradients are equal on all ranks"
    SINGLE = "losses, gradients or weights are compared with one process"


@dataclass
class Finding:
    """What was found: verdict is "ok", "warn" or "FAIL".

    A sentence is a list of texts and `Line`s: whoever prints it may replace
    each `Line` by the line in another version of the script.
    """

    verdict: str
    sentence: list
    hint: list  # what to do, where the sentence does not say it
    error: str = ""  # with which the script has ended, without its place
    kind: str = ""  # the fault's name, where it has one
    ranks: list = ()  # those to blame: their numbers; `why` has `Rank`s
    numbers: dict = field(default_factory=dict)  # in the sentence, by name
    question: str = ""  # its title; "" if it is about the runs themselves
    learned: dict = field(default_factory=dict)  # fields of a `Comparison`
    proves: frozenset[Proof] = frozenset()

    @property
    def text(self):
        return "".join(map(str, self.sentence))

    @property
    def advice(self):
        return "".join(map(str, self.hint))

    @property
    def lines(self):
        return {int(part) for part in self.sentence if isinstance(part, Line)}


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
    """

    script: Path
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    internal_errors: tuple[str, ...] = ()

    @property
    def failures(self) -> list[Finding]:
        return [one for one in self.findings if one.verdict == "FAIL"]

    @property
    def warnings(self) -> list[Finding]:
        return [one for one in self.findings if one.verdict == "warn"]

    @property
    def status(self) -> int:
        """The exit status: 0 right, 1 a failure, 2 not verified."""
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
                    "with the versions of torch and rankcheck")
        if self.status != 2:
            return ""
        return (f"not verified: {'; '.join(self.uncompared)}. fix: let one "
                "process read the same samples (set a seed, or {n} in a "
                "flag), or accept this by --allow-uncompared")

    def __str__(self) -> str:
        lines = [f"{one.verdict}: {one.text}" for one in self.findings]
        if self.error:
            lines.append(f"error: {self.error}")
        return "\n".join(lines)


def ok(text, **more):
    """more: further fields; so below."""
    return Finding("ok", [text], [], **more)


def warn(text, hint, **more):
    return Finding("warn", [text], [hint], **more)


def fail(sentence, hint="", error="", **more):
    """sentence, hint: a text, or texts and `Line`s."""
    sentence, hint = ([words] if isinstance(words, str) else [*words]
                      for words in (sentence, hint))
    return Finding("FAIL", sentence, hint, error, **more)


def counted(things, noun):
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def percent(error):
    if error != error:
        return "nan"
    return f"{error:.0%}" if error >= 0.1 else f"{error:.1%}"
