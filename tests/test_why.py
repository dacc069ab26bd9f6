"""`why`: faults in scripts that are not ours, each named; no false alarm."""

import functools
import gzip
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed  # noqa: F401 the witness looks there
import why_cases
from cluster import wait_for
from conftest import edit, needs, program, python

from backstage import ROOT
from notebooks.experiments import hangs
from notebooks.experiments.hangs import REDUCE
from rankcheck.errors import UserError
from rankcheck.launch.ranks import Launch, free_port
from rankcheck.why import command, evidence, start, witness
from rankcheck.why.evidence import collect
from rankcheck.why.judge import ADVICE, RULES, SIGNS, judge
from rankcheck.why.ranks import PATIENCE, Place, Rank
from rankcheck.why.start import HOOK
from rankcheck.why.witness import (
    MARK,
    Witness,
    find_line,
    read_rank,
    read_state,
)
from workshop.results import speed
from workshop.results.runs import published_efficiency


@pytest.fixture
def launch(tmp_path):
    """Starts a foreign script with a fault; ends it after the test."""
    started = []

    def start(edits=(), *flags, **variables):
        script = tmp_path / "their_train.py"
        script.write_text(edit(hangs.SCRIPT.read_text(), *edits))
        started.append(Launch(script, *flags, world_size=3, probes=[
            functools.partial(hangs.prepare, tmp_path / "why",
                              dict.fromkeys(range(3), variables))]))
        return started[-1]

    yield start
    for one in started:
        one.clear()


def answer(folder, alive=True):
    return judge(collect(folder, []), alive)


def lose_patience(monkeypatch, seconds):
    for name in ("ranks", "judge", "evidence", "command"):
        monkeypatch.setattr(f"rankcheck.why.{name}.PATIENCE", seconds)


NAMED = {  # the fault, the ranks to blame, and words of the reason
    1: ("different collectives", [2], "all_gather of float [1]"),
    2: ("different collectives", [1], "all_gather of float [1]"),
    3: ("different sizes", [1], "all_reduce of float [3]"),
    4: ("no record of an end", [1], "rank 1 on"),
    5: ("blocked port", [2], "cannot be reached from rank 2 on"),
    6: ("wrong MASTER_ADDR", [0], "192.0.2.77"),
    7: ("straggler", [3], "the others wait for it"),
    8: ("no record of an end", [2, 3], "and all ranks of that node with it"),
    9: ("a rank is late", [2], "comm.Recv(loss, source=0), and kept"),
}


@pytest.mark.whole
@pytest.mark.parametrize("number", NAMED)
def test_the_faults_of_the_lesson(number, tmp_path, monkeypatch):
    """Each is named within a minute of the first sign, and not otherwise."""
    if number == hangs.MPI:
        needs("mpirun", "mpi4py")
        lose_patience(monkeypatch, 4)  # its ranks compute while they wait
    fault, blamed, words = NAMED[number]
    folder = tmp_path / "why"
    job = hangs.start(number, tmp_path, folder)
    try:
        if number in (4, 8):  # those that end
            job.wait(240)
        end, found = time.monotonic() + 240, SimpleNamespace(kind="")
        while not found.kind and time.monotonic() < end:
            time.sleep(1)
            found = answer(folder, alive=number not in (4, 8))
    finally:
        job.clear()
    assert (found.kind, words in found.text) == (fault, True), found.text
    assert [rank.rank for rank in found.ranks] == blamed
    if number in (1, 2, 3, 7, 9):
        assert " of their_" in found.text


@pytest.mark.table
@pytest.mark.parametrize(("stage", "launcher", "fault", "others"), [
    pytest.param(*how, id=name) for name, how in why_cases.cases()])
def test_a_job_of_the_table(
        stage, launcher, fault, others, tmp_path, request):
    job = (why_cases.Plain(tmp_path) if launcher != "srun" else
           why_cases.Job(tmp_path, request.getfixturevalue("slurm")))
    why_cases.try_out(job, stage, launcher, fault, others)


@pytest.mark.whole
def test_what_every_site_has_prints_what_the_lesson_shows(tmp_path):
    cells = json.loads((ROOT / "notebooks" / "hangs.ipynb").read_text())
    text, = ("".join(cell["source"]) for cell in cells["cells"]
             if cell["id"] == "hangs-every-site")
    script, = re.findall("```python\n(.*?)```", text, re.S)
    (tmp_path / "lost.py").write_text(edit(script, (
        # which reads this variable when it is loaded: here, long before
        "as dist\n", "as dist; dist.set_debug_level_from_env()\n")))
    blocks = re.findall("```text\n(.*?)```", text, re.S)
    env = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for line, shown in re.findall(
            r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks).replace(
                "\\\n    ", ""), re.M):
        fault = line.split()[-1]
        if fault in ("other", "late"):  # torchrun adds nothing to them
            job = Launch(tmp_path / "lost.py", fault, world_size=2, env=env)
            said = (look_at_ranks(job) if fault == "late" else
                    "".join(rank.err for rank in job.wait()))
        elif "py-spy" not in line:  # that has looked at both already
            said = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
        for words in shown.splitlines():
            assert re.search(".*".join(map(
                re.escape, words.split("..."))), said), (words, said)


def look_at_ranks(job):
    """What py-spy says of them, once one waits for the one that is late."""
    try:
        for _ in range(240):
            said = "".join(subprocess.run(
                ["py-spy", "dump", "--pid", str(rank.pid)], text=True,
                capture_output=True).stdout for rank in job.jobs)
            if "main (lost.py:18)" in said and "main (lost.py:19)" in said:
                return said
            time.sleep(0.5)
        raise AssertionError(said)
    finally:
        job.clear()


@pytest.mark.whole
def test_a_sound_run_is_no_alarm(launch, tmp_path, capsys, monkeypatch):
    """Unless somebody stops its processes, as Ctrl-Z does."""
    launch((), "--pause", 1)
    folder = tmp_path / "why"
    wait_for(lambda: folder.exists() and [
        len(rank.calls or ()) > 8 for rank in collect(folder, [])
        ] == [True] * 3, 240)
    assert answer(folder).kind == ""
    record = json.loads((
        ROOT / "example-logs" / "ddp-2" / "hyperparameters.json").read_text())
    (tmp_path / "hyperparameters.json").write_text(json.dumps(record | {
        "hosts": ["gpu01"], "backend": "nccl", "scheduler": "SLURM job 7",
        "launcher": "srun", "command": "python x", "startup": 6.7}))
    assert speed.main(SimpleNamespace(job=str(folder))) == 0
    said = capsys.readouterr().out
    assert ("\n  world size 2: 1 node x 2 cpu, gpu01; nccl, SLURM job 7; "
            "srun: python x; startup 6.7 s\n") in said
    assert said.startswith("nothing is wrong: ")
    assert re.search(r"where the time of rank 0 goes, of 40 looks.*\d%  line "
                     r"\d+ of their_train.py: time.sleep\(args.pause\)", said,
                     re.DOTALL)
    for rank in collect(folder, []):
        os.kill(rank.pid, signal.SIGSTOP)
    monkeypatch.setattr(evidence, "ANSWER", 1)
    assert speed.main(SimpleNamespace(job=str(folder))) == 1
    assert capsys.readouterr().out.startswith(
        "a stopped process: ranks 0, 1, 2 on ")


