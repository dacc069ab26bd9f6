"""What check and verify conclude, from records: no process is started."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import program

from rankcheck.engine import exits
from rankcheck.engine.findings import Finding, Line
from rankcheck.engine.ranks import Rank
from rankcheck.record.tensors import assemble, describe
from rankcheck.verification import comparison, runs
from rankcheck.verification.questions import resume
from workshop.board import Terminal
from workshop.check import experiment
from workshop.check.experiment import Mistake, Outcome
from workshop.check.lines import lines_as_in
from workshop.check.plan import Mesh, PlannedTrial
from workshop.check.questions import model
from workshop.check.questions.question import (
    QUESTIONS,
    Examined,
    distance,
)
from workshop.check.trials import StageTrial
from workshop.diff.diff import Diff
from workshop.stages import STAGES

NAN, INF = torch.nan, torch.inf


def trial(*ranks, script="their_train.py", **seen):
    """One that ended so, without an observer's record but for `seen`."""
    return StageTrial(Path(script), list(ranks), stage="ddp",
                      mesh=Mesh(dp=len(ranks)),
                      seen=[seen or None] * len(ranks),
                      events=[[] for _ in ranks])


@pytest.mark.parametrize(("err", "says"), [
    ("error while reading the data\n", "error while reading the data"),
    ("error: no data: see --data\n", "no data: see --data"),
    ("[rank1]: error (rank 1): no data\n", "no data"),
    ("cannot read it: OSError:\n", "cannot read it: OSError:"),
    ("ValueError: 3\nthe cause\nRuntimeError:\n", "ValueError: 3"),
])
def test_the_last_words_of_a_script(err, says):
    finding = exits.explain(trial(Rank(1, "", err), Rank(0, "", "")))
    assert finding.text == f"rank 0 ended with an error: {says}"


def test_where_a_rank_is_after_an_error_that_was_caught():
    one = trial(Rank(None, "", """\
  File "their_train.py", line 3, in load
OSError: no cache
Stack (most recent call first):
  File "their_train.py", line 9 in train
"""))
    one.gave_up = "flood"
    assert exits.explain(one).text.endswith("rank 0 is in line 9 (train)")


@pytest.mark.parametrize(("out", "err", "says", "hint"), [
    ("Traceback (most recent call last):\nValueError: no data\n", "",
     "ValueError: no data", ""),
    ("", 'if os.path.exists("x"):\nFileNotFoundError: no data\n',
     "FileNotFoundError: no data", ""),
    ("", "FileExistsError: runs/a\n", "FileExistsError: runs/a", "{run}"),
    ("", "ImportError: attempted relative import with no known parent "
     "package\n", "attempted relative import", "-m package.module")])
def test_what_follows_from_an_error(out, err, says, hint):
    finding = runs.how_it_ends(trial(Rank(1, out, err), asked=[]))
    assert says in finding.text
    assert hint in finding.advice and bool(hint) == bool(finding.advice)


# -------------------------------------------------------- too deep to look at


DEEP = f"x = {'+'.join(['1'] * 2000)}\n"


def test_a_deep_expression_is_no_mistake(tmp_path):
    script = program(tmp_path / "train_gpt2.py", DEEP)
    ast.parse(DEEP)  # Python runs it
    one = trial(Rank(0, "", ""), script=script, asked=[], compiled=None)
    one.source = DEEP.encode()
    verdicts = {}
    for question in QUESTIONS:
        if question.title in ("every name that it uses is defined",
                              "each process asks for its own device"):
            finding, = question.ask(Examined(one, one, "whole"))
            verdicts[finding.text] = finding.verdict
    assert verdicts == {
        "each process asks for its own device": "ok",
        "it was not checked whether every name that it uses is defined":
            "warn"}
    solution = STAGES["ddp"].solution.read_text()
    diff = Diff("ddp", script, (solution + DEEP).encode())
    assert not diff.left and len(diff.others) == 1


# ------------------------------------------------------------ odd scripts


def test_a_byte_order_mark_is_no_difference(tmp_path, capsys):
    """Notepad writes one. What is wrong is said, as of any script."""
    script = tmp_path / "train_gpt2.py"
    script.write_text(STAGES["std"].solution.read_text(), "utf-8-sig")
    one = trial(Rank(0, "", ""))
    planned = PlannedTrial("1", "whole", Mesh())
    mistake = Mistake("losses agree", "that of step 0 is 5", frozenset(), "")
    experiment.diagnose(
        SimpleNamespace(stage="ddp", script=script), Terminal(False),
        Outcome(planned, one, [], mistake, []), mistake)
    assert "changes are left" in capsys.readouterr().out


def test_what_follows_is_folded(capsys):
    found = [Finding(verdict, [text], []) for verdict, text in (
        ("ok", "it ends"), ("FAIL", "off by 5"), ("and", "so is the loss"))]
    for verbose, lines in ((False, [
            "  FAIL  off by 5", "        (1 more follows from it)"]), (True, [
            "  ok    it ends", "  FAIL  off by 5", "  and   so is the loss"])):
        experiment.tell_findings(Terminal(verbose), found, 1.0,
                                 verbose=verbose)
        assert capsys.readouterr().out.splitlines() == lines


