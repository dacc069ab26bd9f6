"""A run in a terminal: one line is written again and again, a few stay."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from stages import STARTER, Result, tiny, train, wait_for_rows

from workshop.stages import STAGES

QUIET = ("--generate-every", "1000", "--checkpoint-every", "1000")


def in_terminal(*flags, term="xterm"):
    """Run the stage std in a pseudo-terminal: (status, output, seconds)."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    env = {**os.environ, "COLUMNS": "", "LINES": "", "TERM": term}
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, STAGES["std"].solution, *map(str, flags)],
        stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    output = b""
    try:
        while part := os.read(ours, 10_000):
            output += part
    except OSError:  # how Linux says that nobody writes there any more
        pass
    os.close(ours)
    return process.wait(), output.decode(), time.monotonic() - begin


def screen(output):
    """The rows that a terminal shows in the end, as it was written to."""
    rows, row, column = [], "", 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", output):
        if part == "\r":
            column = 0
        elif part == "\x1b[K":
            row = row[:column]
        elif part == "\n":
            rows.append(row)
            row = ""
        else:
            row = row[:column] + part + row[column + len(part):]
            column += len(part)
    return [*rows, row]


def steps(rows):
    """Of each row that is a whole log line: its step."""
    found = [re.fullmatch(r"\| step +(\d+)/60 \| loss .* \| tok/s: [\d,]+ \|"
                          r"( val: [\d.]+ \|)? mem: [\d.]+ GiB \|", row)
             for row in rows if "| step" in row]
    assert all(found), rows
    return [int(match[1]) for match in found]


def test_one_line_shows_the_steps_and_a_few_stay(data, tmp_path):
    run = tmp_path / "run"
    status, output, seconds = in_terminal(
        *tiny(run, data, "--max-steps", 60, *QUIET, "--eval-every", 25))
    assert status == 0, output
    rows = screen(output)
    shown = steps(rows)
    assert {0, 24, 49, 59} <= set(shown)
    assert len(shown) == len(set(shown)) <= 4 + seconds / 10
    assert rows[-2].startswith("finished: ") and rows[-1] == ""
    assert sum(row.startswith("> Hello") for row in rows) == 4
    # every step was shown, in one row of the terminal
    updates = re.findall(r"\r\x1b\[K(\| step [^\r\n]*)(?!\r?\n)", output)
    assert {int(line.split()[2].split("/")[0]) for line in updates} == set(
        range(60))
    assert Result(run, []).column("step") == list(range(60))


def test_an_error_has_a_row_of_its_own(data, tmp_path):
    status, output, _ = in_terminal(*tiny(
        tmp_path / "run", data, "--max-steps", 60, "--learning-rate", "1e30"))
    rows = screen(output)
    assert status == 1 and rows[-2].startswith("error: step "), output
    last = int(re.match(r"error: step (\d+)", rows[-2])[1]) - 1
    assert steps(rows)[-1] == last


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_wrong_flag_is_named(encoding, monkeypatch):
    """In colours, in a box and, where there is no UTF-8, without one."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    status, output, _ = in_terminal("--max-stepz", 3)
    assert (status, output) == (1, "error: unrecognized options: --max-stepz, "
                                "3: see --help\r\n")


def test_texts_of_any_letters_in_a_terminal_without_utf8(
        data, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    status, output, _ = in_terminal(*tiny(
        tmp_path / "run", data, "--max-steps", 2))
    assert status == 0 and "?" in output.partition("> Hello")[2], output


@pytest.mark.whole
def test_a_terminal_that_cannot_erase_gets_every_line(data, tmp_path):
    status, output, _ = in_terminal(*tiny(
        tmp_path / "run", data, "--max-steps", 60, *QUIET), term="dumb")
    assert status == 0 and "\x1b" not in output
    assert steps(screen(output)) == list(range(60))


@pytest.mark.parametrize(("stage", "kind"), [
    ("std", "pipe"), ("std", "terminal"), ("starter", "pipe"),
    pytest.param("lit", "pipe", marks=pytest.mark.whole)])
def test_where_the_output_ends_the_run_saves_and_can_go_on(
        stage, kind, data, tmp_path):
    """As where Ctrl-C ends `| tee log`, too, or the terminal is closed."""
    run = tmp_path / "run"
    script, flags = (STARTER, ["--run", run]) if stage == "starter" else (
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
