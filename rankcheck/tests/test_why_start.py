"""`why run`: what it starts stays as it is, and is known afterwards."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankcheck.system import proc
from rankcheck.system.errors import UserError
from rankcheck.system.hook import HOOK
from rankcheck.why import calls, command, evidence, ranks, start, watcher
from rankcheck_testing.support import SOURCE_PATH, program

VIEW = """\
import atexit, gc, json, locale, os, resource, signal, sys, threading, warnings
opened = open(os.devnull)
view = {
    "first": opened.fileno(), "path": sys.path, "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:], "flags": repr(sys.flags),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd")
                   if int(name) < 100),
    "variables": {name: value for name, value in os.environ.items()
                  if not name.startswith("RANKCHECK_")
                  and name != "PYTHONPATH"},
    "signals": {name.name: str(signal.getsignal(name))
                for name in signal.valid_signals()
                if isinstance(name, signal.Signals)},
    "ignored": [line for line in open("/proc/self/status")
                if line.startswith(("SigIgn", "SigBlk"))],
    "threads": len(threading.enumerate()), "umask": os.umask(0o22),
    "hooks": [sys.excepthook is sys.__excepthook__, str(sys.unraisablehook),
              sys.gettrace(), sys.getprofile(), len(sys.path_hooks),
              str(threading.excepthook),
              [str(finder).partition(" at ")[0] for finder in sys.meta_path
               if "rankcheck_watcher" not in str(finder)]],
    "gc": [gc.isenabled(), gc.get_threshold(), str(gc.callbacks)],
    "cwd": os.getcwd(), "locale": locale.setlocale(locale.LC_ALL),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "warnings": repr(warnings.filters), "main": sorted(globals()),
    "recursion": sys.getrecursionlimit(), "session": os.getsid(0),
    "modules": sorted(sys.modules)}
import here
atexit.register(print, json.dumps(view))
try:
    os.waitpid(-1, os.WNOHANG)
    print("it has a child")
except ChildProcessError:
    pass
os.write(1, b"")
"""
# Beside the hook's own, Python's that torch imports, too
MODULES = {"faulthandler", "_compat_pickle", "_heapq", "_json", "_opcode",
           "_pickle", "_socket", "_struct", "_weakrefset", "array", "fcntl",
           "__future__", "collections.abc", "errno", "heapq", "importlib",
           "importlib._bootstrap", "importlib._bootstrap_external",
           "json.decoder", "json.encoder", "json.scanner", "linecache",
           "math", "opcode", "pickle", "select", "selectors", "socket",
           "struct", "textwrap", "token", "tokenize", "traceback",
           "contextlib", "importlib.util", "importlib._abc", "pathlib",
           "fnmatch", "ntpath", "urllib", "urllib.parse", "ipaddress",
           "dataclasses", "inspect", "ast", "dis"}


def run(folder, *words, home=None, **variables):
    """rankcheck why, with its own home; the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "rankcheck", "why", *map(str, words)],
        cwd=folder, text=True, capture_output=True, env={
            **os.environ, "HOME": str(home or folder),
            "PYTHONPATH": SOURCE_PATH, **variables})


@pytest.mark.parametrize("path", ["", ":", "{}:", ":{}", "{}::/nowhere", "."])
@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_script_sees_what_it_sees_without_the_hook(path, rank, tmp_path):
    """An empty entry of PYTHONPATH is the working directory."""
    folder = tmp_path / "src"
    folder.mkdir()
    script = program(folder / "script.py", VIEW)
    program(tmp_path / "here.py", "")
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "RANKCHECK_WHY")} | rank
    given = {"PYTHONPATH": path.format(tmp_path)}
    hooked = start.with_hook(given)
    assert hooked.startswith(str(HOOK))

    def look(**variables):
        return subprocess.run(
            [sys.executable, "-X", "dev", script], cwd=tmp_path, text=True,
            capture_output=True, env=environment | variables)

    plain = look(**given)
    watched = look(PYTHONPATH=hooked, RANKCHECK_WHY=str(tmp_path / "why"))
    assert watched.returncode == plain.returncode
    assert watched.stderr == plain.stderr
    if path == "":  # no entry at all
        assert "No module named 'here'" in watched.stderr
        return
    before, after = (json.loads(done.stdout) for done in (plain, watched))
    added = {*after.pop("modules")} - {*before.pop("modules")}
    assert {name for name in added if not name.startswith(
        ("rankcheck_watcher", "rankcheck_witness"))} <= MODULES
    assert after == before and after["first"] == 3


