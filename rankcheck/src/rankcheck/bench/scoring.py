"""What a tool's answers about the two scripts of a case are worth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from rankcheck.bench.cases import Case

# Of these nothing can be proven: the rank and its line are the answer
OBSERVED = frozenset({"I/O"})


class Score(Enum):
    """How good a tool's answer is, the best first."""

    NAMED = "named"
    NOTICED = "noticed"
    MISSED = "missed"
    FALSE = "false"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Statement:
    """One thing that a tool says about a script.

    Attributes:
        text: as the tool says it.
        is_problem: whether it says that something is wrong.
        is_warning: whether it says so, but does not fail.
        is_cause: whether it gives a reason. "The losses differ" gives none.
        describes: whether it only says where the ranks are.
        kind: the kind of finding, if the tool's document says one.
        ranks: the ranks that it blames, if the document lists them.
        lines: the script's lines that it names, if the document lists them.
    """

    text: str
    is_problem: bool = True
    is_warning: bool = False
    is_cause: bool = False
    describes: bool = False
    kind: str = ""
    ranks: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToolAnswer:
    """All that a tool says about a script, in its order."""

    statements: tuple[Statement, ...]
    seconds: float


@dataclass(frozen=True)
class Judgement:
    """A score, with its reason.

    Attributes:
        by_warning: whether the fault was named by a warning only.
        false_warnings: how many warnings there were about the right script.
    """

    score: Score
    reason: str
    by_warning: bool = False
    false_warnings: int = 0


def score(case: Case, wrong: ToolAnswer, right: ToolAnswer) -> Judgement:
    """Score a tool's answers about the wrong script and about its twin.

    The statements count in the tool's order, as somebody reads them: a wrong
    reason that comes first is a false answer, whatever follows. What the tool
    says about the right script, too, does not count.
    """
    warnings = sum(one.is_warning for one in right.statements)
    for statement in right.statements:
        if statement.is_problem and not statement.is_warning:
            return Judgement(Score.FALSE, f"about the right script: "
                             f"{statement.text}", False, warnings)
    usual = {without_numbers(one) for one in right.statements
             if one.is_problem or one.describes}
    noticed = ""
    for statement in wrong.statements:
        if without_numbers(statement) in usual:
            continue
        names = names_fault(case, statement)
        if names and (case.kind in OBSERVED or not statement.describes):
            return Judgement(Score.NAMED, statement.text, statement.is_warning,
                             warnings)
        if names or shows_place(case, statement):
            noticed = noticed or statement.text
        if not statement.is_problem:
            continue
        follows = is_consequence(case, statement)
        if statement.is_cause and not statement.is_warning and not follows:
            return Judgement(Score.FALSE, f"a wrong reason: {statement.text}",
                             False, warnings)
        if follows or not statement.is_warning:
            noticed = noticed or statement.text
    if noticed:
        return Judgement(Score.NOTICED, noticed, False, warnings)
    others = [one.text for one in wrong.statements if not one.is_problem]
    return Judgement(Score.MISSED, "; ".join(others) or "nothing about it",
                     False, warnings)


def without_numbers(statement: Statement) -> str:
    """Return a statement's text without the numbers, which vary."""
    return re.sub(r"\d+", "", statement.text)


def names_fault(case: Case, statement: Statement) -> bool:
    """Whether a statement names the fault: its kind and its place."""
    if not (statement.is_problem or statement.describes):
        return False
    return has_kind(case, statement) and has_place(case, statement)


def has_kind(case: Case, statement: Statement) -> bool:
    """Whether a statement gives the right kind: by its kind, or in words."""
    return statement.kind in case.kinds or found(case.names[0], statement)


def has_place(case: Case, statement: Statement) -> bool:
    """Whether a statement gives the right place: by ranks, or in words."""
    if case.ranks and set(case.ranks) == set(statement.ranks):
        return True
    return all(found(name, statement) for name in case.names[1:])


def shows_place(case: Case, statement: Statement) -> bool:
    """Whether a description gives the right place, if not the kind."""
    has_any = bool(case.ranks) or len(case.names) > 1
    return statement.describes and has_any and has_place(case, statement)


def is_consequence(case: Case, statement: Statement) -> bool:
    """Whether a statement is true of the fault, but not its cause."""
    return any(found(one, statement) for one in case.follows)


def found(pattern: str, statement: Statement) -> bool:
    """Whether a statement matches, in upper or lower case."""
    return bool(re.search(pattern, statement.text, re.IGNORECASE))
