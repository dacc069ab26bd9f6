"""Errors for people: one line that says what is wrong and what to do."""

import atexit
import contextlib
import errno
import io
import multiprocessing
import os
import re
import signal
import sys
import time

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Something that the user can mend; shown as one line, not a traceback."""


def check(condition, message):
    """Raise a `UserError` with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def start(main):
    """Call `main()`; exit with status 1 and one line where the user can help.

    Ctrl-C exits with 130. Errors of the program itself keep their traceback.
    """
    try:
        guard(main)
        status = 0
    except SystemExit as end:
        status = end.code
    if "torch.distributed" in sys.modules and isinstance(status, int):
        leave(status)
    sys.exit(status)


def leave(status):
    """Exit without taking the interpreter apart.

    A thread of torch.distributed that asks for the interpreter's lock while
    that goes on aborts the process, which has done all its work.
    """
    if multiprocessing.parent_process():  # workshop.ranks does it itself
        sys.exit(status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def guard(main):
    """`main()`, with `SystemExit` and one line where the user can help."""
    try:
        main()
    except BrokenPipeError:  # `| head` has read enough
        drop_output()
        sys.exit(1)
    except (UserError, MemoryError, OSError, RuntimeError) as error:
        message = explain(error)
        if message is None:
            raise
        say_once(message)
        drop_output()
        sys.exit(1)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def drop_output():
    """Forget what cannot be written, or Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def explain(error):
    """One line for an error that the user can mend, or None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    kind = type(error).__name__
    if kind == "OutOfMemoryError":  # torch's, without importing torch
        return ("the device's memory is full: "
                "try a smaller --microbatch-size or --sequence-length")
    if isinstance(error, MemoryError):
        return "the memory is full: try a smaller --microbatch-size"
    if kind.startswith("Dist") or "gloo" in str(error):  # torch.distributed
        reason = str(error).strip().splitlines()[0]
        return ("lost the other processes: look for the first error above; "
                f"--resume goes on from the last checkpoint ({reason})")
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FULL:
        return (f"there is no room to write: {error.strerror}: make room; a "
                "run goes on with --resume")
    return None


def say_once(message):
    """Print an error once, though every rank has met it.

    Rank 0 speaks at once. The others give the launcher time to end them, and
    speak only if it does not: then theirs is an error that rank 0 has not.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3 + 0.5 * int(os.environ.get("LOCAL_RANK", rank)))
    where = f"error (rank {rank})" if rank else "error"
    print(f"{where}: {message}", file=sys.stderr, flush=True)


def parse_flags(cls, **options):
    """`tyro.cli(cls, **options)`, but a wrong flag is a `UserError`."""
    import tyro

    box = io.StringIO()  # tyro draws its errors on stderr, in a box
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(cls, **options)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    rows = re.findall(r"^│ (.*?) *│$", box.getvalue(), re.MULTILINE)
    reason = []
    for row in rows:
        if row.startswith("──"):
            break
        reason.append(row.strip())
    reason = " ".join(reason) or "wrong flags"
    reason = reason[0].lower() + reason[1:].rstrip(".")
    raise UserError(f"{reason}: see --help")
