"""Find the change that makes a script wrong, by experiment.

The lesson's finished script is right. With all differences of the attendee's
script it is not. So some of them, put into the finished script alone, make it
wrong: one, which is found by trying each, or several together, which delta
debugging finds.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from workshop.diff.diff import Diff, RemainingChange

MOST_MISTAKES = 2  # mistakes that are named
TRIES = 20  # scripts that are tried: a second each, on an idle machine


@dataclass(frozen=True)
class OneChange:
    """A change of a lesson that is tried with all others made.

    Attributes:
        number: as `diff` numbers it.
        place: ", line N" where it is in the attendee's script, or "".
        data: the script in which the others are made as in the lesson; None
            if this one is made so, too.
    """

    number: int
    place: str = ""
    data: bytes | None = None


Fails = Callable[[Sequence[RemainingChange]], bool]


def find_smallest(items: list[RemainingChange], fails: Fails,
                  beside: Sequence[RemainingChange] = ()
                  ) -> list[RemainingChange]:
    """Return a part of the items with which `fails` holds, and none smaller.

    This is delta debugging (Zeller and Hildebrandt, "Simplifying and
    Isolating Failure-Inducing Input", 2002).

    Args:
        items: differences of which a part is searched.
        fails: whether a script with these differences is wrong; it is, with
            all items and those beside them. It is asked about 2 log2(n) times
            where one item is the mistake, and more often where two are wrong
            together.
        beside: differences that the script has in each try.
    """
    if len(items) == 1:
        return items
    first, second = items[:len(items) // 2], items[len(items) // 2:]
    for part in (first, second):
        if fails([*beside, *part]):
            return find_smallest(part, fails, beside)
    first = find_smallest(first, fails, [*beside, *second])
    return first + find_smallest(second, fails, [*beside, *first])


def find_breaking(items: list[RemainingChange],
                  symptom: Callable[[Sequence[RemainingChange]], object]
                  ) -> Iterator[list[RemainingChange]]:
    """Yield each smallest set of differences that breaks the script.

    It ends after `MOST_MISTAKES` parts, or where `TRIES` are not enough for
    the smallest.

    Args:
        items: all differences.
        symptom: what shows that a script with these differences is wrong, or
            None. A part of the items may be wrong for another reason, such as
            a name that the other part defines: only what shows the same
            counts.
    """
    tries = 0
    for _ in range(MOST_MISTAKES):
        seen = symptom(items) if items else None
        if seen in (None, symptom([])):
            return  # without them it fails, too: the cause is elsewhere

        def fails(some: Sequence[RemainingChange],
                  seen: object = seen) -> bool:
            nonlocal tries
            tries += 1
            return tries <= TRIES and symptom(some) == seen

        alone = next((item for item in items if fails([item])), None)
        part = find_smallest(items, fails) if alone is None else [alone]
        if tries > TRIES and len(items) > 1:
            return  # it may be larger than it has to be
        yield part
        items = [item for item in items if item not in part]


def rename_symbols(yours: str, goal: str) -> str:
    """Return the script with the lesson's names, where its own are only
    others.

    A name that the script itself defines and the lesson does not have, at
    whose places the lesson has always the same name, which the script does not
    have. Lines stay lines.
    """
    yours_tokens, goal_tokens = map(read_tokens, (yours, goal))
    own_strings = [token.string for token in yours_tokens]
    goal_strings = [token.string for token in goal_tokens]
    matcher = SequenceMatcher(None, own_strings, goal_strings, autojunk=False)
    pairs: dict[str, set[str]] = {}  # own name -> the lesson's at its places
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "replace" and i2 - i1 == j2 - j1:
            for own, other in zip(own_strings[i1:i2], goal_strings[j1:j2],
                                  strict=True):
                pairs.setdefault(own, set()).add(other)
    mine = defined(yours)
    names = {}
    for own, (other, *more) in pairs.items():
        is_own = own in mine and own not in goal_strings
        is_free = other.isidentifier() and other not in own_strings
        if not more and is_own and is_free:
            names[own] = other
    lines = io.StringIO(yours).readlines()
    for token in reversed(yours_tokens):
        if token.type == tokenize.NAME and token.string in names:
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = line[:begin] + names[token.string] + line[end:]
    return "".join(lines)


# Where a node of a syntax tree has the name that it gives or uses
NAME_FIELDS: dict[type[ast.AST], str] = {
    ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg",
    ast.alias: "asname", ast.Name: "id", ast.Attribute: "attr"}


def defined(text: str) -> set[str]:
    """Return the names that a script gives to something."""
    return {getattr(node, NAME_FIELDS[type(node)])
            for node in ast.walk(ast.parse(text)) if type(node) in NAME_FIELDS
            and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)}


def read_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return a script's tokens, but for comments and line ends."""
    return [token for token in tokenize.generate_tokens(
        io.StringIO(text).readline) if token.type not in (
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)]


def in_order(diff: Diff, named: Collection[int]) -> list[RemainingChange]:
    """Return the differences, the suspicious ones first.

    What is neither as it was before the lesson nor as the lesson makes it is
    suspicious.

    Args:
        diff: of the attendee's script.
        named: the lines that the check names, which are suspicious, too.
    """
    start = {line.strip() for line in diff.lesson.start.lines}

    def suspicion(item: RemainingChange) -> int:
        lines = {i + 1 for i1, i2, *_ in item.edits for i in range(i1, i2)}
        is_own = any(diff.script.lines[i - 1].strip() not in start
                     for i in lines)
        is_named = any(line in named for line in lines)
        return is_named + is_own

    return sorted(diff.remaining + diff.other_changes, key=suspicion,
                  reverse=True)


def kept_lines(diff: Diff, part: Sequence[RemainingChange]) -> str:
    """Return the lesson's line, where a part breaks one that the lesson
    keeps; else "".

    Such a line stands among those of a change, but was there before it.
    """
    lines = [diff.goal.lines[j].strip() for item in part
             for *_, j1, j2 in item.edits for j in range(j1, j2)]
    before = {line.strip() for line in diff.lesson.start.lines}
    return lines[0] if len(lines) == 1 and lines[0] in before else ""


@dataclass(frozen=True)
class MovedLines:
    """Lines that a script has in another place than the lesson.

    Attributes:
        lines: without their indentation.
        where: "earlier" or "later" in the script than in the lesson.
    """

    lines: tuple[str, ...]
    where: str


def find_moved(diff: Diff, part: Sequence[RemainingChange]
               ) -> MovedLines | None:
    """Return the lines of a part if all of them are only moved, else None.

    A moved line is two differences: one has it in addition, in the other it
    is missing. The part may be one of them alone.
    """
    whole = lines_of(diff, diff.remaining + diff.other_changes)
    own = lines_of(diff, part)
    places = set()
    for line in own.additional | own.missing:
        if line not in whole.additional or line not in whole.missing:
            return None
        if max(script.lines.count(line)
               for script in (diff.script, diff.goal)) > 1:
            return None  # which of them is moved?
        is_later = whole.additional[line] >= whole.missing[line]
        places.add("later" if is_later else "earlier")
    if len(places) != 1:
        return None
    lines = own.additional or own.missing
    return MovedLines(tuple(line.strip() for line in lines), places.pop())


@dataclass(frozen=True)
class DifferentLines:
    """The lines of code of some differences.

    Attributes:
        additional: those of the script, with their places in it.
        missing: those of the lesson, with the places where the script lacks
            them.
    """

    additional: dict[str, int]
    missing: dict[str, int]


def lines_of(diff: Diff, items: Sequence[RemainingChange]) -> DifferentLines:
    """Return the lines of code of some differences."""
    code, goal_code = set(diff.script.where), set(diff.goal.where)
    found = DifferentLines({}, {})
    for item in items:
        for i1, i2, j1, j2 in item.edits:
            for i in sorted(code.intersection(range(i1, i2))):
                found.additional[diff.script.lines[i]] = i
            for j in sorted(goal_code.intersection(range(j1, j2))):
                found.missing[diff.goal.lines[j]] = i1
    return found


def make_without(diff: Diff, items: Sequence[RemainingChange],
                 among: Sequence[RemainingChange] | None = None
                 ) -> bytes | None:
    """Return the script with all differences made as in the lesson but these.

    Args:
        diff: of the attendee's script.
        items: the differences that stay.
        among: those that are made; None: all.

    Returns:
        None if that is not Python: their lines belong together.
    """
    if among is None:
        among = diff.remaining + diff.other_changes
    data: bytes = diff.replace(edit for item in among if item not in items
                               for edit in item.edits).encode()
    try:
        ast.parse(data)
        return data
    except SyntaxError:
        return None


def name_changes(part: Sequence[RemainingChange]) -> str:
    """Return the name and the lines of a part of the differences."""
    names = []
    for item in part:
        title = "a difference that is not in the lesson"
        if item.number:
            title = f"change {item.number} ({item.title})"
        names.append(f"{title}, line {item.edits[0][0] + 1}")
    return ", together with ".join(names)
