"""What verify concludes, from records: no process is started."""

from pathlib import Path

import pytest
import torch

from rankcheck.engine import exits
from rankcheck.engine.findings import Line, fail
from rankcheck.engine.ranks import RankExit
from rankcheck.engine.run_record import RunRecord
from rankcheck.record.rank_record import RankRecord
from rankcheck.record.tensors import assemble, describe_tensors
from rankcheck.verification import comparison, runs
from rankcheck.verification.questions import resume
from rankcheck_testing.expected import read_expected

NAN, INF = torch.nan, torch.inf


def run_record(*ranks, **seen):
    """One that ended so, without an observer's record but for `seen`."""
    record = RankRecord(**seen) if seen else None
    return RunRecord(Path("their_train.py"), list(ranks),
                     records=[record] * len(ranks),
                     events=[[] for _ in ranks])


@pytest.mark.parametrize(("err", "says"), [
    ("error while reading the data\n", "error while reading the data"),
    ("error: no data: see --data\n", "no data: see --data"),
    ("[rank1]: error (rank 1): no data\n", "no data"),
    ("cannot read it: OSError:\n", "cannot read it: OSError:"),
    ("ValueError: 3\nthe cause\nRuntimeError:\n", "ValueError: 3"),
])
def test_the_last_words_of_a_script(err, says):
    finding = exits.explain_failure(run_record(RankExit(1, "", err),
                                               RankExit(0, "", "")))
    assert finding.text == f"rank 0 ended with an error: {says}"


def test_where_a_rank_is_after_an_error_that_was_caught():
    one = run_record(RankExit(None, "", """\
  File "their_train.py", line 3, in load
OSError: no cache
Stack (most recent call first):
  File "their_train.py", line 9 in train
"""))
    one.gave_up = "flood"
    text = exits.explain_failure(one).text
    assert text.endswith("rank 0 is in line 9 (train)")


@pytest.mark.parametrize(("out", "err", "says", "fix"), [
    ("Traceback (most recent call last):\nValueError: no data\n", "",
     "ValueError: no data", ""),
    ("", 'if os.path.exists("x"):\nFileNotFoundError: no data\n',
     "FileNotFoundError: no data", ""),
    ("", "FileExistsError: runs/a\n", "FileExistsError: runs/a", "{run}"),
    ("", "ImportError: attempted relative import with no known parent "
     "package\n", "attempted relative import", "-m package.module")])
def test_what_follows_from_an_error(out, err, says, fix):
    finding = runs.explain_end(run_record(RankExit(1, out, err), joined=False))
    assert says in finding.text
    assert fix in finding.fix_text and bool(fix) == bool(finding.fix_text)


@pytest.mark.parametrize(("mine", "good", "same"), [
    ([1.0, 2.0], [1.0, 2.0], True), ([1.0, NAN], [1.0, 2.0], False),
    ([1.0, 2.0], [1.0, NAN], False), ([INF, NAN], [INF, NAN], True),
    ([INF, 2.0], [INF, 4.0], False), ([INF, 2.0], [-INF, 2.0], False),
    ([NAN, NAN], [1.0, 2.0], False)])
def test_nan_is_no_number_and_itself(mine, good, same):
    """Whichever of several parameters it is in."""
    for at in range(3):
        wholes = [assemble([describe_tensors(
            (str(i), torch.tensor(values if i == at else [3.0]))
            for i in range(3))]) for values in (mine, good)]
        one, other = wholes
        assert (one.error(other) < 1e-6) == same
        both = assemble([describe_tensors(one.tensors.items()),
                         describe_tensors(other.tensors.items())])
        assert both.unequal == (set() if same else {str(at)})
        assert all(off > 0 for off in both.differing.values())


@pytest.mark.parametrize("tensor", [
    torch.tensor(1.0), torch.zeros(0, 3), torch.tensor([NAN, -0.0]),
    torch.arange(6.0).view(2, 3).t(), torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True)])
