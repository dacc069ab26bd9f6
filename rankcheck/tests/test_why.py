"""`why`: faults in scripts that are not ours, each named; no false alarm."""

import builtins
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401 the watcher looks there

from rankcheck.engine.ranks import free_port
from rankcheck.system import launchers, proc
from rankcheck.system.errors import UserError
from rankcheck.system.hook import HOOK
from rankcheck.system.sources import Sources, find_callee
from rankcheck.why import calls, command, evidence, jobs, start, watcher
from rankcheck.why.describe import describe_rank
from rankcheck.why.evidence import collect
from rankcheck.why.judge import FAULT_QUESTIONS, diagnose, find_latest_rank
from rankcheck.why.ranks import Rank
from rankcheck.why.watcher import START_MARK
from rankcheck_testing.evidence import (
    FOLDER,
    Said,
    answer,
    check_end,
    join_alone,
    read_ranks,
    read_said,
    run_watched,
)
from rankcheck_testing.support import (
    HOUSE,
    SOURCE_PATH,
    needs,
    program,
    python,
    wait_for,
)

JOBS = read_said()


@pytest.mark.parametrize(
    ("job", "fault", "blamed", "part"),
    [(job, said.fault, said.blamed, said.part) for job, said in JOBS.items()])
def test_what_is_said_of_a_job(job, fault, blamed, part):
    """From the records that its ranks wrote; see evidence.py."""
    ranks = read_ranks(job)
    found = diagnose(ranks, lambda: ranks)
    Said(fault, blamed, part).check(found)
    assert found.verdict == ("FAIL" if fault else "ok")


def test_each_job_that_is_kept_has_one_row():
    """What to say of a job is checked by its row in said.md."""
    kept = {path.stem for path in FOLDER.glob("*.jsonl")}
    lacking, without_file = sorted(kept - {*JOBS}), sorted({*JOBS} - kept)
    assert not lacking, f"said.md has no row for {lacking}; fix: add one"
    assert not without_file, f"no records of {without_file}; fix: store them"


def test_two_rows_for_a_job_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rankcheck_testing.evidence.FOLDER", tmp_path)
    head = "| job | the fault | whose | words |\n|---|---|---|---|\n"
    (tmp_path / "said.md").write_text(head + 2 * "| one | | | words |\n")
    with pytest.raises(AssertionError, match="two rows for one; fix: rename"):
        read_said()


def test_a_rank_that_has_given_up_does_not_wait_for_a_debugger():
    """Rank 0 is still at its prompt; rank 1 has timed out meanwhile."""
    ranks = read_ranks("breakpoint", changed=1, ended={
        "status": 1, "time": 0, "error": "RuntimeError", "then": [],
        "message": "Timed out waiting 1800000ms for recv operation",
        "stack": [["/venv/lib/python3.11/site-packages/torch/distributed/"
                   "distributed_c10d.py", 1, "all_reduce"]]})
    assert ranks[1].ending == "lost"
    found = diagnose(ranks, lambda: ranks)
    assert found.kind == "debugger prompt" and "waits" not in found.text


@pytest.mark.whole
def test_records_of_a_job_are_kept(tmp_path):
    """By the program evidence.py: without this machine's names."""
    run_watched(tmp_path, "1 / 0", RANK="0", WORLD_SIZE="1")
    kept = tmp_path / "kept.jsonl"
    keeper = HOUSE / "tests/rankcheck_testing/evidence.py"
    (tmp_path / "empty").mkdir()
    for words, says in ((["nowhere", kept], "no rank has left a record in no"),
                        (["empty", kept], "no rank has left a record in em"),
                        (["why"], "invalid arguments; fix: evidence.py")):
        end = python(tmp_path, keeper, *words)
        assert end.returncode and end.stderr.startswith(f"error: {says}")
        assert not kept.exists()
    end = python(tmp_path, keeper, "why", kept)
    assert not end.returncode, end.stderr
    assert "next: add a row for kept to" in end.stdout
    rank, = (Rank(*json.loads(line)) for line in kept.open())
    found = diagnose([rank])
    assert "ZeroDivisionError" in found.text
    assert rank.host == "node1" and str(tmp_path) not in kept.read_text()


@pytest.mark.parametrize("times, share", [
    ([(9, 0), (10, 9.5)], 0.95),  # it has waited before the first began
    ([(8, 0), (9, 0), (10, 0)], 1.0),  # for three at once
    ([(1, 0), (11, 10)], 2 / 11)])
def test_nobody_waits_for_more_than_all_the_time(times, share):
    number, found, _ = find_latest_rank(
        [dict(enumerate(pair)) for pair in times])
    assert (number, found) == (0, pytest.approx(share))


@pytest.mark.parametrize(("inner", "fault"), [
    (["torch/distributed/c10d.py", 3, "recv"], ""),
    (["rankcheck/why/calls.py", 3, "called"], ""),  # MPI's
    (["x.py", 3, "read"], "straggler")])
def test_who_is_late_because_it_waits(inner, fault):
    """Itself, as the first stage of a pipeline does, is no straggler."""
    ranks = read_ranks("fault-7", changed=3, stack_samples=[
        [20, [["x.py", 1, "main"]]], [20, [["x.py", 2, "main"], inner]]])
    assert diagnose(ranks).kind == fault


WATCHED = """\
import sys, time, torch  # an empty module, but now the thread begins
class Noisy:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, "is freed")
def train(seconds):
    cache, noisy = b"x" * 2**28, Noisy("noisy")
    time.sleep(seconds)  # a look or two
    del cache, noisy
    print("del")
    cache = b"x" * 2**28
kept = Noisy("kept")
train(float(sys.argv[1]))
status = open("/proc/self/status").read().split()
print("peak", int(status[status.index("VmHWM:") + 1]) >> 18)
"""


@pytest.mark.whole
def test_memory_and_destructors_stay_as_they_are(tmp_path):
    """`del` frees at once, while the hook looks, too."""
    script = program(tmp_path / "script.py", WATCHED)
    program(tmp_path / "torch.py", "")
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    plain = python(tmp_path, script, 0, **rank)
    watched = python(tmp_path, script, 3, **rank, PYTHONPATH=str(HOOK),
                     RANKCHECK_WHY="why")
    record, = (tmp_path / "why").glob("*.json")
    assert json.loads(record.read_text())["answers"], watched.stderr
    assert plain.stdout == watched.stdout == (
        "noisy is freed\ndel\npeak 1\nkept is freed\n")