def test_a_start_is_no_part_of_its_command(tmp_path):
    """Signals that Python ignores, its locale, a child: none is left; what
    the job prints is its own alone.
    """
    variables = {"LC_ALL": "", "LANG": "", "LC_CTYPE": ""}
    line = ("grep -E 'SigIgn|SigBlk' /proc/self/status; env | grep LC_CTYPE;"
            "ls /proc/self/fd")
    environment = {name: value for name, value in os.environ.items()
                   if name not in variables}
    plain = subprocess.run(["bash", "-c", line], env=environment,
                           stdin=subprocess.DEVNULL, capture_output=True)
    started = subprocess.run(
        [sys.executable, "-m", "rankcheck", "why", "run", "--", "bash", "-c",
         line], stdin=subprocess.DEVNULL, capture_output=True,
        env=environment | {"HOME": str(tmp_path), "PYTHONPATH": SOURCE_PATH})
    assert started.stdout == plain.stdout
    assert started.stderr.startswith(b"while it runs, or afterwards: ")


@pytest.mark.parametrize("message", [
    "return self.gone", "return 3", "raise SystemExit(4)"])
def test_an_error_whose_message_fails(message, tmp_path):
    """It is recorded in Python's words, and nothing is printed by us."""
    script = program(tmp_path / "script.py", f"""\
class Gone(Exception):
    def __str__(self):
        {message}
try:
    raise Gone
except Gone as error:
    raise Gone from error
""")
    rank = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    rank.pop("PYTHONPATH", None)
    plain = subprocess.run([sys.executable, script], env=rank, text=True,
                           capture_output=True)
    watched = subprocess.run(
        [sys.executable, script], text=True, capture_output=True, env={
            **rank, "PYTHONPATH": str(HOOK),
            "RANKCHECK_WHY": str(tmp_path / "why")})
    assert watched.stderr == plain.stderr
    assert watched.returncode == plain.returncode
    rank, = evidence.collect(tmp_path / "why")
    assert rank.ended["error"] == "Gone" and rank.place.line == 5
    assert rank.ended["message"] == "<exception str() failed>"


def test_a_file_that_has_our_number_is_left_alone(tmp_path):
    """A daemon closes all, and opens so many of its own."""
    script = program(tmp_path / "script.py", """\
import os
os.closerange(3, 1000)
files = [open("mine", "ab", 0) for _ in range(120)]
if os.fork() == 0:
    for file in files:
        file.write(b".")
    os._exit(0)
os.wait()
1 / 0
""")
    subprocess.run([sys.executable, script], cwd=tmp_path, env={
        **os.environ, "PYTHONPATH": str(HOOK), "RANK": "0", "WORLD_SIZE": "1",
        "RANKCHECK_WHY": "why"}, stderr=subprocess.PIPE)
    assert (tmp_path / "mine").read_bytes() == 120 * b"."
    rank, = evidence.collect(tmp_path / "why")
    assert rank.ended["error"] == "ZeroDivisionError"


def test_two_containers_with_one_name_and_number(tmp_path, monkeypatch):
    """Each has its own record, and each is asked whether it lives."""
    names = set()
    for space in "11", "22":
        monkeypatch.setattr(proc, "name_space", lambda space=space: space)
        names.add(proc.name_process(os.environ))
    assert len(names) == 2
    for name in names:
        assert name.startswith(f"{proc.name_host(os.environ)}-{os.getpid()}@")


