"""Files: written atomically, with errors of one line."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin

from backstage import ROOT
from backstage.errors import UserError, leave_mpi, report, require

PART = ".workshop-part"  # how the name of an unfinished file of ours ends
StrPath = Union[str, "os.PathLike[str]"]
MAPPED: dict[StrPath, int] = {}  # files that are read as memory: their bytes


class Damaged(UserError):
    """A file whose content is not what it should be."""


class WriteFailed(UserError):
    """A file whose write failed; reason: in the system's words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@contextmanager
def reading(file: StrPath, fix: str = "") -> Iterator[None]:
    """Raise any error of reading and checking a file as `Damaged`.

    Anybody may have changed, copied or truncated it, and each library has its
    own exceptions. `FileNotFoundError` and another `Damaged` stay as they are.
    """
    try:
        require(stat.S_ISREG(os.stat(file).st_mode), "not a file")  # a pipe
        yield
    except (FileNotFoundError, Damaged):
        raise
    except Exception as error:
        is_system = getattr(error, "errno", None) or isinstance(
            error, UnicodeEncodeError)  # of its name
        advice = f"; fix: {fix}" if fix and not is_system else ""
        what = "cannot be read" if is_system else "is corrupt"
        raise Damaged(
            f"{file} {what} ({reason(error)}){advice}") from error


def map_file(file: StrPath) -> None:
    """Report a SIGBUS in one line if this file was truncated while read."""
    MAPPED[file] = os.stat(file).st_size
    # Python's own handler would wait for the read, which never ends
    ctypes.CDLL(None).signal(signal.SIGBUS, say_cut)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def say_cut(number: int) -> None:
    for path, size in MAPPED.items():
        if os.path.exists(path) and os.stat(path).st_size < size:
            report(UserError(f"{path} was truncated while being read; fix: "
                             "rebuild it; a run resumes with --resume"))
            leave_mpi(1)
            os._exit(1)
    ctypes.CDLL(None).signal(number, None)  # it has another cause
    os.kill(os.getpid(), number)


def read_json(file: StrPath, like: Any, fix: str = "") -> Any:
    """Return the content of a JSON file of this form. Raises as `reading`."""
    with reading(file, fix):
        value = json.loads(Path(file).read_bytes())
        require_like(value, like)
        return value


def require_like(value: Any, like: Any, name: str = "it") -> None:
    """Raise a `UserError` unless a JSON value has the required types.

    like: a flag's type, a dictionary of keys, or a list of one item's type.
    """
    kind = like if isinstance(like, type) else type(like)
    right = value in get_args(like) if get_origin(like) is Literal else (
        type(value) is kind or (kind is float and type(value) is int))
    require(right and (kind is not str or "\0" not in value),  # as in no path
            f"{name} is {str(value)[:20]!r}, which has the wrong type")
    for key, inside in like.items() if type(like) is dict else ():
        require(key in value, f"{name} has no {key}")
        require_like(value[key], inside, key)
    for item in value if type(like) is list else ():
        require_like(item, like[0], f"an item of {name}")


def reason(error: BaseException) -> str:
    """Return a library's error about a file as one short line."""
    text = getattr(error, "strerror", None) or str(error)
    if "eights_only" in text or "eights only" in text:  # PyTorch: trust it
        found = re.search(r"GLOBAL ([\w.]+)", text)
        text = "it holds Python objects, not only tensors" + (
            f": {found[1]}" if found else "")
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    missing = " is missing" if isinstance(error, KeyError) else ""
    return " ".join(first.split())[:200] + missing


# What a file system answers that cannot do it at all (vboxsf, older CIFS, some
# NFS and FUSE), which is no failure of a write: SQLite and PostgreSQL ignore
# it, too: EINVAL and EBADF of a folder's fsync, EACCES and EISDIR of its
# opening, and what fchmod says.
UNABLE = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS,
          errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)


