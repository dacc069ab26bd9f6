"""The class board: who writes what, and the page that shows it."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from cluster import wait_for
from conftest import all_processes, copy_clone, program, python, workshop

from backstage import ROOT
from workshop.instructor import classroom

OTHERS = ('{"stage": "ddp"', "[]", '{"stage": "no", "time": 1}',
          '{"stage": "ddp", "time": 1, "left": 7}', "[" * 100_000, "\0",
          *(f'{{"stage": "ddp", "time": {time}, "left": [3]}}' for time in (
              "-1e299", "1e299", "NaN", '"1"', "[[1]]", "true",
              "9" * 400, "9" * 5000)))


def write(folder, name, *lines):
    (folder / f"{name}.jsonl").write_text("".join(
        line if isinstance(line, str) else
        json.dumps({"stage": "ddp", **line}) + "\n" for line in lines))


def test_a_line_for_those_who_take_part(tmp_path):
    shared, mine = tmp_path / "class", copy_clone(tmp_path / "mine")
    shared.mkdir()
    diff = ("-m", "workshop", "diff", "ddp")
    without = python(mine, *diff, WORKSHOP_CLASS="")
    taking_part = python(mine, *diff, WORKSHOP_CLASS=str(shared))
    assert taking_part.stdout == without.stdout and not taking_part.stderr
    wait_for(lambda: [*shared.glob("*")] and classroom.read_people(shared))
    file, = shared.glob("*")
    said, = file.read_text().splitlines()  # one: the first did not take part
    assert json.loads(said).keys() == {"stage", "time", "left"}
    assert file.stat().st_mode & 0o777 == 0o644
    person, = classroom.read_people(shared)
    assert person.stage == "ddp" and person.right is None
    assert person.left == [
        *range(1, 1 + len(classroom.documents.load_changes("ddp")))]


@pytest.mark.parametrize("kind", ["missing", "file", "read-only", "link",
                                  "hard link", "FIFO", "FIFO with a reader"])
def test_a_bad_folder_disturbs_nobody(kind, tmp_path, monkeypatch, capfd):
    """Nor is what anybody has put under the predictable name written to."""
    shared, other = tmp_path / "class", tmp_path / "other"
    mine = shared / f"{classroom.my_name()}.jsonl"
    other.write_text("not a note\n")
    if kind == "file":
        shared.touch()
    elif kind == "read-only":
        shared = "/proc"  # for root, too
    elif kind != "missing":
        shared.mkdir()
    if kind.endswith("link"):
        (mine.symlink_to if kind == "link" else mine.hardlink_to)(other)
    elif kind.startswith("FIFO"):
        os.mkfifo(mine)
    reader = kind.endswith("reader") and os.open(
        mine, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("WORKSHOP_CLASS", str(shared))
    classroom.note_progress("ddp", left=[1])
    assert capfd.readouterr() == ("", "")
    wait_for(lambda: not any(classroom.WRITE in words
                             for _, words, _ in all_processes()))
    assert other.read_text() == "not a note\n"
    assert kind != "missing" or not shared.exists()
    if reader:
        assert os.read(reader, 9) == b""
        os.close(reader)


def test_what_is_read_from_a_folder_that_all_may_write_to(tmp_path):
    write(tmp_path, "a", *(f"{line}\n" for line in OTHERS),
          {"time": 20, "left": [9, 2, 99, 2]}, {"time": 10, "left": [1]},
          {"time": 30, "left": [2, 9]})
    write(tmp_path, "b", *(f"{line}\n" for line in OTHERS))
    write(tmp_path, "c", "x" * (classroom.LARGEST_FILE + 1))
    os.mkfifo(tmp_path / "d.jsonl")
    (tmp_path / "e.jsonl").mkdir()
    (tmp_path / "f.jsonl").symlink_to("a.jsonl")
    (tmp_path / "g.jsonl").symlink_to("/dev/zero")
    assert classroom.read_people(tmp_path) == [
        classroom.Person("ddp", [2, 9], 20, None, "")]


def test_the_page_says_what_there_is_to_do(tmp_path, snapshot):
    write(tmp_path, "a", {"time": 0, "left": [7, 8]},
          {"time": 900, "right": False, "mistake": "<b>wrong</b>"})
    write(tmp_path, "b", {"time": 0, "left": [7]}, {"time": 900, "left": []})
    write(tmp_path, "c", {"time": 5, "left": [1]}, {"time": 9, "right": True})
    write(tmp_path, "d", {"time": 600, "left": []},  # all made, but wrong
          {"time": 990, "right": False, "mistake": "<b>wrong</b>"})
    page = classroom.draw_page(classroom.read_people(tmp_path),
                               "Jobs: 1 waits", 1000)
    now = time.strftime("%H:%M:%S", time.localtime(1000))
    snapshot("class.html", page.replace(now, "12:00:00"))


def test_the_jobs_of_the_course(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert classroom.count_jobs() == ""
    squeue = program(tmp_path / "squeue", "#!/bin/sh\necho 'PENDING ddp-1n2g\n"
                     "RUNNING std\nRUNNING somebody else\n"
                     "PENDING ddp-1n4g'\n")
    assert classroom.count_jobs() == "Jobs: 2 waiting in the queue, 1 running."
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert classroom.count_jobs() == ""


def test_a_page_that_is_not_ours_is_kept(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("my thesis")
    assert "choose another page with -o" in workshop(
        ROOT, "class", tmp_path, "-o", page, status=1)
    assert page.read_text() == "my thesis"


def test_a_folder_that_is_not_there(tmp_path):
    assert "mkdir -m 1777" in workshop(
        ROOT, "class", tmp_path / "no", status=1)


def test_the_page_in_a_browser_renews_itself(tmp_path, browser):
    shared, page = tmp_path / "class", tmp_path / "page.html"
    shared.mkdir()
    write(shared, "attendee-1", {"time": 10, "left": [3]})
    board = subprocess.Popen(
        [sys.executable, "-m", "workshop", "class", shared, "-o", page],
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(page.exists)
        tab = browser.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("tr.person")
        write(shared, "another", {"time": time.time(), "right": True})
        tab.wait_for_function(  # nobody reloads it
            "document.querySelectorAll('tr.person').length == 2")
        text = tab.content()
        assert not any(file.stem in text for file in shared.glob("*"))
        tab.close()
    finally:
        board.send_signal(signal.SIGINT)
        assert board.wait(20) == 130
