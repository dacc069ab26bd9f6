"""Starts a job whose ranks write records: rankcheck why run -- X

Each start is remembered, twice:

    FOLDER/PROCESS.start        beside the evidence
    STARTS/.starts/TOKEN.json   in the user's list of starts

A start in the list names those that it has found there, so these were earlier:
that needs no clock, and no lock, and holds between hosts that share a home.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rankcheck.system import proc
from rankcheck.system.errors import UserError, read_regular
from rankcheck.system.hook import with_hook
from rankcheck.why.watcher import (
    FOLDER_VARIABLE,
    START_MARK,
    START_SUFFIX,
    START_VARIABLE,
)

KEPT_STARTS = 20  # starts with their evidence
LISTED = 100  # starts in the user's list
MARK_TEXT = "made by rankcheck why run, which keeps the newest starts\n"
START_LINE = "while it runs, or afterwards: rankcheck why "


@dataclass(frozen=True)
class Start:
    """What `why run` has started, and become."""

    token: str  # which no other start has
    number: int  # larger than that of each start in `before`
    before: list[str]  # the tokens of all starts that were listed
    folder: str
    command: list[str]
    host: str
    space: str  # as proc.name_space() names it
    pid: int
    ticks: int  # as proc.read_ticks() reads them
    session: str  # of the shell that it was typed into
    time: float  # in seconds since 1970, by that host's clock
    output: str | None  # the file that its standard error goes to
    output_begin: int  # where our own line begins there, in bytes

    @property
    def is_here(self) -> bool:
        """Whether its PID means the same process here."""
        return self.space == proc.name_space()

    @property
    def may_run(self) -> bool:
        """Whether it runs; of another host, nobody knows."""
        return not self.is_here or self.runs

    @property
    def runs(self) -> bool:
        """Whether its process is seen to run."""
        return self.is_here and self.ticks == proc.read_ticks(
            self.pid) and proc.read_state(self.pid) != "Z"


def find_starts_folder() -> Path:
    """Return where each start has a folder: in the user's cache."""
    home = os.path.expanduser("~")  # as it is, if nothing says where that is
    if home.startswith("/") and home != "/":
        return Path(home, ".cache", "rankcheck")
    return Path(tempfile.gettempdir(), f"rankcheck-{os.getuid()}")


STARTS_FOLDER = find_starts_folder()


def switch_on(env: Mapping[str, str]) -> dict[str, str]:
    """Return these variables, with which what a launcher starts is watched,
    in the folder that they name already or in a new one.
    """
    name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    folder = find_named(env) or os.path.abspath(STARTS_FOLDER / name)
    return {**env, FOLDER_VARIABLE: folder, "PYTHONPATH": with_hook(env)}


def find_named(env: Mapping[str, str]) -> str | None:
    """Return the folder that these variables name, as a `Start` has it; None
    if they name none.
    """
    name = env.get(FOLDER_VARIABLE)
    return os.path.abspath(os.path.expanduser(name)) if name else None


def make_start_folder(name: str | os.PathLike[str]) -> None:
    """Make and mark the folder of a start, if it is in `STARTS_FOLDER`; remove
    the oldest ones there, unless a process of theirs lives.
    """
    folder = Path(name)
    if folder.parent != STARTS_FOLDER:
        return
    with contextlib.suppress(OSError):  # the ranks say what is wrong
        folder.mkdir(parents=True)
        (folder / START_MARK).write_text(MARK_TEXT)
    for mark in sorted(STARTS_FOLDER.glob(f"*/{START_MARK}"))[:-KEPT_STARTS]:
        with contextlib.suppress(OSError), mark.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == MARK_TEXT:
                shutil.rmtree(mark.parent)


# ------------------------------------------------------- the user's list


def name_session() -> str:
    """Return the session of this process, a shell's as a rule, or ""."""
    with contextlib.suppress(OSError):
        leader = os.getsid(0)
        ticks = proc.read_ticks(leader)
        if ticks:
            return f"{proc.name_space()}-{leader}-{ticks}"
    return ""


def read_start(file: Path) -> Start | None:
    """Return the start in a file of ours; None if it holds something else."""
    try:
        value = json.loads(read_regular(file))
        return Start(**{field.name: value[field.name]
                        for field in fields(Start)})
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def read_starts(files: Sequence[Path]) -> list[Start]:
    """Return the starts in these files, those that are earlier first."""
    found = [read_start(file) for file in files]
    return sorted((start for start in found if start is not None),
                  key=lambda start: (start.number, start.time))


def list_starts() -> list[Start]:
    """Return all that this user has started and that is still listed."""
    return read_starts([*STARTS_FOLDER.glob(".starts/*.json")])