@contextmanager
def where_possible() -> Iterator[None]:
    """Ignore an `OSError` of a file system that does not support this."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNABLE:
            raise


def write_atomically(
        path: StrPath, data: bytes | Callable[[BinaryIO], object],
        fix: str = "", last_look: Callable[[], object] = bool) -> None:
    """Write all of the data to the file, or leave the file unchanged.

    data: bytes, or a function that writes them to the open file it is given.
    last_look: called just before the old file is gone; it may raise.

    Raises:
        WriteFailed: the data could not be written; `fix` follows. Or
            they are in the file, and the disk has failed to confirm it: this
            is what the line says then.
    """
    path = Path(path)
    existed = os.path.lexists(path)
    part: Path | None = None
    stamp: os.stat_result | None = None
    try:
        part, file = open_part(path)
        with file:
            data(file) if callable(data) else file.write(data)
            file.flush()
            os.fsync(file.fileno())
            stamp = os.fstat(file.fileno())
        if path.exists():  # a script may be executable
            with where_possible():
                os.chmod(part, path.stat().st_mode)
        last_look()
        os.replace(part, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        if isinstance(error.__context__, OSError):  # torch hides the cause
            error = error.__context__
        why = reason(error)
        if was_replaced(path, part, stamp):
            raise WriteFailed(
                f"{show_path(path)} was written, but the disk did not confirm "
                f"it ({why}); fix: check the disk, then the file", why
            ) from error
        line = f"{show_path(path)} could not be written ({why})"
        if existed and (part is None or os.path.lexists(part)):
            line += ", and is unchanged"
        raise WriteFailed(line + fix, why) from error
    finally:
        if part:
            with suppress(OSError):  # `remove_parts` does it later
                part.unlink(missing_ok=True)


def was_replaced(path: Path, part: Path | None,
                 stamp: os.stat_result | None) -> bool:
    """Return whether the part replaced the file, even if os.replace failed.

    stamp: of the part, when it was whole. A server may fail after it has
    renamed it.
    """
    if part is None or stamp is None or os.path.lexists(part):
        return False
    with suppress(OSError):
        return os.path.samestat(stamp, os.lstat(path))
    return False


def open_part(path: Path) -> tuple[Path, BinaryIO]:
    """Open a new file beside `path`, locked while open; return its name."""
    for number in itertools.count():
        part = path.with_name(f".{path.name}.{os.getpid()}-{number}{PART}")
        with suppress(FileExistsError):
            file = open(part, "xb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            return part, file
    raise AssertionError  # no number is the last


def remove_parts(folder: StrPath) -> None:
    """Remove the partial files that killed processes left there.

    Nobody has a lock on them any more; without locks, they stay.
    """
    for part in Path(folder).glob(f".*{PART}"):
        with suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def lock_folder(folder: StrPath, refusal: str) -> int:
    """Lock a folder for this process; returns the open folder, an int.

    Closing it ends the lock. Where folders cannot be locked (NFS), none is
    taken. Raises `UserError(refusal)` if another process has the lock.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(refusal) from error
    except OSError:
        pass
    return handle


def sync_folder(folder: StrPath) -> None:
    """Make sure that a rename in the folder survives a power cut.

    Where the file system cannot, nobody can.
    """
    with where_possible():
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def new_folder(parent: StrPath, name: str) -> Path:
    """Make parent/<date>-<time>-<name>, even if others do so right now."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(parent) / f"{now}-{name}{suffix}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError  # no number is the last


def keep(file: Path) -> Path:
    """Keep a file that will be replaced under a dated name; return that."""
    while os.path.lexists(kept := file.with_stem(
            file.stem + time.strftime(".%Y%m%d-%H%M%S"))):
        time.sleep(0.1)  # until the next second
    try:
        os.link(file, kept, follow_symlinks=False)
    except OSError:  # a folder, or a file system without links
        file.rename(kept)
    return kept


def show_path(path: StrPath, folder: Path = ROOT) -> str:
    """Return the path relative to the folder if it is inside, else absolute.

    folder: Path.cwd() for a path that somebody is to type.
    """
    path = Path(os.path.abspath(path))
    return str(path.relative_to(folder) if folder in path.parents else path)
