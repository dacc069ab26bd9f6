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


@pytest.mark.whole
def test_a_wrong_flag_is_named():
    """Without colours and the box, for which there are no letters here."""
    ours, its = pty.openpty()
    ended = subprocess.run(
        [sys.executable, STAGES["std"].solution, "--max-stepz", "3"],
        stdin=its, stdout=its, stderr=its,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert (ended.returncode, os.read(ours, 10_000)) == (
        1, b"error: unrecognized options: --max-stepz, 3; fix: see --help\r\n")
    os.close(ours)
    os.close(its)


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "kind"), [
    ("std", "terminal"), ("std", "pipe"), ("starter", "pipe")])
def test_where_the_output_ends_the_run_saves_and_can_go_on(
        stage, kind, data, tmp_path):
    """As where Ctrl-C ends `| tee log`, too, or the terminal is closed.

    The terminal knows no UTF-8; no line there says what was saved.
    """
    run, every = tmp_path / "run", "2" if kind == "terminal" else "5000"
    script, flags = (STARTER, ["--run-dir", run]) if stage == "starter" else (
        STAGES[stage].solution, tiny(run, data, "--checkpoint-every", every))
    ours, its = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, *map(str, (script, *flags, "--max-steps", 5000,
                                    "--eval-every", 5000))],
        stdout=its, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        preexec_fn=lambda: kind == "pipe" or fcntl.ioctl(
            its, termios.TIOCSCTTY, 0))
    os.close(its)
    wait_for_rows(run, 3)
    if kind == "terminal":
        text = os.read(ours, 100_000).decode().partition("> Hello")[2]
        assert "?" in text and "saved " not in text
    os.close(ours)
    if stage == "starter":
        process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    rows = len(Result(run, []).rows)
    *_, saved = sorted(run.glob("checkpoints/*.pt"))
    assert saved.name == f"step_{rows:08d}.pt" and rows < 5000
    more = train(stage, run, "--resume", "--max-steps", rows + 2)
    assert more.column("step") == list(range(rows + 2))


@pytest.mark.whole
@pytest.mark.parametrize("words", [
    ["-c", "from backstage.signals import Signals\nsignals = Signals(0)\n"
     "print('a step', flush=True)\nassert signals.last is None"],
    [STARTER, "--max-steps", "2", "--warmup-steps", "0"]])
def test_a_log_without_room_ends_no_run(words, tmp_path):
    """As where the home is full, but the folder of the run is elsewhere."""
    with open("/dev/full", "w") as full:
        end = subprocess.run([sys.executable, *words], cwd=tmp_path,
                             stdout=full, stderr=subprocess.PIPE)
    assert (end.returncode, end.stderr) == (0, b"")
