"""The processes that tests and checks start: what they say of their end."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from rankcheck.engine import ranks
from rankcheck.system import proc
from rankcheck_testing.support import program, wait_for

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK),
                    reason="the system does not let us choose a process's "
                           "number")
def test_a_number_that_the_system_gives_again(tmp_path):
    """After 32,768 processes Linux begins again with the first numbers."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nprint(os.getpid())\n"
                      "time.sleep(float(sys.argv[2]))\n"
                      "sys.exit(int(sys.argv[1]))\n")
    for _ in range(50):  # another process may take the number before ours
        first, = ranks.launch(script, 0, 0)
        pid = int(first.out)
        LAST_PID.write_text(str(pid - 1))
        again, = ranks.launch(script, 3, 0.3)
        if int(again.out or 0) == pid or again.status != 3:
            break
    assert again == ranks.RankExit(3, f"{pid}\n", "")


def test_a_stopped_process_is_not_asleep(tmp_path):
    """A rank, or the server of the ranks: what waits for them waits on."""
    script = program(tmp_path / "script.py", "import time\ntime.sleep(60)\n")
    launch = ranks.Launch(script)
    try:
        for pid in launch.jobs[0].pid, launch.jobs[0].server.process.pid:
            wait_for(lambda: not launch.activity().eager, 60)
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: launch.activity().eager, 60)
            os.kill(pid, signal.SIGCONT)
    finally:
        launch.clear()


def test_variables_of_a_process_that_has_just_been_started():
    """Its parent goes on before Linux shows its command and variables."""
    for _ in range(100):
        process = subprocess.Popen(["sleep", "600"],
                                   env={**os.environ, "PLANTED": "1"})
        try:
            assert "PLANTED=1" in proc.read_variables(process.pid)
        finally:
            process.kill()
            process.wait()


def test_variables_of_a_process_that_has_none():
    process = subprocess.Popen(["sleep", "600"], env={})
    try:
        assert proc.read_variables(process.pid) == []
        process.kill()
        wait_for(lambda: proc.read_state(process.pid) == "Z", 30)
        assert not proc.read_variables(process.pid)
    finally:
        process.kill()
        process.wait()
    assert proc.read_variables(process.pid) is None


def test_temporary_files_are_where_its_environment_says(tmp_path):
    """Not where the server's are: verify removes its folder at the end."""
    script = tmp_path / "script.py"
    script.write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    rank, = ranks.launch(
        script, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert rank == ranks.RankExit(0, f"{tmp_path}\n", "")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_free_and_stays_so(monkeypatch, family):
    """Others get none of these: the system gives them higher ones."""
    with socket.socket() as other:
        other.bind(("", 0))
        assert ranks.free_port() < 20_000 < other.getsockname()[1]

    taken, free = ranks.free_port(), ranks.free_port()
    order = [taken, free]
    monkeypatch.setattr(ranks.secrets, "choice", lambda _: order.pop(0))
    with socket.socket(family) as listener:
        listener.bind(("", taken))
        listener.listen()
        assert ranks.free_port() == free
