"""A copy of the current folder, in which a watched script runs.

A file that was there before is never changed, and nothing is left beside it:

- The copy is the ranks' current folder. Small files are copied, of others and
  of large folders it has links. The folders above it are there, too, so that
  `../data` leads to where it does from the current folder; and of what the
  user's links lead to elsewhere there is a copy in the same way.
- Before a rank writes to what is a link, the guard puts a copy in its place.
- Before a rank changes what was there before and is elsewhere, as by an
  absolute path, the guard ends the rank, and `require_kept` says why.
- What a rank starts of Python is guarded, too, by `why`'s hook. Another
  program or a compiled library can still write through a link, unseen: `Kept`
  compares the user's own files before and after.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rankcheck.system.errors import UserError, show_path
from rankcheck.system.hook import with_hook

TYPE_CHECKING = False  # a guarded Python loads this: nothing more than needed
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Union

    AnyPath = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]

SMALL = 1_000_000  # bytes of a file that is copied at once
# Entries of a folder that is copied with all that is in it
MOST_ENTRIES = 2_000
MOST_COPIED = 100_000_000  # bytes that are copied at once, in all
NOTES = "guard"  # the folder of what the guards tell one another
MOST_FILES = 20_000  # that `Kept` compares
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
GUARDED = "RANKCHECK_GUARD"  # the variable by which what is started knows it
BY_WHOM = ("by another program, or by one that the script started or compiled;"
           " in that case, run this in a copy of the folder")

# What a change does to a path: it makes something where nothing is; it takes
# what is there away, or puts something else in its place; it changes the
# content, of which what was there before may be needed, or not.
NEW, ENTRY, CONTENT, EMPTY = range(4)
# The audit events of changes: the kind, the place of the path among their
# arguments, and of the open folder that it is relative to, if it can be
CHANGES: dict[str, list[tuple[int, int, int | None]]] = {
    "os.chmod": [(CONTENT, 0, 2)], "os.chown": [(CONTENT, 0, 3)],
    "os.link": [(CONTENT, 0, 2), (NEW, 1, 3)], "os.mkdir": [(NEW, 0, 2)],
    "os.remove": [(ENTRY, 0, 1)], "os.removexattr": [(CONTENT, 0, None)],
    "os.rename": [(ENTRY, 0, 2), (ENTRY, 1, 3)], "os.rmdir": [(ENTRY, 0, 1)],
    "os.setxattr": [(CONTENT, 0, None)], "os.symlink": [(NEW, 1, 2)],
    "os.truncate": [(CONTENT, 0, None)], "os.utime": [(CONTENT, 0, 3)],
    "shutil.rmtree": [(CONTENT, 0, 1), (ENTRY, 0, 1)],
    "sqlite3.connect": [(CONTENT, 0, None)]}


@dataclass(frozen=True)
class Sandbox:
    """The copy, and the probe that guards a rank."""

    root: str  # the folder of all that the program writes
    top: str  # right in that, it stands for /: `top/home/me` is /home/me

    def __call__(self, log: Any = None) -> None:
        """Guard this process, its forked workers, and the Python it starts.

        log: as any probe gets it; not needed.
        """
        os.environ |= {GUARDED: f"{__name__}:{self.top}",
                       "PYTHONPATH": with_hook(os.environ)}
        inside = threading.local()  # what the guard itself opens is no change
        sys.dont_write_bytecode = True

        def guard(changes: Iterable[tuple[int, Any]]) -> None:
            if not getattr(inside, "guard", False):
                inside.guard = True
                try:
                    for kind, path in changes:
                        self.before_change(kind, path)
                finally:
                    inside.guard = False

        def on_event(event: str, args: Sequence[Any]) -> None:
            if event == "open":
                flags = args[2] or 0
                if flags & os.O_TRUNC:
                    guard([(EMPTY, args[0])])
                elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    guard([(CONTENT, args[0])])
            elif event in STARTS:  # asked by the check, at its end
                self.note("started", event)
            elif event in CHANGES:
                guard([(kind, absolute(args, path, folder))
                       for kind, path, folder in CHANGES[event]])
            elif event == "import" and args[0] == "torch.serialization":
                torch: Any = sys.modules["torch._C"]
                write = torch.PyTorchFileWriter  # by a file's name, unseen

                def guarded_write(file: Any, *args: Any, **kwargs: Any) -> Any:
                    guard([(EMPTY, file)])
                    return write(file, *args, **kwargs)

                torch.PyTorchFileWriter = guarded_write

        sys.addaudithook(on_event)
        opened = os.open  # whose event does not tell the open folder

        def guarded_open(path: AnyPath, flags: int, mode: int = 0o777, *,
                         dir_fd: int | None = None) -> int:
            return opened(absolute((path, dir_fd), 0, 1), flags, mode,
                          dir_fd=dir_fd)

        os.open = guarded_open
        os.supports_dir_fd.add(os.open)
        if "torch" in sys.modules:
            on_event("import", ["torch.serialization"])

    def before_change(self, kind: int, path: Any) -> None:
        """Copy the file that `path` leads to, or end this process.

        Args:
            kind: of the change, from `NEW` to `EMPTY`.
            path: as the event tells it: also an open file.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # an open file
        path = os.path.abspath(os.fsdecode(path))
        with contextlib.suppress(OSError):  # the script will meet it itself
            if is_below(path, self.top):
                self.copy_up(kind, path)
            # `data/..` is elsewhere if data is a link
            folder, name = os.path.split(path)
            place = (os.path.realpath(path) if kind >= CONTENT else
                     os.path.join(os.path.realpath(folder), name))
            if not is_below(place, self.root):
                self.before_change_outside(kind, place)

    def before_change_outside(self, kind: int, place: str) -> None:
        """End this process if it would change an existing file."""
        if not os.path.lexists(place):
            self.note("made", place)
            return
        now = os.lstat(place)
        # an empty file may be a lock, and nothing in it can be lost
        changes = kind == ENTRY or (
            kind > ENTRY and stat.S_ISREG(now.st_mode) and now.st_size)
        if changes and not any(is_below(place, made)
                               for made in self.noted("made")):
            self.note("refused", place)
            os._exit(1)

    def copy_up(self, kind: int, path: str) -> None:
        """Copy the folders and files on the way to `path`."""
        with open(f"{self.root}/{NOTES}/lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            here, names = self.top, path[len(self.top):].split("/")[1:]
            while names and (len(names) > 1 or kind >= CONTENT):
                here = f"{here}/{names.pop(0)}"
                if not os.path.islink(here):
                    continue
                place = os.path.realpath(here)
                if is_below(place, self.top):  # a link inside the copy
                    names = place[len(self.top):].split("/")[1:] + names
                    here = self.top
                elif os.path.isdir(place):
                    os.unlink(here)
                    os.mkdir(here)
                    fill(here, place)
                elif not names and not os.path.exists(place):
                    os.unlink(here)  # what it makes is not to be outside
                elif not names:
                    self.copy_file(place, here, kind == EMPTY)

    def follow(self, link: str, room: Room) -> None:
        """Make a link in the copy lead to a copy of its target."""
        place = resolve(link)
        if os.path.exists(place) and not is_below(place, self.root):
            self.copy_up(ENTRY, self.top + place)
            with contextlib.suppress(OSError):
                os.unlink(self.top + place)
                give(self.top + place, place, room)
            if not is_below(os.path.realpath(link), self.top):  # an absolute
                os.unlink(link)
                os.symlink(self.top + place, link)

    def copy_file(self, place: str, here: str, empty: bool) -> None:
        """Replace a link to a file by a copy, atomically.

        Args:
            place: of the file.
            here: the link in the copy.
            empty: whether the content is not needed.
        """
        if not stat.S_ISREG(os.stat(place).st_mode):
            return
        part = f"{self.root}/{NOTES}/copy"
        try:
            shutil.copyfile(os.devnull if empty else place, part)
            shutil.copystat(place, part)
            os.replace(part, here)
        except OSError:  # too large for this disk, or not readable
            with contextlib.suppress(OSError):
                os.unlink(part)

    def note(self, name: str, place: str) -> None:
        """Note a path for the guards of other processes and for the check."""
        with contextlib.suppress(OSError), open(
                f"{self.root}/{NOTES}/{name}", "a") as file:
            file.write(f"{place}\n")

    def noted(self, name: str) -> list[str]:
        """Return what was noted under this name."""
        file = Path(self.root, NOTES, name)
        return file.read_text().splitlines() if file.exists() else []

    def require_kept(self, fix: str) -> None:
        """Raise `UserError` if a rank was stopped before it changed a file."""
        for place in self.noted("refused")[:1]:
            raise UserError(
                f"the script tried to change the existing file {place} and "
                f"was stopped; the file is unchanged; {fix}")

    def name(self, path: str | Path) -> Path:
        """Return where the copy of a file is."""
        return Path(self.top + os.path.abspath(path))

    def as_known(self, text: str) -> str:
        """Return a text with the paths as the user knows them."""
        return text.replace(self.top, "")


@dataclass
class Room:
    """How many bytes may still be copied at once."""

    bytes_left: int = MOST_COPIED


def absolute(args: Sequence[Any], place: int, folder_place: int | None) -> Any:
    """Return the path among an event's arguments; None for an open file.

    Args:
        args: of the event.
        place: of the path among them.
        folder_place: of the open folder that it is relative to, or None.
    """
    path, folder = args[place], None
    if folder_place and folder_place < len(args):
        folder = args[folder_place]
    if isinstance(folder, int) and folder >= 0:
        with contextlib.suppress(OSError, TypeError):
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"),
                                os.fsdecode(path))
    return path


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def make(root: str | Path, name: str, script: str | Path) -> Sandbox:
    """Make a copy of the current folder and of a script, in root/name.

    One that is there already is taken as it is.
    """
    root, cwd = os.path.realpath(root), os.getcwd()
    top = f"{root}/{name}"
    os.makedirs(f"{root}/{NOTES}", exist_ok=True)
    sandbox = Sandbox(root, top)
    if not os.path.exists(top):
        os.makedirs(top + cwd)
        for folder in Path(cwd).parents:
            fill(f"{top}{folder}", str(folder))
        room = Room() if len(os.listdir(cwd)) <= MOST_ENTRIES else None
        fill(top + cwd, cwd, room)
        # folders before theirs
        for link in sorted(walk(top + cwd, MOST_ENTRIES),
                           key=lambda link: resolve(link.path)):
            if room and leads_out(link, cwd):
                sandbox.follow(link.path, room)
        sandbox.copy_up(CONTENT, str(sandbox.name(script)))
    return sandbox


