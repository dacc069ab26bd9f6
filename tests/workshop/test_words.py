"""The words: none is misspelt, and none has a better, standard term."""

import json
import subprocess
import sys

from conftest import needs, tracked

from backstage import ROOT

GUARD = ROOT / ".ci" / "words.py"


def run(*command: str) -> tuple[int, str]:
    """Run a command in the clone; return its status and its output."""
    end = subprocess.run([sys.executable, *command], cwd=ROOT,
                         capture_output=True, text=True)
    return end.returncode, end.stdout + end.stderr


def test_no_file_uses_a_word_that_has_a_standard_term():
    assert run(str(GUARD), *tracked("*.md", "*.ipynb", "*.py")) == (0, "")


def test_the_guard_reads_text_and_no_names(tmp_path):
    word = "mend" + "ed"
    page, script = tmp_path / "page.md", tmp_path / "script.py"
    page.write_text(f"# A page\n\nThis is {word}.\n")
    script.write_text(f"{word} = 1  # fixed\nprint(f'{word} {{1}}')\n"
                      f"# {word}\n")
    book = tmp_path / "book.ipynb"
    book.write_text(json.dumps({"cells": [
        {"source": ["fine"]}, {"source": ["It is\n", f"{word}.\n"]}]}))
    status, out = run(str(GUARD), *map(str, (page, script, book)))
    assert status == 1
    assert out.splitlines() == [
        f"{path}:{line}: {word!r}: write fix, repair"
        for path, line in ((page, 3), (script, 2), (script, 3), (book, 2))]


def test_no_word_is_misspelt():
    needs("codespell_lib")
    status, out = run("-m", "codespell_lib", *tracked())
    assert (status, out) == (0, "")