def starts_of(folder: Path) -> list[Start]:
    """Return those that write to a folder; several if it was used several
    times.
    """
    return read_starts([*folder.glob(f"*{START_SUFFIX}")])


def find_last_starts(env: Mapping[str, str]) -> list[Start]:
    """Return what was started last: one start, or several of which each may
    be meant.

    Args:
        env: the variables of who asks.
    """
    starts = list_starts()
    earlier = {token for start in starts for token in start.before}
    found = [start for start in starts if start.token not in earlier]
    if any(start.may_run for start in found):
        # the user may mean any that runs
        found += [start for start in starts if start.runs]
    # an account may be shared: the last one of this shell's own
    session = name_session()
    found += [start for start in starts
              if session and start.session == session][-1:]
    # which this shell uses for what it starts
    named = find_named(env)
    found += [start for start in starts if start.folder == named][-1:]
    newest = {start.folder: start for start in sorted(
        found, key=lambda start: start.number)}
    return [*newest.values()]


def list_start(start: Start) -> None:
    """Write a start into its folder, and into the user's list."""
    text = json.dumps(asdict(start))
    name = f"{proc.name_process(os.environ)}{START_SUFFIX}"
    with contextlib.suppress(OSError):  # the ranks say what is wrong
        Path(start.folder).mkdir(parents=True, exist_ok=True)
        Path(start.folder, name).write_text(text)
    listed = STARTS_FOLDER / ".starts"
    try:
        listed.mkdir(parents=True, exist_ok=True)
        part = listed / f"{start.token}.part"
        part.write_text(text)
        part.replace(listed / f"{start.token}.json")
    except OSError as error:
        print(f"warning: {listed} cannot be written to ({error.strerror}); "
              "fix: give `rankcheck why` the folder's name", file=sys.stderr)
    for old in list_starts()[:-LISTED]:
        if old.token in start.before and not old.runs:
            with contextlib.suppress(OSError):
                (listed / f"{old.token}.json").unlink()


def begin_start(command: Sequence[str], env: dict[str, str],
                output_begin: int = -1) -> dict[str, str]:
    """Make the folder of a start and remember what this process becomes.

    Args:
        command: what it becomes.
        env: the variables for it, of `switch_on`.
        output_begin: where our own line begins in the file that the standard
            error goes to; less than 0 if it says nothing there.

    Returns:
        The variables, with the one by which its processes are known.
    """
    make_start_folder(env[FOLDER_VARIABLE])
    known = list_starts()
    output = os.path.realpath("/proc/self/fd/2")
    has_output = output_begin >= 0 and os.path.isfile(output)
    start = Start(
        token=os.urandom(8).hex(),
        number=1 + max((other.number for other in known), default=0),
        before=[other.token for other in known],
        folder=env[FOLDER_VARIABLE],
        command=[*command], host=proc.name_host(os.environ),
        space=proc.name_space(), pid=os.getpid(),
        ticks=proc.read_ticks("self"), session=name_session(),
        time=time.time(), output=output if has_output else None,
        output_begin=output_begin)
    list_start(start)
    return {**env, START_VARIABLE: start.token}


def exec_command(
        command: Sequence[str],
        start_monitor: Callable[[Path, Mapping[str, str]], None] | None = None
        ) -> None:
    """Become this command, in a folder that its ranks write to.

    Args:
        command: what to start.
        start_monitor: called before, with the folder and the variables that
            this process was given.
    """
    given = without_ours(os.environ)
    env = switch_on(given)
    line = f"{START_LINE}{shlex.quote(env[FOLDER_VARIABLE])}\n"
    sys.stdout.flush()
    print(line, end="", file=sys.stderr, flush=True)
    env = begin_start(command, env, stderr_position() - len(line.encode()))
    if start_monitor is not None:
        start_monitor(Path(env[FOLDER_VARIABLE]), given)
    # as Python has found them, as a rule: it ignores these itself
    for number in signal.SIGPIPE, signal.SIGXFSZ:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], [*command], env)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from error


def stderr_position() -> int:
    """Return how far the file of the standard error is written, in bytes; -1
    if it is none.
    """
    try:
        return os.lseek(2, 0, os.SEEK_CUR)
    except OSError:  # a pipe, or a terminal
        return -1


def without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that this process was started with: Python adds
    one of its own where the locale is C (PEP 538).
    """
    variables = dict(env)
    given = proc.read_text("/proc/self/environ")
    if given and "\0LC_CTYPE=" not in f"\0{given}":
        variables.pop("LC_CTYPE", None)
    return variables
