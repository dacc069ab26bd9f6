"""Nothing of a run is lost when it is resumed and something is not there."""

import json
import os
import shutil

import pytest
from stages import attempt, refused, train

from backstage.files import PART


@pytest.fixture(scope="module", params=[
    "std", pytest.param("starter", marks=pytest.mark.whole)])
def begun(request, data, tmp_path_factory):
    """A run of six steps, whose checkpoints are of steps 4 and 6."""
    run = tmp_path_factory.mktemp("begun") / "run"
    train(request.param, run, "--max-steps", 6, "--checkpoint-every", 2,
          data=data)
    return request.param, run


def rows(change):
    """Change the lines of metrics.csv, a list of bytes without the header."""
    def edit(run):
        file = run / "metrics.csv"
        header, *lines = file.read_bytes().splitlines()
        file.write_bytes(b"\n".join([*change(header, lines), b""]))

    return edit


def lines_of(text):
    return {line.rstrip(b"\r,") for line in text.splitlines()}


def columns(header, lines):
    """With a note of somebody's own, not in UTF-8, in each row."""
    return [header + b",note", *(line + b",caf\xe9 7" for line in lines)]


def checkpoints(change):
    return lambda run: change(run / "checkpoints")


def link(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "purged")


def a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("moved to the archive")


def damage(folder):
    for file in folder.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def rename(folder):
    for file in folder.iterdir():
        file.rename(file.with_name(f"best-{file.stem}.ckpt"))


def newest(folder):
    return max(folder.glob("step_*"))


def link_newest(folder):
    file = newest(folder)
    file.unlink()
    file.symlink_to("/purged/step.pt")


def link_metrics(run):
    (run / "metrics.csv").rename(run.parent / "archive.csv")
    (run / "metrics.csv").symlink_to("../archive.csv")
    rename(run / "checkpoints")


def link_metrics_hard(run):
    os.link(run / "metrics.csv", run.parent / "backup.csv")
    shutil.rmtree(run / "checkpoints")


def read_only(run):
    (run / "metrics.csv").chmod(0o444)
    shutil.rmtree(run / "checkpoints")


GONE = "no checkpoint", "no step_*.pt"
# what is changed, and whether it begins anew, is refused or goes on
CASES = {
    "moved": (lambda run: (run / "checkpoints").rename(run / "old"), "anew"),
    "renamed": (checkpoints(rename), "anew"),
    "an empty folder": (lambda run: [
        file.unlink() for file in run.glob("checkpoints/*")], "anew"),
    "a link to a purged disk": (checkpoints(link), "refused"),
    "a file": (checkpoints(a_file), "refused"),
    "all damaged": (checkpoints(damage), "refused"),
    "the newest moved": (checkpoints(lambda folder: newest(folder).unlink()),
                         "on"),
    "the newest a link to nothing": (checkpoints(link_newest), "on"),
    "metrics elsewhere": (link_metrics, "anew"),
    "metrics with two names": (link_metrics_hard, "anew"),
    "metrics read-only": (read_only, "anew"),
    "a column more": (rows(columns), "on"),
    "in another order": (rows(lambda header, lines: [
        header, *lines[::-1]]), "on"),
    "a comment": (rows(lambda header, lines: [
        header, *lines[:3], b"# a warm restart", *lines[3:]]), "on"),
    "a row twice": (rows(lambda header, lines: [
        header, *lines, lines[2]]), "on"),
    "lines of Windows": (rows(lambda header, lines: [
        line + b"\r" for line in (header, *lines)]), "on"),
    "rows that are gone": (rows(lambda header, lines: [
        header, *lines[:2], *lines[4:]]), "on"),
    "no record": (lambda run: [rename(run / "checkpoints")] + [
        file.unlink() for file in run.glob("hyperparameters.json")], ""),
}


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_every_row_is_still_there(case, begun, tmp_path):
    stage, original = begun
    run = tmp_path / "run"
    shutil.copytree(original, run)
    change, end = CASES[case]
    change(run)
    before = (run / "metrics.csv").read_bytes()
    lines = lines_of(before)
    result = attempt(stage, run, "--resume", "--max-steps", 8)
    said = [line for line in (result.out + result.err).splitlines()
            if line.startswith(("warning: ", "error: "))
            and " lost " not in line and "--warmup-steps" not in line]
    found = b"".join(file.read_bytes() for file in run.glob("metrics*.csv"))
    assert lines <= lines_of(found)
    if end == "refused" or result.status:
        assert result.status == 1 and end in ("refused", "")
        assert (run / "metrics.csv").read_bytes() == before
        assert said[-1].startswith("error: ")
        return
    kept = [file.name for file in run.glob("metrics.2*.csv")]
    assert [line.split(b",")[0] for line in (run / "metrics.csv").read_bytes(
        ).splitlines()[-4:]] == [b"4", b"5", b"6", b"7"]
    if end == "on":
        assert "| step    0/" not in result.out
    else:
        (line,) = said
        assert any(words in line for words in GONE) and kept[0] in line
        assert "| step    0/8" in result.out
        steps = (result.out + result.err if stage == "std" else result.out)
        assert stage == "std" or steps.index(line) < steps.index("| step")


@pytest.mark.whole
def test_a_note_in_the_record_is_still_there(data, tmp_path):
    train("std", tmp_path / "run", "--max-steps", 2, data=data)
    file = tmp_path / "run" / "hyperparameters.json"
    record = json.loads(file.read_bytes()) | {"note": "on the new disk"}
    file.write_text(json.dumps(record))
    train("std", tmp_path / "run", "--resume", "--max-steps", 3)
    after = json.loads(file.read_bytes())
    assert after["note"] == record["note"] and after["max_steps"] == 3


@pytest.mark.whole
def test_a_run_that_was_killed_at_its_birth_begins(data, tmp_path):
    """Its record is an empty file, and a part of one is beside it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "hyperparameters.json").touch()
    part = run / f".hyperparameters.json.1-0{PART}"
    part.write_text('{"sta')
    refused(attempt("std", run, "--max-steps", 2, data=data), "--resume")
    train("std", run, "--resume", "--max-steps", 2, data=data)
    assert json.loads((run / "hyperparameters.json").read_bytes())
    assert not part.exists()


def test_an_empty_record_beside_checkpoints_is_damaged(
        data, begun, tmp_path):
    """The flags that it held decide which samples follow."""
    stage, original = begun
    if stage == "starter":
        pytest.skip("the starter has no record")
    run = tmp_path / "run"
    shutil.copytree(original, run)
    os.truncate(run / "hyperparameters.json", 0)
    refused(attempt(stage, run, "--resume", "--max-steps", 8, data=data),
            "hyperparameters.json is corrupt")


def test_the_starter_says_which_rows_are_lost(tmp_path):
    run = tmp_path / "run"
    train("starter", run, "--max-steps", 3)
    (run / "metrics.csv").unlink()
    result = train("starter", run, "--resume", "--max-steps", 4)
    assert "metrics.csv lacks 3 of the steps 0 to 2" in result.out
    assert "| step    3/4" in result.out
