"""The answer to a question about a trial, and the numbers in it."""

from dataclasses import dataclass


class Line(int):
    """A line of the script that was tried, within a sentence."""

    def __str__(self):
        return f"line {int(self)}"


@dataclass
class Finding:
    """What was found: verdict is "ok", "warn" or "FAIL".

    A sentence is a list of texts and `Line`s: who shows it to the attendee
    knows which of their lines these are.
    """

    verdict: str
    sentence: list
    hint: list  # what to do, where neither the sentence nor a lesson says it
    error: str = ""  # with which the script has ended, without its place
    kind: str = ""  # the fault's name, where it has one
    ranks: list = ()  # those to blame, as `why` knows them

    @property
    def text(self):
        return "".join(map(str, self.sentence))

    @property
    def advice(self):
        return "".join(map(str, self.hint))

    @property
    def lines(self):
        return {int(part) for part in self.sentence if isinstance(part, Line)}

    def name_lines(self, name):
        """Put the text that `name` has for it in the place of each line."""
        for words in (self.sentence, self.hint):
            words[:] = [name(part) if isinstance(part, Line) else part
                        for part in words]


def ok(text):
    return Finding("ok", [text], [])


def warn(text, hint):
    return Finding("warn", [text], [hint])


def fail(sentence, hint="", error=""):
    """sentence, hint: a text, or texts and `Line`s."""
    sentence, hint = ([words] if isinstance(words, str) else [*words]
                      for words in (sentence, hint))
    return Finding("FAIL", sentence, hint, error)


def number(row, column):
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return float("nan")


def percent(error):
    if error != error:
        return "nan"
    return f"{error:.0%}" if error >= 0.1 else f"{error:.1%}"


def shorten(numbers):
    """Some numbers of samples, in words."""
    begin, end = (numbers[0], numbers[-1]) if numbers else (0, 0)
    if len(numbers) > 2 and list(numbers) == list(range(begin, end + 1)):
        return f"{begin} to {end}"
    return ", ".join(map(str, numbers[:8])) + (
        ", ..." if len(numbers) > 8 else "")
