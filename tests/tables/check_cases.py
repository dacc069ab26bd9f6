"""Scripts for the check: wrong ones with what it is to say, and right ones.

    pytest --tables tests/workshop/test_check.py  all of them, in an hour
    pytest --tables tests/workshop/test_check.py -k "ddp-"  those of a stage

They stand in cases/<stage>.py. Each is the stage's solution with changes,
pairs of an old text that is there once and a new one. A wrong script has to
get one diagnosis, whose first line holds the given words; a right one passes,
with these words in its warning if there are any. To extend the table, add an
entry. Slips of one line are not here but in mutants.py, which makes them
itself.
"""

import contextlib
import io
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from conftest import all_processes

from workshop.stages import STAGES

HERE = Path(__file__).resolve().parent
CASES = [replace(case, stage=stage) for stage in STAGES
         if (HERE / "cases" / f"{stage}.py").exists()
         for case in import_module(f"cases.{stage}").CASES]


def outcome(case):
    """(whether it passed, its first FAIL or warning, all that was said)."""
    from rankcheck.errors import UserError
    from workshop.check.command import check

    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(case.script())
        with contextlib.redirect_stdout(out):
            try:
                passed = check(case.stage, script)
            except UserError as error:
                passed = False
                print(f"  FAIL  {error}")
    lines = [line.strip() for line in out.getvalue().splitlines()]
    first = next((i for i, line in enumerate(lines)
                  if line.startswith(("FAIL", "warn"))), None)
    says = lines[first] if first is not None else ""
    return passed, says, out.getvalue()


def problem(case, passed, says):
    """What is not as the case says, "" where all is."""
    if passed != case.right:
        return "passed" if passed else "refused"
    if case.right and bool(says) != bool(case.says):
        return "another warning"
    return "" if case.says in says else "another first line"


def left_in(temporary):
    """The folders of ours in this folder for temporary files."""
    return [file for file in temporary.iterdir()
            if file.name.startswith(("check-", "ranks-", "pymp-"))]


def left_by(temporary):
    """The processes that have this folder for temporary files."""
    return [pid for pid, _, variables in all_processes()
            if any(one.startswith(f"TMPDIR={temporary}") for one in variables)]
