"""Files: written all or nothing, and one line for what is wrong with one.

This needs only the standard library, from Python 3.9 on: the tools of the
course use it, too.
"""

import fcntl
import itertools
import os
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require


class Damaged(UserError):
    """A file that does not hold what it should."""


@contextmanager
def reading(file, remedy=""):
    """Whatever goes wrong while a file is read and checked is a `Damaged`.

    Anybody may have changed, copied or cut the file, and each library has its
    own exceptions. Only `FileNotFoundError` stays as it is.
    """
    try:
        # one would wait for ever for what a pipe holds
        require(stat.S_ISREG(os.stat(file).st_mode), "not a file")
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Damaged(f"{file} is damaged ({reason(error)})"
                      + f": {remedy}" * bool(remedy)) from error


def reason(error):
    """What a library says about a file, in one short line."""
    text = getattr(error, "strerror", None) or str(error)
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    missing = " is missing" if isinstance(error, KeyError) else ""
    return " ".join(first.split())[:200] + missing


PART = ".workshop-part"  # how the name of an unfinished file of ours ends


def write_atomically(path, data):
    """Write all of the data to the file, or leave the file unchanged.

    data: bytes, or a function that writes them to the open file it is given.
    Raises `UserError` if they cannot be written.
    """
    path = Path(path)
    part = None
    try:
        part, file = open_part(path)
        with file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():  # a script may be executable
            os.chmod(part, path.stat().st_mode)
        os.replace(part, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        if isinstance(error.__context__, OSError):  # torch hides the cause
            error = error.__context__
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{show_path(path)} could not be written ({reason})"
                        + ", and is unchanged" * path.exists()) from error
    finally:
        if part:
            part.unlink(missing_ok=True)


def open_part(path):
    """A new file beside `path`, and its name: locked while it is open."""
    for number in itertools.count():
        part = path.with_name(f".{path.name}.{os.getpid()}-{number}{PART}")
        with suppress(FileExistsError):
            file = open(part, "xb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            return part, file


def remove_parts(folder):
    """Remove what killed processes have left of files they wrote there.

    Nobody holds the lock on such a file any more. Where the file system has
    no locks, they stay.
    """
    for part in Path(folder).glob(f".*{PART}"):
        with suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def lock_folder(folder, refusal):
    """Lock a folder for this process alone; returns the open folder, an int.

    The lock is gone when it is closed, or when the process ends in any way.
    Where the file system does not lock folders (NFS), none is taken. Raises
    `UserError(refusal)` if another process has the lock.
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


def sync_folder(folder):
    """Make sure that a file renamed in the folder survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_folder(parent, name):
    """Make parent/<date>-<time>-<name>, even if others do so right now."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(parent) / f"{now}-{name}{suffix}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def show_path(path, folder=ROOT):
    """The path from the folder on where it is inside, else from the root on.

    folder: the repository, in which the lessons name files; Path.cwd() for a
    path that somebody is to type.
    """
    path = Path(os.path.abspath(path))
    inside = folder in path.parents
    return str(path.relative_to(folder) if inside else path)
