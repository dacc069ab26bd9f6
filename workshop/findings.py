"""The answer to a question about a trial, and the numbers in it."""

from dataclasses import dataclass


@dataclass
class Finding:
    """What was found: verdict is "ok", "warn" or "FAIL"."""

    verdict: str
    text: str
    hint: str = ""  # what to do, where neither the text nor a lesson says it


def ok(text):
    return Finding("ok", text)


def warn(text, hint):
    return Finding("warn", text, hint)


def fail(text, hint=""):
    return Finding("FAIL", text, hint)


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
