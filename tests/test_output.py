"""The output of a run: a terminal of any encoding, and one that ends."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from stages import STARTER, Result, tiny, train, wait_for_rows

from workshop.stages import STAGES

QUIET = ("--generate-every", "1000", "--checkpoint-every", "1000")


def in_terminal(*flags):
    """Run the stage std in a pseudo-terminal: (status, output)."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, STAGES["std"].solution, *map(str, flags)],
        stdin=its, stdout=its, stderr=its)
    os.close(its)
    output = b""
    try:
        while part := os.read(ours, 10_000):
            output += part
    except OSError:  # how Linux says that nobody writes there any more
        pass
    os.close(ours)
    return process.wait(), output.decode()


@pytest.mark.whole
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_wrong_flag_is_named(encoding, monkeypatch):
    """In colours, in a box and, where there is no UTF-8, without one."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    status, output = in_terminal("--max-stepz", 3)
    assert (status, output) == (1, "error: unrecognized options: --max-stepz, "
                                "3: see --help\r\n")


@pytest.mark.whole
def test_texts_of_any_letters_in_a_terminal_without_utf8(
        data, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    status, output = in_terminal(*tiny(
        tmp_path / "run", data, "--max-steps", 2))
    assert status == 0 and "?" in output.partition("> Hello")[2], output
    assert "saved " not in output


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "kind"), [
    ("std", "pipe"), ("std", "terminal"), ("starter", "pipe"),
    ("lit", "pipe")])
def test_where_the_output_ends_the_run_saves_and_can_go_on(
        stage, kind, data, tmp_path):
    """As where Ctrl-C ends `| tee log`, too, or the terminal is closed."""
    run = tmp_path / "run"
    script, flags = (STARTER, ["--run-dir", run]) if stage == "starter" else (
        STAGES[stage].solution, tiny(run, data, *QUIET))
    ours, its = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, *map(str, (script, *flags, "--max-steps", 5000,
                                    "--eval-every", 5000))],
        stdout=its, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: kind == "pipe" or fcntl.ioctl(
            its, termios.TIOCSCTTY, 0))
    os.close(its)
    wait_for_rows(run, 3)
    os.close(ours)
    if stage == "starter":
        process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    rows = len(Result(run, []).rows)
    saved, = run.glob("checkpoints/*.pt")
    assert saved.name == f"step_{rows:08d}.pt" and rows < 5000
    more = train(stage, run, "--resume", "--max-steps", rows + 2)
    assert more.status == 0, more.err
    assert more.column("step") == list(range(rows + 2))
