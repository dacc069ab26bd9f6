"""What is left to change in the attendee's script, and where.

Scripts are compared by their lines of code: comments, blank lines, trailing
spaces and line endings do not count. What differs in docstrings and in the
text of messages alone is not left to do.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache, cached_property
from pathlib import Path

from backstage.errors import UserError, require
from backstage.files import StrPath, show_path
from workshop.diff import documents
from workshop.diff.backups import explain_syntax, read_script_bytes
from workshop.stages import STAGES, WORKING_COPY, find_stage

# (i1, i2, j1, j2): lines i1 to i2 of one become lines j1 to j2 of the other
Edit = tuple[int, int, int, int]
# (i1, i2, j1, j2, last): the same, and whether the comments below belong to it
EditSpan = tuple[int, int, int, int, bool]
# (change or None, begin, end, texts): lines of the goal, see `Diff._runs`
GoalRun = tuple[int | None, int, int, list[str] | None]

JOIN_GAP = 2  # this many equal lines do not split a change
# With so many lines changed, a script is still nearly a stage's
FEW_LINES = 10

# A line up to its comment: a string may contain "#", a quote may be unclosed.
QUOTED = r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
CODE = re.compile(rf"({QUOTED}|[^#])*")
# Strings that Python joins, also over several lines.
STRINGS = re.compile(rf"(?:\s*\b[fr]?{QUOTED}|\s*{QUOTED})+(?:\s+(?=[),]))?")


class Script:
    """The lines of a script, and which of them are code."""

    def __init__(self, path: StrPath, data: bytes | None = None) -> None:
        """data: the bytes to look at in place of those in the file.

        Raises `UserError` if it cannot be read.
        """
        self.path, name = Path(path), show_path(path)
        try:
            self.data = read_script_bytes(path) if data is None else data
            text = self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8 text ({error})") from None
        line = text[:text.find("\0") + 1].count("\n") + 1
        require("\0" not in text, f"{name} has a null byte in line {line}, "
                "so it is not Python; fix: delete that character")
        self.raw = list(io.StringIO(text, newline=""))  # with their line ends
        self.lines = [line.rstrip().expandtabs(4) for line in self.raw]
        code = [strip_comment(line) for line in self.lines]
        self.where = [i for i, line in enumerate(code) if line]
        self.code = [code[i] for i in self.where]
        self.text = text

    @cached_property
    def is_code(self) -> list[bool]:
        """Of each line of code, whether it is in no docstring."""
        return outside_docstrings(self.code)

    @cached_property
    def syntax_error(self) -> str | None:
        """What is wrong and where, None if it is Python."""
        try:
            ast.parse(self.text)
        except SyntaxError as error:
            return explain_syntax(error, self.lines)
        except (RecursionError, MemoryError):  # Python may run it
            pass
        return None

    @cached_property
    def tree(self) -> str | None:
        """The syntax tree, None if it cannot be parsed.

        It takes longer than all else about a script, so only what is compared
        has one.
        """
        try:
            return ast.dump(ast.parse(self.text))
        except (SyntaxError, RecursionError, MemoryError):
            return None

    def span(self, begin: int, end: int, last: bool = True) -> tuple[int, int]:
        """The range of lines of code[begin:end] and the comments above it.

        last: include the comments below it.
        """
        edges = [-1, *self.where, len(self.lines)]
        first = edges[begin] + 1
        return first, edges[end + 1] if last else max(first, edges[end] + 1)

    def place(self, i: int) -> str:
        """The names of the class and function that line i is in."""
        names: list[str] = []
        around = indent(self.lines[i])
        for line in reversed(self.lines[:i]):
            if line and indent(line) < around:
                around = indent(line)
                found = re.match(r"\s*(?:class|def) (\w+)", line)
                names[:0] = found.groups() if found else []
        return ".".join(names)


def strip_comment(line: str) -> str:
    """Return the code of a line, "" if it has none."""
    found = CODE.match(line)
    return found[0].rstrip() if found else ""


def line_differences(a: Sequence[str], b: Sequence[str]) -> list[Edit]:
    """The (i1, i2, j1, j2) where code a[i1:i2] becomes b[j1:j2].

    What is put in, or left out, begins with its decorators, not with what is
    below them: it does not end with those of what follows.
    """
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    found: list[Edit] = []
    for kind, *ends in matcher.get_opcodes():
        code, k = (b, 2) if kind == "insert" else (a, 0)
        while kind in ("insert", "delete") and ends[k] > (
                found[-1][k + 1] if found else 0) and code[
                    ends[k] - 1] == code[ends[k + 1] - 1] and code[
                        ends[k] - 1].lstrip()[:1] == "@":
            ends = [end - 1 for end in ends]
        if kind != "equal":
            i1, i2, j1, j2 = ends
            found.append((i1, i2, j1, j2))
    return found


def read_stages() -> dict[str, Script]:
    """The finished scripts: {name: `Script`}."""
    return {stage.name: Script(stage.solution)
            for stage in STAGES.values() if stage.solution.exists()}


def nearest(script: Script, stages: Mapping[str, Script]) -> tuple[int, str]:
    """(how many lines of code differ, the stage with the fewest)."""
    return min((sum(i2 - i1 + j2 - j1 for i1, i2, j1, j2 in
                    line_differences(stage.code, script.code)), name)
               for name, stage in stages.items())


# ----------------------------------------------------------------- a lesson


@dataclass
class ChangePart:
    """Start's code[i1:i2], which becomes the goal's code[j1:j2]."""

    change: int  # which change of the lesson it belongs to, from 0
    i1: int
    i2: int
    j1: int
    j2: int


class Lesson:
    """The changes from one stage to the next, and the code of each."""

    def __init__(self, stage: str) -> None:
        self.stage, self.changes = stage, documents.load_changes(stage)
        self.start = Script(find_stage(find_stage(stage).after).solution)
        self.goal = Script(find_stage(stage).solution)
        self.pieces = [*self.cut(hunks(self.start.code, self.goal.code))]

    def cut(self, hunks: list[list[Edit]]) -> Iterator[ChangePart]:
        """Yield the `ChangePart`s of the hunks: each begins with a change."""
        begins = self.find_begins(hunks)
        for number, hunk in enumerate(hunks):
            points = sorted((*begin, change) for (place, change), begin
                            in begins.items() if place == number)
            i1, i2, j1, _ = hunk[0]
            if not points or points[0][:2] != (i1, j1):
                first = ("-" + self.start.code[i1].strip() if i1 < i2 else
                         "+" + self.goal.code[j1].strip())
                raise ValueError(
                    f"{show_path(self.goal.path)}: the lesson has no change "
                    f"for the hunk that begins with {first!r}")
            ends = [*points[1:], (hunk[-1][1], hunk[-1][3], -1)]
            for (i1, j1, change), (i2, j2, _) in zip(
                    points, ends, strict=True):
                last = [it for it in hunk if (it[0], it[2]) < (i2, j2)][-1]
                yield ChangePart(change, i1, min(i2, last[1]), j1,
                                 min(j2, last[3]))

    def find_begins(
            self, hunks: list[list[Edit]]) -> dict[tuple[int, int], list[int]]:
        """{(number of a hunk, change): [i, j]}: where it begins there."""
        begins: dict[tuple[int, int], list[int]] = {}
        for number, change in enumerate(self.changes):
            for anchor in change.anchors:
                old = anchor.startswith("-")
                code = (self.start if old else self.goal).code
                found = [(place, edit, k) for place, hunk in enumerate(hunks)
                         for edit in hunk
                         for k in range(*(edit[:2] if old else edit[2:]))
                         if code[k].strip() == anchor[1:]]
                if len(found) != 1:
                    raise ValueError(
                        f"lesson {self.stage}: the anchor {anchor!r} is in "
                        f"{len(found)} lines of the diff, not in one")
                (place, (i1, i2, j1, j2), k), = found
                while k > (i1 if old else j1) and (
                        code[k - 1].lstrip()[0] == "@"):
                    k -= 1  # a decorator belongs to what is below it
                begin = ([k, j1 if k == i1 else j2] if old else
                         [i1 if k == j1 else i2, k])
                begins.setdefault((place, number), begin)[not old] = k
        return begins


def hunks(a: Sequence[str], b: Sequence[str]) -> list[list[Edit]]:
    """The differences, in groups that are at most `JOIN_GAP` lines apart."""
    together: list[list[Edit]] = []
    for difference in line_differences(a, b):
        if together and difference[0] - together[-1][-1][1] <= JOIN_GAP:
            together[-1].append(difference)
        else:
            together.append([difference])
    return together


load_lesson = cache(Lesson)


# ------------------------------------------------------------- what is left


@dataclass
class RemainingChange(documents.Change):
    """A change to be made, or, without a number, another difference."""

    number: int = 0  # from 1, its place in the lesson; 0: it is not in it
    # lines of the script and the goal
    edits: list[Edit] = field(default_factory=list)


class Diff:
    """What is left to change in a script until it is the stage's solution.

    remaining: the lesson's changes, in its order; other_changes: differences
    that have nothing to do with the lesson.
    """

    def __init__(self, stage: str, path: StrPath = WORKING_COPY,
                 data: bytes | None = None) -> None:
        self.stage, self.script = stage, Script(path, data)
        self.lesson = load_lesson(stage)
        self.goal, self.total = self.lesson.goal, len(self.lesson.changes)
        self.remaining: list[RemainingChange] = []
        self.other_changes: list[RemainingChange] = []
        self.at = 1  # the change to go on with is this one, or a later one
        if not self.script.syntax_error and self.script.tree == self.goal.tree:
            return
        edits: dict[int, list[Edit]] = {}  # what is left of each change
        wanted: set[int] = set()
        for change, span in self._parts():
            only_in_text = self._differ_only_in_text(*span[:4])
            if change is None and only_in_text:
                continue
            if change is not None and not only_in_text:
                wanted.add(change)
            for edit in self._edits(*span):
                if change is None and self.other_changes and (
                        self.other_changes[-1].edits[-1][1] == edit[0]):
                    self.other_changes[-1].edits.append(edit)
                elif change is None:
                    self.other_changes.append(RemainingChange(
                        "Not in the lesson", "A slip, or something of your "
                        "own? If you did not mean it, change it back.", (),
                        edits=[edit]))
                else:
                    edits.setdefault(change, []).append(edit)
        self.remaining = [
            RemainingChange(**vars(self.lesson.changes[change]),
                            number=change + 1, edits=edits[change])
            for change in sorted(wanted & {*edits})]

    def go_on_from(self, before: Diff) -> None:
        """Stay with the change that was touched since an earlier `Diff`.

        A script that has become another stage is begun anew.
        """
        if before.other_stage or self.other_stage:
            return
        now, then = self.remaining_lines(), before.remaining_lines()
        touched = [number for number in now if now[number] != then.get(number)]
        made = [number for number in then if number not in now]
        self.at = next(iter(touched + made), before.at)

    def remaining_lines(self) -> dict[int, list[tuple[list[str], list[str]]]]:
        """{number of a change: what is left of it, [(old, new lines)]}."""
        return {it.number: [(self.script.lines[i1:i2], self.goal.lines[j1:j2])
                            for i1, i2, j1, j2 in it.edits]
                for it in self.remaining}

    def require_change(self, number: int) -> None:
        require(number in range(1, self.total + 1),
                f"no such change: {number}; fix: choose from those of "
                f"{self.stage}, 1 to {self.total}")

    def _parts(self) -> Iterator[tuple[int | None, EditSpan]]:
        """The differences, cut where another change of the lesson begins.

        Yields (change or None, (i1, i2, j1, j2, last)).
        """
        yours, goal = self.script.code, self.goal.code
        for i1, i2, j1, j2 in line_differences(yours, goal):
            parts = self._runs(yours[i1:i2], j1, j2)
            ends = [i1 + end for end in distribute(
                yours[i1:i2], [texts for *_, texts in parts])]
            ends = join_statements(yours[i1:i2], i1, ends)
            begins = [i1, *ends]
            for k, (change, begin, end, _) in enumerate(parts):
                a, b = yours[begins[k]:ends[k]], goal[begin:end]
                if (a or b) and not same_code(a, b):
                    last = (ends[k], end) == (i2, j2)
                    yield change, (begins[k], ends[k], begin, end, last)

    def _differ_only_in_text(self, i1: int, i2: int, j1: int, j2: int) -> bool:
        """Whether only what people read is different there."""
        a, b = ([line for line, counts in zip(
            script.code[begin:end], script.is_code[begin:end],
            strict=True) if counts]
            for script, begin, end in ((self.script, i1, i2),
                                       (self.goal, j1, j2)))
        return a == b or same_code(a, b) or (
            without_messages(a) == without_messages(b))

    def _runs(self, lines: list[str], j1: int, j2: int) -> list[GoalRun]:
        """[(change or None, begin, end, texts)]: goal's code[j1:j2], in runs.

        texts: what the script's lines of this run resemble; None for the
        first and the last run, which take lines that resemble nothing.
        """
        owners = [(piece, max(piece.j1, j1), min(piece.j2, j2))
                  for piece in self.lesson.pieces
                  if max(piece.j1, j1) < min(piece.j2, j2)
                  or (piece.j1 <= j1 == j2 <= piece.j2 and (
                      piece.j1 < j1 < piece.j2
                      or set(lines) & set(self._removed(piece))))]
        runs: list[GoalRun] = [(None, j1, j1, None)]
        at = j1
        for piece, begin, end in owners:
            if at < begin:
                runs.append((None, at, begin, self.goal.code[at:begin]))
            texts = self.goal.code[piece.j1:piece.j2] + self._removed(piece)
            runs.append((piece.change, begin, end, texts))
            at = end
        if at < j2:
            runs.append((None, at, j2, self.goal.code[at:j2]))
        return [*runs, (None, j2, j2, None)]

    def _removed(self, piece: ChangePart) -> list[str]:
        return self.lesson.start.code[piece.i1:piece.i2]

    def _edits(self, i1: int, i2: int, j1: int, j2: int,
               last: bool) -> Iterator[Edit]:
        """The differences as edits of whole lines, with their comments."""
        a1, a2 = self.script.span(i1, i2, last)
        b1, b2 = self.goal.span(j1, j2, last)
        code = {self.script.where[i] for i in range(i1, i2)}
        for c1, c2, d1, d2 in line_differences(
                self.script.lines[a1:a2], self.goal.lines[b1:b2]):
            own = d1 == d2 and not code & set(range(a1 + c1, a1 + c2))
            if not own:  # the attendee's own comments may stay
                yield a1 + c1, a1 + c2, b1 + d1, b1 + d2

    def apply(self, numbers: Collection[int]) -> str:
        """The script's text with the changes of these numbers made."""
        return self.replace(edit
                            for it in self.remaining if it.number in numbers
                            for edit in it.edits)

    def replace(self, edits: Iterable[Edit]) -> str:
        raw = list(self.script.raw)
        ending = "\r\n" if any(r.endswith("\r\n") for r in raw) else "\n"
        if raw and not raw[-1].endswith(("\r", "\n")):
            raw[-1] += ending
        for i1, i2, j1, j2 in sorted(edits, reverse=True):
            raw[i1:i2] = [line + ending for line in self.goal.lines[j1:j2]]
        return "".join(raw)

    @cached_property
    def other_stage(self) -> str:
        """The stage that the script is, if the lesson is not about it, or "".

        It may have a few lines changed.
        """
        here = (self.lesson.start.path, self.goal.path)
        stages = read_stages()
        count, name = nearest(self.script, stages)
        return "" if count > FEW_LINES or stages[name].path in here else name

    @property
    def advice_to_reset(self) -> str:
        """What to do if the script is another stage, in one line; or ""."""
        if not self.other_stage:
            return ""
        start = find_stage(self.stage).after
        return (f"This is the stage {self.other_stage}, but the lesson starts "
                f"from {start}; fix: `python -m workshop reset {start}`, "
                "which backs yours up.")

    def own_lines(self, numbers: Collection[int]) -> list[int]:
        """The lines that `apply` removes and that are in neither stage."""
        known = {line.strip() for script in (self.lesson.start, self.goal)
                 for line in script.lines}
        return sorted(i for it in self.remaining if it.number in numbers
                      for i1, i2, *_ in it.edits for i in range(i1, i2)
                      if self.script.lines[i].strip() not in {"", *known})


