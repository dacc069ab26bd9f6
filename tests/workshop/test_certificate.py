"""`python -m workshop certificate`: what has passed, when, and a text."""

import json
import re

import pytest
from conftest import copy_clone, copy_course, python, workshop

from workshop.stages import find_stage

DIGESTS = {name: f"{number:012x}{0:052x}" for number, name in enumerate(
    ("first", "second", "other"), 0xabc)}
RECORD = {
    "lit": {DIGESTS["other"]: "2026-11-29 16:00:00"},
    "ddp": {DIGESTS["second"]: "2026-11-29 15:30:00",
            DIGESTS["first"]: "2026-11-29 15:10:00"},
    "ddp 5": {DIGESTS["other"]: "2026-11-29 14:00:00"}}


@pytest.fixture
def clone(tmp_path):
    clone = copy_clone(tmp_path / "clone", "example-logs", "fineweb")
    copy_course(clone, *(f"code/{name}.py" for name in (
        "generate", "trained")))
    (clone / "code" / ".checked.json").write_text(json.dumps(RECORD))
    return clone


def rows(page):
    """The cells of each row of the page's table."""
    return [re.findall("<td>(.*?)</td>", row)
            for row in re.findall("<tr>(.*?)</tr>", page)][1:]


def test_what_has_passed_first(clone):
    """In the order of its time, without changes that were tried alone."""
    said = workshop(clone, "certificate", "--name", "A <b> & C")
    page = (clone / "certificate.html").read_text()
    assert rows(page) == [
        ["ddp", find_stage("ddp").title, "2026-11-29 15:10:00", "0" * 9
         + "abc"],
        ["lit", find_stage("lit").title, "2026-11-29 16:00:00", "0" * 9
         + "abe"]]
    assert "A &lt;b&gt; &amp; C" in page
    assert "writes" not in page and "--preset nano" in said
    assert said.index("15:10:00  ddp") < said.index("16:00:00  lit")
    workshop(clone, "certificate")  # its own page is replaced
    assert "A &lt;b&gt;" not in (clone / "certificate.html").read_text()


def test_nobody_has_one_without_a_check(clone):
    """Nor where the record is damaged, or only a change has passed alone."""
    for text in (None, "{", json.dumps({"ddp 5": RECORD["ddp 5"]})):
        record = clone / "code" / ".checked.json"
        record.unlink()
        if text is not None:
            record.write_text(text)
        said = workshop(clone, "certificate", status=1)
        assert "no script has passed" in said and "fix: " in said
        assert not (clone / "certificate.html").exists()
        record.touch()


def test_a_file_of_ones_own_is_kept(clone):
    own = clone / "certificate.html"
    own.write_text("mine")
    said = workshop(clone, "certificate", status=1)
    assert "fix: choose another file" in said
    assert own.read_text() == "mine"
    assert "not a run with a checkpoint" in workshop(
        clone, "certificate", "--run", "code", "-o", "x.html", status=1)


@pytest.mark.whole
def test_the_model_of_a_run_writes(clone, data):
    """The newest that is no preset for tests, or the one that is named."""
    flags = ["--data", data, "--device", "cpu", "--max-steps", "2",
             "--checkpoint-every", "2"]
    for name, preset in ("first", "nano"), ("second", "tiny"):
        more = [] if preset == "tiny" else [
            "--n-layer", "1", "--minibatch-size", "2", "--microbatch-size",
            "2", "--sequence-length", "32"]
        end = python(clone, "code/train_gpt2.py", "--preset", preset,
                     "--run-dir", f"runs/{name}", *flags, *more)
        assert end.returncode == 0, end.stderr
    said = workshop(clone, "certificate")
    page = (clone / "certificate.html").read_text()
    assert "stage std on 1 process, preset nano, 2 steps, loss " in page
    text, = re.findall("(?s)<pre>(.*?)</pre>", page)
    assert text.startswith("Hello, I'm a language model,".replace(
        "'", "&#x27;")) and "tok/s" not in text and len(text) > 100
    assert "Hello, I'm a language model," in said
    workshop(clone, "certificate", "--run", "runs/second")
    assert "preset tiny" in (clone / "certificate.html").read_text()

    (clone / "runs/first/checkpoints/step_00000002.pt").write_bytes(b"cut")
    failed = python(clone, "-m", "workshop", "certificate", "--run",
                    "runs/first")
    assert failed.returncode == 1
    assert "runs/first generates no text: " in failed.stderr
