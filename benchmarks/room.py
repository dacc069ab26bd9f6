"""What attendees need of a node that they share: memory, CPU time, patience.

    python benchmarks/room.py               10 attendees
    python benchmarks/room.py 20
    python benchmarks/room.py 10 venv.tar   only: they unpack this archive

One after the other: JupyterLab with a kernel that has shown the diff, the
script, and a check of the finished stage ddp. Then that many checks at once,
and again beside six processes that compute without a pause. A fair share of
the cores is what one check's CPU time takes if every check and every busy
process gets as much as any other; what else the machine does, its load at the
start, counts as so many busy processes. Memory is PSS: pages that processes
share are divided among them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from jupyter_client import KernelManager

from backstage import ROOT
from backstage.errors import require
from backstage.process import count_cores
from workshop.stages import find

from shared import busy
from turns import show

BUSY = 6
COURSE = ("backstage", "workshop", "solutions", "code", "fineweb")


def need(process, until):
    """Seconds until `until()` is true, CPU seconds and the most memory of a
    process and of all that it has started.
    """
    begin, memory, cpu = time.monotonic(), 0, {}
    while True:
        ended = until()
        seconds = time.monotonic() - begin
        now = 0
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            family = []
        for one in family:
            try:
                now += one.memory_full_info().pss
                times = one.cpu_times()
                cpu[one.pid] = times.user + times.system
            except psutil.Error:  # it has ended
                continue
        memory = max(memory, now)
        if ended:
            return seconds, sum(cpu.values()), memory
        time.sleep(0.2)


def run(clone, *command):
    """A command in the clone, which has to succeed: what it needs."""
    env = os.environ | {"PYTHONPATH": str(clone)}
    with open(clone / "said", "w+") as said, subprocess.Popen(
            [sys.executable, *command], cwd=clone, stdout=said,
            stderr=subprocess.STDOUT, env=env) as process:
        found = need(psutil.Process(process.pid),
                     lambda: process.poll() is not None)
        said.seek(0)
        text = said.read()
    require(process.returncode == 0 and (
        "check" not in command or text.rstrip().split("\n")[-1]
        .startswith("Right")), f"{command} in {clone}: {text[-500:]}")
    return found


def session(clone):
    """JupyterLab's server, and a kernel in which a lesson is open."""
    with subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0",
             "--allow-root", f"--ServerApp.root_dir={clone}"], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        for line in server.stdout:
            if " is running at" in line:
                break
        found = need(psutil.Process(server.pid), lambda: True)
        server.terminate()
        server.stdout.read()
    kernel = KernelManager()
    kernel.start_kernel(cwd=clone / "code")
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(60)
    client.execute_interactive(
        "import sys; sys.path.insert(0, '..')\n"
        "from workshop.notebook.cells import diff\ndiff('ddp')", timeout=60,
        output_hook=lambda message: None)
    more = need(psutil.Process(kernel.provisioner.pid), lambda: True)
    client.stop_channels()
    kernel.shutdown_kernel(now=True)
    return tuple(a + b for a, b in zip(found, more, strict=True))


def unpack(archive, attendees):
    """Print how long it takes one attendee, and all of them at once."""
    script = ROOT / "setup.sh"

    def call(*command, folder):
        begin = time.monotonic()
        end = subprocess.run(
            command, env=os.environ | {"TMPDIR": folder},
            text=True, capture_output=True)
        require(end.returncode == 0, f"{command}: {end.stderr[-500:]}")
        return end.stdout.strip(), time.monotonic() - begin

    for number in (1, attendees):
        with (tempfile.TemporaryDirectory() as parent,
              ThreadPoolExecutor(number) as pool):
            folders = [Path(parent, str(n)) for n in range(number)]
            for folder in folders:
                folder.mkdir()
            made = [*pool.map(lambda folder: call(
                "bash", script, "unpack", archive, folder=folder), folders)]
            used = [*pool.map(lambda place: call(
                f"{place[0]}/bin/python", "-c", "import torch, lightning",
                folder=parent), made)]
        show((f"{number} at once", *(
            f"{max(seconds for _, seconds in each):.0f}"
            for each in (made, used))))


def main(attendees=10, archive=None):
    if archive:
        show((f"{Path(archive).stat().st_size / 1e9:.2f} GB", "to unpack, s",
              "to import, s"))
        return unpack(archive, attendees)

    def row(name, *found):
        seconds, cpu, memory = (
            max(column) for column in zip(*found, strict=True))
        show((name, f"{seconds:.0f}", f"{cpu:.0f}", f"{memory / 1e6:,.0f}"))
        return seconds, cpu

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        clones = [Path(folder, str(n)) for n in range(attendees)]
        for clone in clones:
            for name in COURSE:
                shutil.copytree(ROOT / name, clone / name, ignore=(
                    shutil.ignore_patterns("__pycache__", ".*", "edu_*")))
            shutil.copy(find("ddp").solution, clone / "code/train_gpt2.py")
        show(("most of", "seconds", "CPU s", "MB"))
        row("JupyterLab, a kernel", session(clones[0]))
        row("the script", run(clones[0], find("std").solution, "--preset",
                              "tiny", "--run-dir", f"{folder}/run"))
        check = "-m", "workshop", "check", "ddp"
        _, cpu = row("one check", run(clones[0], *check))
        for others in (0, BUSY):
            with busy(others), ThreadPoolExecutor(attendees) as pool:
                seconds, _ = row(
                    f"{attendees} checks beside {others}",
                    *pool.map(lambda clone: run(clone, *check), clones))
            share = cpu * (attendees + others + load) / count_cores()
            print(f"a fair share is {share:.0f} s: {seconds / share:.1f} "
                  f"times as long, at most (load at the start: {load:.1f})",
                  flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
