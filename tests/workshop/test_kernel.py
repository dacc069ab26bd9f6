"""The process of the course's Python beside a kernel, as its cells use it.

There is no Jupyter here: what a kernel would display is printed.
test_lab.py and test_notebooks.py have real kernels.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cluster import wait_for
from conftest import copy_clone

from backstage import ROOT
from notebooks import course_messages
from workshop.notebook import server

# Cells that only a test needs.
MORE_CELLS = '''

@in_one_line
def fault():
    """A fault of our own."""
    return {}["missing"]


@in_one_line
def wait(seconds):
    """Wait, and print that."""
    print("it waits", flush=True)
    import time
    time.sleep(seconds)


@in_one_line
def refuse():
    """Ignore that it is interrupted."""
    import time
    for _ in range(600):
        try:
            print("it refuses", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            pass


@in_one_line
def question():
    """Ask, and show the answer between two outputs."""
    frontend.LiveOutput(show_text("before").bundle())
    text = frontend.current.ask("Really? ", 60)
    frontend.LiveOutput(show_text(f"after {text}").bundle())


@in_one_line
def later():
    """Show something, and another thing after the call."""
    output = frontend.LiveOutput(show_text("at first").bundle())

    def follow():
        import time
        time.sleep(0.5)
        output.update(show_text("later").bundle())

    threading.Thread(target=follow, daemon=True).start()


@in_one_line
def where(name):
    """Show the working directory and a variable."""
    subprocess.run(["sh", "-c", "cat; echo past us"])
    return show_text(f"{os.getcwd()} {os.environ.get(name)}")


@in_one_line
def number():
    """Show the process id."""
    return show_text(str(os.getpid()))
'''


@pytest.fixture
def repo(tmp_path):
    """A copy of the course, with more cells."""
    repo = copy_clone(tmp_path / "repo", "notebooks")
    with open(repo / "workshop" / "notebook" / "cells.py", "a") as file:
        file.write(MORE_CELLS)
    return repo


@pytest.fixture
def kernel(repo):
    """Run code where a kernel would; returns the process, with pipes."""
    started = []

    def kernel(code):
        variables = {name: value for name, value in os.environ.items()
                     if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        process = subprocess.Popen(
            [sys.executable, "-c", "import course_process as process\n"
             f"from lesson import {CELLS}\n{code}"],
            cwd=repo / "notebooks", env=variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield kernel
    for process in started:
        process.kill()
        process.wait()


CELLS = "fault, wait, refuse, question, later, where, number, cadence"


def said(process, answers=""):
    """What it prints until its end."""
    out, _ = process.communicate(answers, timeout=300)
    assert process.returncode == 0, out
    return out.splitlines()


def wait_for_line(process, words):
    """Wait until it prints a line with these words."""
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"it does not print {words!r}")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_outputs_and_a_question_keep_their_order(kernel):
    assert said(kernel("question(); print('end')"), "yes\n") == [
        "before", "Really? after yes", "end"]


UPDATED = """
import threading
publish, is_updated = process.publish, threading.Event()

def show(event):
    publish(event)
    if isinstance(event, process.Update):
        is_updated.set()

