"""Where a step's time goes: --profile."""

import gzip
import json
import time
from itertools import chain
from statistics import median

import pytest
from stages import GOLDEN, train

from backstage import profile
from workshop.results import runs as results

DELAY = 0.1  # seconds: long, even where much else is computed


class SlowData:
    """Makes one rank slow, in the data of each of its steps."""

    def __call__(self, rank):
        from backstage import device

        pin = device.pin

        def slow(*args):
            time.sleep(DELAY)
            return pin(*args)

        if rank == 2:
            device.pin = slow


def check(result, number):
    """That the parts are those of the recorded steps; the parts of each."""
    assert result.status == 0, result.err
    assert "finished: " in result.out and not result.err
    recorded = json.loads(
        (result.folder / "profile" / "parts.json").read_text())
    first = recorded["first_step"]
    for steps in recorded["ranks"]:
        assert len(steps) == number
        for step in steps:
            assert list(step) == [*profile.PARTS]
            assert all(seconds >= 0 for seconds in step.values())
    # rank 0 logs how long the steps took by its own clock; on a busy machine
    # it may have to wait between one clock and the other in most of them
    assert any(sum(step.values()) == pytest.approx(seconds, rel=0.02)
               for step, seconds in zip(
        recorded["ranks"][0], result.column("seconds")[first:first + number],
        strict=True))
    return recorded["ranks"]


def test_the_parts_of_one_process_are_its_steps(tmp_path):
    result = train("std", tmp_path / "run", "--profile", 6, "--eval-every", 7,
                   data=GOLDEN)
    steps, = check(result, 6)
    for step in steps:
        assert step["waiting"] == step["all-reduce"] == 0
        assert min(step[part] for part in (
            "data", "forward", "backward", "optimizer")) > 0
    # of all but one another process may have taken a core meanwhile
    assert min(step["loop"] / sum(step.values()) for step in steps) < 0.1
    table = result.out.split("milliseconds:\n")[1].splitlines()
    assert table[0].split() == ["rank", *profile.PARTS, "step"]
    assert table[1].split()[0] == "0" and "| step" in table[2]
    with gzip.open(result.folder / "profile" / "trace-rank-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    rows = [event for event in events if event["pid"] == "parts"]
    drawn = sum(event["dur"] for event in rows if event["ph"] == "X") / 1e6
    assert drawn == pytest.approx(sum(sum(step.values()) for step in steps))
    assert any(event["name"] == "aten::addmm" for event in events)


def test_the_picture_and_a_run_that_goes_on(tmp_path):
    run = tmp_path / "run"
    result = train("std", run, "--profile", 2, "--max-steps", 4, data=GOLDEN)
    assert result.status == 0, result.err
    from workshop.results.plot import PANELS, themed

    assert [*results.PARTS] == [*profile.PARTS]
    read = results.read(run)
    svg = themed(lambda ax: PANELS["parts"](ax, [read]))
    assert "std x 1, rank 0" in svg
    assert all(part in svg for part in results.PARTS)
    parts = run / "profile" / "parts.json"
    parts.unlink()
    assert "no step of these runs" in themed(
        lambda ax: PANELS["parts"](ax, [read]))
    result = train("std", run, "--resume", "--max-steps", 8)
    assert result.status == 0, result.err
    assert not parts.exists()  # only the first steps are recorded


def test_off_is_off_and_a_wrong_number_is_a_line(tmp_path):
    assert type(profile.start(0, tmp_path, 20, None)) is profile.Nothing
    result = train("std", tmp_path / "run", "--max-steps", 2, "--profile",
                   -1, data=GOLDEN)
    assert "--profile must be 0 or more" in result.err
    short = train("std", tmp_path / "short", "--max-steps", 2, "--profile", 1,
                  data=GOLDEN)
    assert short.status == 0 and "recorded nothing" in short.err
    assert not (tmp_path / "short" / "profile").exists()


def charged(step, least):
    """Microseconds of each part."""
    return {part: round(1e6 * seconds) for part, seconds in
            profile.total(step.charge(least)).items() if seconds}


def test_kernels_are_charged_to_the_part_that_asked_for_them():
    """The events of a GPU: it is busy later than the program."""
    def event(begin, end, name, cat, correlation=None, tid=1):
        return {"ph": "X", "ts": begin, "dur": end - begin, "name": name,
                "cat": cat, "tid": tid, "args": {"correlation": correlation}}

    def mark(begin, end, name):
        return event(begin, end, profile.MARK + name, "user_annotation")

    step, = profile.find_steps([
        mark(0, 3, "data"), mark(5, 7, "backward"), mark(20, 20, "end"),
        event(4, 4, "cudaLaunchKernel", "cuda_runtime", 1),
        event(6, 6, "cudaLaunchKernel", "cuda_runtime", 2),
        event(8, 8, "cudaLaunchKernel", "cuda_runtime", 3),
        event(4, 9, "gemm", "kernel", 1), event(9, 13, "gemm", "kernel", 2),
        event(10, 16, "ncclDevKernel_AllReduce", "kernel", 9),
        event(16, 19, "adamw", "kernel", 3)])
    assert charged(step, [1]) == {
        "data": 3, "forward": 6, "backward": 4, "waiting": 2,
        "all-reduce": 1, "optimizer": 4}


@pytest.mark.whole
def test_a_slow_rank_is_charged_and_the_others_wait(tmp_path):
    ranks = check(train(
        "ddp", tmp_path / "run", "--profile", 10, "--eval-every", 20,
        data=GOLDEN, mesh=(1, 4, 1), observe=SlowData()), 10)
    data, waited = ([[step[part] for step in steps] for steps in ranks]
                    for part in ("data", "waiting"))
    slow = sorted(data.pop(2))
    assert slow[5] >= DELAY > sorted(chain(*data))[15]
    assert min(waited, key=sum) is waited[2]
    assert median(chain(*waited[:2], waited[3])) > DELAY / 2


@pytest.mark.whole
@pytest.mark.parametrize("stage, mesh", [
    ("lit", (1, 2, 1)), ("mpi", (1, 2, 1)), ("fsdp", (1, 2, 1)),
    ("tp", (1, 1, 2)), ("3d", (2, 1, 1))])
def test_every_stage_is_recorded(stage, mesh, tmp_path):
    result = train(stage, tmp_path / "run", "--profile", 3, "--max-steps", 7,
                   data=GOLDEN, mesh=mesh)
    ranks = check(result, 3)
    assert ("all counted as waiting" in result.out) == (stage == "3d")
    # a pipeline's messages go from one to the next
    for part in {*profile.PARTS} - {"loop", *["all-reduce"] * (stage == "3d")}:
        assert any(step[part] for steps in ranks for step in steps), part