def fill(copy: str, folder: str, room: Room | None = None) -> None:
    """Give each entry of `folder` one in `copy`, unless it has one: `give`."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            give(f"{copy}/{name}", os.path.join(folder, name), room)


def give(place: str, path: str, room: Room | None) -> None:
    """Copy `path` to `place`, or link to it.

    room: for copies; a folder is copied with all that is in it, if that is
    little, not hidden and not the copy itself. None: there are only links.
    """
    try:
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
        elif room and os.path.isdir(path) and not (
                os.path.basename(path)[0] == "." or is_below(place, path)
                or len(walk(path, MOST_ENTRIES)) == MOST_ENTRIES):
            os.mkdir(place)
            fill(place, path, room)
        elif room and os.path.isfile(path) and (
                size := os.path.getsize(path)) <= min(SMALL, room.bytes_left):
            shutil.copy2(path, place)
            room.bytes_left -= size
        else:
            os.symlink(path, place)
    except FileExistsError:
        pass  # on the way to the current folder
    except OSError:  # it may not be read, or there is no room for all of it
        with contextlib.suppress(OSError):
            Path(place).unlink(missing_ok=True)
            os.symlink(path, place)


def leads_out(entry: os.DirEntry[str], folder: str) -> bool:
    """Return whether it is a link to what is neither in the folder nor above
    it.
    """
    if not entry.is_symlink():
        return False
    place = resolve(entry.path)
    return not is_below(place, folder) and not is_below(folder, place)


def resolve(path: str) -> str:
    """Return where a path leads, or the path if a link may not be read, such
    as `/proc/1/cwd`.
    """
    try:
        return os.path.realpath(path)
    except OSError:
        return path


def walk(folder: str, most: int) -> list[os.DirEntry[str]]:
    """Return entries below a folder, near ones first; none in hidden folders
    and caches.
    """
    found: list[os.DirEntry[str]] = []
    folders = deque([folder])
    while folders and len(found) < most:
        with contextlib.suppress(OSError), os.scandir(
                folders.popleft()) as entries:
            for entry in entries:
                found.append(entry)
                if entry.is_dir(follow_symlinks=False) and not (
                        entry.name.startswith((".", "__pycache__"))):
                    folders.append(entry.path)
    return found[:most]


@dataclass(frozen=True)
class FileState:
    """What changes with a file: its inode, its size in bytes, and the time of
    its last change in ns.
    """

    inode: int
    size: int
    changed: int


class Kept:
    """The files of the current folder, to detect which of them change."""

    def __init__(self) -> None:
        self.before = self.list_states()

    def list_states(self) -> dict[str, FileState]:
        """Return the state of each file, by its path, except what this
        process prints to, and the notebook that it is started from: Jupyter
        saves that by itself.
        """
        found: dict[str, FileState] = {}
        cwd = os.getcwd()
        notebook = os.environ.get("JPY_SESSION_NAME", "")  # by Jupyter
        own = {os.stat(name).st_ino
               for name in ("/dev/stdout", "/dev/stderr", notebook)
               if os.path.exists(name)}
        entries = walk(cwd, MOST_FILES)
        for link in [*entries]:
            if leads_out(link, cwd):
                entries += walk(link.path, MOST_FILES - len(entries))
        for entry in entries:
            with contextlib.suppress(OSError):
                now = entry.stat()
                if now.st_ino not in own and entry.is_file(
                        follow_symlinks=leads_out(entry, cwd)):
                    found[entry.path] = FileState(
                        now.st_ino, now.st_size, now.st_mtime_ns)
        return found

    def changed(self) -> str:
        """Say which have changed, or are gone, since this was asked last; ""
        if none has.
        """
        now = self.list_states()
        names = [show_path(path) for path, before in self.before.items()
                 if now.get(path) != before]
        self.before = now
        if not names:
            return ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more} changed meanwhile"