@pytest.mark.whole
def test_a_loop_that_only_asks_does_not_move(tmp_path):
    """It visits the same few places again and again."""
    why = tmp_path / "why"
    program(tmp_path / "torch.py", "")
    script = program(tmp_path / "script.py", "import os, time, torch\n"
                     "while not os.path.exists('never'):\n"
                     "    time.sleep(0.01)\n")
    job = subprocess.Popen([sys.executable, script], cwd=tmp_path, env={
        **os.environ, "PYTHONPATH": str(HOOK), "RANKCHECK_WHY": str(why),
        "RANK": "0", "WORLD_SIZE": "2"})
    try:  # while it runs: its end is a move
        wait_for(lambda: any(json.loads(file.read_text())["idle_seconds"] > 15
                             for file in why.glob("*.json")), 80)
    finally:
        job.kill()
        job.wait()


def test_who_works(tmp_path):
    """A thread and a process compute, one sleeps, whose name is no UTF-8, and
    one has ended.
    """
    sleep = os.path.join(os.fsencode(tmp_path), b"\xff\xfe")
    shutil.copy(shutil.which("sleep"), sleep)
    started = [*map(subprocess.Popen, (
        [sys.executable, "-c", "while True: pass"], [sleep, "99"], ["true"]))]
    over = threading.Event()
    thread = threading.Thread(target=lambda: [
        sum(range(1000)) for _ in iter(over.is_set, True)])
    thread.start()
    try:
        os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)
        time.sleep(1)  # the other one has begun to sleep
        before = proc.see_work(os.getpid())
        time.sleep(0.5)
        works = {number: worked for _, number, _, _, worked, _ in
                 proc.compare_work(before, proc.see_work(os.getpid()), 0.5)}
        assert [works[one.pid] for one in started] == [True, False, False]
        assert works[thread.native_id]
    finally:
        over.set()
        for one in started:
            one.kill()
            one.wait()


def test_what_a_main_thread_does_is_not_guessed():
    """What it has used of a core may be little, beside what it writes."""
    record = {"rank": 0, "world_size": 1, "host": "node1", "pid": 7,
              "written": 9, "began": 1, "stack": [["x.py", 3, "<module>"]],
              "ended": None, "answers": True,
              "work": [["thread", 7, "python", "S", True, None]]}
    assert describe_rank(Rank(record, alive=True, has_answered=True)).endswith(
        "; computes, reads or writes")


@pytest.mark.parametrize(("file", "message", "ending"), [
    ("autograd/graph.py", "Connection closed by peer", "lost"),
    ("distributed/distributed_c10d.py", "address in use, timed out", "error"),
    ("utils/data/dataloader.py", "DataLoader timed out after 4 s", "error"),
    ("_utils.py", "Caught ConnectionResetError in pin memory thread for device"
     " 0.\nConnection reset by peer", "error")])
def test_an_error_of_its_own_worker_is_no_lost_connection(
        file, message, ending):
    assert Rank({"rank": 0, "host": "node1", "pid": 7, "written": 9,
                 "began": 1, "stack": [], "answers": True, "ended": {
                     "error": "RuntimeError", "message": message, "time": 9,
                     "stack": [[f"/venv/torch/{file}", 3, "f"]]}},
                alive=False).ending == ending


@pytest.mark.parametrize(("error", "blamed"), [
    ("AssertionError", 2), ("RuntimeError", 1), ("BrokenPipeError", 1)])
def test_ranks_that_raise_the_same_error_in_their_own_words(error, blamed):
    """One of a collective may follow from another rank's."""
    found = diagnose([Rank({
        "rank": rank, "host": "node1", "pid": rank, "written": 9, "began": 1,
        "answers": True, "ended": {
            "status": 1, "error": error, "message": f"it is {rank}", "time": 9,
            "stack": [["x.py", 3, "f"]]}}, alive=False) for rank in (0, 1)])
    assert len(found.ranks) == blamed
    assert ("the first" in found.text) == (blamed == 1)


def test_where_a_stopped_process_is_not_guessed():
    """It was there when it last wrote, which may be long ago. One that has
    just answered is stopped now and then, as by `cpulimit`.
    """
    record = {
        "rank": 0, "host": "node1", "pid": 7, "written": 9, "began": 1,
        "stack": [["x.py", 3, "<module>"]], "ended": None, "answers": True,
        "state": "T"}
    said = diagnose([Rank(record, alive=True)])
    assert said.kind == "stopped process"
    assert said.text.endswith(", then in line 3 of x.py")
    record["world_size"] = 1
    assert diagnose([Rank(record, alive=True, has_answered=True)]).kind == ""


def test_a_process_in_a_container():
    """Its number means another process here, or none."""
    record = {"host": proc.name_host(os.environ), "pid": 2**30, "began": 1,
              "space": proc.name_space()}
    if os.path.isdir("/proc"):
        assert evidence.lives(record) is False
    assert evidence.lives({**record, "space": "pid:[7]"}) is None


@pytest.mark.parametrize("start", [
    f"PYTHONPATH={HOOK}:{SOURCE_PATH} RANKCHECK_WHY=$PWD/why-$$ exec",
    f"PYTHONPATH={SOURCE_PATH} RANKCHECK_WHY=$PWD/why-mine exec "
    f"{sys.executable} -m rankcheck why run --"])
def test_a_process_that_is_no_rank(start, tmp_path):
    """As `why run -- python train.py` starts it: what it starts may be."""
    script = tmp_path / "script.py"
    script.write_text("import subprocess, sys\nif len(sys.argv) < 2:\n"
                      "    subprocess.run([sys.executable, __file__, 'x'])\n")
    subprocess.run(
        ["bash", "-c", f"{start} {sys.executable} {script}"], cwd=tmp_path,
        check=True)
    rank, = collect(*tmp_path.glob("why-*"))
    assert (rank.rank, rank.world_size, rank.ending) == (0, 1, "done")


