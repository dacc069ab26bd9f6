"""Lets threads that wait sleep at once, while others need the cores.

A step has hundreds of operations, and after each of them torch's threads wait
for one another. They spin: for up to 3 ms they ask again and again, and only
then do they sleep. Sleeping at once would make a step on an idle machine up to
40% longer. But while other programs compute, spinning is worse: the thread
that spins may keep the core from the very thread that it waits for, and a step
takes ten times as long.

GNU's OpenMP, which torch brings along, has no switch for this after it is
loaded. But it hardly spins if it has more threads than there are cores. So a
thread watches how long the program waits for a core. While that is long, it
keeps a few more threads, which do nothing but sleep.
"""

import ctypes
import math
import os
import threading
import time

INTERVAL = 0.25  # seconds from one look to the next
LONG = 0.1  # of the time: on an idle machine nobody waits that long
KEEP = 10  # seconds without a long wait, until the threads spin again


def share_cores():
    """From now on, spin only while this process gets its cores at once.

    Does nothing with one thread, without GNU's OpenMP, and where the system
    does not say how long a process waits (on macOS).
    """
    import torch

    threads = torch.get_num_threads()
    try:
        openmp = ctypes.CDLL(None)
        too_many = openmp.omp_get_num_procs() - threads + 2
        openmp.GOMP_parallel  # noqa: B018 # whether it is there
        waited()
    except (AttributeError, OSError):
        return
    # many more cores than threads: the library will not believe it is busy
    if threads > 1 and too_many <= 32:
        threading.Thread(
            target=watch, args=(openmp, too_many), daemon=True).start()


def waited():
    """For how many seconds this process's threads have waited for a core.

    All of them: the one that others wait for may be the only one that waits.
    """
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            total += int(file.read().split()[1])  # running, waiting, turns
    return total / 1e9


def watch(openmp, threads):
    """Keep that many threads whenever the process has to wait. For ever."""
    enough = None  # what lets the kept threads end
    last_long, before = -math.inf, math.inf
    while True:
        time.sleep(INTERVAL)
        try:
            now = waited()
        except OSError:  # a thread has ended meanwhile
            continue
        if now - before > LONG * INTERVAL:
            last_long = time.monotonic()
        before = now
        busy = time.monotonic() < last_long + KEEP
        if busy and not enough:
            enough = threading.Event()
            threading.Thread(target=keep_threads, daemon=True,
                             args=(openmp, threads, enough)).start()
        elif enough and not busy:
            enough.set()
            enough = None


def keep_threads(openmp, threads, enough):
    """Have OpenMP keep that many threads for this one, until `enough`."""
    nothing = openmp.omp_get_thread_num  # a function without effect
    openmp.GOMP_parallel(nothing, None, threads, 0)
    enough.wait()
