"""Where a step's time goes: --profile, and the table of its traces."""

import time
from argparse import Namespace
from statistics import mean

import pytest
from stages import train

from backstage import device
from backstage.errors import UserError
from rankcheck.record.recorder import replace
from workshop.results import profile
from workshop.results import runs as results
from workshop.results.plot import PANELS, PART_COLOURS, themed

DELAY = 0.3  # seconds: long, even where much else is computed


def slow_data(log):
    """Makes one rank slow, in the data of each of its steps."""
    @replace(device, "pin")
    def slow(pin, *args):
        time.sleep(DELAY * (log.rank == 1))
        return pin(*args)


def check(result, steps):
    """That these steps are recorded, in parts; those of each rank."""
    assert "finished: " in result.out and not result.err
    ranks = profile.charge_steps(result.folder)
    seconds = result.column("seconds")
    for rank in ranks:
        assert [*rank.steps] == [*steps]
        assert sum(profile.mean(rank).values()) == pytest.approx(
            mean(seconds[step] for step in steps), rel=1e-3)
    return [*map(profile.mean, ranks)]


@pytest.mark.whole
def test_one_process_is_recorded_and_drawn(data, tmp_path, capsys):
    result = train("std", tmp_path / "run", "--profile", 3, "--max-steps", 8,
                   "--eval-every", 1, data=data)
    parts, = check(result, range(5, 8))
    assert parts["waiting"] == parts["all-reduce"] == 0
    assert min(parts[part] for part in (
        "data", "forward", "backward", "optimizer")) > 0
    # the evaluations, many forward passes, are no part of a step; of all
    # steps but one another process may have taken a core meanwhile
    rank, = profile.charge_steps(result.folder)
    assert min(seconds["data"] for seconds in rank.charged) < 0.2 * sum(
        parts.values())

    profile.main(Namespace(run=result.folder))
    table = capsys.readouterr().out.split(":\n")[1].splitlines()
    assert table[0].split() == ["rank", *profile.STEP_PARTS, "step"]
    assert table[1].split()[0] == "0" and "no step" not in table
    assert [*PART_COLOURS] == [*profile.STEP_PARTS]
    svg = themed(lambda ax: PANELS["parts"](ax, [results.read_run(
        result.folder)]))
    assert "std x 1, rank 0" in svg and all(part in svg for part
                                            in PART_COLOURS)


@pytest.mark.whole
def test_a_run_that_goes_on_and_one_that_is_short(data, tmp_path):
    run = tmp_path / "run"
    short = train("std", run, "--max-steps", 5, "--profile", 1, data=data)
    assert "recorded nothing" in short.err
    assert "no step of these runs" in themed(
        lambda ax: PANELS["parts"](ax, [results.read_run(run)]))
    mine = run / "profile" / "rank1.json.gz"
    mine.write_bytes(b"of somebody else")
    check(train("std", run, "--resume", "--max-steps", 11, "--profile", 9),
          [10])
    assert mine.read_bytes() == b"of somebody else"
    before = profile.list_traces(run)
    train("std", run, "--resume", "--max-steps", 12)
    assert profile.list_traces(run) == before  # it records with the flag alone
    before[0].unlink()
    with pytest.raises(UserError, match="--profile 10"):
        profile.main(Namespace(run=run))


def charged(events, length, least):
    """Microseconds of each part in a step of these events."""
    def event(begin, end, name, number=None, cat="cpu_op", tid=1):
        return {"ph": "X", "ts": begin, "dur": end - begin, "name": name,
                "cat": cat, "tid": tid, "args": {
                    "Sequence number": number, "correlation": number}}

    _, steps = profile.find_steps([event(*each) for each in (
        (0, 0, "end of step 3"), *events, (length, length, "end of step 4"))],
        {3: 1.0, 4: length / 1e6})
    return {part: round(1e6 * seconds)
            for part, seconds in steps[4].charge(least).items()}


NODE = "autograd::engine::evaluate_function: EmbeddingBackward0"


def test_the_passes_are_found_by_their_operators():
    assert charged([
        (1, 2, "aten::stack", 5), (4, 5, "aten::embedding", 5),
        (8, 12, NODE, 5), (9, 10, "aten::embedding", 5),  # computed again
        (13, 14, "aten::stack", 6), (15, 16, "aten::embedding", 6),
        (18, 20, NODE, 6), (19, 26, "gloo:all_reduce", None, "cpu_op", 7),
        (28, 29, "aten::add_", 7)], 30, [3]) == {
            "data": 7, "forward": 7, "backward": 5, "waiting": 4,
            "all-reduce": 3, "optimizer": 4}


def test_kernels_are_charged_to_the_part_that_asked_for_them():
    """The events of a GPU: it is busy later than the program."""
    assert charged([
        (1, 2, "aten::stack", 5), (3, 4, "aten::embedding", 5),
        (5, 7, NODE, 5, "cpu_op", 2),
        (4, 4, "cudaLaunchKernel", 1, "cuda_runtime"),
        (6, 6, "cudaLaunchKernel", 2, "cuda_runtime", 2),
        (8, 8, "cudaLaunchKernel", 3, "cuda_runtime"),
        (4, 9, "gemm", 1, "kernel", 9), (9, 13, "gemm", 2, "kernel", 9),
        (10, 16, "ncclDevKernel_AllReduce", 8, "kernel", 10),
        (16, 19, "adamw", 3, "kernel", 9)], 20, [1]) == {
            "data": 3, "forward": 6, "backward": 4, "waiting": 2,
            "all-reduce": 1, "optimizer": 4}


@pytest.mark.whole
def test_a_slow_rank_is_charged_and_the_other_waits(data, tmp_path):
    ranks = check(train(
        "ddp", tmp_path / "run", "--profile", 3, "--max-steps", 9,
        data=data, mesh=(1, 2, 1), probes=[slow_data]), range(5, 8))
    fast, slow = ranks
    # rank 1 begins to read while rank 0 still logs: not all of it counts
    assert slow["data"] > DELAY / 2 > fast["data"]
    assert fast["waiting"] > max(DELAY / 2, slow["waiting"])


@pytest.mark.whole
@pytest.mark.parametrize("stage, mesh", [
    ("lit", (1, 2, 1)), ("mpi", (1, 2, 1)), ("fsdp", (1, 2, 1)),
    ("3d", (2, 1, 1))])
def test_other_stages_are_recorded(stage, mesh, data, tmp_path, capsys):
    result = train(stage, tmp_path / "run", "--profile", 1, "--max-steps", 6,
                   "--eval-minibatches", 1, data=data, mesh=mesh)
    ranks = check(result, [5])
    profile.main(Namespace(run=result.folder))
    said = capsys.readouterr().out
    assert ("all counted as waiting" in said) == (stage == "3d")
    assert ("do not show the messages" in said) == (stage == "mpi")
    hidden = {"3d": {"all-reduce"}, "mpi": {"all-reduce", "waiting"}}
    for part in {*profile.STEP_PARTS} - hidden.get(stage, set()):
        assert any(parts[part] for parts in ranks), part
