"""What verify's exit status means: what has to be shown for 0, and errors of
its own.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import rankcheck
from rankcheck.engine.findings import (
    Finding,
    Proof,
    Report,
    count_of,
    counted,
    fail,
    ok,
    warn,
)
from rankcheck.engine.report import Terminal
from rankcheck.record import recorder
from rankcheck.record.recorder import is_own
from rankcheck.system import proc
from rankcheck.system.errors import InternalError
from rankcheck.verification import command, questions
from rankcheck.verification.questions import REQUIRED, find_remedy, missing
from rankcheck_testing.support import edit
from rankcheck_testing.verify_cases import read

SCRIPT = Path("train.py")
UNCOMPARED = ("nothing was compared with a single process",)


@pytest.mark.parametrize(("findings", "more", "status"), [
    ([ok("fine")], {}, 0),
    ([ok("fine"), warn("look", "")], {}, 0),
    ([ok("fine"), fail("wrong")], {}, 1),
    ([ok("fine")], {"uncompared": UNCOMPARED}, 2),
    ([warn("look", ""), fail("wrong")], {"uncompared": UNCOMPARED}, 1),
    # an error of its own: neither right nor wrong, whatever else was found
    ([ok("fine")], {"internal_errors": ("a question: it failed",)}, 2),
    ([fail("wrong")], {"internal_errors": ("a question: it failed",)}, 2)])
def test_a_status(findings, more, status):
    report = Report(SCRIPT, tuple(findings), **more)
    assert (report.status, report.ok) == (status, status == 0)
    assert bool(report.error) == (status == 2)
    assert "\n" not in report.error
    for reason in (*more.get("uncompared", ()),
                   *more.get("internal_errors", ())):
        assert (reason in report.error) == (status == 2)
    assert str(report).count("\n") == len(findings) - (status != 2)


@pytest.mark.parametrize("proof", Proof)
def test_what_status_0_requires(proof):
    """Each of the required proofs is missed, whatever the verdicts are."""
    shown = [Finding("warn", [""], [], proves=frozenset({one}))
             for one in Proof if one is not proof]

    class Case:
        skip_reason = "it has other samples"

    lacks, = missing(shown, Case)
    assert lacks.startswith(REQUIRED[proof])
    assert (Case.skip_reason in lacks) == (proof is Proof.SINGLE)
    assert missing([*shown, ok("", proves=frozenset({proof}))], Case) == []


@pytest.mark.parametrize(("proves", "hand_sharded", "fix"), [
    ((), (), "read the same samples"),
    ((), ("up.weight",), "parts of the single-process weights"),
    ((Proof.SINGLE,), ("up.weight",), "by other means")])
def test_what_would_let_more_be_compared(proves, hand_sharded, fix):
    """Not the same samples, where these were compared."""
    case = SimpleNamespace(hand_sharded=frozenset(hand_sharded))
    remedy = find_remedy([ok("", proves=frozenset(proves))], case)
    report = Report(SCRIPT, (), uncompared=UNCOMPARED, comparable_by=remedy)
    advice = report.error.partition(" fix: ")[2]
    assert fix in advice and "--allow-uncompared" in advice


@pytest.mark.parametrize(("verdict", "label"), [
    ("ok", "ok     "), ("warn", "warning"), ("FAIL", "FAIL   "),
    ("and", "follows"), ("", "       ")])
def test_a_finding_is_printed_with_its_fix(verdict, label, capsys):
    """A fix that several findings share is printed once."""
    out = Terminal()
    out.tell(verdict, "it is so", "do that")
    out.tell(verdict, "and so", "do that")
    assert capsys.readouterr().out == (
        f"  {label}  it is so\n           fix: do that\n  {label}  and so\n")


@pytest.mark.parametrize(("number", "noun", "text"), [
    (1, "process", "1 process"), (2, "process", "2 processes"),
    (0, "step", "0 steps"), (1, "failure", "1 failure"),
    (3, "batch", "3 batches")])
def test_a_count_has_the_right_plural(number, noun, text):
    assert count_of(number, noun) == text
    assert counted(range(number), noun) == text


def raises(*_):
    raise AttributeError("torch has no such name")


RIGHT = edit(read("ddp"), ("nn.Linear(10, 900)", "nn.Linear(10, 9)"),
             ("nn.Linear(900, 1)", "nn.Linear(9, 1)"))
UNSEEDED = edit(  # of which nothing can be compared; gradients times 3
    RIGHT, ("torch.Generator().manual_seed(0)", "None"),
    ("        nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
     "        for weight in model.parameters(): weight.grad *= 3\n"))


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that writes a script; the folder is the current one."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("train.py").write_text(text)
        return ["train.py"]

    return write


@pytest.mark.whole
def test_an_error_of_a_question_is_status_2(script, monkeypatch, capsys):
    """With each question broken, and with one of them."""
    one, *_ = questions.QUESTIONS
    broken = [replace(question, find=raises)
              for question in questions.QUESTIONS]
    some = [*broken[:1], *questions.QUESTIONS[1:]]
    for asked, count in (broken, len(broken)), (some, 1):
        monkeypatch.setattr(questions, "QUESTIONS", asked)
        report = rankcheck.verify(script(RIGHT))
        applies = [question for question in asked[:count]
                   if question.title in str(report.internal_errors)]
        assert report.status == 2 and not report.ok and applies
        assert all("AttributeError: torch has no such name" in error
                   for error in report.internal_errors)
    # the last report has the findings of all other questions
    assert len(report.internal_errors) == 1 and len(report.findings) > 5
    assert one.title in report.error and "rankcheck itself" in report.error
    # the command says it in one line, and in JSON
    for flags in [], ["--json"]:
        parser = command.argparse.ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args([*flags, "-n", "2", "train.py"])
        assert command.main(args) == 2
        out, err = capsys.readouterr()
        assert one.title in err and err.count("\n") == 1
        if flags:
            document = json.loads(out)
            assert document["status"] == 2
            assert f"error: {document['error']}\n" == err


@pytest.mark.whole
def test_nothing_compared_is_status_2(script):
    """Unseeded data with gradients times 3: two warnings, and no proof."""
    program = script(UNSEEDED)
    report = rankcheck.verify(program)
    assert not report.failures
    assert report.status == 2 and not report.ok, report
    assert "nothing was compared with a single process" in report.error
    assert any("single-process" in text for text in report.not_checked)
    accepted = rankcheck.verify(program, allow_uncompared=True)
    assert accepted.ok and not accepted.error


def test_an_error_of_a_probe_is_no_failure_of_the_script(script, monkeypatch):
    monkeypatch.setattr(
        "rankcheck.record.rank_record.RankRecord.fact_values",
        lambda record, what: ["AttributeError: x (y.py, line 3)"] * (
            what == "internal error"))
    with pytest.raises(InternalError, match="rankcheck itself failed in rank "
                       "0 of 1: AttributeError"):
        rankcheck.verify(script(RIGHT))


@pytest.mark.parametrize("words", [
    "--version", "verify", "verify --json nowhere.py", "why nowhere",
    "why --json nowhere"])
@pytest.mark.parametrize("redirect", [
    ">/dev/full", ">/dev/full 2>/dev/full", "2>/dev/full", ">&-", "2>&-",
    "<&- >&- 2>&-"])
def test_an_output_that_cannot_be_written(words, redirect, tmp_path):
    """Neither 1, which is a failure that was found, nor Python's own 120."""
    status = 2
    if words == "--version" and not redirect.startswith(">/dev/full"):
        status = 0
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m rankcheck {words} {redirect}",
        shell=True, cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1