def test_tensors_are_compared_bit_by_bit(tensor):
    """Also without NumPy, which has no bfloat16."""
    data = comparison.as_bytes(tensor)
    assert len(data) == tensor.numel() * tensor.element_size()
    if data:
        again = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
        again = again.view(tensor.shape)
        assert torch.equal(again.nan_to_num(7), tensor.nan_to_num(7))
    assert comparison.as_bytes(torch.tensor([0.0])) != comparison.as_bytes(
        torch.tensor([-0.0]))


def record(**other):
    """What a rank has recorded of a step."""
    def state(key):
        value = other.get(key, [1.0, 2.0])
        return describe_tensors([("0.0", torch.tensor(value)),
                                 ("0.1", torch.tensor(value))])

    return ({"optimizer": 0, "rows": ["a"], "rates": [other.get("lr", 0.1)],
             "losses": [other.get("loss", 2.0)], "before": state("before"),
             "weights": state("weights"), "buffers": state("buffers"),
             "kept": describe_tensors([(f"0.{i} exp_avg", torch.tensor(
                 other.get("kept", [1.0, 2.0]))) for i in range(2)])},)


CASE = comparison.Comparison(None, None, run_record(
    RankExit(0, "", ""), model={}, shapes={"0.0": (2,), "0.1": (2,)}))
ASKED = {
    "before": lambda good, back: resume.restored_weights([], good, back),
    "kept": lambda good, back: resume.restored_states(CASE, good, back),
    "lr": lambda good, back: resume.restored_rates([], good, back),
    "loss": resume.later_steps, "weights": resume.later_steps,
    "buffers": resume.later_steps}


@pytest.mark.parametrize("what", ASKED)
def test_a_resume_brings_back_nan(what):
    """In two parameters, of which one alone could be seen."""
    nan = NAN if what in ("lr", "loss") else [NAN, NAN]
    finding, = ASKED[what]([record()], [record(**{what: nan})])
    assert finding.verdict == "FAIL" and "nan" in finding.text
    finding, = ASKED[what]([record()], [record()])
    assert finding.verdict == "ok"


@pytest.mark.parametrize(("rates", "expected", "says"), [
    ([], [0.1], "the optimizer has 0 learning rates, not 1"),
    ([0.1], [], "the optimizer has 1 learning rate, not 0"),
    ([0.1], [0.1, 0.2], "the optimizer has 1 learning rate, not 2"),
    ([0.1, 0.3], [0.1, 0.2], "the learning rate is 0.3, not 0.2"),
])
def test_learning_rates_that_do_not_go_on(rates, expected, says):
    """Of each group, where both runs have as many."""
    good, back = ([tuple(one | {"rates": values} for one in record())]
                  for values in (expected, rates))
    finding, = resume.restored_rates([], good, back)
    assert finding.verdict == "FAIL"
    assert finding.text == f"{says}, in the next step"


@pytest.mark.parametrize(("lost", "verdict"), [
    ([], "FAIL"), ([1], "FAIL"), ([0, 1], "warn")])
def test_random_numbers_that_do_not_go_on(lost, verdict):
    """What they change is a mistake where only some ranks draw others."""
    good = record() + record()
    found = [
        *resume.restored_position([], [good], [tuple(
            {**one, "rows": ["b"]} for one in good)], lost),
        *resume.later_steps([good], [record(loss=3.0) * 2], lost)]
    assert [finding.verdict for finding in found] == [verdict] * 2


@pytest.mark.parametrize(("expected", "matches"), [
    ("FAIL mean", True), ("FAIL mean step=2 rank=1 line=7", True),
    ('FAIL mean factor=0.49 "0.weight" "x = 1"', True), ("warn mean", False),
    ("FAIL means", False), ("FAIL mean step=3", False),
    ("FAIL mean rank=0", False), ("FAIL mean line=8", False),
    ("FAIL mean times=2", False), ('FAIL mean "1.weight"', False)])
def test_what_a_test_expects_of_a_finding(expected, matches):
    finding = fail(["of 0.weight in ", Line(7), ": x = 1"], ranks=[1, 3],
                   numbers={"step": 2, "factor": 0.5}, kind="mean")
    assert read_expected(expected).matches(finding) == matches
    assert read_expected(finding.text) is None
