"""Writes what docs/bench.md shows of results.

    python -m rankcheck.bench.page

reads bench/results.json, and writes the summary and the tables between the
marks of the page, and the picture docs/bench.svg.
A test holds both.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from rankcheck.bench import results
from rankcheck.bench.cases import find_folder, load_cases
from rankcheck.bench.results import TITLES, Counts, Results
from rankcheck.bench.scoring import Score
from rankcheck.engine.findings import count_of

RESULTS = "results.json"
OUR_TOOL = "rankcheck"  # the tool that the summary is about
MARKS = re.compile(
    r"(<!-- (?P<name>\w+) of results -->\n).*?(<!-- end -->\n)", re.DOTALL)
COLOURS = {  # readable on white and on black
    Score.NAMED: "#1f8a4c", Score.NOTICED: "#d39b1f",
    Score.MISSED: "#8a8f98", Score.FALSE: "#c8372d"}
WIDTH, LEFT, BAR, GAP = 720, 285, 18, 8
SCALE = WIDTH - LEFT - 60  # pixels for all cases of a group


def count_group(found: Results, group: str) -> list[Counts]:
    """Return the scores of each tool that applies to a group's cases."""
    rows = [row for row in found.rows if row.group == group]
    counts = [results.count(rows, tool, group)
              for tool in results.tools_of(rows)]
    return [one for one in counts if one.applied]


def make_picture(found: Results) -> str:
    """Return an SVG picture: a bar for each tool and group."""
    parts: list[str] = []
    y = 34
    for group, title in TITLES.items():
        bars = count_group(found, group)
        if not bars:
            continue
        most = max(bar.asked for bar in bars)
        parts.append(text(8, y, f"{title} ({most})", "bold"))
        y += GAP
        for bar in bars:
            parts.append(text(8, y + BAR - 5, bar.tool))
            parts += draw_bar(bar, y, SCALE / most)
            y += BAR + GAP
        y += 30
    legend = []
    x = 8.0
    for score, colour in COLOURS.items():
        legend.append(f'<rect x="{x}" y="{y - 12}" width="12" height="12" '
                      f'fill="{colour}"/>')
        legend.append(text(x + 18, y - 2, score.value))
        x += 110
    legend.append(text(x, y - 2, "empty: not applicable"))
    style = ("text { font: 13px sans-serif; fill: #24292f } "
             ".bold { font-weight: bold } .in { fill: #ffffff } "
             "@media (prefers-color-scheme: dark) "
             "{ text { fill: #e6edf3 } .in { fill: #ffffff } }")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
            f'height="{y + 12}" viewBox="0 0 {WIDTH} {y + 12}" role="img" '
            'aria-label="What each tool has named">\n'
            f"<style>{style}</style>\n" + "\n".join(parts + legend)
            + "\n</svg>\n")


def draw_bar(bar: Counts, y: int, unit: float) -> list[str]:
    """Return the parts of a bar. unit: pixels for a case."""
    parts = []
    x = float(LEFT)
    for score, colour in COLOURS.items():
        count = bar.numbers[score]
        if not count:
            continue
        width = count * unit
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
                     f'height="{BAR}" fill="{colour}"/>')
        if width > 18:
            parts.append(text(x + 4, y + BAR - 5, str(count), "in"))
        x += width
    end = LEFT + bar.asked * unit
    parts.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" '
                 f'height="{BAR}" fill="none" stroke="#8a8f98"/>')
    return parts


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Return a text of the picture."""
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{mark}>{escape(content)}</text>'


def describe_scores(found: Results) -> str:
    """Return how many cases of each group rankcheck has named."""
    totals: list[str] = []
    held_out: list[str] = []
    wrong = 0
    for group, title in TITLES.items():
        rows = [row for row in found.rows
                if row.group == group and row.tool == OUR_TOOL]
        if not rows:
            continue
        counts = results.count(rows, OUR_TOOL, title)
        totals.append(f"{counts.named_of_applied} {title}")
        held_rows = [row for row in rows if row.held_out]
        held = results.count(held_rows, OUR_TOOL, title)
        held_out.append(held.named_of_applied)
        wrong += counts.numbers[Score.FALSE]
    if not totals:
        return "rankcheck was asked about no case.\n"
    return (f"rankcheck named {' and '.join(totals)} (of the held-out cases, "
            "which were never used while rankcheck was changed: "
            f"{' and '.join(held_out)}), and gave "
            f"{count_of(wrong, 'false answer')}.\n")


def describe_measurement(found: Results) -> str:
    """Return when and with what the results were measured."""
    versions = ", ".join(f"{name} ({version})"
                         for name, version in found.versions.items())
    return (f"Measured on {found.date[:10]}, on {found.cores} cores, in "
            f"{found.seconds / 60:.0f} minutes, with {versions}.\n")


def make_page(page: str, found: Results) -> str:
    """Return the page with the summary and the tables of these results."""
    tables = results.make_table(found).split("\n\n")
    parts = {"summary": describe_scores(found),
             "run": describe_measurement(found),
             "table": f"{tables[0]}\n",
             "kinds": "\n\n".join(tables[1:]).rstrip() + "\n"}

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{parts[mark['name']]}\n{mark[3]}"

    return MARKS.sub(fill, page)


def main() -> None:
    """Write the page and the picture."""
    folder = find_folder()
    load_cases(folder)
    found = results.read(folder / RESULTS)
    docs = Path(folder.parent, "docs")
    page = docs / "bench.md"
    page.write_text(make_page(page.read_text("utf-8"), found), "utf-8")
    (docs / "bench.svg").write_text(make_picture(found), "utf-8")


if __name__ == "__main__":
    main()
