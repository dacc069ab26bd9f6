"""Show what is left to change, in a terminal and in a notebook."""

from __future__ import annotations

import html
import itertools
import os
import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from backstage.errors import visible
from backstage.files import show_path
from workshop.diff import passed_checks, working_copy
from workshop.diff.diff import Diff, Edit, RemainingChange
from workshop.diff.page import (
    KEEP_IN_SIGHT,
    KEEP_UNFOLDED,
    DiffRow,
    DiffSpan,
    code_box,
    link,
    link_lines,
    quote,
    styled_box,
)
from workshop.html import TERMINAL_BLUE, TERMINAL_ORANGE, folded, paragraph
from workshop.stages import WORKING_COPY, find_stage

CONTEXT = 2  # unchanged lines shown above and below a change


def wants_hints(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether site.sh asks for reasons without the code: WORKSHOP_HINTS."""
    return environment.get("WORKSHOP_HINTS", "no") not in ("", "no", "0")


def is_checked(diff: Diff) -> bool:
    return passed_checks.has_passed(diff.stage, diff.script.data)


def split_changes(diff: Diff) -> tuple[list[RemainingChange],
                                       list[RemainingChange]]:
    """The changes that are left, and those that the check has found right.

    The next one to make is the first of what is left.
    """
    right = working_copy.changes_passed(diff)
    return sorted((item for item in diff.remaining if item not in right),
                  key=lambda item: (item.number < diff.at, item.number)), right


def headline(diff: Diff) -> str:
    """In one line, how far the script is."""
    name, (left, right) = show_path(diff.script.path), split_changes(diff)
    if (right or diff.other_changes) and is_checked(diff):
        return f"{name} has passed the check; what remains is style"
    if left:
        text = f"{name}: {len(left)} of {diff.total} changes left"
    elif right or diff.other_changes:
        text = f"{name}: all {diff.total} changes are made"
    else:
        return f"Done: all {diff.total} changes are made in {name}."
    if diff.other_changes:
        more = "" if len(diff.other_changes) == 1 else "s"
        text += f", and {len(diff.other_changes)} other difference{more}"
    return text


def next_command(diff: Diff) -> str:
    """What to do next, in one line."""
    stage, (left, right) = diff.stage, split_changes(diff)
    if is_checked(diff):
        if right or diff.other_changes:
            return "It passed the check: your differences may stay."
        return "It passed the check, too."
    if left and diff.other_stage:
        return diff.advice_to_reset
    if left or diff.script.syntax_error:
        return "Change the script and save it (Ctrl+S, Cmd+S)."
    if right or diff.other_changes:
        return (f"Your own code may differ from ours: `python -m workshop "
                f"check {stage}` tests whether it is correct.")
    return f"Next: `python -m workshop check {stage}`"


def saved_at(path: Path) -> str:
    when = time.localtime(path.stat().st_mtime)
    today = when[:3] == time.localtime()[:3]
    return time.strftime("saved at %H:%M:%S" if today else
                         "saved on %d %B at %H:%M", when)


def title(diff: Diff, item: RemainingChange) -> tuple[str, str]:
    """The change's number and name, and its place in the script."""
    i1, i2, j1, j2 = item.edits[0]
    # a removed line is in the script, an added one in the solution
    script, begin, end = ((diff.script, i1, i2) if i1 < i2 else
                          (diff.goal, j1, j2))
    place = script.place(next(  # a blank line has no indent
        (i for i in range(begin, end) if script.lines[i]), begin))
    where = f"line {i1 + 1}, " + (
        f"in {place}" if place else "outside any function")
    more = [f"line {edit[0] + 1}" for before, edit in itertools.pairwise(
        item.edits) if edit[0] - before[1] > 2 * CONTEXT]
    if more:
        where += "; also " + ", ".join(more)
    number = f"{item.number} of {diff.total}: " if item.number else ""
    return f"{number}{item.title}", where


def prediction(diff: Diff, item: RemainingChange) -> str:
    """What to predict, and the check that tries it, if one does."""
    return item.predict + (
        f" `python -m workshop check {diff.stage} {item.number}` tries it, "
        "before you make the change." * item.checked)


def change_rows(yours: list[str], goal: list[str], edits: Sequence[Edit],
                titles: Iterable[str] = ()) -> Iterator[DiffRow]:
    """The rows (line number or None, sign, [(text, differs)]) of a change.

    The sign is " ", "-", "+", "" for a row that stands for a gap, or "@" for a
    title: titles has one, or "", for each of the edits.
    """
    titles = iter(titles)
    shown = max(0, edits[0][0] - CONTEXT)
    for i1, i2, j1, j2 in edits:
        if shown + CONTEXT < i1 - CONTEXT:
            yield from unchanged_rows(yours, shown, shown + CONTEXT)
            yield None, "", []
            shown = i1 - CONTEXT
        yield from unchanged_rows(yours, shown, i1)
        above = next(titles, "")
        if above:
            yield None, "@", [(above, False)]
        old, new = mark_differences(yours[i1:i2], goal[j1:j2])
        yield from ((i1 + k + 1, "-", text) for k, text in enumerate(old))
        yield from ((None, "+", text) for text in new)
        shown = i2
    yield from unchanged_rows(yours, shown, min(shown + CONTEXT, len(yours)))


def unchanged_rows(lines: list[str], begin: int, end: int) -> list[DiffRow]:
    return [(i + 1, " ", [(lines[i], False)]) for i in range(begin, end)]


def mark_differences(old: list[str],
                     new: list[str]) -> tuple[list[list[DiffSpan]],
                                              list[list[DiffSpan]]]:
    """Both as lists of (text, differs); similar lines are compared by word."""
    marked = [[(line, False)] for line in old], [[(line, False)]
                                                 for line in new]
    after = 0
    for i, line in enumerate(old):
        for j in range(after, len(new)):
            a, b = (re.findall(r"\w+", it) for it in (line, new[j]))
            if match(a, b).ratio() >= 0.5:
                a, b = (re.findall(r"\w+|.", it) for it in (line, new[j]))
                marked[0][i], marked[1][j] = [], []
                for tag, a1, a2, b1, b2 in match(a, b).get_opcodes():
                    for row, part in ((marked[0][i], a[a1:a2]),
                                      (marked[1][j], b[b1:b2])):
                        if part:
                            row.append(("".join(part), tag != "equal"))
                after = j + 1
                break
    return marked


def match(a: list[str], b: list[str]) -> SequenceMatcher[str]:
    """difflib's matcher for two lists, with nothing left out."""
    return SequenceMatcher(None, a, b, autojunk=False)


def warnings(diff: Diff) -> Iterator[str]:
    """Lines: where the script is not Python, and what was lost from it."""
    if diff.script.syntax_error:
        yield f"Not Python yet, {diff.script.syntax_error}"
    gone: Sequence[int] = ()
    if diff.script.path == WORKING_COPY:
        gone = working_copy.undone_changes(diff)
    if gone:
        numbers = " ".join(map(str, gone))
        which = "change" if len(gone) == 1 else "changes"
        yield (f"`apply` made {which} {numbers}, but the script no longer has "
               f"them: an editor may have saved an older version. fix: "
               f"`python -m workshop apply {diff.stage} {numbers}`")


# ----------------------------------------------------------------- terminal


def to_text(diff: Diff, colour: bool = False, hints: bool = False,
            number: int | None = None) -> str:
    """The view as text; colour: with a terminal's escape sequences.

    hints: without the code. number: only that change, a `UserError` if the
    lesson does not have it.
    """
    def paint(text: str, *codes: object) -> str:
        start = "".join(f"\033[{code}m" for code in codes)
        return f"{start}{text}\033[0m" if colour and codes and text else text

    out = [paint(headline(diff), 1)]
    out += [paint(line, TERMINAL_ORANGE) for line in warnings(diff)]
    out.append(f"Last {saved_at(diff.script.path)}. {next_command(diff)}")
    left, right = split_changes(diff)
    shown = left + diff.other_changes + right
    if number is not None:
        diff.require_change(number)
        shown = [item for item in diff.remaining if item.number == number]
        if not shown:
            out += ["", f"Change {number} is made."]
    for item in shown:
        name, where = title(diff, item)
        out += ["", f"{paint(name, 1)} ({where})", wrap(item.why)]
        if item.predict:
            lesson = show_path(find_stage(diff.stage).lesson)
            out += ["", wrap(f"Predict: {prediction(diff, item)}"), wrap(
                f"(the answer: {lesson}, change {item.number})")]
        if hints:
            if number is not None and item.hint:
                out += ["", wrap(f"Hint: {item.hint}")]
            continue
        for line, sign, parts in change_rows(
                diff.script.lines, diff.goal.lines, item.edits):
            codes = {"-": [TERMINAL_ORANGE],
                     "+": [TERMINAL_BLUE]}.get(sign, [])
            text = "".join(paint(visible(part), *codes, *[7] * differs)
                           for part, differs in parts)
            out.append(f"{line or '':>5} {paint(sign or '...', *codes)} {text}"
                       .rstrip())
    hinted = next((item for item in shown if item.hint), None)
    if hints and hinted and number is None:
        out += ["", "A hint: `python -m workshop diff "
                f"{diff.stage} {hinted.number} --hints`"]
    if hints and shown:
        which = diff.stage + (f" {number}" if number else "")
        out += ["", f"The code: `python -m workshop diff {which} --no-hints`"]
    return "\n".join(out)


def wrap(text: str) -> str:
    """The text in lines that fit, an empty one between its paragraphs."""
    return "\n\n".join(textwrap.fill(part, 79) for part in text.split("\n\n"))


# ----------------------------------------------------------------- notebook


def to_html(diff: Diff, hints: bool = False, whole: bool = False) -> str:
    """The view as HTML: the next change, the others folded below it.

    It fits a laptop's screen, so that what there is to do is in sight after
    Shift+Enter. hints: the code is folded, too. whole: all that differs as
    one diff, as git shows it.
    """
    left, right = split_changes(diff)
    todo = [] if is_checked(diff) else left + diff.other_changes
    name, warned = show_path(diff.script.path), [*warnings(diff)]
    first = html.escape(headline(diff))
    if diff.script.path == WORKING_COPY:
        first = first.replace(name, link(name))
    out = [paragraph(f"<strong>{first}</strong>",
                     "" if todo or diff.script.syntax_error else "good"),
           "" if whole else strip(diff, left)]
    out += [paragraph(quote(line), "bad") for line in warned]
    out.append(paragraph(quote(
        f"Last {saved_at(diff.script.path)}. {next_command(diff)}")))
    if whole:
        out.append(everything(diff))
    for item in [] if whole else left + diff.other_changes + right:
        name, where = map(quote, title(diff, item))
        if diff.script.path == WORKING_COPY:
            where = link_lines(where)
        where = f'<span class="place">({where})</span>'
        id = f' id="{anchor(diff, item.number)}"' if item.number else ""
        if item in todo[:1]:
            out.append(f"<h3{id}>{name} {where}</h3>"
                       f"{change(diff, item, hints)}")
        else:
            if item in right:
                name += " (right, as you wrote it)"
            out.append(folded(f"{name} {where}", change(diff, item, hints),
                              id))
    return styled_box("\n".join([*out, KEEP_UNFOLDED, KEEP_IN_SIGHT]),
                      next(iter(warned), headline(diff)))


def anchor(diff: Diff, number: int) -> str:
    return f"ws-{diff.stage}-{number}"


def strip(diff: Diff, left: list[RemainingChange]) -> str:
    """A box for each change: made, or a link to it."""
    numbers = [item.number for item in left]
    boxes = []
    for number, change in enumerate(diff.lesson.changes, 1):
        state = ("next" if [number] == numbers[:1] else
                 "left" if number in numbers else "made")
        name = html.escape(
            f'{number}: {change.title.replace("`", "")} ({state})')
        about = f'class="{state}" title="{name}"'
        there = anchor(diff, number)
        boxes.append(
            f'<span {about}><span class="unseen">{name}</span>'
            '<span aria-hidden="true">✓</span></span>' if state == "made" else
            f'<a {about} aria-label="{name}" href="#{there}" onclick='
            f'"document.getElementById(\'{there}\').open = true">'
            f'{number}</a>')
    about = f"{diff.total - len(numbers)} of {diff.total} changes are made"
    if numbers:
        about += f"; the next one is change {numbers[0]}"
    return (f'<div class="strip" role="group" aria-label="{about}">'
            f'{"".join(boxes)}</div>')


def change(diff: Diff, item: RemainingChange, hints: bool) -> str:
    """Why, what to predict, the answer folded, and the code.

    hints: a step with each click: a hint in words, the lines, the code.
    """
    def fold(summary: str, content: str) -> str:
        id = f"{anchor(diff, item.number)}-{summary.split()[-1].lower()}"
        return folded(summary, content, f' id="{id}"' * bool(item.number))

    why = [paragraph(quote(part)) for part in item.why.split("\n\n")]
    if item.predict:
        why += [paragraph("<strong>Predict:</strong> "
                          + quote(prediction(diff, item)), "ask"),
                fold("Answer", paragraph(quote(item.answer)))]
    view = [*change_rows(diff.script.lines, diff.goal.lines, item.edits)]
    about = (f"change {item.number}" if item.number else
             "a difference that is not in the lesson")
    code = code_box(view, f"The code of {about}")
    if hints:
        before = code_box((row for row in view if row[1] != "+"),
                          f"The lines of {about}")
        code = fold("Show the lines", before + fold("Show the code", code))
        if item.hint:
            code = fold("Give a hint", paragraph(quote(item.hint)) + code)
    return "".join(why) + code


def everything(diff: Diff) -> str:
    """All that differs, in the order of the script, with titles."""
    edits = sorted((edit, f"{item.number or ''} {item.title}".lstrip())
                   for item in diff.remaining + diff.other_changes
                   for edit in item.edits)
    titles = ["", *(title for _, title in edits)]
    new = [title * (title != before)
           for before, title in itertools.pairwise(titles)]
    return code_box(change_rows(diff.script.lines, diff.goal.lines,
                                [edit for edit, _ in edits], new),
                    "All that differs") if edits else ""


def find_definition(lines: Iterable[str]) -> str:
    """Return the name in the first line that defines something, or ""."""
    for line in lines:
        found = re.match(r"(?:def|class) (\w+)", line)
        if found:
            return found[1]
    return ""


def between(old: str, new: str) -> tuple[str, str]:
    """The changes from a script's text to another's: (HTML, text).

    Those of a function or class are folded under its name.
    """
    before, after = old.splitlines(), new.splitlines()
    edits: list[Edit] = [
        (i1, i2, j1, j2)
        for tag, i1, i2, j1, j2 in match(before, after).get_opcodes()
        if tag != "equal"]
    places: dict[str, list[Edit]] = {}
    for edit in edits:
        i1, i2, j1, j2 = edit
        first = next(filter(None, before[i1:i2] or after[j1:j2]), "")
        place = find_definition([first, *before[:i1][::-1]])
        places.setdefault(place, []).append(edit)
    parts = [folded(
        f"<code>{name or 'outside any function'}</code>: "
        f"{sum(i2 - i1 for i1, i2, *_ in some)} removed, "
        f"{sum(j2 - j1 for *_, j1, j2 in some)} added",
        code_box(change_rows(before, after, some), "The changes there"))
        for name, some in places.items()]
    view = list(change_rows(before, after, edits)) if edits else []
    text = "\n".join(f"{line or '':>5} {sign or '...'} "
                     + "".join(part for part, _ in parts)
                     for line, sign, parts in view)
    return styled_box("".join(parts)), text
