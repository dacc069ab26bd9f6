"""Files of a user's, which a script that is watched may not change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankcheck_testing.support import edit

TEXT = b"three weeks\n" * 9


@dataclass(frozen=True)
class FileState:
    """What there is to see of a file, a folder or a link."""

    content: bytes | None  # None: it is a folder, or leads nowhere
    changed_ns: int
    mode: int


def look(folder: Path) -> dict[Path, FileState]:
    """Return the state of all that is in a folder, by its path."""
    states = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else None
        own = path.lstat()
        states[path] = FileState(content, own.st_mtime_ns, own.st_mode)
    return states


def let_it_write(text: str, more: str = "") -> str:
    """Return a training script that also writes to log1, log3 and out/log2.

    Args:
        more: what its rank 0 does after that.
    """
    return edit(text, ("import torch\n", f"""\
import os, pathlib, torch
if os.environ.get("RANK", "0") == "0":
    torch.save({{}}, pathlib.Path(__file__).resolve().parent / "log3")
    open("log1", "w"); open("out/log2", "w"){more}
"""))
