"""The course's Python beside a kernel: runs what the notebook's cells call.

notebooks/course_process.py starts it, with pipes as its input and output.
Calls run one after another in the main thread; views that follow the script
have threads of their own. It ends when its input ends, as the kernel does.
"""

import importlib.util
import inspect
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

from notebooks.course_messages import (
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
from workshop.jobs.interpreter import COURSE_PACKAGES
from workshop.notebook import cells, frontend, magics
from workshop.notebook.output import Shown, complaint

CALL_SECONDS = 10.0  # seconds for a call to end once the kernel has ended


class Kernel:
    """The kernel that has started this process, as its frontend."""

    is_notebook = True

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self.requests = requests
        self.replies = replies
        self.lock = threading.Lock()
        self.calls: SimpleQueue[Call | None] = SimpleQueue()
        self.answers: SimpleQueue[str] = SimpleQueue()
        self.is_running = False  # whether a call is in progress
        self.was_interrupted = False  # whether that was told to end
        self.is_sending = False  # whether the main thread sends a message
        self.is_due = False  # whether an interrupt waits for its end

    def send(self, message: Message) -> None:
        """Send a message, unless the kernel has ended.

        An interrupt waits: a message that is cut would spoil the next one.

        Raises:
            KeyboardInterrupt: the call in progress was interrupted.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            self.is_sending = True
        with self.lock:
            try:
                self.replies.write(encode(message))
                self.replies.flush()
            except OSError:
                pass
        if is_main:
            self.is_sending = False
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    def display(self, bundle: Bundle, display_id: str) -> None:
        self.send(Display(bundle, display_id))

    def update(self, bundle: Bundle, display_id: str) -> None:
        self.send(Update(bundle, display_id))

    def ask(self, question: str, seconds: float) -> str:
        self.send(Question(question, seconds))
        return self.answers.get()

    def read(self) -> None:
        """Take what the kernel sends, until it ends."""
        for line in self.requests:
            message = decode(line)
            if isinstance(message, Call):
                self.calls.put(message)
            elif isinstance(message, Answer):
                self.answers.put(message.text)
            elif isinstance(message, Interrupt):
                self.interrupt()
        self.calls.put(None)
        self.answers.put("")
        self.interrupt()
        end = threading.Timer(CALL_SECONDS, os._exit, [1])
        end.daemon = True
        end.start()

    def interrupt(self) -> None:
        """Interrupt the call in progress, and the programs that it runs."""
        if self.is_running:
            os.killpg(os.getpgrp(), signal.SIGINT)

    def on_signal(self, *ignored: object) -> None:
        """End the call in progress, once: programs have their own signal."""
        if not self.is_running or self.was_interrupted:
            return
        self.was_interrupted = True
        if self.is_sending:
            self.is_due = True
        else:
            raise KeyboardInterrupt

    def run(self, call: Call, functions: dict[str, Callable[..., object]]
            ) -> Shown | None:
        """Run a call; returns what it returns, or what went wrong."""
        try:
            os.environ.update(call.environment)
            if call.folder:
                os.chdir(call.folder)
            function = functions[call.name]
            self.was_interrupted = False
            self.is_running = True
            try:
                shown = function(*call.arguments, **call.options)
            finally:
                self.is_running = False
        except KeyboardInterrupt:
            return complaint("interrupted")
        except Exception as error:
            self.send(Printed(traceback.format_exc()))
            reason = traceback.format_exception_only(error)[-1].strip()
            return complaint(f"a fault of the course's tools: {reason}")
        if shown is None or isinstance(shown, Shown):
            return shown
        return complaint(f"a fault of the course's tools: {call.name}() "
                         f"returns {type(shown).__name__}")

    def serve(self) -> None:
        """Answer calls until the kernel ends."""
        functions = find_functions()
        docs = {name: document(function) for name, function
                in functions.items() if name.isidentifier()}
        signal.signal(signal.SIGINT, self.on_signal)
        threading.Thread(target=self.read, daemon=True).start()
        self.send(Cells(docs))
        while (call := self.calls.get()) is not None:
            shown = self.run(call, functions)
            if shown is None:
                self.send(Result(None))
            else:
                self.send(Result(shown.bundle()))


class Prints(io.TextIOBase):
    """A stream whose text is printed in the notebook."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self.kernel.send(Printed(text))
        return len(text)


def find_functions() -> dict[str, Callable[..., object]]:
    """Return what a notebook can call, by name."""
    functions: dict[str, Callable[..., object]] = {
        name: value for name, value in vars(cells).items()
        if getattr(value, "is_cell", False)}
    functions["%%ranks"] = magics.ranks
    functions["%%mpi"] = magics.mpi
    functions["%load_ext"] = cells.load_extension
    return functions


def document(function: Callable[..., object]) -> str:
    """Return how to call a function, and what it does."""
    name = getattr(function, "__name__", "")
    text = inspect.getdoc(function) or ""
    return f"{name}{inspect.signature(function)}\n\n{text}"


def take_pipes() -> Kernel:
    """Keep the pipes to the kernel from all that this process starts."""
    requests = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what a program prints past us is kept with the errors
    return Kernel(requests, replies)


def main() -> None:
    """Serve the kernel at the other end of the pipes."""
    if not all(map(importlib.util.find_spec, COURSE_PACKAGES)):
        sys.exit(NOT_THE_COURSES_PYTHON)
    kernel = take_pipes()
    sys.stdout = sys.stderr = Prints(kernel)
    frontend.connect(kernel)
    kernel.serve()
