"""A question of the check or of verify, its answer, and the numbers in it."""

from dataclasses import dataclass, field

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

    @property
    def text(self):
        return "".join(map(str, self.sentence))

    @property
    def advice(self):
        return "".join(map(str, self.hint))

    @property
    def lines(self):
        return {int(part) for part in self.sentence if isinstance(part, Line)}


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
