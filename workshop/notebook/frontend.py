"""Where a cell's outputs appear: a notebook, or a terminal."""

from typing import Protocol
from uuid import uuid4

from notebooks.course_messages import Bundle


class Frontend(Protocol):
    """What shows outputs, and asks questions.

    Attributes:
        is_notebook: whether an output can be replaced by a newer one.
    """

    is_notebook: bool

    def display(self, bundle: Bundle, display_id: str) -> None:
        """Show an output."""

    def update(self, bundle: Bundle, display_id: str) -> None:
        """Show this output in the place of the one with that id."""

    def ask(self, question: str, seconds: float) -> str:
        """Return what is answered within so many seconds, or ""."""


class TerminalFrontend:
    """The frontend where no kernel has started this process."""

    is_notebook = False

    def display(self, bundle: Bundle, display_id: str) -> None:
        print(bundle["text/plain"])

    def update(self, bundle: Bundle, display_id: str) -> None:
        self.display(bundle, display_id)

    def ask(self, question: str, seconds: float) -> str:
        try:
            return input(question)
        except EOFError:
            return ""


current: Frontend = TerminalFrontend()


def connect(frontend: Frontend) -> None:
    """Show everything there from now on."""
    global current
    current = frontend


class LiveOutput:
    """An output that can be replaced by newer ones."""

    def __init__(self, bundle: Bundle) -> None:
        """Show it."""
        self.display_id = uuid4().hex  # new in every kernel of the notebook
        current.display(bundle, self.display_id)

    def update(self, bundle: Bundle) -> None:
        """Replace what is shown."""
        current.update(bundle, self.display_id)
