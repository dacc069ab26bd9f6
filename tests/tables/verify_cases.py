"""Scripts in 65 styles for `verify`, each right, and each with mistakes.

    pytest --tables tests/rankcheck/test_verify.py  all of them, in minutes
    pytest --tables tests/rankcheck/test_verify.py -k "FSDP"  those so called

They stand in verify/STYLE, see planted.py; the right one of a style is given
by its difference from another style's. A right script must not be refused, and
of a mistake the answer has to hold the given words, which it must not hold of
the right one. Other words of the first line: `resumed`, the script is resumed,
too; `whole`, one of each kind, which the suite has. To extend the table, add a
file.
"""

import contextlib
import io
import os
from pathlib import Path

import pytest
from planted import HERE, load_all

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


def outcome(case, folder):
    """(exit status, what it prints), run in an empty folder."""
    from rankcheck.verification.command import verify

    script = Path(folder, "their_train.py")
    text = case.script()
    script.write_text(text)
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO()) as out):
        patch.chdir(folder)
        right = verify(
            [str(script), *FLAGS.get(case.group, [])], 2,
            STEPS.get(case.group, 4),
            RESUMES[case.group] if "resumed" in case.marks else None)
    assert script.read_text() == text
    left = os.listdir(folder)
    assert not case.right or left == [script.name], left
    return int(not right), out.getvalue()


def problem(case, status, out):
    """What is not as the case says, "" where all is."""
    if case.right and (status or "FAIL" in out):
        return "refused"
    if status != ("FAIL" in out):
        return f"status {status}"
    missing = [words for words in case.says if words not in out]
    if missing:
        return f"not named: {missing[0]}"
    for other in CASES:
        if case.right and not other.right and other.says[0] in out and (
                case.group == other.group
                and ("resumed" in case.marks) == ("resumed" in other.marks)):
            return f"named though it is right: {other.says[0]}"
    return ""
