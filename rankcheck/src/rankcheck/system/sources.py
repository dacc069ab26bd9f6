"""Who owns a line's file: the script, PyTorch, Python or a launcher.

A path alone does not say it: a script may be in a folder called `torch`. So a
rank records the folders of what it has imported, and `Sources` compares with
them. Only the standard library: it is loaded into any script, by watcher.py.
"""

from __future__ import annotations

import os
import re
import sys

TYPE_CHECKING = False  # without importing typing in each process
if TYPE_CHECKING:
    from collections.abc import Sequence
    from dis import Instruction
    from types import FrameType
    from typing import Any

    # File, line, function: a list if it was read from JSON
    Frame = Sequence[Any]
    Stack = Sequence[Frame]  # outermost first

SCRIPT, INSTALLED, LAUNCHER = "script", "installed", "launcher"
TORCH, MPI4PY, PYTHON, GENERATED = "torch", "mpi4py", "python", "generated"
# What is named first, where a stack has lines of several
NAMED = (SCRIPT, INSTALLED, LAUNCHER)

PACKAGES = re.compile(r"/(site|dist)-packages/")
# Python's own `<string>` and torch.compile's files; what a user types is none
NO_FILE = re.compile(r"^<(?!stdin>)|/c[a-z2-7]{51}\.py$")
LAUNCHER_FILES = re.compile(
    r"/rankcheck/(engine|launch|system|why)/\w+\.py$"
    r"|/(site|dist)-packages/(accelerate/commands|deepspeed/launcher)/"
    r"|/\.local/bin/[^/]*$")
# In a record without folders, as older ones are, by the path alone
OLD_FOLDERS = (
    (TORCH, re.compile("(^|/)torch/")), (MPI4PY, re.compile("(^|/)mpi4py/")),
    (PYTHON, re.compile("/lib/python3")))

# Functions of torch.distributed that wait for other ranks. Beside these there
# are some that only compute, or that write files, as a checkpoint's do.
WAITING = re.compile(
    "wait|barrier|gather|reduce|scatter|broadcast|all_?to_?all|permute|send"
    "|recv|(?<!re)store|rendezvous|group|(?<!a)sync|rpc_|shutdown|verify_param")
COLLECTIVES_FILE = "distributed/distributed_c10d.py"
ELASTIC = re.compile("^distributed/elastic/")  # a frame around any script
NOT_WAITING = re.compile(r"^distributed/(checkpoint|elastic)/")
# Files of torch that read, write or wait for a process of this rank alone
LOCAL_TORCH = re.compile(
    r"^(distributed/|utils/data/|multiprocessing/|serialization\.py"
    r"|storage\.py|hub\.py)")
# Methods by which a script waits for a collective, or for what a GPU has to
# do, and operations that may stand in the GPU's queue
MAY_WAIT = re.compile(
    r"(^|\.)(wait|result|synchronize|item|tolist|cpu|cuda|to|numpy)$"
    r"|^(BINARY|COMPARE|UNARY|TO_BOOL|POP_JUMP|STORE_SUBSCR)")
NOT_COLLECTIVE = re.compile(r"^(os|select|signal)\.")  # os.wait


def find_folders() -> dict[str, str]:
    """Return where this process has its packages from, to be recorded as JSON.

    Returns:
        One of the constants above, as TORCH -> a folder, or "".
    """
    folders = {name: find_package(name) for name in (TORCH, MPI4PY)}
    folders[PYTHON] = os.path.dirname(os.__file__)
    # where `torchrun` and a package's own commands are
    folders[LAUNCHER] = os.path.dirname(sys.executable or "")
    return folders


def find_package(name: str) -> str:
    """Return the folder of an imported package; "" if it is not imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return os.path.dirname(file) if file else ""


def find_callee(frame: FrameType) -> str | None:
    """Return what a frame is calling: `time.sleep`, or an operation's name.

    Returns None where Python does not tell the positions of instructions
    (before 3.11).
    """
    if sys.version_info < (3, 11):
        return None
    import dis  # here: most processes that load this never need it
    at, before = frame.f_lasti, []
    for step in dis.get_instructions(frame.f_code):
        if step.offset > at:
            break
        before.append(step)
    if not before:
        return None
    last = before[-1]
    if not last.opname.startswith("CALL"):
        return last.opname
    begin = find_position(last)
    if begin is None:
        return None
    names = [
        str(step.argval) for step in before
        if step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST"
        and find_position(step) == begin and isinstance(step.argval, str)]
    return ".".join(names) or None


def find_position(
        step: Instruction) -> tuple[int | None, int | None] | None:
    """Return the line and column where an instruction's source begins."""
    if step.positions is None:
        return None
    return step.positions.lineno, step.positions.col_offset


