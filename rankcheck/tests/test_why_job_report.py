"""What `why` prints: one line for equal ranks, JSON, stacks; --on-hang."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from rankcheck.system import proc
from rankcheck.system.hook import HOOK
from rankcheck.why import command, evidence, hang, job_report, watcher
from rankcheck.why.ranks import Rank
from rankcheck_testing.evidence import FOLDER, read_ranks
from rankcheck_testing.support import HOUSE, SOURCE_PATH, program, wait_for

FIELDS = {"schema", "status", "error", "folder", "command", "kind", "verdict",
          "text", "fix", "blamed", "world_size", "missing", "ranks",
          "other_jobs", "slurm", "candidates"}


def make_rank(number, line=8, idle_seconds=30.0, **changes):
    """One of 64 on two nodes that waits in a line."""
    call = {"group": [*range(64)], "name": "0", "number": 7,
            "call": "barrier", "sizes": [], "types": [], "waits": True,
            "p2p": False, "time": 5.0, "line": None}
    return Rank({
        "rank": number, "world_size": 64, "host": f"node{1 + number // 32}",
        "pid": 4000 + number, "written": 40.0, "began": 1.0, "joined": True,
        "stack": [["x.py", line, "train"]], "ended": None, "answers": True,
        "idle_seconds": idle_seconds, "calls": [call], "work": [],
        **changes}, True, True)


def test_equal_ranks_have_one_line():
    ranks = [make_rank(number, idle_seconds=30.0 + number % 3)
             for number in range(63)]
    ranks.append(make_rank(63, line=9, calls=[]))
    first, last = map(job_report.describe_ranks, job_report.group_equal(ranks))
    assert first == (
        "ranks 0-62 on node1, node2, collective 7: wait in barrier, "
        "collective 7 of group 0, in line 8 of x.py, 30-32 s so far")
    assert last.startswith("rank 63 on node2, process 4063: is in line 9 of")
    del ranks[5], ranks[40:42]
    found = job_report.report_job(ranks)
    assert job_report.describe_missing(found).startswith(
        "ranks 5, 41, 42, of 64, have left no record here: look for ranks "
        "that run without the hook")


@pytest.mark.parametrize(("numbers", "words"), [
    ([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 2, 3, 4], "ranks 0, 2-4"),
    ([7, 6, 5, 9], "ranks 5-7, 9")])
def test_ranks_in_words(numbers, words):
    assert job_report.join_ranks(numbers) == words


def test_what_differs_between_equal_ranks():
    texts = ["busy: process 7 (gzip) for 9 s; last wrote at 10:00:03",
             "busy: process 12 (gzip) for 10 s; last wrote at 10:00:01"]
    assert job_report.merge_texts(texts) == (
        "busy: process 7-12 (gzip) for 9-10 s; last wrote at "
        "10:00:01-10:00:03")
    assert job_report.merge_texts(texts[:1]) == texts[0]


def test_stacks_of_equal_ranks_are_printed_once():
    lines = job_report.describe_stacks([make_rank(0), make_rank(1), make_rank(
        2, line=9, threads=[["saver", 77, [["y.py", 1, "save"]]]])])
    assert lines == [
        "main thread of ranks 0, 1:", '  File "x.py", line 8, in train',
        "main thread of rank 2:", '  File "x.py", line 9, in train',
        "thread saver of rank 2:", '  File "y.py", line 1, in save']


@pytest.mark.parametrize("name", sorted(
    path.stem for path in FOLDER.glob("*.jsonl")))
def test_every_answer_is_json(name):
    """All that JSON cannot hold is null, in every kind of end."""
    found = job_report.to_json(job_report.report_job(read_ranks(name)),
                               stacks=True)
    text = json.dumps(found, allow_nan=False)
    assert {*json.loads(text)} | {"schema"} <= FIELDS
    for rank in found["ranks"]:
        assert {"rank", "host", "pid", "state", "place", "collective",
                "waits", "error", "stack", "threads"} <= {*rank}


def test_the_page_names_all_fields():
    page = (HOUSE / "README.md").read_text()
    page = page[page.index("`rankcheck why --json`"):]
    for name in FIELDS | {*job_report.to_json(
            job_report.JobReport([make_rank(0)],
                                 job_report.diagnose([make_rank(0)])),
            stacks=True)["ranks"][0]}:
        assert name in page, name


def test_the_words_of_the_answers(snapshot, capsys):
    """A page with the answer about each stored job, to be read as text."""
    page = []
    for name in sorted(path.stem for path in FOLDER.glob("*.jsonl")):
        ranks = read_ranks(name)
        found = job_report.report_job(ranks, lambda ranks=ranks: ranks)
        command.print_finding(found.finding)
        page += [f"# {name}", "", capsys.readouterr().out.rstrip()]
        for group in job_report.group_equal(ranks):
            page.append(f"  {job_report.describe_ranks(group)}")
        page.append("")
    # a clock shows the machine's own time zone
    text = re.sub(r"\b\d\d:\d\d:\d\d\b", "TIME", "\n".join(page))
    snapshot("why.txt", text)


def ask(folder, *words, home):
    done = subprocess.run(
        [sys.executable, "-m", "rankcheck", "why", *map(str, words)],
        cwd=folder, capture_output=True, text=True, env={
            **os.environ, "HOME": str(home), "PYTHONPATH": SOURCE_PATH})
    return done.returncode, done.stdout, done.stderr


def test_json_of_a_start(tmp_path):
    """Also where there is nothing to see."""
    status, out, err = ask(tmp_path, "--json", home=tmp_path)
    document = json.loads(out)
    assert (status, document["status"], err) == (2, 2, "")
    assert {*document} == FIELDS and document["schema"] == 3
    assert "py-spy dump --subprocesses" in document["error"]
    ask(tmp_path, "run", "--", sys.executable, "-c", "1 / 0", home=tmp_path)
    status, out, err = ask(tmp_path, "--json", "--stacks", home=tmp_path)
    document = json.loads(out)
    assert (status, document["status"], document["verdict"]) == (1, 1, "FAIL")
    assert document["command"] == [sys.executable, "-c", "1 / 0"]
    assert document["kind"] == "rank failed" and document["blamed"] == [0]
    rank, = document["ranks"]
    assert rank["error"]["type"] == "ZeroDivisionError"
    assert rank["collective"] is None and rank["stack"]


# ------------------------------------------------------------------ on hang


JOB = """\
import os, sys, threading, time, torch
try:
    print("child", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
while os.path.exists("wait"):
    time.sleep(0.05)
    {work}
try:
    print("child", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
"""


def find_monitors(folder):
    """The processes that --on-hang has started there."""
    found = []
    for pid in proc.list_processes():
        words = proc.read_command(pid)
        if "--on-hang" in words and any(str(folder) in one for one in words):
            found.append(pid)
    return found


def start_job(folder, command, work, seconds):
    """A job of one rank, which ends when the file `wait` has gone."""
    program(folder / "torch.py", "")
    (folder / "wait").touch()
    script = program(folder / "script.py", JOB.format(work=work))
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rankcheck", "why", "run", "--on-hang",
             command, "--hang-after", str(seconds), "--", sys.executable, "-u",
             script], cwd=folder, stdout=log, stderr=log,
            pass_fds=[log.fileno()], env={
                 **os.environ, "HOME": str(folder), "RANK": "0",
                 "WORLD_SIZE": "1", "PYTHONPATH": SOURCE_PATH})


@pytest.mark.whole
def test_a_command_when_a_job_hangs(tmp_path):
    """Once, with the folder; the job goes on, has no child, and nothing of
    it is left.
    """
    command = (f"echo {{}} $RANKCHECK_FOLDER >>{tmp_path}/said; "
               "env | grep -c 'system/hook\\|RANKCHECK_WHY' "
               f">>{tmp_path}/said")
    job = start_job(tmp_path, command, "", 21)
    try:
        wait_for(lambda: find_monitors(tmp_path), 60)
        wait_for((tmp_path / "said").exists, 120)
        wait_for(lambda: not find_monitors(tmp_path), 60)
        assert job.poll() is None
    finally:
        (tmp_path / "wait").unlink()
        assert job.wait(60) == 0
    folder, = (tmp_path / ".cache/rankcheck").glob("2*")
    assert (tmp_path / "said").read_text() == f"{folder} {folder}\n0\n"
    assert (tmp_path / "log").read_text().splitlines()[1:] == [
        "no child", "no child"]
    record, = folder.glob("*.json")
    assert json.loads(record.read_text())["idle_seconds"] >= 20


@pytest.mark.whole
@pytest.mark.parametrize("end", ["itself", "SIGKILL"])
def test_a_monitor_ends_with_its_job(end, tmp_path):
    """Without its command, if there was no hang."""
    job = start_job(tmp_path, f"touch {tmp_path}/said", "sum(range(9))", 600)
    try:
        wait_for(lambda: {*find_monitors(tmp_path)} - {job.pid}, 60)
        wait_for(lambda: "no child" in (tmp_path / "log").read_text(), 60)
        monitor, = find_monitors(tmp_path)  # it alone: the job is a script
        opened = {os.path.basename(os.readlink(f"/proc/{monitor}/fd/{name}"))
                  for name in proc.list_folder(f"/proc/{monitor}/fd")}
        assert opened == {"null", "anon_inode:[pidfd]"}
        assert int(proc.read_stat(monitor)[1]) != job.pid
        if end == "SIGKILL":
            os.kill(job.pid, signal.SIGKILL)
    finally:
        (tmp_path / "wait").unlink()
        job.wait(60)
    wait_for(lambda: proc.read_state(monitor) == "?", 60)
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize(("changes", "hangs"), [
    ([{}, {}], True), ([{}, {"idle_seconds": 3.0}], False),
    # a rank that computes may come to the others; one that waits spins
    ([{}, {"calls": [], "work": [["thread", 4001, "", "R", True, None]]}],
     False),
    ([{"work": [["thread", 4000, "", "R", True, None]],
       "idle_seconds": 40.0}, {}],
     True),
    # one that sends and receives in a loop comes back to the same places
    ([{"work": [["thread", 4000, "", "R", True, None]], "idle_seconds": 40.0,
       "line_seconds": 2.0}, {}], False),
    ([{"idle_seconds": 40.0, "line_seconds": 2.0}, {}], True),
    # a worker of its own does
    ([{}, {"calls": [], "work": [["process", 9, "", "R", True, None]]}],
     False),
    # those that have ended do not count, but one has to run
    ([{}, {"ended": {"status": 0, "time": 9}}], True),
    ([{"ended": {"status": 0, "time": 9}}] * 2, False)])
def test_what_is_a_hang(changes, hangs):
    ranks = [make_rank(number, **change)
             for number, change in enumerate(changes)]
    for rank, change in zip(ranks, changes, strict=True):
        if "ended" in change:
            rank.alive = False
            vars(rank).pop("ending")
    assert hang.is_hanging(ranks, "", 25) == hangs


def test_a_rank_that_does_not_answer_hangs_once_it_was_asked(tmp_path):
    """What it did before nobody knows: it has to be silent for so long."""
    now = time.time_ns()
    answered = f"{now - 60 * 10**9}\n"
    rank = Rank({**make_rank(0).record, "asked": answered}, True, False)
    for ago, hangs in ((30, True), (3, False)):
        asked = f"{answered}{now - ago * 10**9}\n{now}\n"
        assert hang.is_hanging([rank], asked, 25) == hangs


def test_on_hang_where_the_working_directory_is_gone(tmp_path):
    """Said once: the monitor, a copy of the process, must not say it too."""
    line = (f"cd {tmp_path / 'gone'} && rmdir {tmp_path / 'gone'} && "
            f"{sys.executable} -m rankcheck why run --on-hang true -- true")
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env={
            **os.environ, "HOME": str(tmp_path), "PYTHONPATH": SOURCE_PATH})
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        "error: --on-hang: the working directory was removed; fix: change to "
        "one that exists"]


@pytest.mark.parametrize(("flags", "says"), [
    (["--on-hang", " "], "--on-hang needs a command"),
    (["--on-hang", "true", "--hang-after", "-3"], "--hang-after must be"),
    (["--on-hang", "true", "--hang-after", "nan"], "--hang-after must be")])
def test_on_hang_that_would_never_run(flags, says, tmp_path):
    """Then the job does not begin, either."""
    status, out, err = ask(tmp_path, "run", *flags, "--", "echo", "begun",
                           home=tmp_path)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_on_hang_without_a_start(tmp_path):
    status, _, err = ask(tmp_path, "--on-hang", "true", home=tmp_path)
    assert status == 2 and "belongs to a start" in err


@pytest.mark.parametrize(("words", "says"), [
    (["run"], "no command is named that starts the job; fix: rankcheck why"),
    (["run", "torchrun"], "unrecognized arguments: torchrun (those of the "
     "job's own command come after --); fix: ")])
def test_a_start_without_a_command(words, says, tmp_path):
    status, out, err = ask(tmp_path, *words, home=tmp_path)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}")
    assert err.count("\n") == 1


@pytest.mark.whole
def test_threads_are_recorded_whole(tmp_path):
    """When somebody asks."""
    program(tmp_path / "torch.py", "")
    script = program(tmp_path / "script.py", """\
import threading, time, torch
def save():
    time.sleep(60)
threading.Thread(target=save, name="saver", daemon=True).start()
time.sleep(60)
""")
    job = subprocess.Popen([sys.executable, script], env={
        **os.environ, "PYTHONPATH": str(HOOK), "RANK": "0", "WORLD_SIZE": "1",
        "RANKCHECK_WHY": str(tmp_path / "why")})
    try:
        wait_for(lambda: [*(tmp_path / "why").glob("*.json")], 60)
        wait_for(lambda: any(
            "threads" in record
            for record in evidence.read_records(tmp_path / "why")
            ) or watcher.add_request(tmp_path / "why/ask") is None, 60)
        rank, = evidence.collect(tmp_path / "why")
    finally:
        job.kill()
        job.wait()
    stacks = {name: stack for name, _, stack in rank.threads}
    assert [2, "save"] not in stacks["MainThread"]
    assert any(frame[1:] == [3, "save"] for frame in stacks["saver"])


def test_two_starts_at_once_in_one_folder(tmp_path):
    """By RANKCHECK_WHY: each is answered, with its own command and output."""
    jobs = []
    for number, text in enumerate(("1 / 0", "missing")):
        code = (f"import os, time; open('{number}', 'w').close()\n"
                f"while not os.path.exists('{1 - number}'): time.sleep(.1)\n"
                f"{text}")
        with open(tmp_path / f"log{number}", "w") as log:
            jobs.append(subprocess.Popen(
                [sys.executable, "-m", "rankcheck", "why", "run", "--",
                 sys.executable, "-c", code], cwd=tmp_path, stdout=log,
                stderr=log, env={
                    **os.environ, "HOME": str(tmp_path), "RANK": "0",
                    "MASTER_PORT": f"2950{number}", "WORLD_SIZE": "1",
                    "PYTHONPATH": SOURCE_PATH, "RANKCHECK_WHY": "why"}))
    assert [job.wait(60) for job in jobs] == [1, 1]
    status, out, _ = ask(tmp_path, "why", home=tmp_path)
    assert status == 1 and out.startswith("2 jobs were started here, 0 still")
    answers = out.split("\njob ")[1:]
    for port, error in (("29500", "ZeroDivisionError"),
                        ("29501", "NameError")):
        found, = [one for one in answers if f"MASTER_PORT {port}" in one]
        assert f"with {error}: " in found.partition("\n  its output")[0]
    status, out, _ = ask(tmp_path, "why", "--json", home=tmp_path)
    document = json.loads(out)
    other, = document["other_jobs"]
    assert document["kind"] == other["kind"] == "rank failed"
