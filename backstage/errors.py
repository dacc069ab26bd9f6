"""User-facing errors: one line with what is wrong and how to fix it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import io
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from backstage import ROOT

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch.distributed says only of another process that is gone or silent.
# The client of its store times out, too, where no other has been met yet.
LOST = re.compile(
    r"(?i)by peer|broken pipe|connection (was|refused)|watchdog|"
    r"(?<!client socket has )timed? ?out|remote ?(process|error)")
LARGEST = 2**31 - 1  # of a flag that is a number
# For MPI_Finalize, and MPI_Abort. Where a launch of four ranks on two busy
# cores ended by itself, it took less than 2 s in all.
MPI_SECONDS = 10
HANDLERS: list[Callable[[int], None]] = []  # what C may call is to stay
PATHS = "data", "dataset", "run_dir", "init", "file", "assistant"  # flags
Flags = TypeVar("Flags")  # a dataclass


class UserError(Exception):
    """An error that the user can fix: shown as one line, no traceback."""

    status = 1  # the exit status of a program that it ends


# What a terminal obeys, or by which it turns a line around; not line ends and
# tabs.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return the text with control characters escaped, for a terminal.

    Whatever is read from a file, or is a file's name, is printed through this.
    """
    def name(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return CONTROLS.sub(name, text)


def require(condition: object, message: str) -> None:
    """Raise a `UserError` with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def parse_flags(cls: type[Flags], default: Flags | None = None,
                arguments: list[str] | None = None, **least: float) -> Flags:
    """`tyro.cli(cls)`, but a wrong flag is a `UserError`.

    default: an instance of cls; arguments: None, this process's; least: see
    `check_numbers`. A `~` that begins a path, as in --out=~/x, is the home.
    """
    import tyro  # which a portal's kernel does not have

    box = io.StringIO()  # tyro draws its errors on stderr, in a box
    try:
        with contextlib.redirect_stderr(box):
            flags: Any = tyro.cli(cls, args=arguments, default=default)
        for name, value in vars(flags).items():
            if isinstance(value, os.PathLike) or (value and name in PATHS):
                kind: Any = type(value)
                setattr(flags, name, kind(os.path.expanduser(value)))
        check_numbers(flags, least)
        return flags
    except SystemExit as exit_:
        if not exit_.code:  # --help
            raise
    text = re.sub(r"\x1b\[[\d;]*m", "", box.getvalue())  # without colours
    rows = [row.strip(" │") for row in text.splitlines()]
    edges = [number for number, row in enumerate(rows)
             if re.match("[╭╰]|[─-]+$", row)]  # hyphens: no UTF-8 here
    first, end, *_ = *edges, 0, 0
    reason = " ".join(rows[first + 1:end]) or "invalid arguments"
    raise UserError(f"{reason[0].lower()}{reason[1:].rstrip('.')}; fix: see "
                    "--help")


def check_numbers(flags: object, least: Mapping[str, float]) -> None:
    """Raise a `UserError` for a number below its `least` (0), or too large."""
    for name, value in vars(flags).items():
        flag, low = "--" + name.replace("_", "-"), least.get(name, 0)
        most = {int: LARGEST, float: sys.float_info.max}.get(type(value))
        if most:
            require(value >= low, f"{flag} must be {low} or more")
            require(value <= most, f"{flag} must be {most} or less")


def to_count(text: str) -> int | None:
    """Return the number in an environment variable; None if it is none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def run_main(main: Callable[[], object]) -> NoReturn:
    """Call `main()`, then exit; say in one line what the user can fix.

    The status is 0, that of a `SystemExit`, 130 after Ctrl-C, the error's
    `status`, or 1. Bugs keep their traceback.
    """
    for name in "stdin", "stdout", "stderr":  # cron and daemons close them:
        if getattr(sys, name) is None:  # no file may get their numbers
            setattr(sys, name, open(os.devnull, "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # of any encoding
        sys.stdout.reconfigure(errors="replace")
    status: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.last_value = error  # as Python itself leaves it at the end
        status = report(error)
    leave(status)


def report(error: BaseException) -> int:
    """Print what happened; return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        return 130
    status = error.status if isinstance(error, UserError) else 1
    if not isinstance(error, BrokenPipeError):  # of `| head`, for example
        if (message := explain(error)) is None:
            traceback.print_exc()
        else:
            say_once(message, status)
    try:
        sys.stdout.flush()
    except OSError:
        silence()
    return status


def leave(status: str | int | None) -> NoReturn:
    """Exit; with torch.distributed or MPI, without Python's own clean-up.

    If a thread of torch.distributed asks for the interpreter's lock during
    the clean-up, the process aborts although it has done all its work. After
    an error, an exit handler that leaves a process group would wait for the
    other ranks, with NCCL for ten minutes. With MPI an error ends all ranks.
    """
    leave_mpi(status, lambda: finish(0))
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(status, int):
        sys.exit(status)
    finish(status, status == 0 or not distributed.is_initialized())
    os._exit(status)


def finish(status: int, call_exit_handlers: bool = True) -> None:
    """Do what is left to do in a process that ends without Python's clean-up.
    """
    tell_watcher(status)
    if call_exit_handlers:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def tell_watcher(status: int) -> None:
    """Let `why`, if it watches, record how this process ends."""
    # "witness" is the name in an older rankcheck
    watcher = (sys.modules.get("rankcheck_watcher")
               or sys.modules.get("rankcheck_witness"))
    if watcher is not None:
        watcher.leave(status)


def leave_mpi(status: object,
              last: Callable[[], object] = lambda: None) -> None:
    """Leave the other processes of MPI, or end them all after an error.

    They would wait for this one for ever, and MPI_Finalize for them. last:
    called, after no error, before this process ends if MPI_Finalize does not
    return.
    """
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    failed = status not in (0, None)
    code = status if isinstance(status, int) else 1

    def end() -> None:
        if failed:
            os._exit(code)
        end_well(last)

    sys.stdout.flush()
    if failed:
        sys.stderr.flush()
    if MPI.COMM_WORLD.size > 1:
        if failed:
            with time_limit(end):
                MPI.COMM_WORLD.Abort(code)
        agree(MPI)
    with time_limit(end):
        MPI.Finalize()


def agree(MPI: Any) -> None:
    """Return when all ranks have finished. All ranks.

    In MPI_Finalize, MPICH over TCP (UCX) completes its connections, and a rank
    that has done so waits in a barrier, where it no longer answers. So each
    writes to all before, and then sleeps: of 60 launches none waited there
    for ever, but 13 of 14 where the ranks looked for messages meanwhile.
    """
    comm = MPI.COMM_WORLD
    comm.Ialltoallv(MPI.IN_PLACE, (bytearray(comm.size), MPI.BYTE)).Wait()
    time.sleep(0.1)


@contextlib.contextmanager
def time_limit(over: Callable[[], object],
               seconds: float = MPI_SECONDS) -> Iterator[None]:
    """Call `over`, which ends this process, if what is inside never returns.

    mpi4py holds Python's lock there: a thread of Python, or its handler of a
    signal, would wait for it. In a handler that C calls, the lock is ours.
    """
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(number: int) -> None:
        try:
            over()
        finally:
            os._exit(1)

    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    HANDLERS.append(handle)
    set_handler(signal.SIGALRM, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def end_well(last: Callable[[], object]) -> None:
    """End this process with status 0, without MPI_Finalize.

    All ranks have agreed that all is done. A launcher takes a process for
    failed that ends before it has said so: Open MPI's mpirun ends with status
    1, and MPICH's kills the other ranks and ends with 9.
    """
    # if a launcher does not answer, the signal ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(MPI_SECONDS)
    tell_launcher()
    signal.alarm(0)
    # who waited for this process would go on if it ended, and come to a
    # barrier for which those wait no longer that have told the launcher
    time.sleep(2)
    try:
        last()
    finally:
        os._exit(0)


def tell_launcher() -> None:
    """Tell the launcher that this process succeeded, as MPI_Finalize does.
    """
    if pmix := find_pmix():  # Open MPI's mpirun, and srun --mpi=pmix
        pmix.PMIx_Finalize(None, ctypes.c_size_t(0))
    elif {"PMI_FD", "MPI_LOCALRANKID"} <= os.environ.keys():  # MPICH's
        with contextlib.suppress(OSError, ValueError):
            link = int(os.environ["PMI_FD"])
            os.write(link, b"cmd=finalize\n")
            answer = b""  # the end of a barrier, perhaps, and then its answer
            while b"finalize_ack" not in answer and (
                    more := os.read(link, 99)):
                answer += more


def find_pmix() -> ctypes.CDLL | None:
    """Return the library that connects MPI to its launcher, if loaded."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libpmix.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def silence() -> None:
    """Discard further output, and what an exit would try to flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can fix, or None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if (kind == "OutOfMemoryError" or first == "CUDA error: out of memory"
            or "STATUS_ALLOC_FAILED" in first):  # cuBLAS's, cuDNN's
        return ("out of memory on the device; "
                "fix: use a smaller --microbatch-size or --sequence-length")
    if "probability tensor contains either" in first:  # of the next token
        return "the loss became NaN; fix: use a lower --learning-rate"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in first:
        return ("out of memory; fix: use a smaller --microbatch-size, or a "
                "smaller model")
    if "can't start new thread" in first or is_refused_fork(error):
        return (f"no thread or process can be started ({first}); fix: end "
                "some of yours (`ulimit -u` is the limit), or free memory")
    if "oo many open files" in str(error):
        return (f"the limit of open files is reached ({error}); fix: raise "
                "it: ulimit -n 4096")
    if kind.startswith("Dist") or "gloo" in str(error):
        return explain_distributed(str(error).strip().splitlines() or [kind])
    # Errors of a device are asynchronous: the traceback may name another line.
    if (kind == "AcceleratorError"
            and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1"):
        return (f"the device failed ({first}); fix: set CUDA_LAUNCH_BLOCKING="
                "1 to see in which line; if that line is not yours, try "
                "another device; --resume continues from the last checkpoint")
    if isinstance(error, OSError) and error.filename:
        line = f"{error.filename}: {error.strerror}"
        refused = error.errno in (errno.EACCES, errno.EROFS)
        inside = f"{ROOT}/" in str(error.filename)
        if refused and inside and not os.access(ROOT, os.W_OK):
            line += "; fix: work in a clone of your own"
        return line
    if isinstance(error, OSError) and error.errno in FULL:
        return (f"cannot write: {error.strerror}; fix: free some space; a "
                "run resumes with --resume")
    if kind == "RuntimeError" and error.__cause__:  # a pipeline stage failed
        return explain(error.__cause__)
    return None


def is_refused_fork(error: BaseException) -> bool:
    """Return whether Python failed to start a process."""
    frames = traceback.extract_tb(error.__traceback__)
    return (getattr(error, "errno", None) == errno.EAGAIN and bool(frames)
            and frames[-1].name in ("_launch", "_execute_child"))


def explain_distributed(lines: list[str]) -> str:
    """One line for the lines of an error of torch.distributed."""
    text = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
    missing = re.search(r"Unable to find address for: (\S+)", text)
    if missing:
        return (f"GLOO_SOCKET_IFNAME names {missing[1]}, which is not a "
                "network interface of this machine; fix: unset it, or name "
                "one of "
                + ", ".join(name for _, name in socket.if_nameindex()))
    if LOST.search(text):
        return (f"lost the other processes ({lines[0]}); fix: look for the "
                "first error above; --resume continues from the last "
                "checkpoint")
    return f"torch.distributed failed: {text}"


def say_once(message: str, status: int) -> None:
    """Print an error once, even if every rank has it: rank 0, at once.

    The others give the launcher time to end them; if it does not, rank 0 does
    not have that error. `why` learns of it before: a rank that the launcher
    ends can no longer say what it was.
    """
    rank, local_rank = (  # that the names make no sense may be the error
        to_count(os.environ.get(name, "")) or 0
        for name in ("RANK", "LOCAL_RANK"))
    if rank:
        tell_watcher(status)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3 + 0.5 * local_rank)
    where = f"error (rank {rank})" if rank else "error"
    print(f"{where}: {visible(message)}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one line of warning; the run goes on."""
    print(f"warning: {visible(message)}", file=sys.stderr, flush=True)