@pytest.mark.whole
def test_a_script_that_knows_nothing_of_us(tmp_path, monkeypatch, capsys):
    """py-spy is enough."""
    needs("py-spy")
    lose_patience(monkeypatch, 4)
    script = tmp_path / "their_train.py"
    script.write_text(edit(hangs.SCRIPT.read_text(), (
        REDUCE, "        if rank != 1 or step != 3:\n    " + REDUCE)))
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "RANK": str(rank), **names},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(2)]
    try:
        end, found = time.monotonic() + 240, ""
        while not re.match("nobody moves: .*line 40", found):
            assert time.monotonic() < end, found
            status = command.why(str(ranks[0].pid))
            found = capsys.readouterr().out.partition("\n")[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert status == 0  # their messages are not known, only their lines
    assert "rank 0 is in line 38 of their_train.py" in found
    assert "rank 1 is in line 40 of their_train.py" in found


@pytest.mark.whole
def test_a_stopped_process_has_no_stack():
    """py-spy cannot look into it."""
    needs("py-spy")
    process = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"],
        stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert evidence.spy(process.pid) == []
    finally:
        process.kill()
        process.communicate()


def run_watched(folder, text, *words, **variables):
    """Run this as a rank, with the hook; its status, and what it leaves."""
    script = program(folder / "script.py", text)
    hook = os.pathsep.join([str(HOOK), str(ROOT)])
    end = python(folder, *words, script, PYTHONPATH=hook, **{
        "RANKCHECK_WHY": "why", **variables})
    return end.returncode, [json.loads(file.read_text()) for file in
                            (folder / "why").glob("*.json")]


WATCHED = """\
import sys, time
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


def test_memory_and_destructors_stay_as_they_are(tmp_path):
    """`del` frees at once, while the hook looks, too."""
    script = program(tmp_path / "script.py", WATCHED)
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    plain = python(tmp_path, script, 0, **rank)
    watched = python(tmp_path, script, 3, **rank, PYTHONPATH=str(HOOK),
                     RANKCHECK_WHY="why")
    assert list((tmp_path / "why").glob("*.json")), watched.stderr
    assert plain.stdout == watched.stdout == (
        "noisy is freed\ndel\npeak 1\nkept is freed\n")


def test_a_loop_that_only_asks_does_not_move():
    """As a data loader's does; one that computes or reduces does."""
    mine = SimpleNamespace(seen=set(), place=("", 1))
    moves = [Witness.has_moved(mine, (line, calls), works)
             for line, calls, works in (
                 (7, 1, False), (8, 1, False), (7, 1, False), (8, 1, False),
                 (8, 1, True), (8, 2, False))]
    assert moves == [True, True, False, False, True, True]


def test_an_answer_comes_at_once(monkeypatch):
    """Where the time goes takes longer to tell, above all on a busy node."""
    written, asks = [], iter((0, 1, 1))

    def write(lines=False):
        written.append(lines)
        mine.ended = {} if lines else None

    mine = SimpleNamespace(
        ended=None, still=0, place=(), write=write, find_script=lambda: None,
        clock=lambda: 0, last_ask=lambda: next(asks), find_place=lambda: (),
        reads_files=lambda: False, waits=lambda: False,
        has_moved=lambda *_: False, note_error=lambda: None)
    monkeypatch.setattr(witness, "POLL", 0)
    Witness.watch_moves(mine)
    assert written == [False, False, True]


@pytest.mark.parametrize("looks", [{}, {"looks": [[1, []]]}])
def test_an_answer_is_one_without_its_second_part(looks, tmp_path,
                                                  monkeypatch):
    """`why` waits for that, but not for ever."""
    record = {
        "format": witness.FORMAT,
        "rank": 0, "world_size": 1, "pid": os.getpid(), "calls": None,
        "host": witness.name_host(os.environ), "ended": None, "oom_before": 0,
        "began": 1, "written": 1, "start": [], "stack": [], "joined": True,
        "answers": True}
    file = tmp_path / f"{record['host']}-{os.getpid()}.json"
    file.write_text(json.dumps(record))
    answers = [record | {"written": 2}, record | looks | {"written": 3}]

    def pause(seconds):
        if answers:
            part = file.with_suffix(".part")
            part.write_text(json.dumps(answers.pop(0)))
            part.replace(file)

    monkeypatch.setattr(evidence, "ANSWER", 0.2)
    monkeypatch.setattr(time, "sleep", pause)
    rank, = collect(tmp_path, [])
    assert rank.fresh and rank.written == 3


def test_what_workers_do():
    """One computes, one sleeps, one has ended."""
    words = ("while True: pass", "import time; time.sleep(99)", "")
    started = [subprocess.Popen([sys.executable, "-c", word])
               for word in words]
    try:
        os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)
        time.sleep(1)  # the other one has begun to sleep
        before = witness.see_workers(os.getpid())
        time.sleep(0.5)
        seen = {pid: works for pid, _, works in witness.compare(
            before, witness.see_workers(os.getpid()))}
        assert [seen.get(one.pid) for one in started] == [True, False, None]
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_a_process_that_is_no_rank(tmp_path):
    """As `why run -- python train.py` starts it: what it starts may be."""
    script = tmp_path / "script.py"
    script.write_text("import subprocess, sys\nif len(sys.argv) < 2:\n"
                      "    subprocess.run([sys.executable, __file__, 'x'])\n")
    subprocess.run(
        ["bash", "-c", f"RANKCHECK_WHY=$PWD/why-$$ exec {sys.executable} "
         f"{script}"], cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(HOOK)})
    rank, = collect(*tmp_path.glob("why-*"), [])
    assert (rank.rank, rank.world_size, rank.ending) == (0, 1, "done")