def join_statements(lines: list[str], i1: int, ends: list[int]) -> list[int]:
    """Return where the parts end, with no part of a statement by itself.

    The first and the last part are no change's. If their lines open or close
    a bracket of others, such as `0, 1)`, they replace lines of the change
    beside them, although they do not resemble them.

    Args:
        lines: the script's lines of all parts.
        i1: the number of the first of them.
        ends: where each part ends.
    """
    if len(ends) < 3:
        return ends
    first, *middle, last = ends
    if not has_matching_brackets(lines[:first - i1]):
        first = i1
    if not has_matching_brackets(lines[middle[-1] - i1:]):
        middle[-1] = last
    return [first, *middle, last]


def has_matching_brackets(lines: list[str]) -> bool:
    """Whether each bracket that opens there closes there, and vice versa."""
    depth = 0
    for bracket in re.findall(r"[][(){}]", STRINGS.sub("", "\n".join(lines))):
        depth += 1 if bracket in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def distribute(lines: list[str],
               groups: Sequence[list[str] | None]) -> list[int]:
    """Cut `lines` into one part for each group; returns where the parts end.

    A group is a list of texts that its lines resemble, or None, for lines
    that resemble nothing.
    """
    # the total, and each line's group
    best: list[tuple[float, list[int]]] = [(0.0, [])] * len(groups)
    for line in lines:
        reached: list[tuple[float, list[int]]] = []
        before: tuple[float, list[int]] = (-1.0, [])
        for k, texts in enumerate(groups):
            before = max(before, best[k], key=lambda it: it[0])
            score = 0.2 if texts is None else likeness(line, texts)
            reached.append((before[0] + score, [*before[1], k]))
        best = reached
    chosen = max(best, key=lambda it: it[0])[1]
    return [sum(k <= group for k in chosen) for group in range(len(groups))]