def test_a_large_script_is_compared_with_itself_at_once():
    data = b"x = 1\n" * 80_000
    assert lines_as_in(data, bytes([*data]))(Line(7)) == "line 7"


# ------------------------------------------------------------------------ nan


@pytest.mark.parametrize(("mine", "good", "same"), [
    ([1.0, 2.0], [1.0, 2.0], True), ([1.0, NAN], [1.0, 2.0], False),
    ([1.0, 2.0], [1.0, NAN], False), ([INF, NAN], [INF, NAN], True),
    ([INF, 2.0], [INF, 4.0], False), ([INF, 2.0], [-INF, 2.0], False),
    ([NAN, NAN], [1.0, 2.0], False)])
def test_nan_is_no_number_and_itself(mine, good, same):
    """Whichever of several parameters it is in."""
    for at in range(3):
        wholes = [assemble([describe(
            (str(i), torch.tensor(values if i == at else [3.0]))
            for i in range(3))]) for values in (mine, good)]
        one, other = wholes
        assert (distance(one, other) == 0) == same
        assert (one.error(other) < 1e-6) == same
        both = assemble([describe(one.tensors.items()),
                         describe(other.tensors.items())])
        assert both.apart == (set() if same else {str(at)})
        assert all(off > 0 for off in both.differing.values())


def test_weights_of_nan_are_not_the_single_devices():
    def with_weights(*values):
        return trial(Rank(0, "", ""), weights=describe(
            (str(i), torch.tensor([value])) for i, value in enumerate(values)))

    good = with_weights(1.0, 2.0, 3.0)
    assert model.weights(good, good) is None
    for values in ((NAN, 2.0, 3.0), (1.0, NAN, NAN), (1.0, 2.0, NAN)):
        assert model.weights(with_weights(*values), good).verdict == "FAIL"


def update(**other):
    """What a rank has recorded of an update."""
    def state(key):
        value = other.get(key, [1.0, 2.0])
        return describe([("0.0", torch.tensor(value)),
                         ("0.1", torch.tensor(value))])

    return ({"optimizer": 0, "rows": ["a"], "rates": [other.get("lr", 0.1)],
             "losses": [other.get("loss", 2.0)], "before": state("before"),
             "weights": state("weights"), "buffers": state("buffers"),
             "kept": describe([(f"0.{i} exp_avg", torch.tensor(
                 other.get("kept", [1.0, 2.0]))) for i in range(2)])},)


CASE = comparison.Comparison(None, None, trial(
    Rank(0, "", ""), model={}, shapes={"0.0": (2,), "0.1": (2,)}))
ASKED = {
    "before": lambda good, back: resume.weights([], good, back),
    "kept": lambda good, back: resume.kept(CASE, good, back),
    "lr": lambda good, back: resume.learning_rates([], good, back),
    "loss": resume.afterwards, "weights": resume.afterwards,
    "buffers": resume.afterwards}


@pytest.mark.parametrize("what", ASKED)
def test_a_resume_brings_back_nan(what):
    """In two parameters, of which one alone could be seen."""
    nan = NAN if what in ("lr", "loss") else [NAN, NAN]
    finding, = ASKED[what]([update()], [update(**{what: nan})])
    assert finding.verdict == "FAIL" and "nan" in finding.text
    finding, = ASKED[what]([update()], [update()])
    assert finding.verdict == "ok"


@pytest.mark.parametrize(("rates", "expected", "says"), [
    ([], [0.1], "the optimizer has 0 learning rates, not 1"),
    ([0.1], [], "the optimizer has 1 learning rate, not 0"),
    ([0.1], [0.1, 0.2], "the optimizer has 1 learning rate, not 2"),
    ([0.1, 0.3], [0.1, 0.2], "the learning rate is 0.3, not 0.2"),
])
def test_learning_rates_that_do_not_go_on(rates, expected, says):
    """Of each group, where both runs have as many."""
    good, back = ([tuple(one | {"rates": values} for one in update())]
                  for values in (expected, rates))
    finding, = resume.learning_rates([], good, back)
    assert finding.verdict == "FAIL"
    assert finding.text == f"{says}, in the next update"


@pytest.mark.parametrize(("lost", "verdict"), [
    ([], "FAIL"), ([1], "FAIL"), ([0, 1], "warn")])
def test_random_numbers_that_do_not_go_on(lost, verdict):
    """What they change is a mistake where only some ranks draw others."""
    good = update() + update()
    found = [
        *resume.position([], [good], [tuple(
            {**one, "rows": ["b"]} for one in good)], lost),
        *resume.afterwards([good], [update(loss=3.0) * 2], lost)]
    assert [finding.verdict for finding in found] == [verdict] * 2
