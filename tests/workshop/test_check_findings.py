"""What a check concludes, from records: no process is started."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import edit, program

from rankcheck.engine.findings import Finding, Line
from rankcheck.engine.ranks import RankExit
from rankcheck.record.tensors import assemble, describe_tensors
from workshop.board import CheckTerminal
from workshop.check import experiment
from workshop.check.experiment import Mistake, Outcome
from workshop.check.lines import lines_as_in
from workshop.check.plan import Mesh, StageRunPlan
from workshop.check.probe import CourseRecord
from workshop.check.questions import model
from workshop.check.questions.question import (
    QUESTIONS,
    Examined,
    largest_difference,
)
from workshop.check.stage_runs import StageRun
from workshop.diff.diff import Diff
from workshop.stages import STAGES

NAN, INF = torch.nan, torch.inf


def run(*ranks, script="their_train.py", **seen):
    """One that ended so, without an observer's record but for `seen`."""
    return StageRun(Path(script), list(ranks), stage="ddp",
                    mesh=Mesh(dp=len(ranks)),
                    records=[CourseRecord(**seen) if seen else None
                               ] * len(ranks),
                    events=[[] for _ in ranks])


# -------------------------------------------------------- too deep to look at


DEEP = f"x = {'+'.join(['1'] * 2000)}\n"


def test_a_deep_expression_is_no_mistake(tmp_path):
    script = program(tmp_path / "train_gpt2.py", DEEP)
    ast.parse(DEEP)  # Python runs it
    one = run(RankExit(0, "", ""), script=script, facts=[], compiled=None)
    one.source = DEEP.encode()
    verdicts = {}
    for question in QUESTIONS:
        if question.title in ("all names that the script uses are defined",
                              "each process asks for its own device"):
            finding, = question.ask(Examined(one, one, "whole"))
            verdicts[finding.text] = finding.verdict
    assert verdicts == {
        "each process asks for its own device": "ok",
        "it was not checked whether all names that the script uses are "
        "defined": "warn"}
    solution = STAGES["ddp"].solution.read_text()
    diff = Diff("ddp", script, (solution + DEEP).encode())
    assert not diff.remaining and len(diff.other_changes) == 1


# ------------------------------------------------------------ odd scripts


def test_a_byte_order_mark_is_no_difference(tmp_path, capsys):
    """Notepad writes one. What is wrong is said, as of any script."""
    script = tmp_path / "train_gpt2.py"
    script.write_text(STAGES["std"].solution.read_text(), "utf-8-sig")
    one = run(RankExit(0, "", ""))
    planned = StageRunPlan("1", "whole", Mesh())
    mistake = Mistake("losses agree", "that of step 0 is 5", frozenset(), "")
    experiment.name_faulty_changes(
        SimpleNamespace(stage="ddp", script=script), CheckTerminal(False),
        Outcome(planned, one, [], mistake, []), mistake)
    assert "changes are left" in capsys.readouterr().out


@pytest.mark.parametrize("errors", [[], ["losses agree: KeyError: 'x'"]])
def test_no_change_is_named_where_the_check_itself_fails(
        errors, tmp_path, capsys, monkeypatch):
    """Two are wrong; either alone is right, or that is not known."""
    text = edit(STAGES["ddp"].solution.read_text(),
                ("self.position += self.stride", "self.position += self.B"),
                ("dist.all_reduce(report)", "pass"))
    script = program(tmp_path / "train_gpt2.py", text)
    planned = StageRunPlan("1", "whole", Mesh())
    mistake = Mistake("losses agree", "that of step 0 is 5", frozenset(), "")

    def find(bench, planned, name):
        wrong = "self.B\n" in bench.text and "    pass" in bench.text
        return Outcome(planned, run(RankExit(0, "", "")), [],
                       mistake if wrong else None, [] if wrong else errors)

    monkeypatch.setattr(experiment, "run_and_ask", find)
    experiment.name_faulty_changes(
        SimpleNamespace(stage="ddp", script=script, with_script=lambda data: (
            SimpleNamespace(text=data.decode(), folder=tmp_path / "none"))),
        CheckTerminal(False),
        Outcome(planned, run(RankExit(0, "", "")), [], mistake,
                []), mistake)
    assert ("The error is in " in capsys.readouterr().out) == (not errors)


def test_what_follows_is_folded(capsys):
    found = [Finding(verdict, [text], []) for verdict, text in (
        ("ok", "it ends"), ("FAIL", "off by 5"), ("and", "so is the loss"))]
    for verbose, lines in ((False, [
            "  FAIL     off by 5",
            "           (1 further finding follows from this one)"]), (True, [
            "  ok       it ends", "  FAIL     off by 5",
            "  follows  so is the loss"])):
        experiment.tell_findings(CheckTerminal(verbose), found, 1.0,
                                 verbose=verbose)
        assert capsys.readouterr().out.splitlines() == lines


def test_a_large_script_is_compared_with_itself_at_once():
    data = b"x = 1\n" * 80_000
    assert lines_as_in(data, bytes([*data]))(Line(7)) == "line 7"


# ------------------------------------------------------------------------ nan


@pytest.mark.parametrize(("mine", "good", "same"), [
    ([1.0, 2.0], [1.0, 2.0], True), ([1.0, NAN], [1.0, 2.0], False),
    ([INF, NAN], [INF, NAN], True), ([NAN, NAN], [1.0, 2.0], False)])
def test_the_distance_of_nan(mine, good, same):
    """Whichever of several parameters it is in."""
    for at in range(3):
        one, other = (assemble([describe_tensors(
            (str(i), torch.tensor(values if i == at else [3.0]))
            for i in range(3))]) for values in (mine, good))
        assert (largest_difference(one, other) == 0) == same


def test_weights_of_nan_are_not_the_single_devices():
    def with_weights(*values):
        return run(RankExit(0, "", ""), weights=describe_tensors(
            (str(i), torch.tensor([value])) for i, value in enumerate(values)))

    good = with_weights(1.0, 2.0, 3.0)
    assert model.check_final_weights(good, good) is None
    for values in ((NAN, 2.0, 3.0), (1.0, NAN, NAN), (1.0, 2.0, NAN)):
        assert model.check_final_weights(with_weights(*values),
                                         good).verdict == "FAIL"