@pytest.mark.whole
def test_ranks_that_plain_python_spawns(tmp_path):
    """Their numbers, before they have joined a group, are mp.spawn's."""
    script = tmp_path / "script.py"
    script.write_text(f"""\
import time
import torch.multiprocessing as mp
from torch import distributed as dist
def train(rank):
    time.sleep(600 * rank)
    dist.init_process_group(
        "gloo", "tcp://127.0.0.1:{free_port()}", rank=rank, world_size=2)
if __name__ == '__main__': mp.spawn(train, nprocs=2)
""")
    why = tmp_path / "why"
    job = subprocess.Popen([sys.executable, script], env={
        **os.environ, "PYTHONPATH": str(HOOK), "RANKCHECK_WHY": str(why)})
    try:
        wait_for(lambda: len(collect(why)) == 2, 120)
        wait_for(lambda: "rank 0 waits in init_process_group, in line 6" in (
            answer(why).text), 120)  # not as soon as it is there
        assert "rank 1 is in line 5 of script.py: time.sleep(600" in answer(
            why).text
    finally:
        for pid in reversed(proc.descendants(job.pid)):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def test_a_module_that_is_being_imported(monkeypatch):
    """It has no names yet; the thread that looks at it goes on."""
    monkeypatch.setitem(sys.modules, "multiprocessing.process", sys)
    assert launchers.find_spawned() is None


def make_record(rank, began=1, **changes):
    """As a rank writes it that torchrun has started on node1."""
    record = {
        "format": watcher.RECORD_FORMAT, "rank": rank, "world_size": 2,
        "host": "node1", "pid": 100 * int(began) + rank, "parent": 7,
        "space": "1", "network": "net:[1]", "token": None, "began": began,
        "written": began + 9, "ended": {"status": 0, "time": began + 9},
        "joined": True, "answers": True, "launched": True, "alive": False,
        "asked": "", "stack": [], "library": "", "calls": None,
        "start": ["none", "0", None, None, None, "10.0.0.1", "29500", "2"]}
    return {**record, **changes}


def told(**changes):
    """What a launcher tells, with these changes."""
    start = jobs.read_launch(make_record(0))
    return [*{**start, **changes}.values()]


RUNS = {"ended": None, "alive": True}
SOME = ["7f", "0", None, None, None, "127.0.0.1", "29400", "2"]


@pytest.mark.parametrize(("changes", "split"), [
    # a sweep of torchruns with the same port, one after the other
    ([{}, {}, {"began": 20, "parent": 8}, {"began": 21, "parent": 8}],
     [[0, 1], [2, 3]]),
    # at once, with a port each; and with a run id each
    ([RUNS, RUNS, {**RUNS, "start": told(port="29501")},
      {**RUNS, "start": told(port="29501")}], [[0, 1], [2, 3]]),
    ([{**RUNS, "start": SOME}, {**RUNS, "start": SOME},
      {**RUNS, "start": ["8e", *SOME[1:]]},
      {**RUNS, "start": ["8e", *SOME[1:]]}], [[0, 1], [2, 3]]),
    # in two containers, each with its own network: the same loopback address
    ([{**RUNS, "start": SOME}, {**RUNS, "start": SOME},
      {**RUNS, "start": SOME, "network": "net:[2]", "space": "2"},
      {**RUNS, "start": SOME, "network": "net:[2]", "space": "2"}],
     [[0, 1], [2, 3]]),
    # two that mpiexec, or mp.spawn, has started: nobody told them a port
    ([{**RUNS, "start": [None] * 8}, {**RUNS, "start": [None] * 8},
      {**RUNS, "start": [None] * 8, "parent": 8},
      {**RUNS, "start": [None] * 8, "parent": 8}], [[0, 1], [2, 3]]),
    # one job whose nodes were told different ports, sizes, addresses
    ([RUNS, {**RUNS, "start": told(port="29501", world_size="3"),
             "parent": 8, "host": "node2"}], [[0, 1]]),
    ([{**RUNS, "start": SOME}, {**RUNS, "start": SOME, "host": "node2"}],
     [[0, 1]]),
    # one job on two nodes, each with its own launcher
    ([RUNS, {**RUNS, "parent": 8, "host": "node2"}], [[0, 1]]),
    # ranks that are there twice: one port cannot be two jobs' at once
    ([RUNS, RUNS, {**RUNS, "parent": 8, "began": 2},
      {**RUNS, "parent": 8, "began": 2}], [[0, 1, 2, 3]]),
    # what a rank's own script runs before it trains
    ([{"joined": False}, {"joined": False}, {"began": 20, **RUNS},
      {"began": 20, **RUNS}], [[0, 1, 2, 3]]),
    # a loop of `RANK=... python train.py &` in one shell
    ([{}, {}, {"began": 20}, {"began": 20}], [[0, 1], [2, 3]])])
def test_which_ranks_are_of_one_job(changes, split):
    records = [make_record(number % 2, **{"pid": number, **change})
               for number, change in enumerate(changes)]
    found = jobs.split_jobs(records)
    assert [sorted(record["pid"] for record in job)
            for job in found] == split


def test_which_jobs_are_of_the_last_start():
    """Those with its name, what still runs, and not a job's earlier attempt;
    without a name, what was not over when the last one began.
    """
    old, new = [make_record(0, 1), make_record(1, 1)], [
        make_record(0, 20, parent=8), make_record(1, 20, parent=8)]
    assert jobs.choose_current([old, new]) == [new]
    assert jobs.choose_current([[{**one, "token": "a"} for one in job]
                                for job in (old, new)]) != [new]
    other = [{**old[0], "token": "b"}], [{**new[0], "token": "a"}]
    assert jobs.choose_current([*other]) == [other[1]]
    other[0][0].update(RUNS)
    assert jobs.choose_current([*other]) == [*other]
    # the last start's rank has ended before another's began
    assert jobs.choose_current([*other[::-1]], "a") == [*other[::-1]]
    again = [make_record(0, 20, token="a", start=told(restart="1"))]
    first = [make_record(0, token="a")]
    assert jobs.choose_current([first, again]) == [again]


