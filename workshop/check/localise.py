"""Which change makes a script wrong, by trying.

The lesson's finished script is right. With all differences of the attendee's
script it is not. So some of them, put into the finished script alone, make it
wrong: one, which is found by trying each, or several together, which delta
debugging finds.
"""

import ast
import io
import tokenize
from difflib import SequenceMatcher

MOST = 2  # mistakes that are named
TRIES = 20  # scripts that are tried: a second each, on an idle machine


def smallest(items, fails, beside=()):
    """A part of the items with which `fails` holds, and none smaller.

    fails(items): whether a script with these differences is wrong; it is, with
    all items and those beside them. It is asked about 2 log2(n) times where
    one item is the mistake, and more often where two are wrong together.
    """
    if len(items) == 1:
        return items
    first, second = items[:len(items) // 2], items[len(items) // 2:]
    for part in (first, second):
        if fails([*beside, *part]):
            return smallest(part, fails, beside)
    first = smallest(first, fails, [*beside, *second])
    return first + smallest(second, fails, [*beside, *first])


def find(items, symptom):
    """Yield each smallest set of differences that breaks the script.

    symptom(items): what shows that a script with these differences is wrong,
    or None. A part of the items may be wrong for another reason, such as a
    name that the other part defines: only what shows the same counts. It ends
    after `MOST` parts, or where `TRIES` are not enough for the smallest.
    """
    tries = 0
    for _ in range(MOST):
        seen = symptom(items) if items else None
        if seen in (None, symptom([])):
            return  # without them it fails, too: the cause is elsewhere

        def fails(some, seen=seen):
            nonlocal tries
            tries += 1
            return tries <= TRIES and symptom(some) == seen

        alone = next((item for item in items if fails([item])), None)
        part = smallest(items, fails) if alone is None else [alone]
        if tries > TRIES and len(items) > 1:
            return  # it may be larger than it has to be
        yield part
        items = [item for item in items if item not in part]


def rename(yours, goal):
    """The script with the lesson's names, where its own are only others.

    A name that the script itself defines and the lesson does not have, at
    whose places the lesson has always the same name, which the script does not
    have. Lines stay lines.
    """
    yours_tokens, goal_tokens = map(tokens, (yours, goal))
    words = [[token.string for token in some]
             for some in (yours_tokens, goal_tokens)]
    pairs = {}  # own name -> the lesson's names at its places
    for tag, i1, i2, j1, j2 in SequenceMatcher(
            None, *words, autojunk=False).get_opcodes():
        if tag == "replace" and i2 - i1 == j2 - j1:
            for own, other in zip(words[0][i1:i2], words[1][j1:j2],
                                  strict=True):
                pairs.setdefault(own, set()).add(other)
    mine = defined(yours)
    names = {own: other for own, (other, *more) in pairs.items()
             if not more and own in mine and own not in words[1]
             and other.isidentifier() and other not in words[0]}
    lines = io.StringIO(yours).readlines()
    for token in reversed(yours_tokens):
        if token.type == tokenize.NAME and token.string in names:
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = line[:begin] + names[token.string] + line[end:]
    return "".join(lines)


NAMES = {ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg",
         ast.alias: "asname", ast.Name: "id", ast.Attribute: "attr"}


def defined(text):
    """The names that a script gives to something."""
    return {getattr(node, NAMES[type(node)])
            for node in ast.walk(ast.parse(text)) if type(node) in NAMES
            and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)}


def tokens(text):
    return [token for token in tokenize.generate_tokens(
        io.StringIO(text).readline) if token.type not in (
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)]


def in_order(diff, named):
    """The differences, the suspicious ones first.

    named: the lines that the check names, which are suspicious, as is what is
    neither as it was before the lesson nor as the lesson makes it.
    """
    start = {line.strip() for line in diff.lesson.start.lines}

    def suspicion(item):
        lines = {i + 1 for i1, i2, *_ in item.edits for i in range(i1, i2)}
        own = any(diff.yours.lines[i - 1].strip() not in start for i in lines)
        return bool(lines & named) + own

    return sorted(diff.left + diff.others, key=suspicion, reverse=True)


def kept_lines(diff, part):
    """The lesson's line, where a part breaks one that the lesson keeps, or "".

    Such a line stands among those of a change, but was there before it.
    """
    lines = [diff.goal.lines[j].strip() for item in part
             for *_, j1, j2 in item.edits for j in range(j1, j2)]
    before = {line.strip() for line in diff.lesson.start.lines}
    return lines[0] if len(lines) == 1 and lines[0] in before else ""


def without(diff, items, among=None):
    """The script with all differences made as in the lesson but these.

    among: those that are made, all by default. None if that is not Python:
    their lines belong together.
    """
    among = diff.left + diff.others if among is None else among
    data = diff.replace(edit for item in among if item not in items
                        for edit in item.edits).encode()
    try:
        ast.parse(data)
        return data
    except SyntaxError:
        return None


def name(part):
    """What a part of the differences is called, with its lines."""
    return ", together with ".join(
        (f"change {item.number} ({item.title})" if item.number else
         "a difference that is not in the lesson")
        + f", line {item.edits[0][0] + 1}" for item in part)
