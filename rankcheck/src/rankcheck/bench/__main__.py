"""The command python -m rankcheck.bench: runs tools over cases."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankcheck.bench import results
from rankcheck.bench.asking import try_out
from rankcheck.bench.cases import Case, find_folder, load_cases, select
from rankcheck.bench.choice import TOOLS, choose_installed
from rankcheck.bench.results import ResultRow, Results
from rankcheck.bench.scoring import Score, ToolAnswer, score
from rankcheck.bench.tools import Tool
from rankcheck.system.command_line import exit_with
from rankcheck.system.errors import UserError
from rankcheck.system.version import require_torch


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rankcheck.bench", description="Run tools over the "
        "cases of the fault bench, and print how many each has named.")
    parser.add_argument("names", nargs="*", metavar="CASE", help="a case, a "
                        "kind, or a group: silent, hang (all)")
    parser.add_argument("--tool", action="append", default=[], metavar="NAME",
                        help="one of " + ", ".join(
                            tool.name for tool in TOOLS) + " (all)")
    parser.add_argument("--cases", metavar="FOLDER", help="where the cases "
                        "are, if not in a clone: CLONE/rankcheck/bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all "
                        "results to this file")
    parser.add_argument("--table", type=Path, metavar="FILE",
                        action="append", default=[], help="run nothing: "
                        "score the statements in a file of results again, "
                        "and print the tables; several files are one run")
    parser.add_argument("--jobs", type=int, default=5, help="how many scripts "
                        "are looked at at once: most of the time a job waits "
                        "(5)")
    parser.add_argument("--list", action="store_true", help="run nothing: "
                        "print the cases")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    args = make_parser().parse_args(arguments)
    if args.jobs < 1:
        raise UserError("--jobs is 1 or more")
    cases = select(load_cases(find_folder(args.cases)), args.names)
    if args.table:
        found = merge([results.read(file) for file in args.table], cases)
        if args.json:
            results.write(found, args.json)
        print(results.make_table(found))
        return 0
    if args.list:
        for case in cases:
            print(f"{case.name}: {case.kind}, {case.report}. {case.fault}")
        return 0
    require_torch()
    tools = choose_installed(args.tool)
    found = results.begin({tool.name: tool.version() for tool in tools})
    begin = time.monotonic()
    if args.json:  # before the run, if that cannot be done
        results.write(found, args.json)
    try:
        for row in try_out(tools, cases, args.jobs):
            print(f"{row.tool}: {row.case}: {row.score}: {row.reason}",
                  file=sys.stderr, flush=True)
            found.rows.append(row)
    finally:  # also of a run that is interrupted
        found = replace(found, seconds=time.monotonic() - begin,
                        cpu_seconds=results.count_cpu_seconds(),
                        rows=sort_rows(found.rows, tools, cases))
        if args.json:
            results.write(found, args.json)
    print(results.make_table(found))
    return 0


def sort_rows(rows: Sequence[ResultRow], tools: Sequence[Tool],
              cases: Sequence[Case]) -> list[ResultRow]:
    """Return rows in the order of the tools and of the cases."""
    by_name = {(row.tool, row.case): row for row in rows}
    keys = [(tool.name, case.name) for tool in tools for case in cases]
    return [by_name[key] for key in keys if key in by_name]


def merge(parts: Sequence[Results], cases: Sequence[Case]) -> Results:
    """Return results as one run, scored by what the registry says now.

    If a tool was asked about a case more than once, the last answer counts.
    The time is that of the tools that are asked without being named.
    """
    versions: dict[str, str] = {}
    last: dict[tuple[str, str], ResultRow] = {}
    for part in parts:
        versions |= part.versions
        for row in part.rows:
            last[row.tool, row.case] = row
    rows = []
    for tool in dict.fromkeys(tool for tool, _ in last):
        for case in cases:
            if (tool, case.name) in last:
                rows.append(rescore(last[tool, case.name], case))
    timed = [part for part in parts if not is_of_slow_tools(part)]
    return Results(parts[0].date, versions, parts[0].cores,
                   sum(part.seconds for part in timed),
                   sum(part.cpu_seconds for part in timed), rows)


def is_of_slow_tools(part: Results) -> bool:
    """Whether only tools were asked that are left out if none is named."""
    slow = {tool.name for tool in TOOLS if tool.is_slow}
    return bool(part.rows) and {row.tool for row in part.rows} <= slow


def rescore(row: ResultRow, case: Case) -> ResultRow:
    """Return a row with the score of its statements."""
    if row.score == Score.NOT_APPLICABLE.value:
        return row
    result = score(case, ToolAnswer(tuple(row.wrong), 0.0),
                   ToolAnswer(tuple(row.right), 0.0))
    return replace(
        row, held_out=case.held_out, kind=case.kind,
        score=result.score.value, reason=result.reason,
        by_warning=result.by_warning, false_warnings=result.false_warnings)


def main() -> None:
    """Exit with 0 if all that are named or installed were asked, else with 2.
    """
    # as Ctrl-C: the jobs that it has started are ended
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exit_with(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