def test_a_clock_that_is_set_back(monkeypatch):
    """The last collective stays the last."""
    entries = [{"process_group": ["0"], "collective_seq_id": number,
                "profiling_name": "gloo:all_reduce", "input_sizes": [],
                "input_dtypes": [], "retired": False, "is_p2p": False,
                "time_created_ns": seconds * 1e9}
               for number, seconds in enumerate((5000, 5001, 7))]
    monkeypatch.setattr(calls, "find_dumps", lambda: [
        lambda *_: pickle.dumps({"entries": entries})])
    assert [call["number"] for call in calls.read_calls(False)
            ] == [0, 1, 2]


@pytest.mark.whole
@pytest.mark.parametrize("imports", [False, True])
def test_the_lines_of_a_record_import_nothing(imports, tmp_path):
    """Half a torch._inductor is what a script got that imported it, too."""
    script = tmp_path / "train.py"
    script.write_text(f"""\
import sys
import torch
from torch import distributed as dist
from rankcheck.why.calls import read_calls
dist.init_process_group("gloo", "tcp://127.0.0.1:{free_port()}", rank=0,
                        world_size=1)
if {imports}:
    import torch._inductor
dist.barrier()
print(read_calls(True)[-1]["line"][1:])
print("torch._inductor" in sys.modules, torch._inductor.__name__)
""")
    ended = python(tmp_path, script, PYTHONPATH=SOURCE_PATH,
                   TORCH_FR_BUFFER_SIZE="9")
    assert ended.stdout == (
        f"[9, '<module>']\n{imports} torch._inductor\n"), ended.stderr


HOOKED = """\
import sys
print(len([path for path in sys.path if path.endswith("/system/hook")]))
try:
    import sitecustomize
    print(sitecustomize.SITE)
except ImportError:
    print("none")
import usercustomize
print(usercustomize.USER)
"""
VERSIONS = [Path(sys.executable), *sorted(Path.home().glob(
    ".pyenv/versions/*/bin/python"))]


def name_version(interpreter):
    return interpreter.parts[-3]


@pytest.mark.parametrize("place", ["the sites", "none"])
@pytest.mark.parametrize("interpreter", VERSIONS, ids=name_version)
def test_a_sites_own_hook_stays_what_it_is(interpreter, place, tmp_path):
    """Also beside another clone's, and in any Python that a job calls: the
    hook's folder is not even in its path.
    """
    far, site = tmp_path / "rankcheck", tmp_path / place
    shutil.copytree(HOOK.parents[1], far)
    site.mkdir()
    if place != "none":
        program(site / "sitecustomize.py", "SITE = 'X'\nprint('runs')\n")
    program(site / "usercustomize.py", "USER = 'Y'\n")
    script = program(tmp_path / "script.py", HOOKED)
    copy = far / "system" / "hook"
    for hooks in ((HOOK, copy), (copy, HOOK)):
        done = subprocess.run(
            [interpreter, "-W", "error", script], text=True, cwd=tmp_path,
            capture_output=True, env={
                "RANK": "0", "WORLD_SIZE": "1", "RANKCHECK_WHY": "why",
                "PYTHONPATH": os.pathsep.join(map(str, (*hooks, site)))})
        assert (done.stdout.split(), done.stderr) == (
            ["0", "none", "Y"] if place == "none" else
            ["runs", "0", "X", "Y"], "")


CHANGES_NOTHING = """\
import faulthandler, glob, os, pickle, signal, sys, threading, time
if len(sys.argv) > 1:
    import torch
if __name__ == "__main__":
    for function in (sys.exit, os._exit, signal.signal, faulthandler.enable):
        assert pickle.loads(pickle.dumps(function)) is function
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    while threading.active_count() > 1:
        time.sleep(0.1)
    with open(os.environ["RANKCHECK_WHY"] + "/ask", "w") as file:
        file.write("1")
    for _ in sys.argv[1:]:
        time.sleep(6)  # it looks, writes, and is not seen
        file, = glob.glob(os.environ["RANKCHECK_WHY"] + "/*.json")
        assert '"stack_samples"' in open(file).read()
    assert threading.enumerate() == [threading.main_thread()]
    if len(sys.argv) == 1 and not os.fork():
        os._exit(0)  # from Python 3.12 on with a warning beside a thread
    print("the same")
"""


@pytest.mark.whole
@pytest.mark.parametrize("interpreter", [
    path for path in VERSIONS
    if not re.search(r"/(2|3\.[678])\.", str(path))], ids=name_version)
