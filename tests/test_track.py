"""The metrics: a line of the log, metrics.csv, and other tools."""

import importlib.util
import math
import os
import sys
import time

import pytest
from stages import FOLDER, train

from backstage import track
from backstage.errors import UserError
from backstage.run import format_line


@pytest.mark.parametrize("val_loss", [None, 10.123456])
@pytest.mark.parametrize("each", [None, 1_543_210.0])
@pytest.mark.parametrize("mfu", [None, 0.456])
def test_a_line_of_the_log_fits_a_screen(val_loss, each, mfu):
    """With the largest numbers that a long run on many GPUs has."""
    line = format_line(18691, 18692, 10.123456, 6e-4, 12.3456, 1.2345,
                       12_345_678.0, each, mfu, val_loss, 4.6)
    assert len(line) <= 140
    assert ("bits/byte: 3.1" in line) == (val_loss is not None)
    if val_loss is None:
        assert ("tok/s: 12,345,678 (1,543,210 each) |" in line) == (
            each is not None)
        assert ("mfu: 45.6%" in line) == (mfu is not None)


def test_the_figures_of_each_device(tmp_path):
    result = train("ddp", tmp_path / "run", "--max-steps", 3,
                   data=FOLDER / "golden", mesh=(1, 2, 1))
    assert result.status == 0, result.err
    for row in result.rows:
        assert row["samples_per_second"] == pytest.approx(
            8 / row["seconds"], rel=1e-6)
        assert row["tokens_per_second_per_device"] == pytest.approx(
            row["tokens_per_second"] / 2, rel=1e-6)
    assert " each) |" in result.out
    assert not list((tmp_path / "run").glob("*tfevents*"))


@pytest.mark.parametrize("name", track.TOOLS)
def test_a_tool_that_is_not_installed_is_a_line(name, monkeypatch):
    track.check("no")
    monkeypatch.setitem(sys.modules, name, None)  # hides it
    with pytest.raises(UserError, match=f"pip install {name}$"):
        track.check(name)


def needs_package(name):
    """Skip a test without it; in CI, where it is installed, fail."""
    if importlib.util.find_spec(name) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            f"not installed: {name}")


def test_tensorboard_has_the_numbers_of_metrics_csv(tmp_path):
    needs_package("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    run, flags = tmp_path / "run", ("--track", "tensorboard")
    result = train("std", run, "--max-steps", 4, *flags,
                   data=FOLDER / "golden")
    assert result.status == 0, result.err
    events = EventAccumulator(str(run)).Reload()
    names = set(events.Tags()["scalars"])
    assert names == {"loss", "val_loss", "lr", "norm", "seconds",
                     "tokens_per_second", "samples_per_second",
                     "tokens_per_second_per_device"}
    for name in names - {"val_loss"}:
        seen = events.Scalars(name)
        assert [point.step for point in seen] == [0, 1, 2, 3]
        assert [point.value for point in seen] == pytest.approx(
            result.column(name), rel=1e-6)

    # what was written after the checkpoint that is resumed counts once
    time.sleep(1)  # the files are read by the second in their names
    writer = track.start("tensorboard", run, 2)
    writer.log(2, {"loss": 1.0, "mfu": None})
    writer.close()
    seen = EventAccumulator(str(run)).Reload().Scalars("loss")
    assert [point.step for point in seen] == [0, 1, 2]
    assert seen[-1].value == 1.0 and not math.isnan(seen[0].value)


def test_wandb_writes_without_a_network(tmp_path, monkeypatch):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed, in CI either: it is large")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    result = train("std", tmp_path / "run", "--max-steps", 2, "--track",
                   "wandb", data=FOLDER / "golden")
    assert result.status == 0, result.err
    written, = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"tokens_per_second_per_device" in written.read_bytes()