@pytest.mark.whole
def test_ranks_that_plain_python_spawns(tmp_path):
    """Without the hook and with it, before they have joined a group: their
    numbers are those that mp.spawn gives.
    """
    needs("py-spy")
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
        wait_for(lambda: sorted(
            seen["rank"] for pid in evidence.descendants(job.pid)
            if (seen := evidence.look(pid))) == [0, 1], 120)
        assert evidence.look(job.pid, alone=True)["world_size"] == 1
        wait_for(lambda: len(found := collect(why, [])) == 2 and found[
            0].inside("init_process_group"), 120)
        found = collect(why, [])
        for rank in found:
            rank.still = PATIENCE + 1
        answer = judge(found)
        assert (answer.kind, answer.ranks) == ("a rank is late", [found[1]])
        assert "line 5 of script.py: time.sleep(600 * rank)" in answer.text
    finally:
        for pid in reversed(evidence.descendants(job.pid)):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def test_an_earlier_start_in_the_same_folder():
    """Three ranks that have ended, then two."""
    first, second = ([{"rank": rank, "began": began, "written": began + 9,
                       "start": ["node1", port, size]}
                      for rank in range(size)]
                     for began, port, size in ((1, "1", 3), (20, "2", 2)))
    assert evidence.of_last_start(first + second) == second
    first[2]["written"] = 21  # it still writes
    assert evidence.of_last_start(first + second) == [first[2], *second]


def test_a_clock_that_is_set_back(tmp_path, monkeypatch):
    """An answer is one, and the last collective stays the last."""
    file = tmp_path / "node1-1.json"
    file.write_text("{}")
    asked = {file: evidence.name_write(file)}
    record = {"host": "node1", "pid": 1}
    assert not evidence.answered(tmp_path, record, asked)
    os.utime(file, (1, 1))
    assert evidence.answered(tmp_path, record, asked)

    entries = [{"process_group": ["0"], "collective_seq_id": number,
                "profiling_name": "gloo:all_reduce", "input_sizes": [],
                "input_dtypes": [], "retired": False, "is_p2p": False,
                "time_created_ns": seconds * 1e9}
               for number, seconds in enumerate((5000, 5001, 7))]
    monkeypatch.setattr(witness, "find_dumps", lambda: [
        lambda *_: pickle.dumps({"entries": entries})])
    assert [call["number"] for call in witness.read_record(False)["calls"]
            ] == [0, 1, 2]


@pytest.mark.parametrize("imports", [False, True])
def test_the_lines_of_a_record_import_nothing(imports, tmp_path):
    """Half a torch._inductor is what a script got that imported it, too."""
    script = tmp_path / "train.py"
    script.write_text(f"""\
import sys
import torch
from torch import distributed as dist
from rankcheck.why.witness import read_record
dist.init_process_group("gloo", "tcp://127.0.0.1:{free_port()}", rank=0,
                        world_size=1)
if {imports}:
    import torch._inductor
dist.barrier()
print(read_record(True)["calls"][-1]["line"][1:])
print("torch._inductor" in sys.modules, torch._inductor.__name__)
""")
    ended = python(tmp_path, script, PYTHONPATH=str(ROOT),
                   TORCH_FR_BUFFER_SIZE="9")
    assert ended.stdout == (
        f"[9, '<module>']\n{imports} torch._inductor\n"), ended.stderr


HOOKED = """\
import sys
print(len([path for path in sys.path if path.endswith("/why/hook")]))
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
    far, site = tmp_path / "rankcheck" / "why", tmp_path / place
    shutil.copytree(HOOK.parent, far)
    site.mkdir()
    if place != "none":
        program(site / "sitecustomize.py", "SITE = 'X'\nprint('runs')\n")
    program(site / "usercustomize.py", "USER = 'Y'\n")
    script = program(tmp_path / "script.py", HOOKED)
    for hooks in ((HOOK, far / "hook"), (far / "hook", HOOK)):
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
    open(os.environ["RANKCHECK_WHY"] + "/ask", "w").close()
    for _ in sys.argv[1:]:
        time.sleep(6)  # it looks, writes, and is not seen
        file, = glob.glob(os.environ["RANKCHECK_WHY"] + "/*.json")
        assert '"looks"' in open(file).read()
    assert threading.enumerate() == [threading.main_thread()]
    if len(sys.argv) == 1 and not os.fork():
        os._exit(0)  # from Python 3.12 on with a warning beside a thread
    print("the same")
"""


@pytest.mark.parametrize("interpreter", [
    path for path in VERSIONS
    if not re.search(r"/(2|3\.[678])\.", str(path))], ids=name_version)
def test_the_hook_changes_nothing(interpreter, tmp_path):
    own = interpreter == VERSIONS[0]
    done = subprocess.run(
        [interpreter, "-c", CHANGES_NOTHING, *["torch"] * own],
        cwd=tmp_path, text=True, capture_output=True, env={
            **os.environ, "RANK": "0", "WORLD_SIZE": "1",
            "RANKCHECK_WHY": str(tmp_path / "why"), "PYTHONPATH": str(HOOK)})
    assert (done.stdout, done.stderr) == ("the same\n", "")
    record, = (tmp_path / "why").glob("*.json")
    assert json.loads(record.read_text())["ended"]["status"] in (0, None)


def test_starts_do_not_pile_up(tmp_path, monkeypatch):
    """Only our own go, and none whose rank lives."""
    monkeypatch.setattr(start, "STARTS", tmp_path)
    monkeypatch.setattr(start, "KEPT", 2)
    for name in "abcdef":
        start.make_folder(tmp_path / name)
        (tmp_path / name / "node1-1.json").touch()
        if name == "a":  # no mark of ours
            (tmp_path / name / MARK).write_text("mine")
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
    start.make_folder(tmp_path / "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0", "a", "f", "g"]
    start.make_folder(tmp_path.parent / "elsewhere")  # a run's is never ours
    assert not (tmp_path.parent / "elsewhere").exists()


@pytest.mark.parametrize("home", ["", "~", "me"])
def test_without_a_home_no_folder_is_called_so(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert start.find_starts().is_absolute()


def test_a_shell_alone_watches_nothing(tmp_path):
    """Watching is asked for; then a launcher needs no word of ours."""
    env = {"PYTHONPATH": str(ROOT)}
    script = program(tmp_path / "script.py", "import os, sys\n"
                     "print(os.environ.get('RANKCHECK_WHY'))\n")
    assert python(tmp_path, script, **env).stdout == "None\n"
    done = python(tmp_path, "-m", "workshop", "why", "run", "--", "bash", "-c",
                  "echo $RANKCHECK_WHY $PYTHONPATH", **env)
    said, variables = done.stdout.splitlines()
    folder, paths = variables.split()
    assert said.endswith(f"rankcheck why {folder}")
    assert paths.split(os.pathsep)[0] == str(HOOK)
    assert (Path(folder) / MARK).exists()
    shutil.rmtree(folder)


JOIN = ("import torch.distributed as dist\ndist.init_process_group('gloo', "
        f"'tcp://127.0.0.1:{free_port()}', rank=0, world_size=1)\n")


@pytest.mark.parametrize(("last", "status", "error"), [
    ("", 0, None), ("1 / 0", 1, "ZeroDivisionError"),
    # nobody in the process knows the status then
    ("sys.exit(3)", None, None), ("raise SystemExit(3)", None, None),
    ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, None),
    ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nsys.exit()",
     None, None),
    # the first of chained errors, whatever came of it
    ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
     "    raise ValueError('bad') from error", 1, "ZeroDivisionError"),
    ("try:\n    1 / 0\nfinally:\n    int('x')", 1, "ZeroDivisionError"),
    # as rich's traceback does
    ("sys.excepthook = lambda *_: None\n1 / 0", 1, "ZeroDivisionError"),
    ("run_main(lambda: 1 / 0)", 1, "ZeroDivisionError"),
    # in a group, the course's stages leave without exit handlers
    (JOIN + "run_main(lambda: 1 / 0)", 1, "ZeroDivisionError"),
    (JOIN + "run_main(lambda: None)", 0, None)])