def test_the_hook_changes_nothing(interpreter, tmp_path):
    own = interpreter == VERSIONS[0]
    done = subprocess.run(
        [interpreter, "-c", CHANGES_NOTHING, *["torch"] * own],
        cwd=tmp_path, text=True, capture_output=True, env={
            **os.environ, "RANK": "0", "WORLD_SIZE": "1",
            "RANKCHECK_WHY": str(tmp_path / "why"), "PYTHONPATH": str(HOOK),
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy"})  # torch's
    assert (done.stdout, done.stderr) == ("the same\n", "")
    record, = (tmp_path / "why").glob("*.json")
    assert json.loads(record.read_text())["ended"]["status"] in (0, None)


def test_starts_do_not_pile_up(tmp_path, monkeypatch):
    """Only our own go, and none whose rank lives."""
    monkeypatch.setattr(start, "STARTS_FOLDER", tmp_path)
    monkeypatch.setattr(start, "KEPT_STARTS", 2)
    for name in "abcdef":
        start.make_start_folder(tmp_path / name)
        (tmp_path / name / "node1-1.json").touch()
        if name == "a":  # no mark of ours
            (tmp_path / name / START_MARK).write_text("mine")
        if name == "b":
            lives = subprocess.Popen(
                [sys.executable, "-c", "print(1, flush=True); input()"],
                env={"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(HOOK),
                     "RANKCHECK_WHY": str(tmp_path / name)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            lives.stdout.readline()
    (tmp_path / "0").mkdir()  # somebody else's
    try:
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "0", "a", "b", "e", "f"]
    finally:
        lives.communicate()
    start.make_start_folder(tmp_path / "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0", "a", "f", "g"]
    # a run's is never ours
    start.make_start_folder(tmp_path.parent / "elsewhere")
    assert not (tmp_path.parent / "elsewhere").exists()


@pytest.mark.parametrize("home", ["", "~", "me"])
def test_without_a_home_no_folder_is_called_so(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert start.find_starts_folder().is_absolute()


@pytest.mark.whole
@pytest.mark.parametrize(("last", "status", "error"), [
    ("", 0, None), ("1 / 0", 1, "ZeroDivisionError"),
    # nobody in the process knows the status then
    ("sys.exit(3)", None, None), ("raise SystemExit(3)", None, None),
    ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, None),
    ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nsys.exit()",
     None, None),
    # the first of chained errors, whatever followed it
    ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
     "    raise ValueError('bad') from error", 1, "ZeroDivisionError"),
    ("try:\n    1 / 0\nfinally:\n    int('x')", 1, "ZeroDivisionError"),
    # as rich's traceback does
    ("sys.excepthook = lambda *_: None\n1 / 0", 1, "ZeroDivisionError")])
def test_how_a_script_of_others_ends(last, status, error, tmp_path):
    check_end(tmp_path, last, status, error)


@pytest.mark.whole
def test_a_rank_of_a_start_that_is_seen_once_it_has_joined(tmp_path):
    """As mp.spawn's may be: it is of the same start as those seen earlier."""
    record, = run_watched(tmp_path, join_alone()).records
    assert record["joined"] and {*record["start"]} == {None}


def test_what_a_rank_starts_is_not_watched(tmp_path):
    """A rank that starts itself anew, by execv, stays one; what nobody has
    called a rank is none.
    """
    again = ("import os, subprocess, sys\nif len(sys.argv) < 2:\n"
             "    subprocess.run([sys.executable, __file__, 'again'])\n"
             "    os.execv(sys.executable, ['x', __file__, 'new'])\n"
             "import colorsys\nif sys.argv[1] == 'new':\n    1 / 0\n")
    record, = run_watched(
        tmp_path, again, RANK="0", WORLD_SIZE="2").records
    assert record["ended"]["error"] == "ZeroDivisionError"
    (tmp_path / "launcher").mkdir()
    assert not run_watched(tmp_path / "launcher", again).records


@pytest.mark.parametrize(("others", "chosen"), [
    # a monitor loads no torch; a rank that has joined is no monitor
    ({"answers": False}, [0]), ({"began": 9, "joined": False}, [0]),
    # both have joined: a duplicate rank, or has started another job
    ({"began": 9}, [0, 1]), ({"began": 9, "starter": "0"}, [0]),
    # a monitor that loads it: the launcher's own child is the rank
    ({"began": 9, "joined": False, "launched": False}, [0]),
    # it has not joined, but is about to
    ({"began": 9, "joined": False, "stack": [["x.py", 3, "rendezvous"]]},
     [0, 1])])
def test_who_is_the_rank(others, chosen, tmp_path, monkeypatch):
    record = {"format": watcher.RECORD_FORMAT, "rank": 0, "world_size": 2,
              "host": "node1", "written": 10, "began": 1, "start": [],
              "stack": [], "joined": True, "calls": None, "ended": None,
              "answers": True, "launched": True, "library": "",
              "asked": "7\n8\n"}  # the second by somebody else
    for pid, changes in enumerate(({}, others)):
        (tmp_path / f"node1-{pid}.json").write_text(json.dumps(
            {**record, "pid": pid, **changes}))
    monkeypatch.setattr(evidence, "ANSWER_SECONDS", 0)
    monkeypatch.setattr(time, "time_ns", lambda: 7)  # what they are asked
    assert sorted(rank.pid for rank in collect(tmp_path)) == chosen


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"rank": 0}', "[" * 100_000, '{"format": 1}'])
def test_files_of_ones_own_are_no_evidence(text, tmp_path):
    for name in "eval-2026.json", "node1-7.json", "node1-7.exits":
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "a-1.json")
    with pytest.raises(UserError, match="no rank left a record"):
        command.answer_request(command.Request(str(tmp_path)))


def test_a_rank_that_only_its_launcher_has_seen(tmp_path):
    (tmp_path / "node1-7.exits").write_text(json.dumps(
        {8: {"rank": 1, "status": -7, "time": 9}}))
    assert answer(tmp_path).text.startswith(
        "rank 1 was killed by SIGBUS, according to the launcher")


@pytest.mark.parametrize(("launcher", "last", "fault", "words"), [
    ("torchrun", "os._exit(4)", "rank failed", "with status 4"),
    ("spawn", "sys.exit(3)", "rank failed", "rank 1 ended, with "
     "status 3, according to the launcher"),
    ("spawn", "os.kill(os.getpid(), 14)", "rank killed", "rank 1 was "
     "killed by SIGALRM"),
    ("spawn", "1 / 0", "rank failed", ", in line 6 of script.py: 1 / 0")])
@pytest.mark.whole
def test_what_the_launcher_says_of_an_end(
        launcher, last, fault, words, tmp_path):
    """torchrun's table of exit codes, and the error of mp.spawn.

    Of torchrun's other ends there is recorded evidence.
    """
    script = program(tmp_path / "script.py", f"""\
import os, sys, time, torch.multiprocessing, torch.distributed as dist
def train(rank):
    own = None if "RANK" in os.environ else "tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", own, rank=rank, world_size=2)
    if rank == 1:
        {last}
    time.sleep(600)  # until the launcher ends it
if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        torch.multiprocessing.spawn(train, nprocs=2)
""")
    start = ["-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node=2"] * (launcher == "torchrun")
    folder = tmp_path / "why"
    python(tmp_path, *start, script, RANKCHECK_WHY=str(folder),
           PYTHONPATH=f"{HOOK}:{SOURCE_PATH}")
    found = answer(folder)
    assert (found.kind, words in found.text) == (fault, True), found.text


@pytest.mark.parametrize(("command", "is_launcher"), [
    ("python -m torch.distributed.run train.py", True),
    ("python -m torch.distributed.launch train.py", True),
    ("/opt/bin/python /opt/bin/torchrun --nproc-per-node 4 train.py", True),
    ("python /opt/bin/accelerate launch train.py", True),
    ("python -m accelerate.commands.launch train.py", True),
    ("python -um torch.distributed.run train.py", True),
    ("python -W ignore -u /bin/torchrun train.py", True),
    ("python my_torchrun_test.py", False), ("python train.py", False),
    ("python -m train --strategy deepspeed", False),
    ("python train.py --strategy deepspeed", False)])
