"""Scripts for the check: wrong ones with what it is to say, and right ones.

    python tests/check_cases.py              all of them, in some minutes
    python tests/check_cases.py ddp no_sync  those of a stage, or so called

They stand in cases/<stage>.py. Each is the stage's solution with changes,
pairs of an old text that is there once and a new one. A wrong script has to
get one diagnosis, whose first line holds the given words; a right one passes,
with these words in its warning if there are any. To extend the table, add an
entry. What came of the last run of all of a stage stands in
check_cases_<stage>.txt. Slips of one line are not here but in mutants.py,
which makes them itself.
"""

import contextlib
import io
import platform
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workshop.stages import STAGES

HERE = Path(__file__).resolve().parent
CASES = [replace(case, stage=stage) for stage in STAGES
         if (HERE / "cases" / f"{stage}.py").exists()
         for case in import_module(f"cases.{stage}").CASES]


def outcome(case):
    """(whether it passed, its first FAIL or warning, all that was said)."""
    from backstage.errors import UserError
    from workshop.check.command import main

    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(case.script())
        with contextlib.redirect_stdout(out):
            try:
                passed = main(case.stage, script)
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


def run(words):
    """Try the scripts so called; whether all came out as expected."""
    chosen = [case for case in CASES if all(
        word == case.stage if word in STAGES else word in case.name
        for word in words)]
    assert chosen, f"no script is so called: {' '.join(words)}"
    good = True
    for stage in dict.fromkeys(case.stage for case in chosen):
        cases = [case for case in chosen if case.stage == stage]
        good &= run_stage(stage, cases, complete=len(cases) == sum(
            case.stage == stage for case in CASES))
    return good


def run_stage(stage, cases, complete):
    begin, bad, report = time.time(), 0, []
    for case in cases:
        start = time.time()
        passed, says, _ = outcome(case)
        odd = problem(case, passed, says)
        bad += bool(odd)
        lines = [f"{'NO ' if odd else 'yes'} "
                 f"{'right' if case.right else 'wrong'}: {case.name}"
                 f" ({time.time() - start:.0f} s)"]
        lines += [f"      {says}"] if says else []
        if odd:
            lines += [f"      -- {odd}; expected: {case.says}"]
        report += lines
        print(*lines, sep="\n", flush=True)
    right = sum(case.right for case in cases)
    summary = (f"{stage}, {time.strftime('%Y-%m-%d')}: {len(cases) - bad} of "
               f"{len(cases)} as expected ({len(cases) - right} wrong, "
               f"{right} right), {(time.time() - begin) / 60:.0f} minutes, "
               f"Python {platform.python_version()}")
    print(summary)
    if complete:
        (HERE / f"check_cases_{stage}.txt").write_text(
            "\n".join([summary, *report]) + "\n")
    return bad == 0


if __name__ == "__main__":
    sys.exit(0 if run(sys.argv[1:]) else 1)
