"""rankcheck's errors, where the course's tools report them."""

import subprocess
import sys

from backstage import ROOT, errors


def run(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT,
                          capture_output=True, text=True)


def test_an_error_of_rankcheck_keeps_its_status():
    """`verify` could not be run: its status is 2, as that of rankcheck."""
    done = run("-m", "workshop", "verify", "no_such_script.py")
    assert done.returncode == 2
    assert done.stderr == (
        "error: no_such_script.py does not exist; fix: name the script as "
        "seen from this folder\n")


def test_an_error_of_rankcheck_is_one_line():
    done = run("-c", """\
from rankcheck.system.errors import require
from workshop.errors import run_tool
run_tool(lambda: require(False, "the job has ended: start it again"))
""")
    assert done.returncode == 1
    assert done.stderr == "error: the job has ended: start it again\n"


def test_a_class_of_that_name_alone_is_a_bug():
    """Its class says what an exception is, not the name of it."""
    other = type("UserError", (Exception,), {})
    assert errors.explain(other("a script's own")) is None
    assert errors.explain(errors.UserError("ours")) == "ours"
