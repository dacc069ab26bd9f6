"""Scripts in 65 styles for `verify`, each right, and each with mistakes.

    pytest --tables tests/rankcheck/test_verify.py  all of them, in minutes
    pytest --tables tests/rankcheck/test_verify.py -k "FSDP"  those so called

They stand in verify/STYLE, see planted.py; the right one of a style is given
by its difference from another style's. A right script must not be refused, and
of a mistake the answer has to hold the given words, which it must not hold of
the right one. The warnings about a right script are listed in its first line,
each as "warn  " and its first words: another one is false, and fails. Other
words of the first line: `uncompared`, of a right script, for which status 2 is
right, as nothing can be compared with one process; `resumed`, the script is
resumed, too; `whole`, one of each kind, which the suite has. To extend the
table, add a file.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from planted import HERE, Planted, load_all

from rankcheck.engine.findings import Report

CASES = load_all("verify")


def read(name):
    return (HERE / "foreign" / f"{name}.py").read_text()


FLAGS = {"rank as a flag": ["{rank}", "{32/n}"],
         "HF Trainer": ["run-{run}"], "HF Trainer no seed": ["run-{run}"],
         "minGPT": ["snapshot-{run}.pt"],
         "starter": ["--run-dir", "run-{run}", "--checkpoint-every", "2"]}
STEPS = {"many updates": 60}
RESUMES = {"starter": "--resume", "HF Trainer": "resume",
           "HF Trainer no seed": "resume", "minGPT": ""}


WARNING = "warn  "


@dataclass(frozen=True)
class Outcome:
    """What verify says of a script, and all that it prints."""

    report: Report
    out: str


def outcome(case: Planted, folder: Path) -> Outcome:
    """Verify a script of the table in an empty folder."""
    from rankcheck.verification.command import verify

    script = Path(folder, "their_train.py")
    text = case.script()
    script.write_text(text)
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO()) as out):
        patch.chdir(folder)
        report = verify(
            [str(script), *FLAGS.get(case.group, [])], 2,
            STEPS.get(case.group, 4),
            RESUMES[case.group] if "resumed" in case.marks else None)
    assert script.read_text() == text
    left = os.listdir(folder)
    assert not case.right or left == [script.name], left
    return Outcome(report, out.getvalue())


def problem(case: Planted, found: Outcome) -> str:
    """Say what is not as the case says; "" where all is."""
    report, out = found.report, found.out
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
    missing = [words for words in case.says if words not in out]
    if missing:
        return f"not named: {missing[0]}"
    for other in CASES:
        if case.right and not other.right and other.says[0] in out and (
                case.group == other.group
                and ("resumed" in case.marks) == ("resumed" in other.marks)):
            return f"named though it is right: {other.says[0]}"
    return ""


def false_warnings(case: Planted, report: Report) -> list[str]:
    """Return the warnings about a right script that it does not list."""
    expected = tuple(words.removeprefix(WARNING) for words in case.says
                     if words.startswith(WARNING))
    return [finding.text for finding in report.warnings
            if not (expected and finding.text.startswith(expected))]
