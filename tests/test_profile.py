"""Where a step's time goes: --profile."""

import gzip
import json
import time
from statistics import median

import pytest
from stages import FOLDER, train

from backstage import profile
from workshop.results import runs as results

DELAY = 0.1  # seconds: long, even where much else is computed


class Delays:
    """Makes one rank slow, in a part of each of its steps."""

    def __init__(self, rank, part):
        self.rank, self.part = rank, part

    def __call__(self, rank):
        if rank != self.rank:
            return
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from backstage import device

        if self.part == "optimizer":
            register_optimizer_step_pre_hook(
                lambda *_: time.sleep(DELAY))
            return
        place, name = {
            "data": (device, "pin"),
            "forward": (torch.nn.functional, "cross_entropy")}[self.part]
        function = getattr(place, name)

        def slow(*args):
            time.sleep(DELAY)
            return function(*args)

        setattr(place, name, slow)


def parts_of(result):
    return json.loads((result.folder / "profile" / "parts.json").read_text())


def check(result, number):
    """That the parts are those of the recorded steps; the parts of each."""
    assert result.status == 0, result.err
    assert "finished: " in result.out and not result.err
    recorded = parts_of(result)
    first = recorded["first_step"]
    for steps in recorded["ranks"]:
        assert len(steps) == number
        for step in steps:
            assert list(step) == [*profile.PARTS]
            assert all(seconds >= 0 for seconds in step.values())
    # rank 0 logs how long the steps took by its own clock; on a busy machine
    # it may have to wait between one clock and the other
    assert median(sum(step.values()) / seconds for step, seconds in zip(
        recorded["ranks"][0], result.column("seconds")[first:first + number],
        strict=True)) == pytest.approx(1, rel=0.02)
    return recorded["ranks"]


def means(ranks, part):
    return [sum(step[part] for step in steps) / len(steps) for steps in ranks]


def test_the_parts_of_one_process_are_its_steps(tmp_path):
    result = train("std", tmp_path / "run", "--profile", 6, "--eval-every", 7,
                   data=FOLDER / "golden")
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


def test_a_resumed_run_is_not_recorded_again(tmp_path):
    run = tmp_path / "run"
    train("std", run, "--profile", 2, "--max-steps", 4,
          data=FOLDER / "golden")
    (run / "profile" / "parts.json").unlink()
    result = train("std", run, "--resume", "--max-steps", 8)
    assert result.status == 0, result.err
    assert not (run / "profile" / "parts.json").exists()


def test_off_is_off_and_a_wrong_number_is_a_line(tmp_path):
    assert type(profile.start(0, tmp_path, 20, None)) is profile.Nothing
    result = train("std", tmp_path / "run", "--max-steps", 2, "--profile",
                   -1, data=FOLDER / "golden")
    assert "--profile must be 0 or more" in result.err
    short = train("std", tmp_path / "short", "--max-steps", 2, "--profile", 1,
                  data=FOLDER / "golden")
    assert short.status == 0 and "recorded nothing" in short.err
    assert not (tmp_path / "short" / "profile").exists()


def test_what_lies_on_top_is_charged():
    assert profile.cover([[(2, 3, "a"), (2, 4, "a")], [(0, 5, "b")]]) == [
        (0, 2, "b"), (2, 3, "a"), (3, 4, "a"), (4, 5, "b")]
    step = profile.Step(
        0, 10, [(0, 4, "forward"), (4, 10, "backward")], [(5, 6, None)],
        [], [(4, 9, "gloo:all_reduce")])
    others = [[("gloo:all_reduce", 2)], [("gloo:send", 1)]]
    least = profile.shortest([step.sent, *others], step.sent)
    assert least == [2]
    spent = profile.total(step.charge(least))
    assert {part: round(1e6 * seconds) for part, seconds in spent.items()
            if seconds} == {"forward": 4, "backward": 2, "waiting": 2,
                            "all-reduce": 2}
    # between the stages of a pipeline all is waiting
    step.messages = [(4, 9, "gloo:recv")]
    assert profile.shortest([step.sent], step.sent) == [0]


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
    spent = profile.total(step.charge([1]))
    assert {part: round(1e6 * seconds) for part, seconds in spent.items()
            if seconds} == {
                "data": 3, "forward": 6, "backward": 4, "waiting": 2,
                "all-reduce": 1, "optimizer": 4}
    # MPI sends from the CPU; the GPU shows the marks once more
    step, = profile.find_steps([
        mark(0, 3, "data"), mark(5, 7, "backward"), mark(20, 20, "end"),
        event(6, 6, "cudaLaunchKernel", "cuda_runtime", 1),
        event(7, 9, "gemm", "kernel", 1),
        event(7, 9, profile.MARK + "backward", "gpu_user_annotation"),
        event(10, 16, "mpi:Allreduce", "user_annotation"),
        event(17, 18, "mpi:Allreduce", "gpu_user_annotation")])
    assert step.sent == [("mpi:Allreduce", 6)]
    spent = profile.total(step.charge([2]))
    assert {part: round(1e6 * seconds) for part, seconds in spent.items()
            if seconds} == {
                "data": 3, "forward": 2, "backward": 4, "waiting": 4,
                "all-reduce": 2, "optimizer": 5}


@pytest.mark.whole
def test_a_slow_rank_is_charged_and_the_others_wait(tmp_path):
    for part in "data", "optimizer":
        ranks = check(train(
            "ddp", tmp_path / part, "--profile", 10, "--eval-every", 20,
            data=FOLDER / "golden", mesh=(1, 4, 1),
            observe=Delays(2, part)), 10)
        slow, others = (sorted(step[part] for rank in chosen for step in rank)
                        for chosen in ([ranks[2]], ranks[:2] + ranks[3:]))
        assert slow[5] >= DELAY > others[15]
        waited = means(ranks, "waiting")
        assert min(waited) == waited[2]
        others = [step["waiting"] for rank, steps in enumerate(ranks)
                  for step in steps if rank != 2]
        assert sorted(others)[len(others) // 2] > DELAY / 2


@pytest.mark.whole
@pytest.mark.parametrize("stage, mesh", [
    ("lit", (1, 2, 1)), ("mpi", (1, 2, 1)), ("fsdp", (1, 2, 1)),
    ("tp", (1, 1, 2)), ("3d", (2, 1, 1))])
def test_every_stage_is_recorded(stage, mesh, tmp_path):
    result = train(stage, tmp_path / "run", "--profile", 3, "--max-steps", 7,
                   data=FOLDER / "golden", mesh=mesh)
    ranks = check(result, 3)
    assert ("all counted as waiting" in result.out) == (stage == "3d")
    for part in ("data", "forward", "backward", "optimizer", "waiting"):
        assert max(means(ranks, part)) > 0, part
    # a pipeline's messages go from one to the next
    assert stage == "3d" or max(means(ranks, "all-reduce")) > 0


def test_the_picture_has_a_row_for_each_rank(tmp_path):
    result = train("std", tmp_path / "run", "--profile", 2, "--max-steps", 4,
                   data=FOLDER / "golden")
    assert result.status == 0, result.err
    from workshop.results.plot import PANELS, PARTS, themed

    assert [*PARTS] == [*profile.PARTS]
    run = results.read(result.folder)
    svg = themed(lambda ax: PANELS["parts"](ax, [run]))
    assert "std x 1, rank 0" in svg and all(part in svg for part in PARTS)
    (result.folder / "profile" / "parts.json").unlink()
    assert "no step of these runs" in themed(
        lambda ax: PANELS["parts"](ax, [run]))
