"""What a lesson's cells import.

Each of them does so for itself: it can be run after a restart of the kernel,
before those above it.

The functions are those of `workshop/notebook/cells.py`. They run in the
course's own Python; a kernel, whatever its Python from 3.9 on, shows what
they send.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))

from course_process import Shown, call, describe_cells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Cell = Callable[..., Optional[Shown]]


def __getattr__(name: str) -> Cell:
    """Return the function of this name."""
    if name.startswith("_"):
        raise AttributeError(name)
    docs = describe_cells()
    if docs and name not in docs:
        raise AttributeError(f"no cell of the course is called {name}")

    def cell(*arguments: object, **options: object) -> Shown | None:
        return call(name, *arguments, **options)

    cell.__name__ = name
    cell.__qualname__ = name
    cell.__doc__ = docs.get(name)
    return cell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Define the magics; called by `%load_ext lesson`."""
    for name in ("ranks", "mpi"):
        ipython.register_magic_function(make_magic(name), "cell", name)
    call("%load_ext")  # if that complains, so does the first cell


def make_magic(name: str) -> Callable[[str, str], Shown | None]:
    """Return the function of a cell magic."""
    def magic(line: str, cell: str) -> Shown | None:
        return call(f"%%{name}", line, cell)

    return magic