def test_the_agent_of_torchrun_is_no_rank(command, is_launcher):
    """SLURM has told it a number, which is not that of its first rank."""
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    agent = None, None
    assert launchers.read_rank(slurm, command.split()) == (
        agent if is_launcher else (1, 2))
    assert launchers.read_rank(
        slurm | {"RANK": "5", "WORLD_SIZE": "8"},
        command.split()) == (agent if is_launcher else (5, 8))
    assert launchers.read_rank(
        {"RANK": "x", "WORLD_SIZE": ""}, ["python"]) == agent


@pytest.mark.parametrize("name", ["rankcheck_watcher", "rankcheck_witness"])
def test_a_launcher_leaves_as_any_script_does(name, tmp_path):
    """Also a script that has a launcher's name calls the hook's `leave`, by
    the name of today or the one before."""
    script = program(tmp_path / "torchrun", "import sys\n"
                     f"sys.modules['{name}'].leave(3)")
    ended = python(tmp_path, script, RANKCHECK_WHY="why",
                   PYTHONPATH=f"{HOOK}:{SOURCE_PATH}")
    assert (ended.returncode, ended.stderr) == (0, "")


FOLDERS = {"torch": "/env/lib/python3.11/site-packages/torch",
           "mpi4py": "/env/lib/python3.11/site-packages/mpi4py",
           "python": "/usr/lib/python3.11", "launcher": "/env/bin"}
COLLECTIVE = f"{FOLDERS['torch']}/distributed/distributed_c10d.py"


@pytest.mark.parametrize(("file", "owner"), [
    ("/home/me/torch/train.py", "script"),
    ("/home/me/pytorch/distributed/train.py", "script"),
    ("/home/me/mpi4py/train.py", "script"),
    ("/home/me/lib/python3.11/mine/train.py", "script"),
    ("/home/me/site-packages-old/train.py", "script"), ("<stdin>", "script"),
    (COLLECTIVE, "torch"), ("/usr/lib/python3.11/socket.py", "python"),
    ("/env/lib/python3.11/site-packages/axolotl/train.py", "installed"),
    ("/usr/lib/python3/dist-packages/yaml/main.py", "installed"),
    ("/usr/lib/python3.11/site-packages/six.py", "installed"),
    ("/env/bin/axolotl", "launcher"), ("<string>", "generated"),
    ("/env/lib/python3.11/site-packages/accelerate/commands/launch.py",
     "launcher"), ("src/mpi4py/MPI.src/Comm.pyx", "mpi4py")])
def test_whose_a_file_is(file, owner):
    """By the folders that a rank has recorded, and not by a name."""
    assert Sources(FOLDERS).owner(file) == owner


def test_a_line_of_an_installed_package_that_is_run():
    """As `-m axolotl.cli` is; with a script of somebody's, it is that one's.
    """
    stack = [["/env/bin/axolotl", 8, "<module>"],
             ["/env/lib/python3.11/site-packages/axolotl/cli.py", 3, "main"],
             ["/usr/lib/python3.11/contextlib.py", 9, "inner"],
             ["/env/lib/python3.11/site-packages/trainer/loop.py", 5, "fit"],
             [COLLECTIVE, 3, "all_reduce"]]
    assert Sources(FOLDERS).find_line(stack) == stack[3]
    mine = ["/home/me/plugin.py", 2, "on_step"]
    assert Sources(FOLDERS).find_line([*stack, mine, stack[-1]]) == mine
    assert Sources(FOLDERS).find_line(stack[-1:]) == stack[-1]


@pytest.mark.parametrize(("file", "function", "waits"), [
    ("distributed/distributed_c10d.py", "barrier", True),
    ("distributed/distributed_c10d.py", "_new_process_group_helper", True),
    ("distributed/distributed_c10d.py", "_object_to_tensor", False),
    ("distributed/checkpoint/filesystem.py", "_write_files_from_queue", False),
    ("distributed/checkpoint/state_dict_loader.py", "_restore", False),
    ("distributed/fsdp/_fully_shard/_fsdp_param_group.py",
     "wait_for_unshard", True),
    ("distributed/utils.py", "_sync_params_and_buffers", True),
    ("distributed/tensor/_api.py", "__new__", False),
    ("utils/data/dataloader.py", "_try_get_data", False)])
def test_which_functions_wait_for_other_ranks(file, function, waits):
    """Writing a checkpoint's file is no wait for others."""
    stack = [["/home/me/train.py", 3, "main"],
             [f"{FOLDERS['torch']}/{file}", 5, function]]
    assert bool(Sources(FOLDERS).find_wait(stack)) == waits
    assert not Sources(FOLDERS).find_wait([
        ["/home/me/torch/distributed/mine.py", 3, "barrier"]])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tells no positions")
def test_what_a_frame_calls():
    """The callee by its name, an operation by Python's."""
    lock, event = threading.Lock(), threading.Event()

    class Slow:
        def __gt__(self, other):
            return event.wait(60)

    def acquire():
        lock.acquire(
            timeout=max(60, 8))

    def sleep():
        time.sleep(2) if lock else None

    def compare():
        return Slow() > 1

    lock.acquire()
    for function, callee in ((acquire, "lock.acquire"),
                             (sleep, "time.sleep"), (compare, "COMPARE_OP")):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        wait_for(lambda thread=thread, function=function, callee=callee: (
            find_callee_in(thread, function) == callee), 20)
    lock.release()
    event.set()


def find_callee_in(thread, function):
    """What a function calls in another thread; None if it does not run."""
    frame = sys._current_frames().get(thread.ident)
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame and find_callee(frame)


def test_a_deadlock_takes_two_samples():
    """That agree; and no other thread may come to what others wait for."""
    ranks = read_ranks("three_groups")
    assert diagnose(ranks, lambda: ranks).kind == "deadlock"
    assert diagnose(ranks).kind == ""
    stack = [["/home/me/train.py", 9, "main"]]
    later = read_ranks("three_groups", stack=stack, callee="time.sleep")
    assert diagnose(ranks, lambda: later).kind == ""
    assert diagnose(later, lambda: later).kind == ""
    saving = [["Thread-1", 7, [[
        f"{ranks[0].folders['torch']}/distributed/checkpoint/state_dict_"
        "saver.py", 9, "save"]]]]
    later = read_ranks("three_groups", threads=saving)
    assert diagnose(later, lambda: later).kind == ""
    idle = [["ThreadPoolExecutor-0_0", 7, [[
        f"{ranks[0].folders['python']}/concurrent/futures/thread.py", 81,
        "_worker"]]]]
    later = read_ranks("three_groups", threads=idle)
    assert diagnose(later, lambda: later).kind == "deadlock"


