"""Scripts for the check: wrong ones with what it is to say, and right ones.

    pytest --tables tests/workshop/test_check.py  all of them, in an hour
    pytest --tables tests/workshop/test_check.py -k "ddp:"  those of a stage

They stand in check/STAGE, see rankcheck_testing/planted.py. A wrong script
has to get one diagnosis, whose first line holds the given words; a right one
passes, with these words in its warning, or in what to do about it, if there
are any. To extend the table, add a file.
Slips of one line are not here but in mutants.py, which makes them itself.
"""

import contextlib
import io
import tempfile
from pathlib import Path

from conftest import all_processes

from backstage import ROOT
from rankcheck.engine.scratch import PREFIX
from rankcheck_testing.planted import load_all

CASES = load_all(Path(__file__).with_name("check"), ROOT)


def outcome(stage, text):
    """(whether it passed, its first FAIL or warning with what to do, all that
    was said).
    """
    from rankcheck.system.errors import UserError
    from workshop.check.command import check

    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(text)
        with contextlib.redirect_stdout(out):
            try:
                passed = check(stage, script).ok
            except UserError as error:
                passed = False
                print(f"  FAIL  {error}")
    lines = [line.strip() for line in out.getvalue().splitlines()]
    first = next((i for i, line in enumerate(lines)
                  if line.startswith(("FAIL", "warn"))), None)
    says = ""
    if first is not None:
        says = lines[first]
        if lines[first + 1].startswith("->"):  # what to do
            says += f" {lines[first + 1]}"
    return passed, says, out.getvalue()


def problem(case, passed, says, out):
    """What is not as the case says, "" where all is.

    A right script's warnings are those that its first line lists, and no
    others.
    """
    if passed != case.right:
        return "passed" if passed else "refused"
    warnings = [line.strip() for line in out.splitlines()
                if line.strip().startswith("warn")]
    false = [line for line in warnings
             if not any(words in line for words in case.says)]
    if case.right and false:
        return f"a false warning: {false[0]}"
    return "" if all(words in says for words in case.says) else (
        "another first line")


def left_in(temporary):
    """The folders of ours in this folder for temporary files."""
    return [file for file in temporary.iterdir()
            if file.name.startswith((PREFIX, "ranks-", "pymp-"))]


def left_by(temporary):
    """The processes that have this folder for temporary files."""
    return [pid for pid, _, variables in all_processes()
            if any(one.startswith(f"TMPDIR={temporary}") for one in variables)]
