"""The record of a rank: what is written is what is read."""

import json
from dataclasses import dataclass, fields

import pytest
import torch

from rankcheck.engine.hang_detector import Budget
from rankcheck.engine.run_record import RunRecord, watch_run
from rankcheck.record.files import opened
from rankcheck.record.rank_record import RankRecord, record_file
from rankcheck.record.recorder import Log, OptimizerSteps
from rankcheck.record.tensors import describe_tensors
from rankcheck.system.errors import InternalError
from rankcheck_testing.support import program


@dataclass
class Counted(RankRecord):
    """A client's own."""

    count: int = 0


def count(log):
    log.on("end", lambda: setattr(log.record, "count", 7))


def fails(log):
    log.on("end", lambda: setattr(log.record, "count", {1, 2}))


def test_what_is_written_is_read(tmp_path):
    weight = torch.arange(3.0)
    tensors = describe_tensors([("weight", weight)])
    record = RankRecord(
        facts=[("sampler", (2, 0, "", 1)), ("epoch", None)], joined=True,
        writers={"/tmp/a": 7, "/tmp/b": "lightning"}, low_precision=True,
        saved_before_step=3,
        steps=[{"losses": [1.5, float("inf")], "drawn": {3: 4, -1: 2},
                "before": tensors, "now": tensors}],
        shapes={"weight": (3,), "": ()},
        settings=[[{"names": ["weight"], "values": {"lr": (0.5,)}}]])
    record.write(str(tmp_path), 3, torch.save)
    again = RankRecord.read_from(tmp_path, 3)
    (before, now), (step,) = ([one.pop(name) for one in again.steps
                               for name in ("before", "now")],
                              record.steps)
    assert torch.equal(before["flat"], weight)
    assert before["flat"] is now["flat"]  # written once
    assert before["plain"] == [("weight", (3,))]
    del step["before"], step["now"]
    assert again == record
    for one in fields(RankRecord):
        assert type(getattr(again, one.name)) is type(getattr(
            record, one.name)), one.name


def test_a_rank_that_died_has_none(tmp_path):
    assert RankRecord.read_from(tmp_path, 0) is None
    run = RunRecord(tmp_path, records=[RankRecord(), None])
    assert run.facts("epoch") == []
    with pytest.raises(InternalError, match="rank 1 left no record"):
        _ = run.all_records


@pytest.mark.parametrize("change", [
    {"schema": 0}, {"schema": None}, {"a": "later field"}])
def test_a_record_of_another_version_is_refused(tmp_path, change):
    RankRecord().write(str(tmp_path), 0, torch.save)
    file = record_file(tmp_path, 0)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InternalError, match="not a record of this version"):
        RankRecord.read_from(tmp_path, 0)


def test_what_cannot_be_recorded_is_an_error(tmp_path, capfd):
    """The script's own end stays; the record is missing."""
    with pytest.raises(TypeError, match="a set cannot be recorded"):
        Counted(count={1}).write(str(tmp_path), 0, torch.save)
    log = Log(tmp_path, 0, Counted(count={1}))
    log.finish()
    assert "a set cannot be recorded" in capfd.readouterr().err
    assert Counted.read_from(tmp_path, 0) is None


def test_a_clients_record_comes_back_from_the_ranks(tmp_path):
    script = program(tmp_path / "script.py", "print('there')\n")
    run = watch_run(RunRecord(script), (), tmp_path / "seen", print,
                    Budget(20.0),
                    probes=[count], record=Counted, world_size=2)
    assert [record.count for record in run.all_records] == [7, 7]
    run = watch_run(RunRecord(script), (), tmp_path / "more", print,
                    Budget(20.0),
                    probes=[fails], record=Counted, world_size=2)
    assert run.records == [None, None]


def begins(log):
    log.begun = True  # steps count without a model


@pytest.mark.parametrize(("line", "saved"), [
    ("pickle.dumps(torch.ones(2))", []),  # as all_gather_object does
    ("torch.save({'weight': torch.ones(2)}, io.BytesIO())", ["saved-1"])])
def test_a_tensor_that_is_sent_is_not_saved(line, saved, tmp_path):
    script = program(tmp_path / "script.py", f"""\
import io, pickle, torch
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.SGD([weight], 0.1).step()
{line}
""")
    seen = tmp_path / "seen"
    watch_run(RunRecord(script), (), seen, print, Budget(20.0),
              probes=[begins, OptimizerSteps(), opened])
    assert [path.name for path in seen.glob("saved-*")] == saved