def test_how_a_script_of_others_ends(last, status, error, tmp_path):
    end, (record,) = run_watched(
        tmp_path, "import os, sys, colorsys\nfrom backstage.errors import "
        f"run_main\nos.chdir('/')\n{last}\n", RANK="0", WORLD_SIZE="2")
    assert record["ended"]["status"] == status
    assert status is None or end == status
    assert record["ended"].get("error") == error
    if error:  # where it was, and what it said
        assert find_line(record["ended"]["stack"])[0].endswith("script.py")
        assert "zero" in record["ended"]["message"]


def test_what_a_rank_starts_is_not_watched(tmp_path):
    """A rank that starts itself anew, by execv, stays one; what nobody has
    called a rank is none.
    """
    again = ("import os, subprocess, sys\nif len(sys.argv) < 2:\n"
             "    subprocess.run([sys.executable, __file__, 'again'])\n"
             "    os.execv(sys.executable, ['x', __file__, 'new'])\n"
             "import colorsys\nif sys.argv[1] == 'new':\n    1 / 0\n")
    _, (record,) = run_watched(tmp_path, again, RANK="0", WORLD_SIZE="2")
    assert record["ended"]["error"] == "ZeroDivisionError"
    (tmp_path / "launcher").mkdir()
    _, found = run_watched(tmp_path / "launcher", again)
    assert not found


@pytest.mark.parametrize(("others", "chosen"), [
    # a monitor loads no torch; a rank that has joined is no monitor
    ({"answers": False}, [0]), ({"began": 9, "joined": False}, [0]),
    # both have joined: a rank is there twice
    ({"began": 9}, [0, 1]),
    # it has not joined, but is about to
    ({"began": 9, "joined": False, "stack": [["x.py", 3, "rendezvous"]]},
     [0, 1])])
def test_who_is_the_rank(others, chosen, tmp_path, monkeypatch):
    record = {"format": witness.FORMAT, "rank": 0, "world_size": 2,
              "host": "node1", "written": 10, "began": 1, "start": [],
              "stack": [], "joined": True, "calls": None, "ended": None,
              "answers": True}
    for pid, changes in enumerate(({}, others)):
        (tmp_path / f"node1-{pid}.json").write_text(json.dumps(
            {**record, "pid": pid, **changes}))
    monkeypatch.setattr(evidence, "ANSWER", 0)
    monkeypatch.setattr(evidence, "answered", lambda *_: True)
    assert sorted(rank.pid for rank in collect(tmp_path, [])) == chosen


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"rank": 0}', "[" * 100_000, '{"format": 1}'])
def test_files_of_ones_own_are_no_evidence(text, tmp_path):
    for name in "eval-2026.json", "node1-7.json", "node1-7.exits":
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "a-1.json")
    with pytest.raises(UserError, match="no process there has said which"):
        command.look(str(tmp_path), tmp_path, [])


def test_a_rank_that_only_its_launcher_has_seen(tmp_path):
    (tmp_path / "node1-7.exits").write_text(json.dumps(
        {8: {"rank": 1, "status": -7, "time": 9}}))
    assert answer(tmp_path, alive=False).text == (
        "SIGBUS has ended rank 1 on node1, as the launcher says")


@pytest.mark.parametrize(("last", "fault", "words"), [
    ("sys.exit(3)", "a rank ended", "rank 1 was the first to end, with "
     "status 3"),
    ("os._exit(4)", "a rank ended", "with status 4"),
    ("os.kill(os.getpid(), 14)", "a rank was killed", "SIGALRM has ended "
     "rank 1"),
    ("1 / 0", "a rank ended", "in line 6 of script.py: 1 / 0, with ")])
@pytest.mark.whole
def test_what_the_launcher_says_of_an_end(last, fault, words, tmp_path):
    """torchrun's table of exit codes, and the error of mp.spawn."""
    script = program(tmp_path / "script.py", f"""\
import os, sys, time, torch.multiprocessing, torch.distributed as dist
def train(rank):
    dist.init_process_group("gloo", "tcp://127.0.0.1:{free_port()}",
                            rank=rank, world_size=2)
    if rank == 1:
        {last}
    time.sleep(600)  # until the launcher ends it
if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
    else:
        torch.multiprocessing.spawn(train, nprocs=2)
""")
    for launcher in (["-m", "torch.distributed.run", "--standalone",
                      "--nproc-per-node=2"], []):
        folder = tmp_path / f"why{len(launcher)}"
        python(tmp_path, *launcher, script, RANKCHECK_WHY=str(folder),
               PYTHONPATH=os.pathsep.join([str(HOOK), str(ROOT)]))
        found = answer(folder, alive=False)
        assert (found.kind, words in found.text) == (fault, True), found.text


