"""Scripts in many styles for `verify`: right ones, and some with a mistake.

    pytest --tables tests/test_verify.py  all of them, in minutes
    pytest --tables tests/test_verify.py -k HF-Trainer  those so called

They stand in tables/verify/STYLE, see planted.py; the right one of a style is
given by its difference from another style's. A right script must not be
refused, and a mistake has to get the findings that its first line lists, which
the right one must not get; see expected.py. What is not a finding is a text
that has to be printed: what was not checked, or names in what is advised. The
warnings about a right script are listed in its first line: another one is
false, and fails; one after "perhaps" need not be there. Other words of the
first line: `uncompared`, of a right script, for which status 2 is right, as
nothing can be compared with one process; `resumed`, the script is resumed,
too; `whole`, one of each kind, which the suite has. To extend the table, add a
file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankcheck.engine.findings import Report
from rankcheck_testing.expected import Expected, list_kinds, read_expected
from rankcheck_testing.planted import Planted, load, load_all
from rankcheck_testing.support import HOUSE

TABLES = HOUSE / "tests" / "tables"
CASES = load_all(TABLES / "verify", TABLES)
MARKS = {"right", "wrong", "uncompared", "resumed", "whole"}
PERHAPS = "perhaps "  # before a finding that may be there, or not
VERDICTS = ("ok", "warn", "FAIL")


@dataclass(frozen=True)
class Style:
    """How the scripts of a style are run.

    Attributes:
        resume: the flags of a resumed run, of a script that is `resumed`.
        needs: packages, besides those that the script itself imports.
    """

    flags: tuple[str, ...] = ()
    steps: int = 4
    resume: str = ""
    needs: tuple[str, ...] = ()


HF_TRAINER = Style(flags=("run-{run}",), resume="resume",
                   needs=("accelerate",))
STYLES = {
    "rank as a flag": Style(flags=("{rank}", "{32/n}")),
    "HF Trainer": HF_TRAINER, "HF Trainer no seed": HF_TRAINER,
    "minGPT": Style(flags=("snapshot-{run}.pt",)),
    "many steps": Style(steps=60)}
PLAIN = Style()


@dataclass(frozen=True)
class Outcome:
    """What verify says of a script, and all that it prints."""

    report: Report
    out: str


def read(name: str) -> str:
    """Return a script that others are made of."""
    return (TABLES / "foreign" / f"{name}.py").read_text()


def make_params(cases: Sequence[Planted], at_once: Collection[str]
                ) -> list[Any]:
    """Return a test's parameters.

    Args:
        at_once: the names of those that `pytest` alone runs, too.
    """
    params = []
    for case in cases:
        marks = [pytest.mark.table]
        if case.name in at_once:
            marks = []
        elif "whole" in case.marks:
            marks = [pytest.mark.whole]
        # -k takes no spaces, so this is as the folder and the file are called
        name = f"{case.path.parent.name}/{case.path.stem}"
        params.append(pytest.param(case, id=name, marks=marks))
    return params


def find_needs(case: Planted) -> set[str]:
    """Return the packages that a script needs, besides torch."""
    found = {*STYLES.get(case.group, PLAIN).needs}
    for node in ast.walk(ast.parse(case.script())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"torch"}


def outcome(case: Planted, folder: Path, style: Style | None = None
            ) -> Outcome:
    """Verify a script of the table in an empty folder."""
    from rankcheck.verification.command import verify

    style = style or STYLES.get(case.group, PLAIN)
    script = Path(folder, "their_train.py")
    text = case.script()
    script.write_text(text)
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO()) as out):
        patch.chdir(folder)
        report = verify(
            [str(script), *style.flags], 2, style.steps,
            style.resume if "resumed" in case.marks else None)
    assert script.read_text() == text
    left = os.listdir(folder)
    assert not case.right or left == [script.name], left
    return Outcome(report, out.getvalue())


def problem_in_first_line(case: Planted) -> str:
    """Say what is wrong with a case's first line; "" where nothing is."""
    unknown = [mark for mark in case.marks if mark not in MARKS]
    if unknown or ("right" in case.marks) == ("wrong" in case.marks):
        return f"{case.path}: `right` or `wrong` first, then none but {MARKS}"
    if not case.right and not case.says:
        return f"{case.path}: names no finding after `wrong: `"
    for text in case.says:
        finding = text.removeprefix(PERHAPS)
        if finding.split()[0] in VERDICTS and read_expected(finding) is None:
            return (f"{case.path}: {finding!r} is not of the form "
                    "in expected.py")
    return ""


def problem(case: Planted, found: Outcome) -> str:
    """Say what is not as the case says; "" where all is."""
    report = found.report
    if report.internal_errors:
        return f"rankcheck failed: {report.internal_errors[0]}"
    if case.right and report.failures:
        return f"refused: {report.failures[0].text}"
    right = 2 if "uncompared" in case.marks else 0
    if case.right and report.status != right:
        return f"status {report.status}, not {right}: {report.error}"
    if not case.right and report.status != 1 and "FAIL" in case.says[0]:
        return f"status {report.status}"
    if case.right and (false := false_warnings(case, report)):
        return f"a false warning: {false[0]}"
    missing = [text for text in case.says if not (
        text.startswith(PERHAPS) or is_said(text, found))]
    if missing:
        found_kinds = list_kinds(report.failures + report.warnings)
        return f"not found: {missing[0]}; found: {found_kinds}"
    if case.right:
        return find_mistake(case, found)
    return ""


def is_said(text: str, found: Outcome) -> bool:
    """Return whether there is such a finding, or such a text."""
    expected = read_expected(text)
    if expected is None:
        return text in found.out
    return expected.is_in(found.report.findings)


def find_mistake(case: Planted, found: Outcome) -> str:
    """Say which mistake of its style is named of a right script."""
    for path in case.path.parent.glob("*.diff"):
        other = load(path, case.top)
        both_resumed = ("resumed" in case.marks) == ("resumed" in other.marks)
        if not other.right and both_resumed and is_said(other.says[0], found):
            return f"named though it is right: {other.says[0]}"
    return ""


def false_warnings(case: Planted, report: Report) -> list[str]:
    """Return the warnings about a right script that it does not list."""
    listed: list[Expected] = []
    for text in case.says:
        expected = read_expected(text.removeprefix(PERHAPS))
        if expected is not None:
            listed.append(expected)
    return [f"{list_kinds([finding])}: {finding.text}"
            for finding in report.warnings
            if not any(expected.matches(finding) for expected in listed)]
