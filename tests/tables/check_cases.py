"""Scripts for the check: wrong ones with what it is to say, and right ones.

    pytest --tables tests/workshop/test_check.py  all of them, in an hour
    pytest --tables tests/workshop/test_check.py -k "ddp:"  those of a stage

They stand in check/STAGE, see rankcheck_testing/planted.py. A wrong script
has to get one diagnosis, which is the finding that its first line gives, in
the form of rankcheck_testing/expected.py; a right one passes, with these
warnings and no others. To extend the table, add a file.
Slips of one line are not here but in mutants.py, which makes them itself.
"""

import contextlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

from conftest import all_processes

from backstage import ROOT
from rankcheck.engine.findings import Report
from rankcheck.engine.scratch import PREFIX
from rankcheck_testing.expected import list_kinds, read_expected
from rankcheck_testing.planted import load_all

CASES = load_all(Path(__file__).with_name("check"), ROOT)


@dataclass(frozen=True)
class Outcome:
    """What the check says of a script.

    Attributes:
        report: None if the script could not be run.
        first: its first failure, else its first warning, with what to do
            about it, in a line; "" if there is none.
        out: all that was printed.
    """

    report: Report | None
    first: str
    out: str

    @property
    def passed(self) -> bool:
        return self.report is not None and self.report.ok


def outcome(stage, text):
    """Check a script."""
    from rankcheck.system.errors import UserError
    from workshop.check.command import check_script

    out = io.StringIO()
    report = None
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(text)
        with contextlib.redirect_stdout(out):
            try:
                report = check_script(stage, script)
            except UserError as error:
                first = str(error)
                print(f"  FAIL     {error}")
    if report is not None:
        found = [*report.failures, *report.warnings]
        first = ""
        if found:
            first = f"{found[0].text} {found[0].fix_text}".strip()
    return Outcome(report, first, out.getvalue())


def problem(case, found):
    """Return what is not as the case says, "" where all is.

    A right script's warnings are those that its first line lists, and no
    others.
    """
    if found.passed != case.right:
        return "passed" if found.passed else "refused"
    if found.report is None:
        return "it could not be run" if case.says else ""
    expected = [read_expected(line) for line in case.says]
    if None in expected:
        return f"not of the form: {case.says}"
    named = found.report.warnings if case.right else found.report.failures[:1]
    for one in expected:
        if not one.is_in(named):
            return f"not found: {one}; found: {list_kinds(named)}"
    for finding in found.report.warnings:
        listed = any(one.matches(finding) for one in expected)
        if case.right and not listed:
            return f"a false warning: {list_kinds([finding])}: {finding.text}"
    return ""


def left_in(temporary):
    """The folders of ours in this folder for temporary files."""
    return [file for file in temporary.iterdir()
            if file.name.startswith((PREFIX, "ranks-", "pymp-"))]


def left_by(temporary):
    """The processes that have this folder for temporary files."""
    return [pid for pid, _, variables in all_processes()
            if any(one.startswith(f"TMPDIR={temporary}") for one in variables)]