process.publish = show
later()
is_updated.wait(60)
print("seen")
"""


def test_a_view_is_updated_after_its_cell(kernel):
    assert said(kernel(UPDATED)) == ["at first", "later", "seen"]


def test_one_process_serves_all_cells(kernel):
    first, second = said(kernel("print(number())\nprint(number())"))
    assert first == second


def test_a_cell_has_the_kernels_folder_and_variables(kernel, tmp_path):
    """As they are now. Programs that it starts cannot disturb the pipes."""
    assert said(kernel(
        "import os\nprint(where('NEW'))\n"
        f"os.environ['NEW'] = 'set'; os.chdir({str(tmp_path)!r})\n"
        "print(where('NEW'))")) == [
        f"{tmp_path}/repo/notebooks None", f"{tmp_path} set"]


def test_a_fault_of_ours_is_a_line_below_its_traceback(kernel):
    *traceback, line = said(kernel("print(fault())\nprint(cadence())"))[:-1]
    assert line == "a fault of the course's tools: KeyError: 'missing'"
    assert traceback[0].startswith("Traceback")


@pytest.mark.parametrize("call", [
    "where(b'x')", "where([1])", "where(all)", "where(object())",
    "where(10**5000)"])
def test_a_cell_takes_what_a_message_can_hold(kernel, call):
    assert said(kernel(f"print({call})")) == [
        f"where() {course_messages.ARGUMENTS_FIX}"]


def test_an_unknown_cell_cannot_be_imported(kernel):
    out = kernel("from lesson import nonsense").communicate(timeout=300)[0]
    assert "cannot import name 'nonsense' from 'lesson'" in out


def test_the_stop_button_ends_a_call(kernel):
    process = kernel("print(wait(600))\nprint(cadence())")
    wait_for_line(process, "it waits")
    process.send_signal(signal.SIGINT)
    assert said(process) == ["interrupted", "(a picture)"]


@pytest.mark.whole
def test_the_stop_button_ends_what_refuses(kernel):
    """The third time it ends the process; the next cell has another one."""
    process = kernel("print(refuse())\nprint(cadence())")
    wait_for_line(process, "it refuses")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "it refuses")  # still
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    line, picture = said(process)
    assert re.match("the course's Python has ended .it was killed: .*: run "
                    "this cell again", line)
    assert picture == "(a picture)"


@pytest.mark.whole
def test_a_process_that_was_killed_is_a_line(kernel):
    process = kernel(
        "import os, threading\n"
        "pid = process.find_running().process.pid\n"
        "threading.Timer(2, os.kill, [pid, 9]).start()\n"
        "print(wait(600))\nprint(cadence())")
    waits, line, picture = said(process)
    assert line.startswith("the course's Python has ended (it was killed: ")
    assert (waits, picture) == ("it waits", "(a picture)")


@pytest.mark.whole
def test_it_ends_with_its_kernel(kernel):
    process = kernel(
        "print(process.find_running().process.pid, flush=True)\nwait(600)")
    pid = int(process.stdout.readline())
    wait_for_line(process, "it waits")
    assert is_alive(pid)
    process.kill()
    wait_for(lambda: not is_alive(pid), 60)


@pytest.mark.whole
def test_the_file_that_says_that_it_lives_ends_with_it(repo, tmp_path):
    """Also where the end takes a while, in which it is not made again."""
    record = {"root_dir": str(repo)}
    (tmp_path / "jpserver-1.json").write_text(json.dumps(record))
    path = os.pathsep.join([str(repo), str(repo / "rankcheck" / "src")])
    end = subprocess.run(
        [sys.executable, "-c", "import atexit, os, time\n"
         "atexit.register(time.sleep, 2)\n"
         "from workshop.notebook import following\n"
         "file = following.pulse()\nprint(file, os.path.exists(file))"],
        cwd=repo, text=True, capture_output=True, check=True, env={
            **os.environ, "PYTHONPATH": path, "JPY_PARENT_PID": "1",
            "JUPYTER_RUNTIME_DIR": str(tmp_path)})
    name, _, was_there = end.stdout.strip().partition(" ")
    assert was_there == "True" and not (repo / name).exists()


@pytest.mark.whole
def test_a_python_that_does_not_start_is_a_line(kernel, repo):
    """If it is the course's: what is not, is passed over."""
    (repo / "workshop" / "html.py").write_text("import nothing_of_ours\n")
    line, = said(kernel("print(cadence())"))
    assert line == ("the course's Python does not start: ModuleNotFoundError: "
                    "No module named 'nothing_of_ours'")


def test_what_is_no_message_is_refused():
    for line in ("Welcome", "{}", "[]", '["Nothing", {}]', '["Result", {}]'):
        with pytest.raises(ValueError):
            course_messages.decode(line)
    for message in (course_messages.Result(None),
                    course_messages.Call("diff", ["ddp"], {}, "", {})):
        line = course_messages.encode(message)
        assert course_messages.decode(line) == message


class CutInTwo(io.StringIO):
    """A pipe that takes a part of a message; then a signal arrives."""

    def write(self, text):
        super().write(text[:9])
        self.on_signal()
        return 9 + super().write(text[9:])


def test_an_interrupt_waits_until_a_message_is_sent():
    """A part of one would spoil the next, which may be the result."""
    replies = CutInTwo()
    kernel = server.Kernel(io.StringIO(), replies)
    replies.on_signal = kernel.on_signal
    kernel.is_running = True
    with pytest.raises(KeyboardInterrupt):
        kernel.send(course_messages.Printed("a line of a cell"))
    kernel.is_running = False
    kernel.send(course_messages.Result(None))
    sent = [course_messages.decode(line)
            for line in replies.getvalue().splitlines()]
    assert sent == [course_messages.Printed("a line of a cell"),
                    course_messages.Result(None)]


WARNS = """\
import sys
import course_process

code = '''
from notebooks.course_messages import Cells, Printed, encode
print(encode(Printed("a warning\\\\n")), end="")
print(encode(Cells({"diff": ""})), end="", flush=True)
input()
'''
process = course_process.CourseProcess([sys.executable, "-c", code])
print(process.wait_until_ready(), process.docs)
process.kill()
"""


def test_what_is_printed_before_it_is_ready():
    """As a warning of a package; it is no end."""
    end = subprocess.run(
        [sys.executable, "-c", WARNS], cwd=ROOT / "notebooks", text=True,
        capture_output=True, timeout=60)
    assert end.stdout == "a warning\nTrue {'diff': ''}\n", end.stderr