# ------------------------------------------------- what was started last


def make_start(home, name, after=(), **changes):
    """A start in the list that is in this home."""
    folder = home / name
    folder.mkdir(exist_ok=True)
    begun = start.Start(**{
        "token": name, "number": len(after) + 1, "before": [*after],
        "folder": str(folder), "command": ["torchrun", name],
        "host": proc.name_host(os.environ), "space": proc.name_space(),
        "pid": 2**22 + 1, "ticks": 5, "session": "another", "time": 9.0,
        "output": None, "output_begin": -1, **changes})
    start.list_start(begun)
    return begun


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "STARTS_FOLDER", tmp_path)
    monkeypatch.setattr(start, "name_session", lambda: SHELL)
    monkeypatch.delenv("RANKCHECK_WHY", raising=False)
    return tmp_path


def find_names(env=()):
    return [Path(one.folder).name for one in start.find_last_starts(dict(env))]


SHELL = "the shell that asks"
LIVES = {"pid": os.getpid(), "ticks": proc.read_ticks("self")}


def test_the_last_start_is_known_without_names_and_clocks(home):
    make_start(home, "z", time=99.0)
    make_start(home, "a", ["z"], time=3.0)  # its clock was set back
    assert find_names() == ["a"]
    make_start(home, "m", ["z", "a"], host="node2", space="other")
    assert find_names() == ["m"]  # another host has seen the first two
    os.utime(home / "z")
    assert find_names() == ["m"]


def test_each_shell_has_a_name():
    ask = [sys.executable, "-c",
           "from rankcheck.why import start; print(start.name_session())"]
    other = subprocess.run(
        ask, start_new_session=True, text=True, capture_output=True,
        check=True, env=os.environ | {"PYTHONPATH": SOURCE_PATH}
    ).stdout.strip()
    assert other not in ("", start.name_session())


@pytest.mark.parametrize(("first", "second", "meant"), [
    # neither knows of the other: at once, or on hosts that share a home
    ({}, {"after": []}, ["a", "b"]),
    ({"host": "node2", "space": "other"}, {"after": []}, ["a", "b"]),
    # both run; one of them does
    (LIVES, LIVES, ["a", "b"]), (LIVES, {}, ["b"]), ({}, LIVES, ["b"]),
    # the one before runs, and of the other nobody knows
    (LIVES, {"host": "node2", "space": "other"}, ["a", "b"]),
    # a shared account: somebody else's is newer than this shell's own
    ({"session": SHELL}, {}, ["a", "b"]),
    ({}, {"session": SHELL}, ["b"])])
def test_starts_of_which_each_may_be_meant(first, second, meant, home):
    make_start(home, "a", **first)
    make_start(home, "b", **{"after": ["a"], **second})
    assert sorted(find_names()) == meant
    if len(meant) == 2:
        with pytest.raises(UserError) as found:
            evidence.find_evidence(None, home)
        said = str(found.value)
        assert "torchrun a" in said and "torchrun b" in said
        assert "\nfix: name one, as in `rankcheck why /" in said


def test_the_folder_that_this_shell_uses(home):
    """Somebody else has started something since."""
    make_start(home, "a")
    make_start(home, "b", ["a"])
    named = {"RANKCHECK_WHY": str(home / "a")}
    assert sorted(find_names(named.items())) == ["a", "b"]
    assert find_names({"RANKCHECK_WHY": str(home / "b")}.items()) == ["b"]
    assert find_names({"RANKCHECK_WHY": str(home / "new")}.items()) == ["b"]


def test_a_last_start_whose_folder_is_gone(home):
    make_start(home, "a")
    folder = make_start(home, "b", ["a"]).folder
    for file in Path(folder).iterdir():
        file.unlink()
    Path(folder).rmdir()
    with pytest.raises(UserError, match=r"was removed: .*/b, of torchrun b"):
        evidence.find_evidence(None, home)