@pytest.mark.parametrize(("command", "is_launcher"), [
    ("python -m torch.distributed.run train.py", True),
    ("python -m torch.distributed.launch train.py", True),
    ("/opt/bin/python /opt/bin/torchrun --nproc-per-node 4 train.py", True),
    ("python -m workshop.as_torchrun train.py", False),
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
    assert read_rank(slurm, command.split()) == (
        agent if is_launcher else (1, 2))
    assert read_rank(slurm | {"RANK": "5", "WORLD_SIZE": "8"},
                     command.split()) == (agent if is_launcher else (5, 8))
    assert read_rank({"RANK": "x", "WORLD_SIZE": ""}, ["python"]) == agent


def test_names_that_are_no_utf8(tmp_path):
    """Of any process of the machine, which `why` looks through."""
    name = os.path.join(os.fsencode(tmp_path), b"\xff\xfe")
    shutil.copy(shutil.which("sleep"), name)
    process = subprocess.Popen([name, "60"])
    try:
        assert process.pid in evidence.descendants(os.getpid())
        assert evidence.look(process.pid) is None
        assert read_state(process.pid) in "RS"
    finally:
        process.kill()
        process.wait()


def test_mpi_calls_are_recorded(tmp_path):
    """Of COMM_WORLD, and of what is made of it; objects have any shape."""
    needs("mpirun", "mpi4py")
    _, (record,) = run_watched(tmp_path, """\
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Allreduce(MPI.IN_PLACE, np.ones(3))
comm.Split(0).Barrier()
comm.allgather(np.ones(3))
""", RANK="0", WORLD_SIZE="2")
    assert [(call["name"], call["number"], call["call"], call["sizes"],
             call["line"][1], call["waits"]) for call in record["calls"]] == [
        ("MPI", 1, "Allreduce", [[3]], 4, False),
        ("MPI.1", 1, "Barrier", [], 5, False),
        ("MPI", 2, "allgather", [], 6, False)]
    assert {*map(str, (call["group"] for call in record["calls"]))} == {"[0]"}


def test_sigterm_leaves_a_stack(tmp_path):
    """Of the rank, and not of what it forks. A handler of the script's own is
    called, and nothing else.
    """
    end, _ = run_watched(tmp_path, """\
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
    assert (end, stack.read_text()) == (0, "")
    end, _ = run_watched(
        tmp_path, "import os\nos.kill(os.getpid(), 15)\n", RANK="0",
        WORLD_SIZE="2")
    assert end == -15 and "line 2 in <module>" in "".join(
        file.read_text() for file in (tmp_path / "why").glob("*.stack"))


# ----------------------------------------------------- what makes it slow


def write_trace(file, data, message):
    """A step of 400 ms: these milliseconds, and 100 of the backward pass."""
    events, at = [], 0
    for name, number, milliseconds in (
            ("end of step 4", None, 0), ("", None, data),
            ("aten::embedding", 9, 0),
            ("autograd::engine::evaluate_function: X", 9, 100),
            ("gloo:all_reduce", None, message),
            ("", None, 300 - data - message), ("end of step 5", None, 0)):
        events.append({"ph": "X", "ts": at, "dur": 1000 * milliseconds,
                       "name": name, "tid": 1, "cat": "cpu_op",
                       "args": {"Sequence number": number}})
        at += 1000 * milliseconds
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps(
        {"traceEvents": events, "baseTimeNanoseconds": 0}).encode()))


def write_slow_run(folder, nodes, tokens, **parts):
    """A run of DDP with two processes on each node, and its profile.

    parts: milliseconds on each of two ranks.
    """
    shutil.copytree(ROOT / "example-logs" / "ddp-2", folder)
    file = folder / "hyperparameters.json"
    record = json.loads(file.read_text()) | {
        "nodes": nodes, "world_size": 2 * nodes}
    file.write_text(json.dumps(record))
    (folder / "metrics.csv").write_text(
        "step,loss,lr,norm,seconds,tokens_per_second\n"
        + "".join(f"{step},1,1,1,0.4,{tokens}\n" for step in range(9)))
    for rank in 0, 1:
        write_trace(folder / "profile" / "1-trace" / f"rank{rank}.json.gz",
                    parts.get("data", (1, 1))[rank],
                    parts.get("message", (1, 1))[rank])


def test_two_nodes_are_slower_than_one(tmp_path, monkeypatch):
    network = tmp_path / "network.json"
    monkeypatch.setattr(speed, "NETWORK", network)
    one, two = tmp_path / "one", tmp_path / "two"
    write_slow_run(one, 1, 1000, message=(20, 20))
    write_slow_run(two, 2, 800, message=(290, 290))
    step, parts, advice, nodes, lost, doctor = speed.explain(two)
    assert step == "a step takes 400 ms, 800 tokens/s"
    assert parts.startswith("of that: 72% all-reduce, 25% backward")
    assert "communication is exposed" in advice
    assert f"2 times the processes of {one}" in nodes
    assert "0.80 times its tokens/s: more nodes are slower" in nodes
    assert "lost to all-reduce: 290.0 ms of a step, 20.0 ms before" in lost
    assert "doctor --ranks` on these nodes says" in doctor
    network.write_text('{"in the nodes": 10, "between nodes": 0.1}')
    sent = float(re.search(r"sends ([\d.]+) MB", doctor)[1])
    said = re.search(r"or ([\d.]+) ms between nodes \(0.10 GB/s\)",
                     speed.explain(two)[-1])
    assert float(said[1]) == pytest.approx(10 * sent, rel=0.05)


@pytest.mark.parametrize(("parts", "words"), [
    ({"data": (290, 290)}, "the input is slow"),
    ({"message": (1, 290)}, "rank 0 is the slowest"),
    ({}, "the work of training"), (None, "--profile 10")])
def test_what_to_try_first(parts, words, tmp_path):
    run = tmp_path / "run"
    write_slow_run(run, 1, 1000, **parts or {})
    if parts is None:
        shutil.rmtree(run / "profile")
    said = speed.explain(run)
    assert words in said[-1]
    assert speed.explain(tmp_path) == []


@pytest.mark.parametrize(("device", "counts"), [
    ("A100-40 fp16", (4, 8, 16)), ("Max 1550 bf16", (4, 8, 16)),
    ("Max 1550 bf16", (2, 3))])
def test_what_is_normal_is_what_was_published(device, counts):
    kept = published_efficiency(device, 16)
    *most, last = (f"{kept[number]:.0%}" for number in counts)
    assert f"{', '.join(most)} and {last}" in " ".join(
        (ROOT / "docs" / "why.md").read_text().split())


@pytest.mark.parametrize(("sacct", "lines"), [
    ("4711|OUT_OF_MEMORY|0:125||n1\n4711.0|FAILED|1:0|9000K|n1\n",
     ["4711 OUT_OF_MEMORY 0:125  n1", "4711.0 FAILED 1:0 9000K n1"]),
    ("", ["JobState=NODE_FAIL Reason=NodeDown ExitCode=0:1"])])
def test_slurms_word(sacct, lines, monkeypatch):
    """By sacct, else by scontrol; nothing of what is no job's number."""
    monkeypatch.setattr(evidence, "ask_slurm", lambda command, *_: {
        "sacct": sacct, "scontrol": "JobId=4711 JobState=NODE_FAIL "
        "Reason=NodeDown Dependency=(null) ExitCode=0:1 BatchHost=n1\n",
    }[command])
    assert evidence.ask_about("471100000") == lines
    assert evidence.ask_about("runs/mine") == []


def test_what_has_ended_or_never_began(tmp_path, monkeypatch):
    """A rank by its process's number; torchrun, which reaches nobody."""
    folder, log = tmp_path / "runs" / "mine" / "why", tmp_path / "log"
    folder.mkdir(parents=True)
    (folder / "node1-99999999.json").touch()
    log.write_text("[c10d] The client socket has failed to connect to any "
                   "network address of (192.0.2.77, 29511).\n")
    find = functools.partial(evidence.find, runs=tmp_path / "runs")
    monkeypatch.setattr(evidence, "ask_slurm",
                        lambda *_: f"JobId=4711\n   StdOut={log}\n")
    assert find("99999999") == (folder, [])
    job = folder.parent.rename(folder.parent.with_name("ddp-1n4g-12")) / "why"
    assert find("12") == find("12.server") == (job, [])
    with pytest.raises(UserError, match="does not reach 192"):
        find("471100000")


# ------------------------------------------------- evidence made by hand

TORCH = "/venv/lib/python3.11/site-packages/torch/"
IN_REDUCE = [["/home/me/train.py", 41, "train"],
             [TORCH + "distributed/c10d_logger.py", 83, "wrapper"],
             [TORCH + "distributed/distributed_c10d.py", 9, "all_reduce"]]
AT_WORK = [["/home/me/train.py", 30, "train"]]
IN_LOADER = [*AT_WORK, [TORCH + "utils/data/dataloader.py", 9, "_get_data"]]
IMPORTS = [*AT_WORK, ["/lib/python3/importlib/x.py", 9, "load"]]
IN_LOCK = [*AT_WORK, ["/venv/lib/python3.11/site-packages/filelock/_api.py",
                      344, "acquire"]]
IN_MEETING = [["/home/me/train.py", 12, "main"], [
    TORCH + "distributed/distributed_c10d.py", 9, "init_process_group"]]
LOST_IT = {"status": 1, "time": 7, "error": "RuntimeError",
           "message": "Connection closed by peer", "stack": IN_REDUCE}
IN_RECV = [*IN_REDUCE[:-1], [IN_REDUCE[-1][0], 8, "recv"]]
IN_PIPELINE = [*AT_WORK, [TORCH + "distributed/pipelining/schedules.py", 8,
                          "_wait_batch_p2p"]]
MEETS = {"joined": False, "stack": IN_MEETING}
WORKS = {"stack": AT_WORK}
LOST, DONE = {"ended": LOST_IT}, {"ended": {"status": 0, "time": 5}}
TOLD_9 = {"told": True, "time": 9}
GONE = {"alive": False}
STACK = ("Stack (most recent call first):\n"
         '  File "/home/me/train.py", line 41 in train\n')
TOLD = {**GONE, "last": STACK}
WAITS = {"group": [0, 1], "name": "data", "number": 7, "call": "all_reduce",
         "sizes": [[3]], "types": ["Float"], "waits": True, "p2p": False,
         "time": 70, "line": None}
IN_7 = {"calls": [WAITS]}
SPAWNED = {**MEETS, "world_size": None}
LATE = {"status": 1, "time": 79, "error": "RuntimeError", "message":
        "Timed out waiting 20000ms", "stack": IN_REDUCE}
SEND = WAITS | {"call": "Send", "p2p": True}


def make_rank(number, alive=True, fresh=True, last="", **changes):
    """A rank that waits in line 41 for a minute, unless changed."""
    return Rank({
        "rank": number, "world_size": 2, "host": "node1", "pid": 100 + number,
        "master": ["node1", "29500"], "began": 0, "ended": None, "still": 60,
        "stack": IN_REDUCE, "state": "S", "calls": None, "joined": True,
        "oom_kills": 0, "connecting": [], "looks": [], "written": 80,
        "age": 80, "message": None, **changes,
    }, alive, fresh, last)


class NamesOf(dict):
    """In place of a value that depends on the job, its name."""

    __missing__ = staticmethod(str.upper)


@pytest.mark.parametrize(("first", "second", "fault", "words"), [
    ({}, {"stack": IN_LOADER}, "the data loader waits", "num_workers=0"),
    ({}, {"stack": [*IN_LOADER, ["/home/me/data.py", 3, "__getitem__"]]},
     "a rank is late", "line 3 of data.py"),
    ({}, {"stack": AT_WORK, "state": "D"},
     "the file system does not answer", "line 30 of train.py"),
    ({}, {"stack": AT_WORK, "state": "T"}, "a stopped process",
     "kill -CONT 101 lets it go on"),
    ({"state": "T", "still": 3}, {"state": "T", "still": 3},
     "a stopped process", "ranks 0, 1 on node1 are stopped, in line 41"),
    ({}, {"stack": AT_WORK, "fresh": False}, "a rank does not answer",
     "py-spy dump --native --pid 101"),
    # py-spy has just let it go on
    ({}, {"stack": AT_WORK, "state": "R"}, "a rank is late", "line 30"),
    ({}, {"connecting": ["10.0.0.7:4711"]}, "the network", "10.0.0.7:4711"),
    ({"stack": IN_RECV}, {"stack": IN_RECV}, "all send, or all receive",
     "needs a send"),
    (LOST, {**GONE, "oom_kills": 1}, "no record of an end",
     "the kernel of that node ended 1 process(es)"),
    (LOST, {**GONE, "host": "node2"}, "no record of an end",
     "and all ranks of that node with it"),
    # what the launcher says
    (LOST, {"ended": {**TOLD_9, "status": -7}}, "a rank was killed",
     "SIGBUS has ended rank 1"),
    (LOST, {"ended": {**TOLD_9, "status": 3}}, "a rank ended",
     "rank 1 was the first to end, with status 3"),
    ({**LOST, "still": 0}, {"ended": {**TOLD_9, "status": -15}, "still": 0},
     "a rank ended", "rank 0 was the first"),
    ({"ended": LOST_IT | {"error": "KeyError", "message": "'x'"}},
     {"ended": {**TOLD_9, "status": -6}}, "a rank ended", "KeyError: 'x'"),
    (LOST, {"ended": LOST_IT | {
        "error": "OutOfMemoryError", "message": "CUDA out of memory."}},
     "out of memory", "a smaller microbatch"),
    (LOST, {"ended": LOST_IT | {
        "message": "can't allocate memory: Error code 12 (Cannot allocate "
                   "memory)"}}, "out of memory", "a smaller microbatch"),
    (LOST,
     {"ended": {"status": "the loss is NaN", "time": 5, "stack": AT_WORK}},
     "a rank ended", "in line 30 of train.py, with status 'the loss is NaN'"),
    (LOST, {"ended": LOST_IT | {  # of a data loader's worker
        "message": 'Caught it.\nOriginal Traceback:\n'
                   '  File "/lib/python3/x.py", line 9, in fetch\n'
                   '  File "/home/me/data.py", line 7, in get\n'
                   "KeyError: 137\n"}}, "a rank ended",
     "in line 7 of data.py, with RuntimeError: Caught it. KeyError: 137"),
    ({"ended": LOST_IT | {
        "error": "Exception", "message": "MPI_ERR_TRUNCATE: message truncated",
        "stack": [*AT_WORK, ["src/mpi4py/MPI.src/Comm.pyx", 9, "x"]]}}, GONE,
     "different collectives",
     "in line 30 of train.py; rank 1 last wrote from line 41"),
    (LOST, {"last": "Fatal Python error: Segmentation fault\n"
                    '  File "/home/me/train.py", line 5 in step'},
     "a rank crashed", "line 5 of train.py: Segmentation fault"),
    ({"last": "Fatal Python error: Aborted\n" + "".join(
        f'  File "{file}", line {line} in {name}\n'
        for file, line, name in reversed(IN_REDUCE))},
     {"ended": LOST_IT | WORKS}, "different collectives",
     "ended rank 0, which received in line 41 of train.py what it did not "
     "expect: rank 1 is in line 30"),
    (DONE, {}, "a rank ended early", "rank 0 ended with status 0"),
    (LOST, DONE, "a rank ended early",
     "rank 1 ended with status 0, and left rank 0"),
    (GONE, {**GONE, "oom_kills": 1}, "no record of an end",
     "all ranks ended without a record of how; meanwhile the kernel"),
    (TOLD, TOLD, "ended from outside", "SIGTERM"),
    ({**LOST, "still": 0}, {"ended": LOST_IT | {"time": 3}, "still": 0},
     "a rank ended", "rank 1 was the first to end"),
    (MEETS, {**MEETS, "connecting": ["10.1.2.3:99"]},
     "wrong network interface", "10.1.2.3:99"),
    (MEETS, {**MEETS, "host": "node2", "answer": "no answer"}, "blocked port",
     "cannot be reached from rank 1 on node2"),
    ({**MEETS, "answer": "no such host"}, MEETS, "wrong MASTER_ADDR",
     "export MASTER_ADDR=node1"),
    # a collective to which one has not come, whatever it does instead
    (IN_7, {"stack": IN_RECV, "still": 50}, "a rank is late",
     "rank 1 is in line 41 of train.py, and kept rank 0 waiting for 60 s"),
    (IN_7, {"stack": AT_WORK, "calls": [WAITS | {"name": "tensor"}]},
     "different order of groups", "rank 0 waits in collective 7 of group "
     "data, in line 41 of train.py, and rank 1 waits in collective 7 of group"
     " tensor"),
    ({"calls": [WAITS | {"waits": False}], "ended": LATE, "still": 20},
     {**TOLD, "still": 20, "last": STACK.replace("41", "30")},
     "a rank is late", "rank 1 on node1 last wrote from line 30 of train.py; "
     "rank 0 waited for it in line 41"),
    # what it wrote before that says nothing
    ({**IN_7, "still": 9}, {"written": 69, "still": 9}, "", "move on"),
    ({"message": SEND}, {"message": SEND}, "all send, or all receive",
     "Sendrecv"),
    (MEETS, {"joined": False, "stack": AT_WORK}, "a rank is late",
     "rank 1 has not come to init_process_group() yet: runs in line 30"),
    # which still imports, and has the launcher's address meanwhile
    (MEETS, {"joined": False, "stack": AT_WORK, "master": ["laptop", "29500"]},
     "a rank is late", "rank 1 has not come to init_process_group() yet"),
    (MEETS, {**MEETS, "master": ["node2", "29500"]}, "different addresses",
     "is node2:29500 on rank 1, and node1:29500 on"),
    # whose script is over, or which a signal met in another thread
    ({**GONE, "last": "Stack (most recent call first):\n"
      '  File "/venv/site-packages/torch/library.py", line 665 in _del\n'
      '  File "/lib/python3.11/weakref.py", line 666 in _exitfunc\n'},
     {"last": "Fatal Python error: Aborted\n\n"
      "Thread 0x0007 (most recent call first):\n"
      '  File "/home/me/data.py", line 3 in feed\n\n'
      "Thread 0x0008 (most recent call first):\n" + "".join(
          f'  File "{file}", line {line} in {name}\n'
          for file, line, name in reversed(IN_REDUCE))},
     "different collectives", "ended rank 1, which received in line 41 of "
     "train.py what it did not expect: rank 0 is in a line that is not known"),
    ({**MEETS, **TOLD},
     {"joined": False, "ended": LOST_IT | {"message": "no such file"}},
     "a rank ended", "RuntimeError: no such file"),
    (MEETS, {**MEETS, "rank": 0}, "a rank is there twice",
     "the same rank: 0 (process 100 on node1), 0 (process 101 on node1)"),
    ({}, {"alive": None, "fresh": False, "host": "node2"},
     "a rank does not answer", "py-spy dump --native --pid 101"),
    (LOST, {"ended": {"status": None, "time": 5}}, "a rank ended early",
     "a status that is not known, and left rank 0"),
    ({"ended": {"status": None, "time": 5}}, DONE, "", "not known"),
    # what a SIGTERM has left, in a rank that went on
    ({}, {"stack": AT_WORK, "last": STACK}, "a rank is late", "line 30"),
    # ranks without a record of their messages
    ({"stack": [["/home/me/train.py", 44, "main"], IN_REDUCE[1]]},
     {"stack": [*AT_WORK, [TORCH + "_tensor.py", 9, "backward"]]},
     "nobody moves", "rank 0 is in line 44 of train.py, rank 1 is in line 30"),
    ({"stack": [["/home/me/train.py", 41, "main"]]}, WORKS, "nobody moves",
     "rank 0 is in line 41 of train.py, rank 1 is in line 30"),
    ({"stack": IN_LOCK}, {"stack": IN_LOCK}, "nobody moves", "in line 30"),
    ({}, {"stack": IN_LOADER, "workers": [[7, "S", False]]},
     "the data loader waits", "its workers do nothing (processes 7)"),
    ({"running": 2, "still": 0, "cores": [0, 1]},
     {"running": 1.9, "still": 0, "cores": [0, 1]}, "more threads than cores",
     "4 threads of ranks 0, 1 run at once on the 2 cores of node1; export "
     "OMP_NUM_THREADS=1"),
    ({"running": 2, "still": 0, "cores": [0, 1]},
     {"running": 2, "still": 0, "cores": [2, 3]}, "", "move on"),
    ({"still": 0, "stack": AT_WORK}, {"still": 0, "collecting": 0.4},
     "the garbage collector", "rank 1 on node1 has spent 40%"),
    ({"still": 0, "collecting": 0.1}, {"still": 0}, "", "move on"),
    # while it loads modules, that is normal
    ({"still": 0, "stack": AT_WORK}, {"still": 0, "collecting": 0.4, "stack": [
        *AT_WORK, ["<frozen importlib._bootstrap>", 7, "_load"]]}, "", "on"),
    # of mp.spawn on two nodes, each of which counts from 0
    (SPAWNED, {**SPAWNED, "rank": 0, "host": "node2"}, "nobody moves", "60 s"),
    (LOST, {"ended": LOST_IT | {
        "error": "KeyError", "message": "'x'", "stack": AT_WORK,
        "then": [[IN_REDUCE, "ValueError: bad"]]}}, "a rank ended",
     "in line 30 of train.py, with KeyError: 'x'; then ValueError: bad, in "
     "line 41 of train.py"),
    # of 40 looks; a pipeline's messages are not recorded
    ({"still": 0, "looks": [[31, IN_PIPELINE], [9, AT_WORK]]},
     {"still": 0, "looks": [[7, IN_PIPELINE], [33, AT_WORK]]}, "straggler",
     "rank 1 on node1 waits 18% of the time, and the others 78% or more; it "
     "is mostly in line 30"),
    ({"still": 0, "looks": [[14, IN_PIPELINE], [26, AT_WORK]]},
     {"still": 0, "looks": [[7, IN_PIPELINE], [33, AT_WORK]]}, "",
     "the ranks move on"),
    # sound jobs: one works and the others wait for it, for minutes
    ({}, {"stack": AT_WORK, "still": 4}, "a rank at work",  # it tokenizes
     "rank 1 is at work in line 30 of train.py; rank 0 has waited for 60 s in "
     "line 41 of train.py"),
    ({}, {"stack": AT_WORK, "state": "D", "still": 9},  # saves
     "a rank at work", ""),
    ({}, {"stack": IN_LOADER, "workers": [[7, "R", True]]},  # slow samples
     "a rank at work", "at work in line 30"),
    ({}, {"stack": AT_WORK, "fresh": False, "state": "R"},  # in C, with
     "a rank at work", ""),  # Python's lock
    (MEETS,  # reads data before it joins
     {"joined": False, "stack": AT_WORK, "still": 3}, "a rank at work", ""),
    ({"joined": False, "stack": AT_WORK, "still": 3},  # so does rank 0
     {**MEETS, "answer": "nobody listens there"}, "a rank at work",
     "rank 0 is at work"),
    (MEETS, {"joined": False, "stack": IMPORTS},  # from a slow disk
     "a rank at work", ""),
    # all of them do something, of which nothing more is known
    (WORKS, WORKS, "nobody moves",
     "no rank has moved for 60 s: ranks 0, 1 are in line 30 of train.py"),
    ({"stack": IN_LOADER, "workers": [[7, "D", True]]},  # the first batch
     {"stack": IN_LOADER, "workers": [[8, "R", True]]}, "nobody moves", ""),
    ({"stack": IN_LOCK}, WORKS,  # a rank makes it for all
     "nobody moves", "so long?"),
    ({"stack": IMPORTS}, {"stack": AT_WORK, "still": 0}, "", "move on"),
    # and those in which all of them wait for a short time, or work
    ({"still": 9}, {"still": 9, "alive": None, "fresh": False,
                    "host": "node2"}, "",
     "the others move on, but rank 1 on node2 has not answered yet"),
    ({"still": 9, "fresh": False}, {"still": 9, "fresh": False}, "",
     "ranks 0, 1 on node1 have not answered yet"),
    ({"stack": AT_WORK, "still": 0}, {"stack": AT_WORK, "still": 0}, "",
     "the ranks move on"),
    (DONE, DONE, "", "all ranks have ended with status 0")])
def test_what_the_judge_says(first, second, fault, words):
    ranks = [make_rank(0, **first), make_rank(1, **second)]
    found = judge(ranks, any(rank.alive for rank in ranks))
    assert found.kind == fault
    assert words in f"{found.text}; {found.advice}"
    assert found.verdict == ("ok" if not fault else "warn" if fault in (
        "a rank at work", "nobody moves") or "all ranks ended" in words
        else "FAIL")


def test_the_page_has_a_row_for_each_fault():
    """In the rules' own words."""
    signs = defaultdict(dict)
    for rule in RULES:
        if rule.fault and rule.find.__doc__:
            signs[rule.sign].setdefault(rule.fault, rule)
    table = "".join(
        f"| {sign if rule is next(iter(rules.values())) else ''} | "
        f"{rule.fault}: {rule.find.__doc__} | "
        f"{rule.advice.format_map(NamesOf(ADVICE))} |\n"
        for sign in SIGNS for rules in [signs[sign]]
        for rule in rules.values())
    assert table in (ROOT / "rankcheck/docs/why.md").read_text(), table


def test_who_is_deaf_is_said_when_rank_0_has_tried():
    """Else a wrong address looks like a port that is blocked."""
    out = {**MEETS, "still": 5, "age": 20}
    ranks = [make_rank(0, **out), make_rank(1, **out, answer="no answer")]
    assert judge(ranks).kind == ""
    # nor is one missing after 20 s, whatever the clock has done since
    assert judge(ranks[:1]).kind == ""
    ranks[0].answer = ""
    assert judge(ranks).kind == "blocked port"
    ranks[0].answer = "no answer"
    assert judge(ranks).kind == "wrong MASTER_ADDR"


def test_asked_before_it_is_certain_it_looks_again(monkeypatch, capsys):
    looks = iter((20, PATIENCE + 1))

    def collect(*_):
        still = next(looks)
        return [make_rank(0, still=still),
                make_rank(1, still=still, stack=AT_WORK)]

    monkeypatch.setattr(command, "collect", collect)
    _, found = command.look("", None, [])
    assert found.kind == "a rank is late"
    assert "stood still for 20 s: looking again" in capsys.readouterr().err


def test_no_word_on_ranks_that_are_not_seen():
    """The other node writes elsewhere: it may be late, or nothing is."""
    found = judge([make_rank(number, world_size=4) for number in range(2)])
    assert found.kind == "ranks are missing"
    assert "ranks 2, 3 have left no evidence here, of 4" in found.text


def test_what_is_compiled_is_not_the_scripts_line():
    """While torch.compile compiles, its own files are the innermost."""
    mine = ["/home/me/train.py", 12, "train"]
    ours = [str(HOOK.parent / "witness.py"), 5, "called"]  # MPI's calls
    made = ["/tmp/torchinductor_me/4g/c4gctn4dfcbfhsqf3etj2uh6z57f2atxonbbl6"
            "f2sxtbm3csrab4.py", 33, "<module>"]
    library = ["/lib/python3/site-packages/torch/_dynamo/eval_frame.py", 5, ""]
    assert find_line([mine, library, made]) == mine
    assert find_line([mine, ours]) == mine
    begin = [*ours[:2], "begin"]  # also where a lesson's tool has called it
    assert str(Place(*find_line([mine, begin, ours]))) == "its start"


@pytest.mark.parametrize("ahead", [1e-4, 3600])
def test_other_lines_are_no_mistake(ahead):
    """As in `if rank == 0: broadcast(a) else: broadcast(b)`.

    Nor is a rank late whose clock is another one.
    """
    def calls(number, line):
        return [{"group": [0, 1], "name": "0", "number": i,
                 "call": "broadcast", "sizes": [[3]], "types": ["Float"],
                 "waits": False, "p2p": False, "time": i + number * ahead,
                 "line": ["/home/me/train.py", line, "train"]}
                for i in range(40)]

    ranks = [make_rank(number, calls=calls(number, 20 + number), still=1,
                       stack=AT_WORK) for number in range(2)]
    assert judge(ranks).kind == ""