def test_an_error_that_a_rank_handles():
    """In `finally` it calls a collective that the others do not call."""
    ranks = read_ranks("finally_barrier")
    ranks[1].handles = ["KeyError", [["/home/me/data.py", 6, "read"]]]
    found = diagnose(ranks)
    assert found.kind == "collective mismatch"
    assert "; rank 1 handles KeyError, raised in line 6 of data" in found.text
    assert "; handles KeyError, raised in line 6" in describe_rank(ranks[1])


def make_lost(message):
    """The record of rank 0 of two, which has lost the other in line 3."""
    return {"rank": 0, "host": "node1", "pid": 7, "written": 10, "began": 1,
            "world_size": 2, "answers": True, "folders": FOLDERS, "ended": {
                "status": 1, "error": "RuntimeError", "time": 10,
                "message": message,
                "stack": [["x.py", 3, "f"], [COLLECTIVE, 3, "all_reduce"]]}}


@pytest.mark.parametrize(("written", "kind"), [
    (9, "rank disappeared"), (30, "")])
def test_who_wrote_after_others_had_lost_it(written, kind):
    """Was there still: they have lost another one."""
    lost = make_lost("Connection closed by peer")
    silent = {"rank": 1, "host": "node1", "pid": 8, "written": written,
              "began": 1, "answers": True, "ended": None,
              "stack": [["x.py", 4, "g"]]}
    assert diagnose([Rank(lost, alive=False), Rank(silent, alive=False)]
                    ).kind == kind


@pytest.mark.parametrize(("line", "kind"), [
    (3, "aborted in the same line"), (5, "aborted in another line")])
def test_a_rank_that_gloo_aborts(line, kind):
    """It got a message of another size, and the other has lost it."""
    lost = make_lost("Connection reset by peer")
    aborted = {"rank": 1, "host": "node1", "pid": 8, "written": 9, "began": 1,
               "answers": True, "folders": FOLDERS,
               "stack": [["x.py", line, "f"], [COLLECTIVE, 3, "all_reduce"]],
               "ended": {"status": -6, "time": 9, "told": True}}
    found = diagnose([Rank(lost, alive=False), Rank(aborted, alive=False)])
    assert found.kind == kind
    assert [rank.rank for rank in found.ranks] == [1]
    assert "another size than it expects" in found.fix_text


@pytest.mark.parametrize(("killed", "blamed"), [(11, [1]), (40, [0])])
def test_sigkill_may_follow_from_an_error(killed, blamed):
    """A launcher sends it to those that do not end at SIGTERM."""
    error = {"rank": 0, "host": "node1", "pid": 7, "written": 10, "began": 1,
             "answers": True, "ended": {
                 "status": 1, "error": "ValueError", "time": 10,
                 "message": "bad", "stack": [["x.py", 3, "f"]]}}
    other = {"rank": 1, "host": "node1", "pid": 8, "written": 9, "began": 1,
             "answers": True, "stack": [["x.py", 4, "g"]],
             "ended": {"status": -9, "time": killed, "told": True}}
    found = diagnose([Rank(error, alive=False), Rank(other, alive=False)])
    assert [rank.rank for rank in found.ranks] == blamed


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")
def test_errors_inside_of_a_group():
    """The first one inside comes first, then what holds it."""
    group = builtins.ExceptionGroup
    try:
        try:
            raise KeyError("reward")
        except KeyError as error:
            inner = group("tasks", [error, ValueError("later")])
            raise group("all", [inner]) from None
    except group as error:
        found = watcher.chain_errors(error)
    assert [str(error) for error in found] == [
        "'reward'", "tasks (2 sub-exceptions)", "all (1 sub-exception)"]


def test_mpi_calls_are_recorded(tmp_path):
    """Of COMM_WORLD, and of what is made of it; objects have any shape."""
    needs("mpirun", "mpi4py")
    end = run_watched(tmp_path, """\
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Allreduce(MPI.IN_PLACE, np.ones(3))
comm.Split(0).Barrier()
comm.allgather(np.ones(3))
comm.reduce(1, MPI.SUM, 0)
copy = comm.Clone()
copy.Create_cart([1]).Sub([True]).Barrier()
copy.Create_graph([1], [0]).Barrier()
copy.Dup().Barrier()
""", RANK="0", WORLD_SIZE="2")
    record, = end.records
    assert [(call["name"], call["number"], call["call"], call["sizes"],
             call["line"][1], call["waits"], call["root"])
            for call in record["calls"]] == [
        ("MPI", 1, "Allreduce", [[3]], 4, False, None),
        ("MPI", 2, "Split", [], 5, False, None),
        ("MPI.2", 1, "Barrier", [], 5, False, None),
        ("MPI", 3, "allgather", [], 6, False, None),
        ("MPI", 4, "reduce", [], 7, False, 0),
        ("MPI", 5, "Clone", [], 8, False, None),
        ("MPI.5", 1, "Create_cart", [], 9, False, None),
        ("MPI.5.1", 1, "Sub", [], 9, False, None),
        ("MPI.5.1.1", 1, "Barrier", [], 9, False, None),
        ("MPI.5", 2, "Create_graph", [], 10, False, None),
        ("MPI.5.2", 1, "Barrier", [], 10, False, None),
        ("MPI.5", 3, "Dup", [], 11, False, None),
        ("MPI.5.3", 1, "Barrier", [], 11, False, None)]
    names = ["MPI", "MPI.2", "MPI.5", "MPI.5.1", "MPI.5.1.1", "MPI.5.2",
             "MPI.5.3"]
    assert record["groups"] == {name: [0] for name in names}
    assert [call["group"] for call in record["calls"]] == [
        call["name"] for call in record["calls"]]


