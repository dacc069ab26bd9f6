"""`python -m workshop check`: scripts of the table, and how it exits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from check_cases import CASES, left_by, left_in, outcome, problem
from cluster import wait_for
from conftest import CLONE_PATH, needs, program, python
from shells import mount as mount  # a fixture
from stages import edited, number_of

from backstage import ROOT
from backstage import errors as ours
from rankcheck.engine import exits, fork_server, hang_detector
from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.run_record import RunRecord, watch_run
from rankcheck.engine.workspace import Workspace
from rankcheck.system.errors import UserError
from rankcheck_testing.expected import read_expected
from rankcheck_testing.planted import load_all
from workshop.check import plan, questions
from workshop.check.command import check_script
from workshop.check.questions import ask_about_run
from workshop.check.stage_runs import Bench
from workshop.diff import documents, passed_checks
from workshop.diff.diff import Diff
from workshop.instructor import classroom
from workshop.stages import STAGES

SUITE = {"ddp: a segmentation fault": pytest.mark.whole}
IN_SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4",
           "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PROCID": "0",
           "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0",
           "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize("table", ["check", "starter"])
def test_the_places_of_the_changes_are_there(table):
    cases = load_all(ROOT / "tests" / "tables" / table, ROOT)
    assert cases and all(case.script() for case in cases)


@pytest.mark.whole
def test_a_table_is_a_program(tmp_path):
    mutants = ROOT / "tests" / "tables" / "mutants.py"
    end = python(tmp_path, mutants, "--help")
    assert not end.returncode, end.stderr


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name,
                 marks=SUITE.get(case.name, pytest.mark.table))
    for case in CASES])
def test_a_script_of_the_table(case):
    found = outcome(case.group, case.script())
    assert not problem(case, found), found.out
    if found.report is not None:  # one diagnosis
        assert len(found.report.failures) == (not case.right)


@pytest.mark.parametrize(("stage", "title", "finds"), [
    pytest.param("ddp", "Ask the launcher", "FAIL error \"'local_rank'\"",
                 marks=pytest.mark.whole),
    ("ddp", "Average the losses", 'FAIL log step=0 "loss"'),
    # it sends more, and is right
    pytest.param("ddp", "Reduce the gradients", "warn reduced-repeatedly",
                 marks=pytest.mark.whole)])
def test_one_change_alone(tmp_path, capsys, monkeypatch, stage, title, finds):
    """The script of the stage before, with all other changes made."""
    seen = []
    monkeypatch.setattr(passed_checks, "record",
                        lambda *words: seen.append(words))
    script = tmp_path / "train_gpt2.py"
    before = STAGES[STAGES[stage].after].solution.read_text()
    script.write_text(before)
    number = number_of(stage, title)
    report = check_script(stage, script, change=number)
    out = capsys.readouterr().out
    assert read_expected(finds).is_in(report.findings), out
    assert f"Change {number} ({title}" in out
    assert report.ok == finds.startswith("warn")
    assert script.read_text() == before
    as_made = report.ok and not report.warnings
    assert [name for name, _ in seen] == [  # it is not the whole check
        f"{stage} {number}"] * as_made


def test_a_change_that_is_made_or_not_there(tmp_path, capsys):
    script = edited(tmp_path, "ddp", HANG)
    made, last = number_of("ddp", "Wrap"), len(documents.load_changes("ddp"))
    assert check_script("ddp", script, change=made).ok
    assert f"Change {made} is made as in the" in capsys.readouterr().out
    with pytest.raises(ours.UserError, match=f"no such change: {last + 1}"):
        check_script("ddp", script, change=last + 1)


@pytest.mark.whole
def test_a_script_that_is_none(tmp_path):
    """One line that says where, before anything is started."""
    with pytest.raises(ours.UserError, match="reset std"):
        check_script("ddp", tmp_path / "moved.py")
    large = tmp_path / "large.py"
    large.write_bytes(b"#" * 20_000_000)
    with pytest.raises(ours.UserError, match="more than 500,000 bytes"):
        check_script("ddp", large)
    for text in "not " * 50_000 + "x", "x" + ".a" * 50_000:
        large.write_text(text)
        with pytest.raises(UserError, match="nested too deeply"):
            check_script("ddp", large)
        assert Diff("ddp", large).remaining  # which looks at lines


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files; one with a long name is not used."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


HANG = ("        if rank == 0:\n            run.log(",
        "        if rank == 0:\n            dist.barrier()\n"
        "            run.log(")


@pytest.mark.whole
@pytest.mark.skipif(not os.path.exists("/proc"), reason="asks /proc")
@pytest.mark.parametrize(("number", "everyone", "long", "line", "seconds"), [
    # while torch is imported, and where it hangs
    (signal.SIGINT, True, False, "Loading PyTorch", 0.3),
    (signal.SIGTERM, False, True, "2 processes", 2)])
def test_a_signal_ends_it_at_once(
        tmp_path, temporary, number, everyone, long, line, seconds):
    """In a shell of srun, without a home. What is no event of a notebook's
    check is shown as wrong there.
    """
    events, place = not long, temporary / ("long" * 25 * long)
    script = edited(tmp_path, "ddp", HANG)
    code = ("from workshop.check.command import check_script\n"
            f"check_script('ddp', {str(script)!r}, events={events})")
    place.mkdir(exist_ok=True)
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={
            **os.environ, **IN_SRUN, "TMPDIR": str(place),
            "HOME": "/dev/null/home", "XDG_CACHE_HOME": "",
            "XDG_CONFIG_HOME": "", "PYTHONPATH": CLONE_PATH,
            "PYTHONUNBUFFERED": "1"})
    said = [""]
    while line not in said[-1]:
        said.append(run.stdout.readline())
        assert said[-1], "it has ended"
    time.sleep(seconds)
    (os.killpg if everyone else os.kill)(run.pid, number)
    # 2 s on an idle machine; it used to be 47
    rest, _ = run.communicate(timeout=30)
    assert run.returncode == 128 + number
    out = "".join(said) + rest
    assert "Traceback" not in out and "/dev/null" not in out
    assert (all(map(json.loads, out.splitlines())) if events else
            out.endswith("interrupted\n"))
    assert not left_in(temporary)
    wait_for(lambda: not left_by(temporary), 20)


def bench_of(stage, script, folder):
    (folder / "bench").mkdir()
    return Bench(Workspace(folder / "bench"), stage, script,
                 script.read_bytes())


def test_an_endless_loop_is_known_by_the_time_of_the_cpu(tmp_path):
    script = program(tmp_path / "train_gpt2.py", "while True:\n    pass\n")
    one = watch_run(RunRecord(script), (), tmp_path / "seen", print,
                    Budget(0.5))
    assert one.gave_up == "busy"
    assert read_expected("FAIL no-progress step=0").matches(
        exits.explain_failure(one))


@pytest.mark.whole
@pytest.mark.parametrize("name", [
    "the sum by atomic_add", "no mask of what is written",
    "all programs write to one row"])
def test_a_kernel_of_the_table(name, tmp_path):
    """Its operations alone: the model takes the interpreter half a minute."""
    needs("triton")
    case, = (case for case in CASES if case.name == f"kernels: {name}")
    script = program(tmp_path / "train_gpt2.py", case.script())
    bench = bench_of("kernels", script, tmp_path)
    row, *_ = plan.plan_runs("kernels")
    results = ask_about_run(bench.make(row), None, row.kind)
    assert not results.internal_errors
    found = [finding for finding in results.findings
             if finding.verdict != "ok"]
    assert len(found) == (not case.right)
    assert all(read_expected(line).is_in(found) for line in case.says)


@pytest.mark.whole
def test_an_error_of_the_check_itself_is_no_verdict(
        tmp_path, capsys, monkeypatch):
    """Neither on the script, nor for the class; the exit status is 2."""
    noted = []
    monkeypatch.setattr(passed_checks, "record",
                        lambda *what: noted.append(what))
    monkeypatch.setattr(
        classroom, "note_progress", lambda *what, **more: noted.append(what))
    broken = [replace(question, find=lambda examined: examined.nothing)
              if question.title == "the script runs to the end" else question
              for question in questions.QUESTIONS]
    monkeypatch.setattr(questions, "QUESTIONS", broken)
    report = check_script("ddp", STAGES["ddp"].solution)
    out = capsys.readouterr().out
    assert report.status == 2 and not report.ok and not noted
    error, = report.internal_errors
    assert error.startswith("the script runs to the end: AttributeError: ")
    assert not report.failures and "FAIL" not in out
    assert out.endswith("\nThe check itself failed, so this is not a "
                        "verdict.\n")


@pytest.mark.whole
def test_saved_during_the_check(tmp_path, temporary, capfd, monkeypatch):
    """It is read once, with what lies beside it, and nothing is left.

    The table stands above the verdict.
    """
    seen = []
    monkeypatch.setattr(passed_checks, "record",
                        lambda *words: seen.append(words))
    script = edited(tmp_path, "ddp", (
        "import math\n", "import math\nimport mine\n"))
    data = script.read_bytes()
    (tmp_path / "mine.py").write_text(
        f"import os; os.system('echo \"raise SystemExit(3)\" > {script}')\n")
    assert check_script("ddp", script).ok and seen == [("ddp", data)]
    out, _ = capfd.readouterr()
    assert "Correct" in out.splitlines()[-1] and "  warning  " not in out
    rows = {line[:-30].strip(): line[-30:].split() for line in
            out.splitlines() if line.endswith(" ok") or " ok " in line[-30:]}
    assert rows["gradients match the single device's"] == ["ok"] * 4
    assert rows["checkpoint"] == ["ok"]  # the end of a long question
    assert out.index("resumed stopped") < out.index("Correct on 1, 2 and 4")
    assert script.read_bytes() != data and not left_in(temporary)


@pytest.mark.parametrize("size", ["6m", "70m"])
def test_a_full_folder_for_temporary_files(tmp_path, temporary, mount, size):
    """One line, whether it is full at once or in the middle of a check."""
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", temporary)
    script = edited(tmp_path, "ddp", ("import math\n", (
        f"import math\nwith open('{temporary}/full', 'wb') as file:\n"
        "    while True:\n        file.write(bytes(2**16))\n")))
    with pytest.raises(UserError, match=f"^{temporary} is full; fix: make "
                       "room there, or name another folder for temporary "
                       r"files: export TMPDIR=\.\.\.$"):
        check_script("ddp", script)
    assert (temporary / "full").exists() == (size == "70m")
    assert not left_in(temporary)


@pytest.mark.whole
def test_the_script_of_another_stage_is_named(capsys):
    """As the list of changes does; and none of its changes is tried."""
    with pytest.raises(ours.UserError, match="This is the stage ddp, but "
                       r"the lesson starts from std; fix: .*reset std"):
        check_script("mpi", STAGES["ddp"].solution, change=3)
    assert check_script("mpi", STAGES["ddp"].solution).status == 1
    said = capsys.readouterr().out
    assert "This is the stage ddp, but" in said and "Without" not in said


@pytest.mark.whole
def test_an_mpirun_that_hangs_before_the_script_begins(tmp_path, monkeypatch):
    """Once is seen now and then, and is no verdict; twice is an error."""
    needs("mpirun")
    (tmp_path / "bin").mkdir()
    hangs = tmp_path / "hangs"
    mpirun = program(tmp_path / "bin" / "mpirun", (
        f'#!/bin/sh\nrm "{hangs}" && exec sleep 600\n'
        f'exec {shutil.which("mpirun")} "$@"\n'))
    monkeypatch.setenv("PATH", f"{mpirun.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(hang_detector, "UNSTARTED", 2.0)
    bench = bench_of("mpi", STAGES["mpi"].solution, tmp_path)
    hangs.touch()
    two = bench.make(plan.StageRunPlan("once", "whole", plan.Mesh(1, 2, 1)))
    assert not hangs.exists()
    assert [rank.status for rank in two.ranks] == [0, 0]

    mpirun.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(UserError, match="mpirun does not start the processes"):
        bench.make(plan.StageRunPlan("twice", "whole", plan.Mesh(1, 2, 1)))


@pytest.mark.whole
@pytest.mark.parametrize("killed", ["os.getpid()", "os.getppid()"])
def test_killed_as_where_the_memory_is_full(tmp_path, temporary, killed):
    """A rank, or the ranks' server, which is replaced: it is no verdict on
    the script, and nothing is left.
    """
    first = fork_server.get_servers()
    script = edited(tmp_path, "ddp", (
        "import math\n", "import math\nimport os\n"
        f"os.kill({killed}, 9)\nos._exit(1)\n"))
    with pytest.raises(UserError, match="the system killed a process, most "
                       "likely because memory"):
        check_script("ddp", script)
    assert not left_in(temporary)
    assert (fork_server.get_servers() == first) == (killed == "os.getpid()")
