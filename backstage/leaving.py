"""How a process leaves MPI: after an error all end; else none waits for ever.

Only the standard library, from Python 3.9 on.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# For MPI_Finalize, and MPI_Abort. Where a launch of four ranks on two busy
# cores ended by itself, it took less than 2 s in all.
SECONDS = 10
HANDLERS = []  # what C may call is to stay


def leave_mpi(status: object,
              last: "Callable[[], object]" = lambda: None) -> None:
    """Leave the other processes of MPI, or end them all after an error.

    They would wait for this one for ever, and MPI_Finalize for them. last:
    called before this process ends if MPI_Finalize does not return.
    """
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    sys.stdout.flush()
    if MPI.COMM_WORLD.size > 1:
        if status not in (0, None):
            sys.stderr.flush()
            code = status if isinstance(status, int) else 1
            with time_limit(lambda: os._exit(code)):
                MPI.COMM_WORLD.Abort(code)
        agree(MPI)
    with time_limit(lambda: end_well(last)):
        MPI.Finalize()


def agree(MPI: Any) -> None:
    """Return when all ranks have come to their end. All ranks.

    In MPI_Finalize, MPICH over TCP (UCX) completes its connections, and a rank
    that has done so waits in a barrier, where it no longer answers. So each
    writes to all before, and then sleeps: of 60 launches none waited there
    for ever, but 13 of 14 where the ranks looked for messages meanwhile.
    """
    comm = MPI.COMM_WORLD
    comm.Ialltoallv(MPI.IN_PLACE, (bytearray(comm.size), MPI.BYTE)).Wait()
    time.sleep(0.1)


@contextmanager
def time_limit(over: Callable[[], object],
               seconds: float = SECONDS) -> Iterator[None]:
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
    signal.alarm(SECONDS)
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
    """Say to the launcher that this process ends well, as MPI_Finalize would.
    """
    if pmix := find_pmix():  # Open MPI's mpirun, and srun --mpi=pmix
        pmix.PMIx_Finalize(None, ctypes.c_size_t(0))
    elif {"PMI_FD", "MPI_LOCALRANKID"} <= os.environ.keys():  # MPICH's
        with suppress(OSError, ValueError):
            link = int(os.environ["PMI_FD"])
            os.write(link, b"cmd=finalize\n")
            said = b""  # the end of a barrier, perhaps, and then its answer
            while b"finalize_ack" not in said and (more := os.read(link, 99)):
                said += more


def find_pmix() -> "ctypes.CDLL | None":
    """The library by which MPI speaks to its launcher, if it is loaded."""
    with suppress(OSError):
        return ctypes.CDLL("libpmix.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)
    return None