class Sources:
    """Tells whose the files of one process are.

    Args:
        folders: as `find_folders` returns them; None in an old record.
        library: a pattern of further files that are not the script's.
    """

    def __init__(self, folders: dict[str, str] | None = None,
                 library: str = "") -> None:
        self.folders = {
            name: os.path.join(folder, "")
            for name, folder in (folders or {}).items() if folder}
        self.library = re.compile(library) if library else None
        self.known: dict[str, str] = {}

    def owner(self, file: str) -> str:
        """Return whose a file is: one of the constants above, as SCRIPT."""
        if file not in self.known:
            self.known[file] = self.find_owner(file)
        return self.known[file]

    def find_owner(self, file: str) -> str:
        """Find out what `owner` returns."""
        if NO_FILE.search(file):
            return GENERATED
        if file.endswith(".pyx"):  # compiled; without the folder it came from
            return MPI4PY if "mpi4py" in file else INSTALLED
        if self.folders:
            for name in TORCH, MPI4PY:
                if name in self.folders and file.startswith(
                        self.folders[name]):
                    return name
        else:
            for name, pattern in OLD_FOLDERS[:2]:
                if pattern.search(file):
                    return name
        if LAUNCHER_FILES.search(file):
            return LAUNCHER
        if PACKAGES.search(file):
            return INSTALLED
        if self.library and self.library.search(file):
            return INSTALLED
        if self.folders:
            if file.startswith(self.folders.get(PYTHON, "\0")):
                return PYTHON
            if os.path.join(os.path.dirname(file), "") == self.folders.get(
                    LAUNCHER):
                return LAUNCHER
        elif OLD_FOLDERS[2][1].search(file):
            return PYTHON
        return SCRIPT

    def find_line(self, stack: Stack) -> Frame:
        """Return the script's innermost frame in a stack.

        Without one, of an installed package, as where that is what was
        started; then of a launcher.
        """
        for owner in NAMED:
            for frame in reversed(stack):
                if self.owner(frame[0]) == owner:
                    return frame
        return (stack or [["?", 0, "?"]])[-1]

    def find_innermost(self, stack: Stack) -> Frame | None:
        """Return the innermost frame, but for the one that dispatches torch's
        operators; None without any.
        """
        for frame in reversed(stack):
            if self.path_in_torch(frame[0]) != "_ops.py":
                return frame
        return None

    def path_in_torch(self, file: str) -> str:
        """Return a file's path in torch's folder, as distributed/utils.py; ""
        if it is not in there.
        """
        if self.owner(file) != TORCH:
            return ""
        if TORCH in self.folders:
            return file[len(self.folders[TORCH]):]
        return f"/{file}".rpartition("/torch/")[2]

    def find_wait(self, stack: Stack) -> str:
        """Return the function of torch.distributed in which a stack waits for
        other ranks; "" if it does not end in one.

        A module of torch.distributed that is being loaded does not count.
        """
        innermost = self.find_innermost(stack)
        if innermost is None:
            return ""
        path = self.path_in_torch(innermost[0])
        name: str = innermost[2]
        function: str
        if not path.startswith("distributed/") or name == "<module>" or (
                NOT_WAITING.search(path)):
            return ""
        public = path == COLLECTIVES_FILE and name[0] != "_"
        if not public and not WAITING.search(name):
            return ""
        for file, _, function in reversed(stack):
            if self.path_in_torch(file).startswith("distributed/") and (
                    function[0] != "_" and function != "wrapper"):
                return function
        return name

    def is_in_collective(self, stack: Stack) -> bool:
        """Whether a stack ends in a file with torch's own collectives, which
        begin there and end there, unless they are asynchronous.
        """
        innermost = self.find_innermost(stack)
        return innermost is not None and self.path_in_torch(
            innermost[0]) == COLLECTIVES_FILE

    def uses_collectives(self, stack: Stack) -> bool:
        """Whether any frame of a stack may call other ranks."""
        return any(
            self.is_distributed(file) or self.owner(file) == MPI4PY
            or is_mpi_call(file, name) for file, _, name in stack)

    def calls_others(self, stack: Stack) -> bool:
        """Whether a stack ends in torch, in something that a function of
        torch.distributed that waits for others has called.
        """
        for file, _, name in reversed(stack):
            if self.owner(file) not in (TORCH, GENERATED) or (
                    self.path_in_torch(file).startswith("nn/modules/")):
                return False
            if self.is_distributed(file) and WAITING.search(name):
                return True
        return False

    def is_distributed(self, file: str) -> bool:
        """Whether a file is of torch.distributed, without its launcher."""
        path = self.path_in_torch(file)
        return path.startswith("distributed/") and not ELASTIC.search(path)


def is_mpi_call(file: str, name: str) -> bool:
    """Whether this is the frame in which our record of MPI calls MPI."""
    return name == "called" and file.endswith("/why/calls.py")