def test_sigterm_leaves_a_stack(tmp_path):
    """Of the rank, and not of what it forks. A handler of the script's own is
    called, and nothing else.
    """
    end = run_watched(tmp_path, """\
import os, signal
for handled in False, True:
    if handled:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (
        5 if handled else -15)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import faulthandler
""", RANK="0", WORLD_SIZE="2")
    stack, = (tmp_path / "why").glob("*.stack")
    assert (end.status, stack.read_text()) == (0, "")
    end = run_watched(
        tmp_path, "import os\nos.kill(os.getpid(), 15)\n", RANK="0",
        WORLD_SIZE="2")
    assert end.status == -15 and "line 2 in <module>" in "".join(
        file.read_text() for file in (tmp_path / "why").glob("*.stack"))


@pytest.mark.whole
def test_no_place_is_in_the_hook(tmp_path):
    """How a rank ends is written by the hook, in the rank's main thread."""
    program(tmp_path / "torch.py", "")
    record, = run_watched(
        tmp_path, "import sys, time, torch\ntime.sleep(2)\nsys.exit(2)\n",
        RANK="0", WORLD_SIZE="2").records
    assert (record["answers"], record["stack"]) == (True, [])


def test_an_end_is_written_where_no_file_can_be_opened(tmp_path):
    """Its room is reserved from the start."""
    end = run_watched(tmp_path, """\
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
kept = []
while True:
    kept.append(open(os.devnull))
""", RANK="0", WORLD_SIZE="2")
    record, = end.records
    assert (end.status, record["ended"]) == (1, None)
    ended, = (tmp_path / "why").glob("*.end")
    assert "Too many open files" in ended.read_text()
    assert "line 5 of script.py" in answer(tmp_path / "why").text


def test_files_of_a_script_that_has_closed_ours_stay(tmp_path):
    """Nothing is written into them or cut off, at a fork or at the end."""
    end = run_watched(tmp_path, """\
import os
os.closerange(3, 1000)
files = [open(f"mine{number}", "wb", 0) for number in range(8)]
for text in b"one ", b"two":
    for file in files:
        file.write(text)
    if os.fork():
        os.wait()
        break
""", RANK="0", WORLD_SIZE="2")
    assert end.status == 0
    assert {file.read_bytes() for file in tmp_path.glob("mine*")} == {
        b"one two"}


def test_a_start_without_a_rank(tmp_path):
    """`why` alone speaks of it, and of what its launcher has printed."""
    home = {"HOME": str(tmp_path), "PYTHONPATH": SOURCE_PATH}
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "rankcheck", "why", "run", "--", "bash",
             "-c", "echo no such node >&2; exit 3"], stdout=file, stderr=file,
            env=os.environ | home)
    end = python(tmp_path, "-m", "rankcheck", "why", **home)
    assert end.returncode == 2 and "last start: " in end.stdout
    assert end.stderr.endswith("no such node\n"), end.stderr


@pytest.mark.parametrize(("sacct", "lines"), [
    ("4711|OUT_OF_MEMORY|0:125||n1\n4711.0|FAILED|1:0|9000K|n1\n",
     ["4711 OUT_OF_MEMORY 0:125  n1", "4711.0 FAILED 1:0 9000K n1"]),
    ("", ["JobState=NODE_FAIL Reason=NodeDown ExitCode=0:1"])])
def test_slurms_word(sacct, lines, monkeypatch):
    """By sacct, else by scontrol; nothing of what is no job's number."""
    monkeypatch.setattr(evidence, "run_slurm_command", lambda command, *_: {
        "sacct": sacct, "scontrol": "JobId=4711 JobState=NODE_FAIL "
        "Reason=NodeDown Dependency=(null) ExitCode=0:1 BatchHost=n1\n",
    }[command])
    assert evidence.ask_about_job("471100000") == lines
    assert evidence.ask_about_job("runs/mine") == []


def test_a_job_by_its_number(tmp_path):
    """Its newest start, by SLURM's number or PBS's; none has the other."""
    folder = tmp_path / "ddp-1n4g-12" / "why"
    folder.mkdir(parents=True)
    (folder / "node1-7.json").touch()
    assert evidence.find_evidence("12", tmp_path) == folder
    assert evidence.find_evidence("12.server", tmp_path) == folder
    with pytest.raises(UserError, match="no run in"):
        evidence.find_evidence("471100000", tmp_path)


def test_a_start_by_the_number_of_its_job(tmp_path, monkeypatch):
    """As `why run` in a batch script, without a folder of runs."""
    monkeypatch.setattr(start, "STARTS_FOLDER", tmp_path)
    for name, job in (("20260101-1", "4710"), ("20260101-2", "4711"),
                      ("20260101-3", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node1-7.json").write_text(json.dumps({
            "format": watcher.RECORD_FORMAT, "start": [None, None, job, "0"]}))
    found = evidence.find_evidence("4711", tmp_path / "runs")
    assert found.name == "20260101-2"
    with pytest.raises(UserError, match="nor a start in the cache"):
        evidence.find_evidence("4712", tmp_path / "runs")


def test_the_page_has_a_row_for_each_fault():
    """In the rules' own words."""
    rows = [f"| {sign} | {fault}: {find.__doc__} | {fix} |"
            for sign, fault, fix, find in FAULT_QUESTIONS]
    page = (HOUSE / "docs/why.md").read_text()
    for row in rows:
        assert row in page, "docs/why.md lacks this row; fix: add it"
    assert "\n".join(rows) in page, (
        "docs/why.md has these rows in another order than judge.py")


def test_what_is_compiled_is_not_the_scripts_line():
    """While torch.compile compiles, its own files are the innermost."""
    mine = ["/home/me/train.py", 12, "train"]
    ours = [calls.__file__, 5, "called"]  # MPI's calls
    made = ["/tmp/torchinductor_me/4g/c4gctn4dfcbfhsqf3etj2uh6z57f2atxonbbl6"
            "f2sxtbm3csrab4.py", 33, "<module>"]
    library = ["/lib/python3/site-packages/torch/_dynamo/eval_frame.py", 5, ""]
    assert Sources(None).find_line([mine, library, made]) == mine
    assert Sources(None).find_line([mine, ours]) == mine