@pytest.mark.parametrize("name", ["~/a", "{}/b/../a", "{}/a/"])
def test_a_folder_of_ones_own_is_the_same_by_any_name(
        name, home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RANKCHECK_WHY", name.format(home))
    (home / "b").mkdir()
    begun = make_start(home, "a")
    assert start.switch_on(os.environ)["RANKCHECK_WHY"] == begun.folder
    (home / "a" / "host-1.json").write_text("{}")
    assert str(evidence.find_last_evidence(os.environ)) == begun.folder


def test_what_was_started_last_in_a_folder_of_ones_own(tmp_path):
    """The second of two, in a folder by RANKCHECK_WHY; its output is in the
    file of the first, which is not its own.
    """
    log = tmp_path / "log"
    for text, folder in (("print('first')", {}),
                         ("1 / 0", {"RANKCHECK_WHY": "aaa"})):
        with log.open("a") as file:
            subprocess.run(
                [sys.executable, "-m", "rankcheck", "why", "run", "--",
                 sys.executable, "-c", text], cwd=tmp_path, stdout=file,
                stderr=file, env={
                    **os.environ, "HOME": str(tmp_path),
                    "PYTHONPATH": SOURCE_PATH, **folder})
    said = run(tmp_path)
    assert said.returncode == 1
    assert f"{tmp_path}/aaa {sys.executable} -c 1 / 0\nrank failed: " in (
        said.stdout)
    first, = (tmp_path / ".cache/rankcheck").glob("2*")
    said = run(tmp_path, first)
    assert said.returncode == 0 and said.stdout.endswith("ends:\n  first\n")
    log.write_text("of another one\n")
    said = run(tmp_path, first)
    assert "of another one" not in said.stdout
    assert "log, no longer exists" in said.stdout


@pytest.mark.whole
def test_an_output_that_another_start_has_replaced(tmp_path):
    """By > FILE, with the same name and, as it happens, the same length."""
    log = tmp_path / "log"
    for text in "print('first')", "print('other')":
        with log.open("w") as file:
            subprocess.run(
                [sys.executable, "-m", "rankcheck", "why", "run", "--",
                 sys.executable, "-c", text], stdout=file, stderr=file, env={
                     **os.environ, "HOME": str(tmp_path),
                     "PYTHONPATH": SOURCE_PATH})
            time.sleep(1.1)  # the folder's name has the second
    first, last = sorted((tmp_path / ".cache/rankcheck").glob("2*"))
    assert "no longer exists" in run(tmp_path, first).stdout
    assert run(tmp_path, last).stdout.endswith("ends:\n  other\n")


def test_a_list_that_cannot_be_written_to_is_said(tmp_path):
    """The job begins all the same."""
    (tmp_path / ".cache").write_text("")
    done = run(tmp_path, "run", "--", "echo", "fine", RANKCHECK_WHY="why")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert "fix: give `rankcheck why` the folder's name" in done.stderr


def test_the_list_stays_short(home, monkeypatch):
    """What runs stays in it, however old."""
    monkeypatch.setattr(start, "LISTED", 2)
    names = []
    for name in "abcde":
        make_start(home, name, names, **(LIVES if name == "a" else {}))
        names.append(name)
    assert [one.token for one in start.list_starts()] == ["a", "d", "e"]
    assert find_names() == ["e"]


# --------------------------------------------------------- size of a record


@pytest.mark.parametrize("world_size", [8, 1024])
def test_a_record_holds_a_group_once(world_size):
    """However many calls it has: only then does it stay small."""
    ranks = [*range(world_size)]
    entries = [{"group": [*ranks], "name": "0", "number": number}
               for number in range(100)]
    entries.append({"group": ranks[:4], "name": "0", "number": 1})
    entries.append({"group": None, "name": "7", "number": 1})
    record = {"calls": [dict(entry) for entry in entries], "message": None}
    record["groups"] = calls.pack_groups(record["calls"])
    assert record["groups"] == {"0": ranks, "0#2": ranks[:4]}
    text = json.dumps(record)
    assert len(text) < 100 * 60 + 6 * world_size
    record = json.loads(text)
    calls.unpack_groups(record)
    assert record == {"calls": entries, "message": None}


@pytest.mark.parametrize("version", [3, 4])
def test_records_of_the_formats_before_can_be_read(version, tmp_path):
    record = {
        "format": f"rankcheck {version}", "rank": 0, "host": "node1", "pid": 7,
        "began": 0.0, "written": 30.0, "ended": None, "answers": True,
        "calls": [{"group": [0, 1], "name": "0", "number": 1, "p2p": False}],
        "still": 21.0, "stays": 20.0, "over": True,
        "looks": [[40, [["x.py", 1, "main"]]]]}
    (tmp_path / "node1-7.json").write_text(json.dumps(record))
    found, = evidence.read_records(tmp_path)
    assert found["calls"][0]["group"] == [0, 1]
    rank = ranks.Rank(found, True, True)
    assert (rank.idle_seconds, rank.line_seconds) == (21.0, 20.0)
    assert rank.script_ended and rank.stack_samples[0].times == 40
    assert watcher.RECORD_FORMAT == "rankcheck 5"


# ------------------------------------------------------- no rank was seen


@pytest.mark.parametrize(("line", "words"), [
    ("env -i {python} -c '{code}'", "the variable RANKCHECK_WHY is not set; "
     "fix: look for `env -i`"),
    ("PYTHONPATH=src {python} -c '{code}'", "its PYTHONPATH lacks "),
    ("{python} -I -c '{code}'", "Python's option -I ignores PYTHONPATH"),
    ("{python} -sE -c '{code}'", "Python's option -sE ignores PYTHONPATH"),
    ("sleep 60", "`py-spy dump --subprocesses --pid ")])
def test_ranks_that_run_without_the_hook(line, words, tmp_path):
    line = line.format(python=sys.executable,
                       code="import time; time.sleep(60)")
    job = subprocess.Popen(
        [sys.executable, "-m", "rankcheck", "why", "run", "--", "bash", "-c",
         f"{line}; true"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={
            **os.environ, "HOME": str(tmp_path), "PYTHONPATH": SOURCE_PATH})
    try:
        for _ in range(600):
            if len(proc.descendants(job.pid)) > 1:
                break
            time.sleep(0.1)
        for _ in range(600):
            said = run(tmp_path)
            if words in said.stderr:
                break
            time.sleep(0.1)
    finally:
        for pid in reversed(proc.descendants(job.pid)):
            os.kill(pid, 9)
        job.wait()
    assert said.returncode == 2 and words in said.stderr, said.stderr
    assert f"process {job.pid} is running" in said.stderr
    assert "no rank left a record" in said.stderr


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, capsys):
    """Then nobody was asked, and nothing is judged."""
    record = {
        "format": watcher.RECORD_FORMAT, "rank": 0, "world_size": 1,
        "host": proc.name_host(os.environ), "pid": os.getpid(),
        "space": proc.name_space(), "began": time.time(), "start": [],
        "written": time.time(), "stack": [["x.py", 3, "f"]], "joined": True,
        "calls": None, "ended": None, "answers": True, "launched": True,
        "library": "", "asked": "", "groups": {}}
    (tmp_path / "node1-7.json").write_text(json.dumps(record))
    (tmp_path / "ask").mkdir()  # root may write to any file
    with pytest.raises(UserError, match=r"cannot be written to .*\nfix: .*\n"
                       r".*\n  rank 0 on .*, then in line 3 of x.py"):
        command.answer_request(command.Request(str(tmp_path)))
    assert capsys.readouterr().out == ""