def likeness(line: str, texts: list[str]) -> float:
    """How similar a line is to the most similar text, from 0 to 2."""
    if line in texts:
        return 2
    words = set(re.findall(r"\w+", line))
    pairs = ((words, set(re.findall(r"\w+", text))) for text in texts)
    return max((len(a & b) / (len(a | b) or 1) for a, b in pairs), default=0)


def same_code(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two pieces of code differ only in quotes and line breaks."""
    if not a or not b or indent(a[0]) != indent(b[0]):
        return False
    try:
        first, second = (
            ast.dump(ast.parse(textwrap.dedent("\n".join(lines))))
            for lines in (a, b))
    except (SyntaxError, RecursionError, MemoryError):
        return False
    return first == second


def outside_docstrings(lines: Iterable[str]) -> list[bool]:
    """For each line of code whether it is none of a docstring.

    By their quotes, so that it also works in a script with a syntax error.
    """
    found, inside = [], False
    for line in lines:
        begins = not inside and line.lstrip().startswith('"""')
        found.append(not (begins or inside))
        if begins or inside:
            inside = line.count('"""') == begins
    return found


def without_messages(lines: Iterable[str]) -> str:
    """The code, with a sign for each string of several words.

    What an f-string computes stays.
    """
    def shorten(found: re.Match[str]) -> str:
        text = "".join(it[1:-1] for it in re.findall(QUOTED, found[0]))
        if not re.search(r"\S\s+\S", text):
            return found[0]
        return "§" + "".join(re.findall(r"\{.*?\}", text))
    return STRINGS.sub(shorten, "\n".join(lines))


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())
