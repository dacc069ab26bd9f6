"""Start a script as several processes of this machine, and wait for them.

What `torchrun` does, in a tenth of the time: the processes are forked from a
server that has imported torch already. For the checks and the tests; a real
run is started by a real launcher.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

PRELOAD = ["numpy", "tiktoken", "torch", "torch.distributed", "tyro",
           "torch.nn.parallel", "torch.distributed.elastic.multiprocessing",
           "torch._dynamo", "workshop.ranks", "workshop.lit"]


@dataclass
class Rank:
    """How a process ended: `status` is None where it had to be killed."""

    status: int | None
    out: str
    err: str


class Launch:
    """`script flags...` as `world_size` processes; None: plain python.

    nodes: how many the processes take themselves to be on.
    observe: a picklable function of the rank that every process calls first;
    what it returns is called at the end, also after an error. preload: what
    is imported once for all of them, by the first Launch of this program.
    """

    def __init__(self, script, *flags, world_size=None, nodes=1, env=None,
                 observe=None, threads=1, preload=PRELOAD):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # "forkserver": a fork of this process would inherit threads of torch
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        port = free_port()
        self.processes = []
        for rank in range(world_size or 1):
            variables = dict(os.environ if env is None else env)
            if world_size:
                devices = world_size // nodes
                variables |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank % devices),
                    "GROUP_RANK": str(rank // devices),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(devices),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = context.Process(target=run_script, args=(
                str(script), [str(flag) for flag in flags], variables,
                str(self.folder / str(rank)), rank, observe, threads))
            process.start()
            self.processes.append(process)

    def wait(self, timeout=120):
        """The `Rank`s, once all have ended; after `timeout` s it ends them.

        One that had to be ended has its stack in `err`.
        """
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            os.kill(process.pid, signal.SIGUSR2)  # faulthandler's
        if late:
            time.sleep(0.5)
        for process in late:
            process.kill()
            process.join()
        ranks = []
        for rank, process in enumerate(self.processes):
            texts = [Path(f"{self.folder}/{rank}.{name}")
                     for name in ("out", "err")]
            ranks.append(Rank(
                None if process in late else process.exitcode,
                *(text.read_text(errors="replace") if text.exists() else ""
                  for text in texts)))
        shutil.rmtree(self.folder)
        return ranks

    def signal(self, number, rank=None):
        """Send a signal to one rank, or to all."""
        chosen = self.processes if rank is None else [self.processes[rank]]
        for process in chosen:
            if process.is_alive():
                os.kill(process.pid, number)


def launch(script, *flags, timeout=120, **options):
    """Start `script`, wait for its end, return its `Rank`s."""
    return Launch(script, *flags, **options).wait(timeout)


def free_port():
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_script(script, flags, variables, output, rank, observe, threads):
    """What a process does: `script flags...` as if python had started it."""
    os.environ.clear()
    os.environ.update(variables)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
    import torch

    torch.set_num_threads(threads)
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    finish = observe(rank) if observe else None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        if finish:
            finish()
        atexit._run_exitfuncs()  # a forked process would leave them out
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
