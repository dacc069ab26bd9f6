"""The course's own Python, as a process beside a notebook's kernel.

A kernel, which may be a portal's, only displays: what a cell calls runs in
the course's Python, in one process that is started by the kernel's first
call and used until the kernel ends. That process sends the outputs, also
those of views that follow the script after their cell has ended.

This is what a kernel runs, so it needs the standard library and IPython
alone, from Python 3.9 on.
"""

from __future__ import annotations

import _thread
import contextlib
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Union

from course_messages import (
    ARGUMENTS_FIX,
    COMPLAINT,
    NOT_THE_COURSES_PYTHON,
    Answer,
    Bundle,
    Call,
    Cells,
    Display,
    Interrupt,
    Message,
    Printed,
    Question,
    Result,
    Update,
    decode,
    encode,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT), str(ROOT / "rankcheck" / "src")]

# What each candidate for the course's Python runs.
BOOT = f"""import sys
if sys.version_info < (3, 10):
    sys.exit({NOT_THE_COURSES_PYTHON})
from workshop.notebook import server
server.main()"""

# What activate.sh does if everything is set up. The site's modules come first,
# because the environment's Python may need their libraries.
FROM_SITE = """
[ ! -f site.sh ] || . ./site.sh
venv=${WORKSHOP_VENV:-.venv}
case $venv in "~"/*) venv=$HOME/${venv#"~"/} ;; esac
case $venv in *.tar | *.tar.*)
    venv=$(bash -p setup.sh unpack "$venv") || exit ;;
esac
[ -x "$venv/bin/python" ] || exit 77
exec "$venv/bin/python" "$@"
"""

# What setup.sh says while a cell waits for it: it unpacks, or another does.
PROGRESS = re.compile(r"^activate\.sh: ((?:unpacking|waiting for) .*)\n", re.M)

# So many times the stop button asks a call to end; then it ends the process.
INTERRUPTS = 2


class NotStarted(Exception):
    """The course's Python does not start; the message says why, in a line."""


class Shown:
    """An output: IPython shows the richest of its types."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def _repr_mimebundle_(self, **kwargs: object) -> Bundle:
        return self.bundle

    def __repr__(self) -> str:
        return self.bundle["text/plain"]


def complaint(text: str) -> Shown:
    """Return what went wrong, in one line."""
    line = html.escape(text, quote=False)
    return Shown({
        "text/html": '<p style="border-left: 4px dashed; padding-left: 8px">'
                     f"{line}</p>",
        "text/plain": text, COMPLAINT: text})


@dataclass(frozen=True)
class Ended:
    """The process has closed its output: it has ended, or does so now."""


@dataclass(frozen=True)
class Stopped:
    """The kernel's stop button was pressed."""


Event = Union[Message, Ended, Stopped]


class CourseProcess:
    """A process of the course's Python, which answers calls one by one."""

    def __init__(self, command: list[str]) -> None:
        """Start it. Raises OSError if there is no such program."""
        self.docs: dict[str, str] = {}
        self.environment = dict(os.environ)
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.lock = threading.Lock()
        self.is_collecting = True  # a thread waits for events
        self.errors = tempfile.TemporaryFile()
        self.lines_shown = 0  # of those that PROGRESS finds there
        # in a session of its own: the kernel's stop button ends no view
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=make_variables(), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, encoding="utf-8",
            errors="replace", start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Take what the process sends, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.deliver(decode(line))
        self.deliver(Ended())

    def deliver(self, event: Event) -> None:
        """Hand an event to the call in progress, or show it at once."""
        with self.lock:
            if self.is_collecting:
                self.events.put(event)
            else:
                publish(event)

    @contextlib.contextmanager
    def showing_at_once(self) -> Iterator[None]:
        """Let the reading thread show what arrives: this one is occupied."""
        self.release()
        try:
            yield
        finally:
            self.is_collecting = True

    def release(self) -> None:
        """Show what has arrived, and from now on what arrives, at once."""
        with self.lock:
            while not self.events.empty():
                publish(self.events.get())
            self.is_collecting = False

    def wait_until_ready(self) -> bool:
        """Wait until it says what it can do; returns whether it does.

        A package may print something before that. An archive of the
        environment takes a minute to unpack, and the cell says so.
        """
        with stop_button(self.events):
            event = self.next_event_of_start()
            while isinstance(event, Printed):
                publish(event)
                event = self.next_event_of_start()
        self.show_progress()
        if isinstance(event, Stopped):
            self.kill()
            raise NotStarted("interrupted")
        if not isinstance(event, Cells):
            self.process.wait()
            return False
        self.docs = event.docs
        self.release()
        return True

    def next_event_of_start(self) -> Event:
        """Wait for an event, and meanwhile show what setup.sh says."""
        while True:
            try:
                return self.events.get(timeout=0.5)
            except Empty:
                self.show_progress()

    def show_progress(self) -> None:
        """Print what setup.sh has said since the last time."""
        file = self.errors.fileno()
        # not `read`: the process writes where this one has read to
        written = os.pread(file, os.fstat(file).st_size, 0)
        lines = PROGRESS.findall(written.decode("utf-8", "replace"))
        for line in lines[self.lines_shown:]:
            publish(Printed(f"{line}\n"))
        self.lines_shown = len(lines)

    def last_error(self) -> str:
        """Return the last line of what the process wrote as its errors."""
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return written[-1] if written else ""

    def send(self, message: Message) -> None:
        """Send a message; if the process has ended, `Ended` follows."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def call(self, call: Call) -> Shown | None:
        """Run a cell's call; returns what the cell returns."""
        self.is_collecting = True
        interrupts = 0
        with stop_button(self.events):
            self.send(call)
            while True:
                event = self.events.get()
                if isinstance(event, Stopped):
                    interrupts += 1
                    if interrupts > INTERRUPTS:
                        self.kill()
                    self.send(Interrupt())
                elif isinstance(event, Question):
                    with self.showing_at_once():
                        text = ask(event.text, event.seconds)
                    self.send(Answer(text))
                elif isinstance(event, (Result, Ended)):
                    break
                else:
                    publish(event)
        self.release()
        if isinstance(event, Ended):
            return complaint(self.describe_end())
        if event.bundle is None:
            return None
        return Shown(event.bundle)

    def kill(self) -> None:
        """End the process, and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """Say in one line that the process has ended, and how."""
        status = self.process.wait()
        reason = self.last_error() or f"exit status {status}"
        if status == -signal.SIGKILL:
            reason = ("it was killed: by the stop button, or because the "
                      "session has too little memory")
        return (f"the course's Python has ended ({reason}): run this cell "
                "again, and those whose views are to follow your script")


def make_variables() -> dict[str, str]:
    """Return the environment for the course's Python.

    PYTHONHOME is the kernel's own. Which folder holds JupyterLab's files is
    what the kernel's Jupyter says.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONHOME", None)
    given = variables.get("PYTHONPATH")
    entries = [*SOURCES, given] if given else SOURCES
    variables["PYTHONPATH"] = os.pathsep.join(entries)
    try:
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return variables
    variables["JUPYTER_RUNTIME_DIR"] = jupyter_runtime_dir()
    return variables


