"""The answer to a question about a trial, and the numbers in it."""

from dataclasses import dataclass


@dataclass
class Finding:
    """What was found: verdict is "ok", "warn" or "FAIL"."""

    verdict: str
    text: str
    hint: str = ""


def ok(text):
    return Finding("ok", text)


def warn(text, hint):
    return Finding("warn", text, hint)


def fail(text, hint):
    return Finding("FAIL", text, hint)


def relative(value, good):
    return abs(value / good - 1) if good else float("inf")


def times(value, good):
    """In words: by which whole factor a value is off, "" if by none."""
    ratio = value / good if good else 0
    for factor in range(2, 65):
        if relative(ratio, factor) < 0.01:
            return f": {factor} times as much"
        if relative(ratio, 1 / factor) < 0.01:
            return f": 1/{factor} of it"
    return ""


def differs(name, value, good, hint, digits=6):
    """A `Finding` about a number that is not the single device's."""
    return fail(f"{name} is {value:.{digits}f}, not {good:.{digits}f}"
                f"{times(value, good)}", hint)


def number(row, column):
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return float("nan")


def values(trial, reference, column, step):
    return (number(trial.rows[step], column),
            number(reference.rows[step], column))


def percent(error):
    return f"{error:.0%}" if error >= 0.1 else f"{error:.1%}"


def shorten(numbers):
    """Some numbers of samples, in words."""
    begin, end = numbers[0], numbers[-1]
    if len(numbers) > 2 and list(numbers) == list(range(begin, end + 1)):
        return f"{begin} to {end}"
    return ", ".join(map(str, numbers[:6])) + (
        ", ..." if len(numbers) > 6 else "")
