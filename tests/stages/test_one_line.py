"""What has no place among files and flags: one line, and no long wait."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import needs
from stages import BYTES

from backstage import ROOT, dataset
from backstage.errors import UserError, explain, report, visible, warn
from backstage.files import read_json
from backstage.run import PrintableTokenizer
from workshop.vocabulary import save_vocabulary

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rok\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\x0dok\u202e"


def test_control_characters_are_visible(capsys):
    """A terminal would obey them; line ends, tabs and all letters stay."""
    assert visible(HOSTILE) == SHOWN
    for text in "two\nlines\tof", "naïve 世界 🦙 e\u0301", "":
        assert visible(text) == text
    warn(f"{HOSTILE} is damaged")
    report(UserError(HOSTILE))
    assert capsys.readouterr().err == (
        f"warning: {SHOWN} is damaged\nerror: {SHOWN}\n")


def test_a_files_words_reach_no_terminal_as_they_are(tmp_path, capsys):
    file = tmp_path / "a\x1b[2Jfile.json"
    file.write_text('{"kind": "\\u001b[2J"}')
    with pytest.raises(UserError) as error:
        read_json(file, {"kind": int})
    report(error.value)
    assert "\x1b" not in capsys.readouterr().err


def test_generated_texts_are_for_a_terminal():
    """Training prints them with the page's own words."""
    tokenizer = PrintableTokenizer(BYTES)
    assert tokenizer.decode([27, 91, 50, 74, 97]) == r"\x1b[2Ja"
    assert tokenizer.encode("a") == [97]
    assert tokenizer.eot_token == BYTES.eot_token


@pytest.mark.parametrize("pattern", ["", "a*", "(?=b)", r"\b", "x|"])
def test_a_pattern_that_matches_nothing(pattern, tmp_path):
    """tiktoken would panic, in training, at the first text."""
    save_vocabulary(BYTES, tmp_path)
    file = tmp_path / dataset.SETTINGS
    text = file.read_text()
    dataset.load_vocabulary(tmp_path)
    quoted = pattern.replace("\\", r"\\")
    file.write_text(text.replace(r'"[\\s\\S]"', f'"{quoted}"'))
    assert file.read_text() != text
    with pytest.raises(UserError, match="matches the empty string"):
        dataset.load_vocabulary(tmp_path)


def test_no_thread_is_left():
    """`ulimit -u`, which no test of root can set."""
    with pytest.raises(RuntimeError) as error:
        start = threading._start_new_thread
        try:
            def refuse(*arguments):
                raise RuntimeError("can't start new thread")
            threading._start_new_thread = refuse
            threading.Thread(target=print).start()
        finally:
            threading._start_new_thread = start
    assert "ulimit -u" in explain(error.value)
    # an output that does not wait is no such error
    assert explain(BlockingIOError(11, os.strerror(11))) is None


NAMED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
         "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
         "MASTER_PORT": "29500"}
NAMES = """\
from backstage.errors import run_main
from backstage.process import name_ranks
run_main(name_ranks)
"""


@pytest.mark.parametrize("start", [
    "", "ip link set lo up; ip addr del 127.0.0.1/8 dev lo;",
    "ip link set lo up;"])
def test_ranks_that_cannot_meet_do_not_wait(start):
    """Without a loopback, or with that of IPv6 alone."""
    needs("ip", "unshare")
    if subprocess.run(["unshare", "--net", "true"],
                      capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    end = subprocess.run(
        ["unshare", "--net", "sh", "-c",
         f'{start} exec "$0" -c "$1"', sys.executable, NAMES],
        cwd=ROOT, env=os.environ | NAMED, capture_output=True, text=True)
    if "del" in start or not start:
        assert end.returncode == 1
        line, = end.stderr.splitlines()
        assert "127.0.0.1/8 dev lo" in line
    else:
        assert end.returncode == 0 and not end.stderr


def test_the_time_of_a_process_is_over():
    """SIGXCPU, of `ulimit -t`, asks to stop as SIGTERM does."""
    program = ("import os, signal, sys\n"
               "from backstage.signals import Signals\n"
               "signals = Signals(0)\n"
               "os.kill(os.getpid(), signal.SIGXCPU)\n"
               "sys.exit(signals.last)")
    end = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert end.returncode == signal.SIGXCPU