def candidates() -> Iterator[list[str]]:
    """Yield the commands that may start the course's Python, best first."""
    yield [sys.executable]
    if os.environ.get("VIRTUAL_ENV"):
        yield [os.environ["VIRTUAL_ENV"] + "/bin/python"]
    yield ["bash", "-lc", FROM_SITE, "bash"]


def start() -> CourseProcess:
    """Start the course's Python.

    Raises:
        NotStarted: there is none yet, or it does not start.
    """
    for command in candidates():
        try:
            process = CourseProcess([*command, "-c", BOOT])
        except OSError:  # there is no such program
            continue
        if process.wait_until_ready():
            return process
        if process.process.returncode != NOT_THE_COURSES_PYTHON:
            reason = process.last_error()
            if not reason:
                reason = f"exit status {process.process.returncode}"
            raise NotStarted(f"the course's Python does not start: {reason}")
    raise NotStarted("the workshop's environment does not exist yet: run "
                     f"`source activate.sh` in a terminal, in {ROOT}")


running: CourseProcess | None = None  # the one of this kernel
calling = threading.Lock()


def find_running() -> CourseProcess:
    """Return this kernel's process; it is started, if need be.

    Raises:
        NotStarted: it cannot be started.
    """
    global running
    if running is None or running.process.poll() is not None:
        running = None
        running = start()
    return running


def describe_cells() -> dict[str, str]:
    """Return each function's documentation; {} if the course has no Python."""
    with calling:
        try:
            return find_running().docs
        except NotStarted:
            return {}


def call(name: str, *arguments: object, **options: object) -> Shown | None:
    """Call a function of the course, in its own Python."""
    if not calling.acquire(blocking=False):
        return complaint("another cell of the lesson runs: wait for its end")
    try:
        process = find_running()
        folder = ""
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        changed = {
            variable: value for variable, value in os.environ.items()
            if process.environment.get(variable) != value}
        request = Call(name, list(arguments), options, folder, changed)
        try:
            encode(request)
        except (RecursionError, ValueError):
            return complaint(f"{name}() {ARGUMENTS_FIX}")
        return process.call(request)
    except NotStarted as error:
        return complaint(str(error))
    finally:
        calling.release()


# ---------------------------------------------------------- in the notebook


@contextlib.contextmanager
def stop_button(events: SimpleQueue[Event]) -> Iterator[None]:
    """Let the kernel's stop button be an event, not an exception.

    An exception could come between an event and what it leads to.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    previous = signal.signal(
        signal.SIGINT, lambda *ignored: events.put(Stopped()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def ask(question: str, seconds: float) -> str:
    """Return what is answered, or "" if nothing is.

    Nobody answers where the notebook runs by itself, as in Run All Cells.
    """
    if threading.current_thread() is not threading.main_thread():
        return ""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        return input(question)
    except (EOFError, KeyboardInterrupt, NotImplementedError, RuntimeError):
        return ""
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, previous)


def publish(event: Event) -> None:
    """Show what an event brings, in the notebook or on a terminal."""
    if isinstance(event, Printed):
        print(event.text, end="", flush=True)
    if not isinstance(event, (Display, Update)):
        return
    shown = Shown(event.bundle)
    try:
        from IPython.display import display
    except ImportError:
        print(shown)
        return
    display(shown, display_id=event.display_id,
            update=isinstance(event, Update))
