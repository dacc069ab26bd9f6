"""The plan of a session, as docs/INSTRUCTOR.md has it."""

import re
from dataclasses import dataclass

from backstage import ROOT
from backstage.errors import require

HEADING = "| 60 min | 90 min | 120 min | 240 min | more | what | where |"
LENGTHS = 60, 90, 120, 240  # minutes of a session
MORE = "more"  # the minutes of what follows the course


@dataclass(frozen=True)
class PlanRow:
    """A row of the plan.

    minutes: {60: 5, 120: 10}, with {MORE: 25} for what can follow the course.
    """

    name: str  # of its notebook or folder; with " end" for a notebook's end
    what: str
    where: str
    minutes: dict[int | str, int]


def read_plan() -> dict[str, PlanRow]:
    """Return the rows of the plan by their names, in its order."""
    text = (ROOT / "docs" / "INSTRUCTOR.md").read_text("utf-8")
    require(HEADING in text, f"docs/INSTRUCTOR.md has no table {HEADING}")
    columns: tuple[int | str, ...] = (*LENGTHS, MORE)
    rows: dict[str, PlanRow] = {}
    name, where = "", ""
    for line in text[text.index(HEADING):].splitlines()[2:]:
        if not line.startswith("|"):
            break
        *minutes, what, place = (
            cell.strip() for cell in line.split("|")[1:-1])
        require(len(minutes) == len(columns),
                f"docs/INSTRUCTOR.md: the plan's table has a row {line}")
        link = re.search(r"\[(\w+)\]\(../(.+)\)", place)
        name, where = link.groups() if link else (
            f"{name} end", where if place else "")  # a break is nowhere
        rows[name] = PlanRow(name, what, where, {
            length: int(cell) for length, cell in zip(
                columns, minutes, strict=False) if cell})
    return rows
