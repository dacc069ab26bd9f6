"""The metrics: a line of the log, metrics.csv, and other tools."""

import math
import re
import socket
import sys
import time

import pytest
from conftest import needs
from stages import train

from backstage import ROOT, track
from backstage.errors import UserError
from backstage.record import COLUMNS, format_number
from backstage.run import format_line
from workshop.results import runs


@pytest.mark.parametrize(("each", "mfu", "val_loss", "memory", "words"), [
    (1_543_210.0, 0.456, None, "139.8 GiB (100%)",
     "| tok/s: 12,345,678 (1,543,210 each) | mfu: 45.6% | "
     "mem: 139.8 GiB (100%) |"),
    (1_543_210.0, 0.456, 10.123456, "139.8 GiB (100%)", "bits/byte: 3.1"),
    (12_345_678.0, None, None, "", "| tok/s: 12,345,678 |")])
def test_a_line_of_the_log_fits_a_screen(each, mfu, val_loss, memory, words):
    """With the largest numbers that a long run on many GPUs has."""
    line = format_line(dict(zip(COLUMNS[:10], (
        18691, 10.123456, val_loss, 6e-4, 12.3456, 1.2345, 12_345_678.0, mfu,
        10.0, each), strict=True)), 18692, 4.6, memory)
    assert len(line) <= 165 and words in line


def test_the_log_and_the_metrics_of_two_devices(data, tmp_path):
    """With memory: a CPU's is the process's own; and which rank's is most."""
    flags = ("--max-steps", 3, "--eval-every", 3)
    result = train("ddp", tmp_path / "run", *flags, data=data,
                   mesh=(1, 2, 1))
    assert result.out.splitlines()[0].endswith(
        "unlike the preset: max_steps 3, eval_every 3")
    line = f"world size 2: 1 node x 2 cpu, {socket.gethostname()}; gloo, no "
    assert line in result.out
    # an attendee whose job waits reads this one: it begins in the same way
    example = (ROOT / "example-logs" / "job.txt").read_text("utf-8")
    said, there = ({line.split()[0] for line in text.partition("| step")[0]
                    .splitlines() if line[0].isalpha()}
                   for text in (result.out, example))
    assert said == {"preset", "world", "run", "startup"} and said <= there
    described = runs.describe_run_start(result.folder)
    assert described.startswith(line) and re.search(
        r"; startup \d+\.\d s$", described)
    file = result.folder / "hyperparameters.json"
    file.write_text(file.read_text().replace('"hosts"', '"older"'))
    assert runs.describe_run_start(result.folder) == ""
    used = result.column("memory")
    assert used == sorted(used) and 2**25 < used[0] and used[-1] < 2**40
    for row in result.rows:
        assert row["samples_per_second"] == pytest.approx(
            8 / row["seconds"], rel=1e-6)
        assert row["tokens_per_second_per_device"] == pytest.approx(
            row["tokens_per_second"] / 2, rel=1e-6)
    assert " each) |" in result.out
    assert result.column("memory_reserved") == [None] * 3
    lines = [line for line in result.out.splitlines() if "| step" in line]
    assert f"mem: {used[1] / 2**30:.1f} GiB |" in lines[1]
    assert "| val: " in lines[-1]
    assert re.search(r"^memory: \d+\.\d GiB at most, on rank [01]\n"
                     r"finished: ",
                     result.out, re.M)


def test_an_older_run_goes_on_without_a_memory(data, tmp_path):
    run, flags = tmp_path / "run", ("--max-steps", 4, "--checkpoint-every", 2)
    train("std", run, *flags, data=data)
    (run / "checkpoints" / "step_00000004.pt").unlink()
    file = run / "metrics.csv"
    rows = file.read_text().splitlines()
    assert rows[0].endswith(",memory,memory_reserved")
    file.write_text("".join(row.rsplit(",", 2)[0] + "\n" for row in rows))
    assert runs.read_run(run).memory is None
    result = train("std", run, "--resume", "--max-steps", 4)
    assert not result.err
    assert [value is None for value in result.column("memory")] == [
        True, True, False, False]
    assert runs.read_run(run).memory == result.column("memory")[3]
    kept = file.read_text().splitlines()  # and the rest as it was
    assert [row.split(",")[:5] for row in kept[:3]] == [
        row.split(",")[:5] for row in rows[:3]]
    assert format_number(17_179_869_185.0) == "17179869185"


@pytest.mark.parametrize("name", track.TRACKERS)
def test_a_tool_that_is_not_installed_is_a_line(name, monkeypatch):
    track.require_tracker("no")
    monkeypatch.setitem(sys.modules, name, None)  # hides it
    with pytest.raises(UserError, match=f"pip install {name}$"):
        track.require_tracker(name)


@pytest.mark.whole
def test_tensorboard_has_the_numbers_of_metrics_csv(data, tmp_path):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    run, flags = tmp_path / "run", ("--track", "tensorboard")
    result = train("std", run, "--max-steps", 4, *flags, data=data)
    events = EventAccumulator(str(run)).Reload()
    names = set(events.Tags()["scalars"])
    assert names == {"loss", "val_loss", "lr", "norm", "seconds",
                     "tokens_per_second", "samples_per_second",
                     "tokens_per_second_per_device", "memory"}
    for name in names - {"val_loss"}:
        seen = events.Scalars(name)
        assert [point.step for point in seen] == [0, 1, 2, 3]
        assert [point.value for point in seen] == pytest.approx(
            result.column(name), rel=1e-6)

    # what was written after the checkpoint that is resumed counts once
    time.sleep(1)  # the files are read by the second in their names
    writer = track.TRACKERS["tensorboard"](run, 2, {})
    writer.log(2, {"loss": 1.0})
    writer.close()
    seen = EventAccumulator(str(run)).Reload().Scalars("loss")
    assert [point.step for point in seen] == [0, 1, 2]
    assert seen[-1].value == 1.0 and not math.isnan(seen[0].value)