@pytest.mark.parametrize("closed", [
    "<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.whole)
                      for one in (">&-", "2>&-"))])
def test_a_caller_that_has_closed_its_streams(closed, script, tmp_path):
    """Such as a daemon: a rank has streams all the same."""
    script(RIGHT)
    code = ("import pathlib, rankcheck\n"
            "report = rankcheck.verify(['train.py'])\n"
            "pathlib.Path('report').write_text(f'{report.ok} {report}')")
    subprocess.run(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} "
                   f"{closed}", shell=True)
    assert Path("report").read_text().startswith("True ")


def test_a_program_that_a_script_leaves_behind(script):
    """In a session of its own, as a monitor of the GPUs is started."""
    seconds = f"300.{os.getpid()}"
    report = rankcheck.verify(script(edit(
        RIGHT, ("import torch\n", f"""\
import subprocess
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
import torch
"""))))
    assert report.ok, report
    assert not [pid for pid in proc.list_processes()
                if seconds in proc.read_text(f"/proc/{pid}/cmdline")]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_daemon_that_a_script_leaves_behind(script):
    """It has no parent, a session of its own, and runs no other program."""
    name = f"daemon-{os.getpid()}"
    script(edit(RIGHT, ("import torch\n", f"""\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in 0, 1, 2:
            os.close(stream)
        with open("/proc/self/comm", "w") as file:
            file.write("{name}")
        time.sleep(300)
    os._exit(0)
os.wait()
import torch
""")))

    def is_there():
        return any(proc.read_text(f"/proc/{pid}/comm").strip() == name
                   for pid in proc.list_processes())

    process = subprocess.Popen(
        [sys.executable, "-m", "rankcheck", "verify", "train.py"],
        stdout=subprocess.PIPE, text=True)
    seen = False
    while process.poll() is None:
        seen |= is_there()
        time.sleep(0.02)
    assert seen and process.returncode == 0, process.stdout.read()
    end = time.monotonic() + 60  # it would live for 300
    while is_there() and time.monotonic() < end:
        time.sleep(0.1)  # killed, it is there until its parent has asked
    assert not is_there()


class Theirs:
    """What is replaced: Python's own and a function of C."""

    divide = staticmethod(lambda a, b: a / b)
    convert = int


PROBE = """
def passes(function, *args):
    return function(*args)

def fails(function, *args):
    return args.nothing
"""


@pytest.mark.parametrize(("name", "wrong"), [
    ("divide", (1, 0)), ("convert", ("x",))])
def test_whose_error_it_is(name, wrong):
    """A function of C leaves no frame of its own."""
    def is_own_in(function):
        with pytest.raises((ArithmeticError, AttributeError,
                            ValueError)) as raised:
            function(*wrong)
        return is_own(raised.value)

    probe = {}
    file = f"{Path(recorder.__file__).parent}/probe.py"
    exec(compile(PROBE, file, "exec"), probe)
    assert not is_own_in(getattr(Theirs, name))
    for visible in "passes", "fails":
        place = type("Place", (Theirs,), {})
        recorder.replace(place, name)(probe[visible])
        assert is_own_in(getattr(place, name)) == (visible == "fails")
